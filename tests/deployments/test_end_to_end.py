"""The shipped config through the command line, as a user runs it: text to model; then with a rank killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.metrics import curve, rows_of

CONFIG = "deployments/configs/local.yaml"
# Shorter than what `make train` runs, with the same two nodes, the same model and four checkpoints.
SHORT = ["train.max_steps=24", "train.checkpoint_every=6", "train.evaluate_every=12", "data.corpus.max_bytes=3_000_000"]

pytestmark = [pytest.mark.long, pytest.mark.training, pytest.mark.prefect]


@pytest.fixture(scope="module")
def home(prefect_home: Callable[[], Path]) -> Path:
    """PREFECT_HOME of all commands here."""
    return prefect_home()


def command(home: Path, root: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.Popen(
        [sys.executable, "-m", "cli.main", "run", CONFIG, *SHORT, f"root={root}", *arguments],
        env=environment | {"PREFECT_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(root: Path) -> dict[int, float]:
    (metrics,) = root.glob("runs/*/metrics.jsonl")
    return curve(rows_of(metrics.read_text()), "step", "loss")


@pytest.fixture(scope="module")
def trained(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A root with an uninterrupted run in it, and what the terminal showed."""
    root = tmp_path_factory.mktemp("root")
    process = command(home, root)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return root, output


def test_raw_text_becomes_a_model_that_writes(trained: tuple[Path, str], tmp_path: Path) -> None:
    root, output = trained
    (run,) = root.glob("runs/*")
    for step in ("1/5 dataset", "2/5 image", "3/5 credentials", "4/5 training", "5/5 checkpoints"):
        assert f"✓ {step}" in output
    assert "nothing to build on local" in output
    seen = losses(root)
    assert sorted(seen) == list(range(1, 25))
    assert seen[24] < seen[1] - 1
    from litgpt import LLM

    llm = LLM.load(str(run / "final/litgpt"))
    assert llm.generate("def ", max_new_tokens=8)
    assert json.loads((run / "final/manifest.json").read_text())["logits_difference"] <= 1e-4
    (usage,) = re.findall(r"^```python\n(.*?)^```", (run / "final/MODEL_CARD.md").read_text(), re.MULTILINE | re.DOTALL)
    # From a folder that has nothing to do with the run's.
    used = subprocess.run([sys.executable, "-c", usage], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert used.returncode == 0, used.stderr
    assert used.stdout.count("Once upon a time") >= 1
    assert "<svg" in (run / "report.html").read_text()
    manifest = json.loads((run / "manifest.json").read_text())
    assert {file["path"] for file in manifest["files"]} >= {"report.html", "final/litgpt/lit_model.pth"}
    assert manifest["software"]["packages"]["torch"]


def test_a_run_whose_rank_was_killed_ends_like_one_that_was_not(
    trained: tuple[Path, str], home: Path, tmp_path: Path
) -> None:
    process = command(home, tmp_path, "train.max_restarts=0")
    killed = kill_a_rank(tmp_path, after_step=14)
    output, _ = process.communicate(timeout=60)
    assert time.time() - killed < 30  # the job is over within 15 s; the command then still closes its Prefect server
    assert process.returncode == EXIT_CODES[Fault.NODE], output
    assert "node fault" in output
    assert not ranks_of(tmp_path)
    assert len(losses(tmp_path)) < 24

    again = command(home, tmp_path)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert "(found done)" in output  # the dataset
    assert [path.name for path in sorted(tmp_path.glob("runs/*/attempts/*"))] == ["1", "2"]
    starts = [row for row in rows_of(next(tmp_path.glob("runs/*/metrics.jsonl")).read_text()) if row["kind"] == "start"]
    assert [row["step"] for row in starts] == [0, 12]
    assert losses(tmp_path) == losses(trained[0])  # bit for bit


def kill_a_rank(root: Path, *, after_step: int) -> float:
    """kill -9 one rank of the job under `root` when the metrics show that step; returns when."""
    deadline = time.time() + 150
    while time.time() < deadline:
        metrics = list(root.glob("runs/*/metrics.jsonl"))
        if metrics and f'"kind":"step","step":{after_step},' in metrics[0].read_text():
            ranks_of(root)[-1].send_signal(signal.SIGKILL)
            return time.time()
        time.sleep(0.2)
    raise AssertionError(f"step {after_step} was not reached in 150 s")


def ranks_of(root: Path) -> list[psutil.Process]:
    """The training processes of jobs under `root`: not the agents above them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if any(str(root) in word for word in line) and line[1:5] == ["-u", "-m", "litgpt_demo", "train"]:
            found.append(process)
    return found
