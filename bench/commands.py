"""The seconds of short commands, each in a process of its own, as a person waits for them: the median of all rounds.

`runs` lists six runs that have ended. `plan` finds the corpus on this machine but no dataset, so it tries the start of
the text. Python's own start is measured beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from launcher.config import RunConfig, config_document, validated
from launcher.job import JobState, JobStatus
from launcher.runs.attempts import job_handle
from launcher.runs.run import plan_run

CONFIG = "deployments/configs/local.yaml"
RUNS = 6
ASKED = {"train-litgpt --help": 0.3, "train-litgpt runs": 0.5, "train-litgpt plan": 1.0}  # seconds


def make_runs(root: Path) -> None:
    """Record runs under a root, each with one attempt that has failed."""
    for seed in range(RUNS):
        overrides = [f"root={root}", f"train.seed={seed}"]
        handle = job_handle(plan_run(validated(RunConfig, config_document(Path(CONFIG), overrides), where=CONFIG)))
        record = handle.reattach_or_create(ended=0, exclude=(), leads=lambda: True)
        handle.attempts.index.record_end(record, JobStatus(state=JobState.FAILED, native="failed"))


def seconds(arguments: Sequence[str], environment: dict[str, str]) -> float:
    """Return the seconds of a Python process with these arguments."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Start every command once to fill the caches of files and bytecode, then once in each round."""
    seen = defaultdict[str, list[float]](list)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="bench-commands-") as folder:
        root = Path(folder)
        make_runs(root / "runs")
        commands = {
            "python -c pass": ["-c", "pass"],
            "train-litgpt --help": ["-m", "cli", "--help"],
            "train-litgpt runs": ["-m", "cli", "runs", str(root / "runs")],
            "train-litgpt plan": ["-m", "cli", "plan", CONFIG, f"root={root / 'new'}"],
        }
        for arguments in commands.values():
            seconds(arguments, environment)
        for _ in range(rounds):
            for command, arguments in commands.items():
                seen[command].append(seconds(arguments, environment))
    bars: dict[str, Any] = {f"{command}, s": (median(times),) for command, times in seen.items()}
    for command, limit in ASKED.items():
        bars[f"{command}, s"] += ("at most", limit)
    return bars, {"seconds": seen}
