"""Profiles of a training's steps, beforehand and on demand, and what `train.debug` leaves; a real training each."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from states import training_of

from litgpt_demo.config import ProfileConfig, TrainConfig
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.runs import PROFILE_REQUEST, ProfileRequest, write_profile_request
from litgpt_demo.storage import open_storage
from litgpt_demo.training import profiling
from litgpt_demo.training.loop import main
from litgpt_demo.training.profiling import Profiling
from litgpt_demo.training.step import train_step

NewRun: TypeAlias = Callable[..., Path]


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return list(json.load(file)["traceEvents"])


@pytest.mark.long
def test_the_steps_asked_for_are_in_a_timeline_and_change_nothing_that_is_trained(
    finished: Path, new_run: NewRun
) -> None:
    run = new_run("profiled", profile={"steps": "5-6"})
    assert main(["--run", str(run)]) == 0
    (trace,) = (run / "profiles").rglob("*.*")
    assert trace == run / "profiles/step-00000005-00000006/rank-0.json.gz"
    names = [event.get("name", "") for event in events(trace)]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert "[memory]" in names
    losses = [curve(rows_of((folder / "metrics.jsonl").read_text()), "step", "loss") for folder in (run, finished)]
    assert losses[0] == losses[1]


def test_a_training_that_runs_is_profiled_on_demand(new_run: NewRun) -> None:
    run = new_run("asked")
    storage = open_storage(str(run))
    with Profiling(training_of(run), look=0.01) as profiled:
        training = profiled._training
        for step in range(6):
            if step == 1:
                write_profile_request(storage, ProfileRequest(steps=2))
                while not profiled.requested:
                    pass
            profiled.before(step + 1)
            train_step(training, step)
            profiled.after(step + 1)
            if profiled.requested:  # as the loop hears of it, with one step or two
                profiled.heed(step + 1)
    assert [path.name for path in (run / "profiles").iterdir()] == ["step-00000003-00000004"]
    assert not storage.exists(PROFILE_REQUEST)


def test_a_profiler_that_fails_costs_the_profile_alone(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(profiling, "profile", broken)
    run = new_run("broken", profile={"steps": "2-3"}, max_steps=4)
    assert main(["--run", str(run)]) == 0
    assert "warning: steps are not profiled: " in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["25-20", "1-51", "0-3", "twenty"])
def test_steps_that_are_none_or_too_many_are_refused(steps: str) -> None:
    with pytest.raises(ValueError, match="steps"):
        ProfileConfig(steps=steps)


def test_neither_profile_nor_debug_makes_another_run() -> None:
    asked = TrainConfig.model_validate({"profile": {"steps": "20-25", "ranks": [0, 1]}, "debug": True})
    assert asked.outcome() == TrainConfig().outcome()


@pytest.mark.long
def test_debug_leaves_the_flight_recorder_of_every_rank(new_run: NewRun, tmp_path: Path) -> None:
    """In a process of its own: torch reads its switches when ranks meet."""
    run = new_run("debugged", world_size=2, debug=True, max_steps=2, warmup_steps=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    done = subprocess.run(
        [*command, "litgpt_demo", "train", "--run", str(run)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "LITGPT_NODE_DIRECTORY": str(tmp_path)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        recorded = json.loads((tmp_path / f"debug/flight-recorder-of-rank-{rank}.json").read_text())
        assert any("all_reduce" in entry["profiling_name"] for entry in recorded["entries"])
