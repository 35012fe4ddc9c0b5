"""What lies in the temporary folder, and a run's own folder, is its user's alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from litgpt_demo.errors import UserError
from litgpt_demo.storage import open_storage
from litgpt_demo.storage.private import make_private, make_temporary, own_temporary, write_private
from litgpt_demo.training.loop import scratch_of


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's part of the temporary folder, which is yet to be made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return own_temporary()


def mode_of(folder: Path) -> int:
    return folder.stat().st_mode & 0o7777


def test_a_folder_that_others_may_have_written_to_is_refused(own: Path) -> None:
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(UserError, match="has mode 777, which lets others write"):
        make_temporary("sources")
    own.rmdir()
    own.touch()
    with pytest.raises(UserError, match="is not a folder"):
        make_temporary("sources")
    own.unlink()
    # One that others could only read is closed, and its content kept.
    (own / "sources").mkdir(parents=True)
    own.chmod(0o755)
    (own / "sources" / "part").write_text("fetched")
    assert (make_temporary("sources") / "part").read_text() == "fetched"
    assert mode_of(own) == 0o700


def test_the_ranks_of_a_run_share_its_folder_and_runs_of_two_buckets_do_not(own: Path) -> None:
    run, other = (open_storage(f"gs://{bucket}/runs/owt-1a2b") for bucket in ("bucket", "other"))
    assert scratch_of(run, 0).parent == scratch_of(run, 1).parent
    assert scratch_of(other, 0) != scratch_of(run, 0)


@pytest.mark.parametrize(("above", "made"), [(0o755, 0o700), (0o2775, 0o2755), (0o1777, 0o700)])
def test_a_new_folder_of_a_run_is_its_owners_alone_unless_it_is_in_a_shared_one(
    tmp_path: Path, above: int, made: int
) -> None:
    tmp_path.chmod(above)
    before = os.umask(0o022)
    try:
        make_private(tmp_path / "owt-1a2b")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "owt-1a2b") == made


def test_a_private_file_is_replaced_in_one_piece_or_stays(tmp_path: Path) -> None:
    write_private(tmp_path / "environment", "export SECRET=1")
    with pytest.raises(UnicodeEncodeError):
        write_private(tmp_path / "environment", "export SECRET=\udcff")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("environment", "export SECRET=1")]
    assert mode_of(tmp_path / "environment") == 0o600
