"""A disk that fills up during a job costs a save, but no training. If it ends a job, the error names it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from nodes import report_of, started_nodes
from waiting import until

from litgpt_demo.errors import EXIT_CODES, FailureClass
from litgpt_demo.metrics import rows_of
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import list_complete


def test_full_disk_that_is_emptied_costs_a_training_nothing(
    new_run: Callable[..., Path], small_disk: Path, tmp_path: Path
) -> None:
    often = {"checkpoint_every": 25, "evaluate_every": 200, "log_every": 1, "keep_last": 1, "keep_best": 0}
    run = Path(shutil.copytree(new_run("run", max_steps=200, **often), small_disk / "run"))
    attempt, storage = tmp_path / "attempt", open_storage(str(run))

    def said_not_saved() -> bool:
        return any("was not saved" in log.read_text() for log in attempt.rglob("stdout.log"))

    with started_nodes(attempt, "-m", "litgpt_demo", "train", "--run", str(run)) as (node,):
        until(lambda: list_complete(storage) != [] or node.poll() is not None)
        ballast = small_disk / "ballast"
        ballast.write_bytes(b"\0" * shutil.disk_usage(small_disk).free)
        until(lambda: said_not_saved() or node.poll() is not None)
        ballast.unlink()
        output, _ = node.communicate()
    assert node.returncode == 0, output
    assert "was not saved" in output
    assert list_complete(storage)[0].step == 200
    steps = [row["step"] for row in rows_of((run / "metrics.jsonl").read_text()) if row["kind"] == "step"]
    assert steps == list(range(1, 201))


def test_node_with_a_full_disk_reports_it_by_exit_code(small_disk: Path) -> None:
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
    assert code == EXIT_CODES[FailureClass.DISK_FULL], (small_disk / "node.log").read_text()
    assert report_of(attempt)["fault"] == "disk full"
