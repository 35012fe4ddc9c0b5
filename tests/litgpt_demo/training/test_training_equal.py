"""The loss curve is `litgpt pretrain`'s own, on the same weights, batches and hyper-parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from bench.litgpt_pretrain import logged
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.training.loop import main

NewRun: TypeAlias = Callable[..., Path]


# What rounding grows to in 30 steps. In bfloat16, torch rounds products of which we keep every digit.
TOLERANCE = {"32-true": 2e-5, "bf16-mixed": 5e-3}


@pytest.mark.long
@pytest.mark.training
def test_thirty_steps_are_litgpts_own(new_run: NewRun, tmp_path: Path) -> None:
    same = {
        "max_steps": 30, "warmup_steps": 0, "learning_rate": 0.003, "min_learning_rate": 0.003, "weight_decay": 0.0,
        "evaluate_every": 30, "checkpoint_every": 30,
    }  # fmt: skip
    runs = {precision: new_run(precision, precision=precision, **same) for precision in TOLERANCE}
    folders = [str(folder) for name, run in runs.items() for folder in (run, tmp_path / f"theirs-{name}")]
    # Compiling changes neither side's loss but by rounding, and would take most of a minute.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "bench.litgpt_pretrain", *folders, "--same-weights", "--constant-rate"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for precision, run in runs.items():
        assert main(["--run", str(run)]) == 0
        ours = curve(rows_of((run / "metrics.jsonl").read_text()), "step", "loss")
        theirs = logged(tmp_path / f"theirs-{precision}", "loss")
        assert len(theirs) == 30
        assert list(ours.values()) == pytest.approx(theirs, rel=TOLERANCE[precision])
        assert ours[30] < ours[1] - 1
