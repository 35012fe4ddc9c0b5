"""The measurement itself, in one process that is all the ranks there are; several are in test_gate.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_node import free_port

from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.metrics import rows_of
from litgpt_demo.node.collectives import MEASURED, Result, Speed, bus_factor, measured_row


def alone(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """One rank of a world of one."""
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), NODE_DIRECTORY: str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "litgpt_demo", "collectives", *flags],
        env={**os.environ, **world, **meet}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.gpu
def test_a_gpu_is_measured_by_nccl(tmp_path: Path) -> None:
    done = alone(tmp_path, "--seconds", "20")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "network.json").read_text())
    assert told["backend"] == "nccl"
    assert max(speed["bytes"] for speed in told["speeds"]) == 2**30
    assert all(speed["algbw"] > 0 for speed in told["speeds"])


def speed(ranks: int, size: int, seconds: float) -> Speed:
    return Speed(ranks=ranks, bytes=size, seconds=seconds, repeats=3)


def test_bandwidth_is_bytes_by_time_and_a_factor_of_the_ranks() -> None:
    one = speed(16, 8 * 10**9, 0.5)
    assert one.algbw == 16.0
    assert one.busbw == 16.0 * 2 * 15 / 16
    assert bus_factor(2) == 1
    assert bus_factor(1) == 0


def test_the_best_is_taken_among_all_ranks_and_not_within_a_node() -> None:
    speeds = (speed(8, 10**9, 0.01), speed(16, 10**6, 0.01), speed(16, 10**9, 0.1))
    made = Result(backend="nccl", nodes=2, hosts=("a", "b"), speeds=speeds, floor=20, seconds=1)
    assert made.best == speeds[2]
    assert not made.enough
    assert made.row()["busbw"] == 18.75


def test_what_was_measured_becomes_a_row_of_the_trainings_metrics(tmp_path: Path) -> None:
    made = Result(backend="nccl", nodes=2, hosts=("a", "b"), speeds=(speed(16, 10**9, 0.1),), floor=None, seconds=9.5)
    (tmp_path / "network.json").write_text(json.dumps(made.document()))
    row = measured_row({MEASURED: str(tmp_path / "network.json")})
    assert row == {
        "kind": "network", "step": 0, "ranks": 16, "nodes": 2, "bytes": 10**9, "algbw": 10.0, "busbw": 18.75,
        "seconds": 9.5,
    }  # fmt: skip
    assert measured_row({}) == {}


def test_a_training_keeps_what_was_measured_before_it(
    new_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from litgpt_demo.training.loop import main

    made = Result(backend="nccl", nodes=2, hosts=("a", "b"), speeds=(speed(16, 10**9, 0.1),), floor=10, seconds=9.5)
    (tmp_path / "network.json").write_text(json.dumps(made.document()))
    monkeypatch.setenv(MEASURED, str(tmp_path / "network.json"))
    run = new_run("measured", max_steps=1, warmup_steps=0, evaluate_every=1, checkpoint_every=1)
    assert main(["--run", str(run)]) == 0
    rows = rows_of((run / "metrics.jsonl").read_text())
    assert [row["kind"] for row in rows][:2] == ["start", "network"]
    assert rows[1] == made.row()
