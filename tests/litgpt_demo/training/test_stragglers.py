"""A rank that the others wait for is named: how slow it is, and since when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from nodes import report_of, start_node
from waiting import free_port

from litgpt_demo.training.stragglers import WINDOW, StragglerWatch

NewRun: TypeAlias = Callable[..., Path]

EVEN = (0.10, 0.11, 0.10, 0.12)
SLOW = (0.10, 0.11, 0.25, 0.12)


def test_a_rank_that_is_slow_for_most_of_the_steps_is_named_once() -> None:
    watch = StragglerWatch(1.5)
    assert not any(watch.add(done, EVEN) for done in range(1, 41))
    told = [found for done in range(41, 101) if (found := watch.add(done, SLOW)) is not None]
    [found] = told
    assert (found.rank, found.seconds, found.others) == (2, 0.25, 0.11)
    assert found.factor == pytest.approx(2.27, abs=0.01)
    assert found.since == 41
    assert not any(watch.add(done, EVEN) for done in range(101, 141))
    again = [found for done in range(141, 181) if (found := watch.add(done, SLOW)) is not None]
    assert [(found.rank, found.since) for found in again] == [(2, 141)]


def test_single_slow_steps_name_nobody() -> None:
    watch = StragglerWatch(1.5)
    assert not any(watch.add(done, SLOW if done % 3 == 0 else EVEN) for done in range(1, 200))


@pytest.mark.parametrize(
    ("slower", "alone"),
    [
        (None, SLOW),
        (3.0, SLOW),
        (1.5, (0.3,)),
        (1.5, (0.001, 0.004)),  # milliseconds that nobody minds
        (1.5, (0.0, 0.0)),
    ],
)
def test_nobody_is_named(slower: float | None, alone: tuple[float, ...]) -> None:
    watch = StragglerWatch(slower)
    assert not any(watch.add(done, alone) for done in range(1, 100))


def test_steps_that_training_went_back_from_do_not_count() -> None:
    watch = StragglerWatch(1.5)
    for done in range(1, WINDOW):
        watch.add(done, SLOW)
    watch.forget()
    assert watch.add(WINDOW, SLOW) is None


SLOW_DISK = """
import os, sys, time
from litgpt_demo.data.batches import Windows

read = Windows.read

def slow_read(self, numbers):
    time.sleep(0.2)
    return read(self, numbers)

if os.environ["RANK"] == "1":
    Windows.read = slow_read

from litgpt_demo.training.loop import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.training
def test_a_node_whose_disk_is_slow_is_named_while_it_trains(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run("slow", world_size=2, global_batch=4, max_steps=WINDOW + 12, evaluate_every=100, checkpoint_every=100)
    script, port = tmp_path / "slow.py", free_port()
    script.write_text(SLOW_DISK)
    nodes = [
        start_node(tmp_path / "job", str(script), "--run", str(run), processes=1, nodes=2, number=number, port=port)
        for number in range(2)
    ]
    output = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], report_of(tmp_path / "job")
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    named = [row for row in rows if row["kind"] == "straggler"]
    assert {(row["node"], row["rank"]) for row in named} == {(1, 1)}
    assert named[0]["factor"] > 1.5
    assert named[0]["seconds"] > 0.1
    assert 1 <= named[0]["since"] < named[0]["step"] <= WINDOW + 12
    assert "warning: node 1 is slow: since step" in output[0]
