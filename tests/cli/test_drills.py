"""Drills: what they show, what they refuse, and that a promise which does not hold is said to be broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.drills.command import chosen, config_for, held
from cli.drills.ground import Ground, Reference
from cli.drills.judging import DrillResult, hold, rows
from cli.drills.table import DRILLS
from launcher.runs.index import Index
from launcher.runs.leftovers import leftovers

# One layer, one rank, two checkpoints.
TINY = [
    "platform.nodes=1", "train.max_steps=8", "train.checkpoint_every=4", "train.evaluate_every=8",
    "model.sequence_length=32", "model.config={n_layer: 1, n_embd: 32, n_head: 2}", "data.corpus.max_bytes=200_000",
]  # fmt: skip
UNDISTURBED = DRILLS[0]


@pytest.fixture
def folder(tmp_path: Path, prefect_home: Callable[[], Path]) -> Path:
    """A folder for drills, whose servers need not make their databases first."""
    for name in ("prefect", "prefect-of-commands"):
        shutil.copytree(prefect_home(), tmp_path / name)
    return tmp_path


@pytest.mark.long
@pytest.mark.training
def test_a_run_that_ends_with_other_weights_breaks_a_promise_and_nothing_of_it_is_left(folder: Path) -> None:
    config = config_for(None, [*TINY, f"root={folder / 'root'}"])
    with Ground.at(folder, config) as ground:
        ground.reference = Reference(weights="0" * 64, loss=6.0, checkpoints=(8, 4), exact=True)
        result = hold(UNDISTURBED, ground)
    (weights,) = [broken for broken in result.violations if "loss" not in broken]
    assert "the weights are not those of the undisturbed run" in weights
    assert result.happened == "attempt 1 succeeded"
    assert leftovers(Index.of(config.root)) == []


@pytest.mark.long
@pytest.mark.training
def test_a_rank_is_killed_and_the_run_ends_as_if_nobody_had(folder: Path) -> None:
    config = config_for(None, [])
    told: list[DrillResult] = []
    undisturbed, killed = held(config, chosen(config, ["rank"]), times=1, folder=folder, tell=told.append)
    assert told == [undisturbed, killed]
    assert (undisturbed.violations, killed.violations) == ((), ())
    assert killed.recovery is not None
    assert killed.recovery < 60
    assert killed.lost is not None
    assert "node fault" in killed.happened


def test_jobs_on_a_cluster_need_a_yes(cli: Any) -> None:
    refused = cli("drill", "deployments/configs/profiles/batch.yaml", "train.global_batch=16")
    assert refused.code == 40
    assert "nothing was started: --yes agrees to these jobs" in refused.err
    assert "on 2 nodes x" in refused.err
    assert "gs://my-bucket/pretraining" in refused.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "earthquake"], "no drill earthquake on this platform; there are undisturbed, rank"),
        (["nowhere"], "'nowhere' is neither local nor a file; give a profile"),
    ],
    ids=["no such drill", "no such platform"],
)
def test_what_cannot_be_held_is_refused_before_anything_starts(cli: Any, words: list[str], why: str) -> None:
    refused = cli("drill", *words)
    assert refused.code == 40
    assert why in refused.err


def test_on_a_cluster_no_drill_looks_for_processes_of_this_machine() -> None:
    config = config_for("deployments/configs/profiles/batch.yaml", [])
    names = [drill.name for drill in chosen(config, [])]
    assert {"while-submitting", "two-at-once", "cancel-training", "server"} <= set(names)
    assert not {"rank", "agent", "machine", "disk-full", "clock"} & set(names)


def test_one_time_that_went_wrong_marks_the_row() -> None:
    def result(recovery: float, *violations: str) -> DrillResult:
        return DrillResult(
            drill="rank", injected="SIGKILL of a rank", happened="attempt 1 failed, 2 succeeded", recovery=recovery,
            lost=4, seconds=20.0, violations=violations, logs="",
        )  # fmt: skip

    (row,) = rows([result(7.04), result(9.0, "a job runs on"), result(8.0)])
    assert row == {
        "": "✗", "drill": "rank", "injected": "SIGKILL of a rank", "happened": "attempt 1 failed, 2 succeeded",
        "passed": "2 of 3", "recovery": "8.0 s, at most 9.0 s", "steps again": "4",
    }  # fmt: skip
