"""Trials that ended in the life of another process: what they took still counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from strict_platform import StrictPlatform

from flows.trials import Trials
from launcher.config import RunConfig, SweepConfig
from launcher.errors import JobCancelled
from launcher.job import JobState, JobStatus
from launcher.runs.attempts import CancelWatch, claim_of
from launcher.runs.index import Index
from launcher.runs.outcomes import Outcome
from launcher.runs.studies import Study
from launcher.runs.sweeps import trials
from launcher.runs.trials import sweep_name

FOUR_HOURS = 4 * 3600.0


@pytest.fixture
def sweep(tiny: Callable[..., RunConfig]) -> SweepConfig:
    search = {"grid": {"train.seed": [1, 2]}, "pruning": {"kind": "asha"}, "budget": {"gpu_hours": 3}}
    return SweepConfig.model_validate({**tiny({"train.evaluate_every": 2}).model_dump(), "sweep": search})


async def nobody(_: Trials) -> None:
    pass


def test_what_a_pruned_trial_took_counts_in_the_budget_of_the_next_start(sweep: SweepConfig) -> None:
    """The decision to prune is written down before its job has ended: nothing in it says what the trial took."""
    known, index = trials(sweep), Index.of(sweep.root)
    before, record = Study(sweep, known), claim_of(known[0].config).take()
    before.next()
    told = {"validation_loss": 7.0, "tokens_per_second": None, "error": "behind", "ended": "pruned"}
    before.tell(Outcome(trial=known[0], run=record.run, **told))
    held = {"scheduled": record.created, "pulled": record.created, "ended": record.created + FOUR_HOURS}
    index.end(record, JobStatus(state=JobState.CANCELLED, native="", **held))

    again = Trials(sweep, Study(sweep, known), CancelWatch(index, []), nobody)
    (ended,) = asyncio.run(again.carry_out(parallel=1))
    assert (ended.state, ended.error, ended.flow_run) == ("pruned", "behind", record.flow_run or "")
    assert ended.seconds == pytest.approx(FOUR_HOURS)
    assert again.gpu_hours == ended.gpu_hours >= 4, "more than its budget, so that the other trial does not begin"
    assert [one.run for one in index.newest()] == [record.run]


def test_the_jobs_of_a_sweep_that_was_cancelled_while_it_was_dead_are_ended(
    sweep: SweepConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, index, name, platform = trials(sweep), Index.of(sweep.root), sweep_name(sweep), StrictPlatform()
    claim = claim_of(known[0].config)
    claim = replace(claim, platform=platform, attempts=replace(claim.attempts, open=lambda section: platform))
    index.begin_work("mine", name)
    platform.submit(platform.render(claim.job_of(claim.take())))
    assert len(platform.live()) == 1
    index.request_cancel(name)
    monkeypatch.setattr("flows.trials.opening_beside", lambda given: claim.attempts.open)
    watch = CancelWatch(index, [name], orchestrator="mine")
    with pytest.raises(JobCancelled):
        asyncio.run(Trials(sweep, Study(sweep, known), watch, nobody, "mine").carry_out(parallel=1))
    assert not platform.live()
    assert len(index.newest()) == 1, "no other trial has begun"
