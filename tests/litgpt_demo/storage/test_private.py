"""What lies in the temporary folder is its user's alone, though every user of the machine can write there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from another_user import as_nobody, needs_another_user, shared_temporary

from litgpt_demo.errors import UserError
from litgpt_demo.node.environment import with_compile_cache
from litgpt_demo.storage import open_storage
from litgpt_demo.storage.private import close_folder, make_private, make_temporary, own_temporary, write_private
from litgpt_demo.training.loop import scratch_of

RUN = open_storage("gs://bucket/pretraining/runs/owt-1a2b")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with shared_temporary(monkeypatch) as folder:
        yield folder


@needs_another_user
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


@needs_another_user
@pytest.mark.parametrize("make", ['mkdir -m 777 "$1"', 'mkdir -m 700 "$1"'])
def test_a_folder_that_another_user_made_first_is_refused(shared: Path, make: str) -> None:
    assert as_nobody(make, own_temporary())
    with pytest.raises(UserError, match=r"belongs to the user nobody, .* remove it, or set TMPDIR to a folder of your"):
        scratch_of(RUN, 0)


@needs_another_user
def test_a_link_that_another_user_put_there_is_refused(shared: Path) -> None:
    (own := shared / "own").mkdir()
    assert as_nobody('ln -s "$1" "$2"', own, own_temporary())
    with pytest.raises(UserError, match="is a symbolic link, so that another user"):
        scratch_of(RUN, 0)
    assert not list(own.iterdir())


def test_a_folder_that_others_may_have_written_to_is_refused(shared: Path) -> None:
    own_temporary().mkdir()
    own_temporary().chmod(0o777)
    with pytest.raises(UserError, match="has mode 777, which lets others write"):
        make_temporary("sources")


def test_a_file_in_the_folders_place_is_refused(shared: Path) -> None:
    own_temporary().touch()
    with pytest.raises(UserError, match="is not a folder"):
        make_temporary("sources")


def test_a_folder_that_others_could_only_read_is_closed_and_its_content_kept(shared: Path) -> None:
    (own_temporary() / "sources").mkdir(parents=True)
    own_temporary().chmod(0o755)
    (own_temporary() / "sources" / "part").write_text("fetched")
    assert (make_temporary("sources") / "part").read_text() == "fetched"
    assert own_temporary().stat().st_mode & 0o777 == 0o700


def test_the_ranks_of_a_run_share_its_folder_and_runs_of_two_buckets_do_not(shared: Path) -> None:
    first, second = scratch_of(RUN, 0), scratch_of(RUN, 1)
    assert first.parent == second.parent
    assert scratch_of(open_storage("gs://other/pretraining/runs/owt-1a2b"), 0) != first
    assert first.is_dir()


def test_compiled_code_is_loaded_from_a_private_folder_unless_the_user_chose_one(shared: Path) -> None:
    chosen = with_compile_cache({})["TORCHINDUCTOR_CACHE_DIR"]
    assert Path(chosen).parent == own_temporary()
    assert own_temporary().stat().st_mode & 0o777 == 0o700
    assert with_compile_cache({"TORCHINDUCTOR_CACHE_DIR": "/c"}) == {"TORCHINDUCTOR_CACHE_DIR": "/c"}


# --- a run's own folders ----------------------------------------------------------------------------------------------


def mode_of(folder: Path) -> int:
    return folder.stat().st_mode & 0o7777


def test_a_new_folder_of_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    make_private(tmp_path / "output" / "runs" / "owt-1a2b")
    assert mode_of(tmp_path / "output" / "runs" / "owt-1a2b") == 0o700


def test_a_folder_that_its_user_made_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "owt-1a2b").mkdir()
    (tmp_path / "owt-1a2b").chmod(0o755)
    make_private(tmp_path / "owt-1a2b")
    assert mode_of(tmp_path / "owt-1a2b") == 0o755


@pytest.mark.parametrize(("above", "made"), [(0o2775, 0o2755), (0o777, 0o755), (0o1777, 0o700), (0o775, 0o700)])
def test_a_folder_in_one_that_is_shared_stays_shared(tmp_path: Path, above: int, made: int) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(above)
    before = os.umask(0o022)
    try:
        make_private(tmp_path / "runs" / "owt-1a2b")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "runs" / "owt-1a2b") == made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to any group")
@pytest.mark.parametrize(("above", "made"), [(0o775, 0o775), (0o770, 0o775), (0o755, 0o700), (0o1777, 0o700)])
def test_a_folder_that_a_group_may_write_to_stays_the_groups(tmp_path: Path, above: int, made: int) -> None:
    (runs := tmp_path / "runs").mkdir()
    os.chown(runs, -1, os.getegid() + 1)
    runs.chmod(above)
    before = os.umask(0o002)
    try:
        make_private(runs / "owt-1a2b")
    finally:
        os.umask(before)
    assert mode_of(runs / "owt-1a2b") == made


# --- what a server keeps ----------------------------------------------------------------------------------------------


def test_a_linked_folder_is_closed_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o755)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    close_folder(tmp_path / "home")
    assert mode_of(tmp_path / "disk") == 0o700


@needs_another_user
def test_another_users_folder_keeps_its_mode(shared: Path) -> None:
    assert as_nobody('mkdir -m 755 "$1"', shared / "home")
    close_folder(shared / "home")
    assert mode_of(shared / "home") == 0o755


def test_a_private_file_is_replaced_in_one_piece_or_stays(tmp_path: Path) -> None:
    write_private(tmp_path / "environment", "export SECRET=1")
    with pytest.raises(UnicodeEncodeError):
        write_private(tmp_path / "environment", "export SECRET=\udcff")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("environment", "export SECRET=1")]
    assert mode_of(tmp_path / "environment") == 0o600
