"""The loss curve is `litgpt pretrain`'s own, on the same weights, batches and hyper-parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from training_runs import NewRun, rows, train

from litgpt_demo.metrics import curve


def test_thirty_steps_are_litgpts_own(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.litgpt_pretrain import logged, pretrain

    run = new_run(
        "ours", precision="32-true", max_steps=30, warmup_steps=0, learning_rate=0.003, min_learning_rate=0.003,
        weight_decay=0.0, evaluate_every=30, checkpoint_every=30,
    )  # fmt: skip
    train(run)
    monkeypatch.setattr(sys, "argv", ["pretrain"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # which it sets
        monkeypatch.setenv(name, "")
    # Compiling changes neither side's loss but by rounding, and would take most of a minute.
    monkeypatch.setattr("torch.compile", lambda model: model)
    pretrain(run, tmp_path / "theirs", same_weights=True, constant_rate=True)
    ours = curve(rows(run), "step", "loss")
    assert list(ours.values()) == pytest.approx(logged(tmp_path / "theirs", "loss"), rel=2e-5)
    assert len(ours) == 30
    assert ours[30] < ours[1] - 1
