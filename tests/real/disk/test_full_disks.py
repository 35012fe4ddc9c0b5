"""A disk that fills up while a job runs: it costs a save and no training, and where it ends a job it is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nodes import report_of, started_nodes
from states import training_of
from waiting import until

from litgpt_demo.errors import EXIT_CODES, DiskFull, Fault
from litgpt_demo.metrics import rows_of
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import committed
from litgpt_demo.training.saving import Saved, Saver


@contextmanager
def filled(disk: Path, *, room: int = 0) -> Iterator[None]:
    """Fill the disk up but for `room` bytes."""
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * max(0, shutil.disk_usage(disk).free - room))
    yield
    ballast.unlink()


def test_a_save_at_any_fill_level_is_whole_or_is_a_warning(new_run: Callable[..., Path], small_disk: Path) -> None:
    run, told = open_storage(str(small_disk / "run")), list[Saved]()
    training = training_of(new_run("run", keep_last=1, keep_best=0), run)
    training.scratch.rmdir()
    training.scratch.symlink_to(small_disk / "scratch")
    (small_disk / "scratch").mkdir()
    outcomes: list[bool] = []
    with Saver(training, tell=told.append) as saver:

        def save(step: int) -> Saved:
            saver.save(step, None)
            with suppress(DiskFull):
                saver.finish()
            return told[-1]

        save(1)
        size = committed(run)[0].size
        for level in range(30):
            with filled(small_disk, room=int(size * 1.2 * level / 30)):
                saved = save(2 + 2 * level)
            outcomes.append(saved.failed is None)
            assert saved.failed is None or (isinstance(saved.failed, DiskFull) and saved.warning)
            assert committed(run)[0].step == saved.step - (saved.failed is not None)
            assert save(3 + 2 * level).failed is None, "there is room again"
            assert [found.step for found in committed(run)] == [3 + 2 * level]
    assert outcomes == sorted(outcomes), "none up to a level, and every one from there on"
    assert 1 < outcomes.count(True) < 15


def test_a_disk_that_fills_up_and_is_emptied_costs_a_training_nothing(
    new_run: Callable[..., Path], small_disk: Path, tmp_path: Path
) -> None:
    often = {"checkpoint_every": 25, "evaluate_every": 200, "log_every": 1, "keep_last": 1, "keep_best": 0}
    run = Path(shutil.copytree(new_run("run", max_steps=200, **often), small_disk / "run"))
    attempt, storage = tmp_path / "attempt", open_storage(str(run))

    def said_not_saved() -> bool:
        return any("was not saved" in log.read_text() for log in attempt.rglob("stdout.log"))

    with started_nodes(attempt, "-m", "litgpt_demo", "train", "--run", str(run)) as (node,):
        until(lambda: committed(storage) != [] or node.poll() is not None)
        with filled(small_disk):
            until(lambda: said_not_saved() or node.poll() is not None)
        output, _ = node.communicate()
    assert node.returncode == 0, output
    assert "was not saved" in output
    assert committed(storage)[0].step == 200
    steps = [row["step"] for row in rows_of((run / "metrics.jsonl").read_text()) if row["kind"] == "step"]
    assert steps == list(range(1, 201))


def test_a_node_whose_own_disk_is_full_says_so_by_its_exit_code_and_report(small_disk: Path) -> None:
    """Its log, its ranks' output and error files, and torchrun's findings have no room either."""
    script, attempt = small_disk / "script.py", small_disk / "attempt"
    script.write_text(
        "import shutil, pathlib\n"
        f"disk = pathlib.Path({str(small_disk)!r})\n"
        "(disk / 'ballast').write_bytes(b'0' * shutil.disk_usage(disk).free)\n"
        "print('x' * 100_000, flush=True)\n"
        "(disk / 'more').write_bytes(b'0' * 10_000)\n"
    )
    command = [
        sys.executable, "-m", "litgpt_demo", "node", "--nodes", "1", "--node-rank", "0", "--processes", "1",
        "--run-id", "r", "--master", "127.0.0.1:0", "--directory", str(attempt), "--", str(script),
    ]  # fmt: skip
    with (small_disk / "node.log").open("wb") as log:
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    assert code == EXIT_CODES[Fault.DISK_FULL], (small_disk / "node.log").read_text()
    assert report_of(attempt)["fault"] == "disk full"
