"""Where the time of a run went: every second has one part, and none has two."""

from dataclasses import replace
from typing import Any

import pytest

from launcher.job import JobId, JobState
from launcher.reports.goodput import AttemptTimes, Ledger, Part, ledger
from launcher.runs.index import AttemptEnd, AttemptRecord
from litgpt_demo.runs import NodeReport, RecordedPrice

PRICE = RecordedPrice(machine="a3-highgpu-8g", usd=36.0, region="us-central1", date="2026-01-01")
DAY = 1_000_000.0
"""The first attempt's record, in seconds since the epoch."""


def attempt(
    number: int, created: float, found: float, pulled: float, node: tuple[float, float], ended: float,
    fell: float | None = None,
) -> AttemptTimes:  # fmt: skip
    """One whose machine was found, whose container and node began and ended, all in seconds since DAY."""
    record = AttemptRecord(
        run="gpt-0f1e2d3c4b", name="gpt", run_id="0f1e2d3c4b", attempt=number, nonce="0a1b2c", config={},
        platform={"nodes": 2}, job_id=JobId(f"gpt-{number}"),
        directory=f"/r/runs/gpt-0f1e2d3c4b/attempts/{number}", flow_run="flow",
        user="ada", host="desk", machine="m", created=DAY + created,
    )  # fmt: skip
    state = JobState.SUCCEEDED if fell is None else JobState.FAILED
    times = {"scheduled": DAY + found, "pulled": DAY + pulled, "ended": DAY + ended, "seen": DAY + ended + 1}
    report = NodeReport.model_validate({
        "node": 0, "message": "", "started": DAY + node[0], "ended": DAY + node[1], "network_test_seconds": 5.0,
        "stage_seconds": 15.0, "exit_code": 0 if fell is None else 43, "fault": None if fell is None else "node fault",
        "ranks": [] if fell is None else [{"rank": 0, "time": DAY + fell}],
    })  # fmt: skip
    return AttemptTimes(record=record, end=AttemptEnd(state=state, native="", **times), reports=[report])


def row(kind: str, step: int, elapsed: float, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "elapsed": elapsed, **values}


def steps(number: int, started: float, first: int, last: int) -> list[dict[str, Any]]:
    """The start of an attempt, and its steps of 2 s from second 40 on, the first of which compiles for 10 s."""
    times = {"node_started": DAY + started, "network_test_seconds": 5.0, "stage_seconds": 15.0}
    later = range(first + 1, last + 1)
    return [
        row("start", first - 1, 40.0, attempt=number, steps=20, **times),
        row("step", first, 52.0, step_seconds=12.0, first_step_seconds=12.0),
        *(row("step", number, 52.0 + 2 * (number - first), step_seconds=2.0) for number in later),
    ]


UNDISTURBED = attempt(1, 0, found=60, pulled=90, node=(100, 183), ended=185)
ROWS = [
    *steps(1, 100, 1, 5),  # until 60
    row("checkpoint", 5, 64.5, seconds=0.5, taken=60.0),
    *(row("step", number, 60.5 + 2 * (number - 5), step_seconds=2.0) for number in range(6, 11)),  # until 70.5
    row("evaluation", 10, 74.5, seconds=4.0),
    row("checkpoint", 10, 80.5, seconds=0.5, taken=74.5),
    row("end", 10, 80.5),
]
"""60 s in the queue, 30 s of image pull, 40 s to the first step, 10 steps of 2 s, an evaluation, two saves."""


def seconds(made: Ledger) -> dict[str, float]:
    return {part.value: round(spent, 3) for part, spent in made.seconds.items() if spent}


def test_every_second_of_a_run_has_its_part_and_price() -> None:
    made = ledger([UNDISTURBED], ROWS, PRICE)
    assert seconds(made) == {
        "queue": 60.0, "image pull": 30.0, "network test": 5.0, "stage-in": 15.0, "first step": 10.0, "training": 20.0,
        "evaluation": 4.0, "checkpoint stall": 6.5, "start and end": 34.5,
    }  # fmt: skip
    collects = attempt(2, 185, found=190, pulled=195, node=(195, 285), ended=285)
    assert seconds(ledger([UNDISTURBED, collects], ROWS))["collecting"] == 70.0
    # Two nodes at $36 an hour are 2 cents a second, from when they were found until the job ended.
    costs = {row["part"]: row["cost"] for row in made.rows()}
    assert [costs[part] for part in (Part.QUEUE, Part.PULL, Part.TRAINING)] == ["$0.00", "$0.60", "$0.40"]


def test_writing_texts_counts_as_evaluation() -> None:
    rows = [entry | {"kind": entry["kind"].replace("evaluation", "sample")} for entry in ROWS]
    assert seconds(ledger([UNDISTURBED], rows)) == seconds(ledger([UNDISTURBED], ROWS))


def test_each_attempt_costs_what_its_own_machines_cost() -> None:
    """The run has moved to cheaper machines, and then to ones without a price."""
    collects, free = (attempt(number, 185, found=190, pulled=195, node=(195, 285), ended=285) for number in (2, 3))
    prices = {1: 36.0, 2: 3.6, 3: None}
    attempts = [
        replace(times, record=times.record.model_copy(update={"platform": local_of(prices[times.record.attempt])}))
        for times in (UNDISTURBED, collects, free)
    ]
    made = ledger(attempts, ROWS, PRICE)
    assert made.usd == pytest.approx((125 * 36.0 + 95 * 3.6) * 2 / 3600)
    assert made.rows()[-1]["cost"] == "$2.69"
    assert made.process_seconds == (125 + 95) * 2 * 4


def local_of(usd: float | None) -> dict[str, Any]:
    return {"kind": "local", "nodes": 2, "processes_per_node": 4, "usd_per_hour": usd}


def test_repeated_training_is_lost_work() -> None:
    """The first attempt saved step 5, fell in step 9, and the second one went on from 5."""
    fallen = attempt(1, 0, found=60, pulled=90, node=(100, 171), ended=172, fell=168)
    again = attempt(2, 180, found=182, pulled=185, node=(190, 298), ended=300)
    lost = [row("step", 6, 62.5, step_seconds=2.0), row("evaluation", 6, 64.5, seconds=2.0)]
    made = ledger([fallen, again], [*ROWS[:7], *lost, *steps(2, 190, 6, 10), row("end", 10, 60.0)])
    assert seconds(made) == {
        "queue": 62.0, "image pull": 33.0, "network test": 10.0, "stage-in": 30.0, "first step": 20.0, "training": 20.0,
        "checkpoint stall": 0.5,
        "lost work": 7.5,  # from 160.5, when step 5 was saved, to 168, when the rank fell
        "restart": 4.0 + 8.0 + 5.0 + 20.0,  # to the end, to the next record, to its node, to its first step
        "start and end": 10.0 + 20.0 + 50.0,
    }  # fmt: skip


def test_unrecorded_time_is_unknown() -> None:
    """A platform that tells no times, and an end that somebody saw a day later."""
    late = AttemptEnd(state=JobState.FAILED, native="", ended=None, seen=DAY + 86_400)
    made = ledger([replace(UNDISTURBED, end=late, reports=[])], ROWS[:3])
    assert seconds(made)["unknown"] == 100.0 + (86_400 - 154)
    assert made.wall == pytest.approx(86_400)
    assert [row["time"] for row in ledger([replace(UNDISTURBED, end=None, reports=[])], []).rows()] == ["0.0 s"]


@pytest.mark.parametrize("hour", [-3600.0, 3600.0])
def test_clock_set_by_an_hour_books_nothing_twice(hour: float) -> None:
    shown = attempt(1, 0, found=60, pulled=90, node=(100 + hour, 183 + hour), ended=185)
    made = ledger([shown], [{**ROWS[0], "node_started": DAY + 100 + hour}, *ROWS[1:]])
    assert all(spent >= 0 for spent in made.seconds.values())
    assert sum(made.seconds.values()) == pytest.approx(made.wall)
