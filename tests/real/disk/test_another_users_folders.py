"""Another user of the machine cannot read or change the temporary folder. The test needs root."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from another_user import as_nobody, needs_another_user, shared_temporary

from litgpt_demo.errors import UserError
from litgpt_demo.storage import open_storage
from litgpt_demo.storage.private import own_temporary
from litgpt_demo.training.loop import scratch_of

pytestmark = needs_another_user
RUN = open_storage("gs://bucket/pretraining/runs/owt-1a2b")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with shared_temporary(monkeypatch) as folder:
        yield folder


def test_another_user_cannot_swap_the_scratch_folder_of_a_rank(shared: Path) -> None:
    # It knows the names of runs, from the processes' command lines or the bucket.
    assert as_nobody('mkdir -m 777 "$1"', shared / "owt-1a2b")
    scratch = scratch_of(RUN, 0)
    (scratch / "shard").write_text("weights")
    assert not as_nobody('mv "$1" "$1.mine"; ln -s /etc "$1"', scratch)
    assert not as_nobody('cat "$1"', scratch / "shard")
    assert not as_nobody('mv "$1" "$1.mine"', scratch.parent)
    assert not as_nobody('mv "$1" "$1.mine"', own_temporary())
    assert (scratch / "shard").read_text() == "weights"


@pytest.mark.parametrize("make", ['mkdir -m 777 "$1"', 'mkdir -m 700 "$1"', 'ln -s /etc "$1"'])
def test_folder_that_another_user_made_first_is_refused(shared: Path, make: str) -> None:
    assert as_nobody(make, own_temporary())
    with pytest.raises(UserError, match="so that another user of this machine could change"):
        scratch_of(RUN, 0)
