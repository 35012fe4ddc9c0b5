"""A disk that fills up while a job runs: it costs a save and no training, and where it ends a job it is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
from nodes import report_of, start_node
from states import same, training_of
from waiting import until

from litgpt_demo.errors import EXIT_CODES, DiskFull, Fault
from litgpt_demo.heartbeat import NODE_DIRECTORY, Heartbeat
from litgpt_demo.metrics import MetricsFile, rows_of
from litgpt_demo.storage import open_storage
from litgpt_demo.storage.reserving import reserve, write_whole
from litgpt_demo.training.checkpoints import committed
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saved, Saver
from litgpt_demo.training.setup import Training
from litgpt_demo.training.step import train_step

NewRun: TypeAlias = Callable[..., Path]

NUMBERS = r"No space left on device.*: [1-9]\d* bytes are needed, \d+ are free; make room"


@contextmanager
def filled(disk: Path, *, room: int = 0) -> Iterator[None]:
    """Fill the disk up but for `room` bytes."""
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * max(0, shutil.disk_usage(disk).free - room))
    yield
    ballast.unlink()


def checkpoint_bytes(training: Training) -> int:
    return committed(training.run)[0].size


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_save_at_any_of_100_fill_levels_is_whole_or_is_a_warning_with_numbers(
    new_run: NewRun, small_disk: Path
) -> None:
    folder = new_run("run", keep_last=1, keep_best=0)
    run, told = open_storage(str(small_disk / "run")), list[Saved]()
    training = training_of(folder, run)
    training.scratch.rmdir()
    training.scratch.symlink_to(small_disk / "scratch")
    (small_disk / "scratch").mkdir()
    outcomes: list[bool] = []
    with Saver(training, tell=told.append) as saver:
        train_step(training, 0)
        saver.save(1, None)
        saver.settle()
        size = checkpoint_bytes(training)
        for level in range(100):
            with filled(small_disk, room=int(size * 1.2 * level / 100)):
                saver.save(2 + 2 * level, None)
                saver.settle()
            outcomes.append(told[-1].failed is None)
            require_whole_or_warned(training, told[-1])
            saver.save(3 + 2 * level, None)  # there is room again
            saver.settle()
            assert told[-1].failed is None
            assert [found.step for found in committed(run)] == [3 + 2 * level]
    assert outcomes == sorted(outcomes)  # none up to a level, and every one from there on
    assert 5 < outcomes.count(True) < 40


def require_whole_or_warned(training: Training, saved: Saved) -> None:
    """The newest checkpoint verifies and holds the state; if it is another save's, the warning says why."""
    newest = committed(training.run)[0].step
    if saved.failed is None:
        assert newest == saved.step
        return
    assert newest == saved.step - 1
    assert isinstance(saved.failed, DiskFull)
    assert saved.warning is not None
    assert saved.warning.startswith(f"the checkpoint of step {saved.step} was not saved: ")
    told = saved.warning.split(" bytes are needed, ")
    needed, free = int(told[0].split()[-1]), int(told[1].split()[0])
    assert needed > free, saved.warning
    assert list(training.scratch.rglob("*.distcp")) == []


def test_what_is_saved_on_a_nearly_full_disk_is_gone_on_with_bit_for_bit(new_run: NewRun, small_disk: Path) -> None:
    run = open_storage(str(small_disk / "run"))
    training = training_of(new_run("run"), run)
    with Saver(training, tell=lambda saved: None) as saver:
        train_step(training, 0)
        saver.save(1, None)
        saver.settle()
        train_step(training, 1)
        with filled(small_disk, room=int(checkpoint_bytes(training) * 1.02)):
            saver.save(2, None)
            saver.finish()
    again = training_of(new_run("run"), run)
    assert resume(again, tell=pytest.fail) == 2
    whole = [(one.model.module, one.optimizer.optimizer) for one in (training, again)]
    assert same(*whole)


# --- what else a node writes ------------------------------------------------------------------------------------------


def test_metrics_wait_for_room_and_none_is_lost(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_disk / "metrics.jsonl"
    metrics = MetricsFile(path, resumed_from=0)
    with filled(small_disk, room=4096):
        for step in range(1, 301):
            metrics.write({"kind": "step", "step": step, "loss": 1.0})
    assert len(rows_of(path.read_text())) < 300
    assert len(capsys.readouterr().out.splitlines()) == 300
    metrics.write({"kind": "step", "step": 301, "loss": 1.0})
    metrics.close()
    assert [row["step"] for row in rows_of(path.read_text())] == list(range(1, 302))


def test_metrics_that_never_find_room_are_said_to_be_missing(small_disk: Path) -> None:
    metrics = MetricsFile(small_disk / "metrics.jsonl", resumed_from=0)
    with filled(small_disk):
        metrics.write({"kind": "step", "step": 1, "loss": 1.0})
        with pytest.raises(DiskFull, match=NUMBERS):
            metrics.close()


def test_a_sign_of_life_that_finds_no_room_names_the_disk(small_disk: Path) -> None:
    node = {NODE_DIRECTORY: str(small_disk / "node")}
    with filled(small_disk), Heartbeat(allow=1, environ=node) as heart, pytest.raises(DiskFull, match=NUMBERS):
        heart.beat(0, "starting")


def test_what_was_reserved_is_written_on_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "job" / "result.json"
    reserve(path)
    with filled(small_disk):
        write_whole(path, {"state": "failed", "why": "x" * 30_000})
    assert path.read_text().endswith('"\n}')
    assert [found.name for found in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(122, "Disk quota exceeded")])
def test_an_error_of_any_script_that_names_a_full_disk_is_of_its_class(error: OSError) -> None:
    from litgpt_demo.errors import fault_of_exception

    assert fault_of_exception(error) is Fault.DISK_FULL
    assert fault_of_exception(f"OSError: {error}") is Fault.DISK_FULL


# --- whole trainings --------------------------------------------------------------------------------------------------


@contextmanager
def train_under_a_node(run: Path, directory: Path) -> Iterator[subprocess.Popen[str]]:
    with start_node(directory, "-m", "litgpt_demo", "train", "--run", str(run), processes=1) as node:
        yield node
        node.terminate()


def moved(run: Path, disk: Path) -> Path:
    """The run's folder, on another disk."""
    return Path(shutil.copytree(run, disk / run.name))


@pytest.mark.long
@pytest.mark.training
def test_a_disk_that_fills_up_and_is_emptied_costs_a_training_nothing(
    new_run: NewRun, small_disk: Path, tmp_path: Path
) -> None:
    often = {"checkpoint_every": 25, "evaluate_every": 200, "log_every": 1, "keep_last": 1, "keep_best": 0}
    run = moved(new_run("run", max_steps=200, **often), small_disk)
    with train_under_a_node(run, tmp_path / "attempt") as node:
        until(lambda: committed(open_storage(str(run))) != [], seconds=300)
        with filled(small_disk):
            seen = committed(open_storage(str(run)))[0].step
            until(lambda: said_not_saved(tmp_path / "attempt") or node.poll() is not None)
        output, _ = node.communicate()
    assert node.returncode == 0, output
    assert "was not saved" in output
    assert "bytes are needed" in output
    assert committed(open_storage(str(run)))[0].step == 200 > seen
    steps = [row["step"] for row in rows_of((run / "metrics.jsonl").read_text()) if row["kind"] == "step"]
    assert steps == list(range(1, 201))


def said_not_saved(attempt: Path) -> bool:
    return any("was not saved" in log.read_text() for log in attempt.rglob("stdout.log"))


@pytest.mark.long
@pytest.mark.training
def test_a_training_whose_last_save_finds_no_room_ends_as_disk_full(
    new_run: NewRun, small_disk: Path, tmp_path: Path
) -> None:
    run = moved(new_run("run", max_steps=4, checkpoint_every=4), small_disk)
    with filled(small_disk, room=60_000), train_under_a_node(run, tmp_path / "attempt") as node:
        output, _ = node.communicate()
    assert node.returncode == EXIT_CODES[Fault.DISK_FULL], output
    report = report_of(tmp_path / "attempt")
    assert report["fault"] == "disk full"
    assert "bytes are needed, " in report["message"]
    assert f"{run}" in report["message"]


@pytest.mark.training
def test_a_node_whose_own_disk_is_full_says_so_by_its_exit_code_and_report(
    new_run: NewRun, small_disk: Path, tmp_path: Path
) -> None:
    """Its log, its ranks' output and error files, and torchrun's findings have no room either."""
    script = small_disk / "script.py"
    script.write_text(
        "import shutil, pathlib\n"
        f"disk = pathlib.Path({str(small_disk)!r})\n"
        "(disk / 'ballast').write_bytes(b'0' * shutil.disk_usage(disk).free)\n"
        "print('x' * 100_000, flush=True)\n"
        "(disk / 'more').write_bytes(b'0' * 10_000)\n"
    )
    attempt = small_disk / "attempt"
    with (small_disk / "node.log").open("wb") as log:
        command = [
            sys.executable, "-m", "litgpt_demo", "node", "--nodes", "1", "--node-rank", "0", "--processes", "1",
            "--run-id", "r", "--master", "127.0.0.1:29511", "--directory", str(attempt), "--", str(script),
        ]  # fmt: skip
        code = subprocess.run(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    assert code == EXIT_CODES[Fault.DISK_FULL], (small_disk / "node.log").read_text()
    assert report_of(attempt)["fault"] == "disk full"
