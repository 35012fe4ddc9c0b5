"""The loss curve is `litgpt pretrain`'s own, on the same weights, batches and hyper-parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import NewRun, rows, train

from litgpt_demo.metrics import curve


def test_thirty_steps_are_litgpts_own(new_run: NewRun, tmp_path: Path) -> None:
    from bench.litgpt_pretrain import logged

    run = new_run(
        "ours", precision="32-true", max_steps=30, warmup_steps=0, learning_rate=0.003, min_learning_rate=0.003,
        weight_decay=0.0, evaluate_every=30, checkpoint_every=30,
    )  # fmt: skip
    # Compiling changes neither side's loss but by rounding, and would take most of a minute.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    theirs = [str(run), str(tmp_path / "theirs"), "--same-weights", "--constant-rate"]
    subprocess.run([sys.executable, "-m", "bench.litgpt_pretrain", *theirs], env=environment, check=True)
    train(run)
    ours = curve(rows(run), "step", "loss")
    assert list(ours.values()) == pytest.approx(logged(tmp_path / "theirs", "loss"), rel=2e-5)
    assert len(ours) == 30
    assert ours[30] < ours[1] - 1
