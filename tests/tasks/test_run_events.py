"""The events of runs: what rows of metrics and verdicts tell an automation, and how often."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.events.worker import EventsWorker
from stored_events import stored_events
from strict_platform import StrictPlatform

from launcher.config import ScriptConfig
from launcher.errors import JobFailed
from launcher.job import Job, JobId, JobState, Submission
from launcher.runs.attempts import Attempts, Claim
from launcher.runs.index import AttemptRecord, Index
from litgpt_demo.config import RestartSettings
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.metrics import marked
from tasks.run_events import (
    RUN_EVENTS,
    AttemptEvents,
    CheckpointCommitted,
    RunEvent,
    RunStarted,
    emit_run_event,
    payload_fields,
)
from tasks.training import run_job

RECORD = AttemptRecord(
    run="demo-k", name="demo", key="k", attempt=2, config={}, platform={"kind": "local"}, job_id=JobId("local/demo-2"),
    directory="/data/runs/demo-k/attempts/2", user="me", host="here", machine="m", created=1.0,
)  # fmt: skip
START = {"kind": "start", "step": 4, "steps": 100, "world_size": 2, "attempt": 2}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_attempt_starts_once_even_if_its_platform_starts_its_processes_again() -> None:
    events = AttemptEvents(RECORD, "/data/runs/demo-k")
    [started] = [one for row in (START, {**START, "step": 8}) for one in events.take(row)]
    assert isinstance(started, RunStarted)
    assert started.text == "demo-k: attempt 2 trains with 2 processes on local, from step 4 to 100"


def test_an_orchestrator_that_takes_an_attempt_up_tells_nothing_of_it_again() -> None:
    events = AttemptEvents(RECORD, "/data/runs/demo-k")
    known: list[dict[str, Any]] = [START, {"kind": "evaluation", "step": 8, "validation_loss": 3.0}]
    events.know([*known, {"kind": "checkpoint", "step": 8}])
    assert not [*events.take({**START, "step": 8}), *events.rest()]
    [committed] = events.take({"kind": "checkpoint", "step": 9})
    assert isinstance(committed, CheckpointCommitted)
    assert committed.validation_loss == 3.0


def test_checkpoints_of_each_second_are_told_of_once_a_minute_and_the_newest_at_the_end() -> None:
    events, told = AttemptEvents(RECORD, "/data/runs/demo-k", clock=(clock := Clock())), list[RunEvent]()
    for step in range(1, 151):
        clock.now = float(step)
        told += events.take({"kind": "evaluation", "step": step, "validation_loss": 200.0 - step})
        told += events.take({"kind": "checkpoint", "step": step})
    told += [*events.rest(), *events.rest()]
    assert [one.step for one in told] == [1, 60, 120, 150]
    assert [one.payload["validation_loss"] for one in told] == [199.0, 140.0, 80.0, 50.0]


def test_a_checkpoint_has_the_loss_up_to_its_step_though_it_is_committed_later() -> None:
    events = AttemptEvents(RECORD, "/data/runs/demo-k")
    for step, loss in ((4, 5.0), (8, float("nan"))):
        assert not [*events.take({"kind": "evaluation", "step": step, "validation_loss": loss})]
    [committed] = events.take({"kind": "checkpoint", "step": 6})
    assert committed.payload["validation_loss"] == 5.0
    lost = replace(committed, validation_loss=float("nan"))  # type: ignore[call-arg]
    assert lost.payload["validation_loss"] is None, "JSON has no NaN"


@pytest.mark.prefect
@pytest.mark.long
def test_what_two_orchestrators_tell_is_one_event_of_the_flow_run(tmp_path: Path) -> None:
    told = [one for _ in range(2) for one in AttemptEvents(RECORD, str(tmp_path)).take(START)]

    @flow(name="scene", flow_run_name="scene of two")
    def scene() -> None:
        for event in told:
            emit_run_event(event)

    scene()
    assert len(told) == 2
    [kept] = stored_events("train-litgpt.", "train-litgpt.run.demo-k")
    assert (kept.event, kept.payload["steps"]) == ("train-litgpt.run.started", 100)
    assert "scene of two" in {one.get("prefect.resource.name") for one in kept.related}


@pytest.mark.prefect
def test_outside_of_a_flow_run_nothing_is_told_and_no_server_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(EventsWorker, "send", lambda self, event: sent.append(event))
    [started] = AttemptEvents(RECORD, "/data/runs/demo-k").take(START)
    emit_run_event(started)
    assert sent == []


class Breaking(StrictPlatform):
    """Trains to a checkpoint in each attempt, and then loses a node."""

    poll_seconds = 0.05

    def submit(self, submission: Submission) -> JobId:
        job_id = super().submit(submission)
        self.start(job_id)
        self.say(job_id, marked({"kind": "start", "step": 0, "steps": 9}), marked({"kind": "checkpoint", "step": 3}))
        self.end(job_id, JobState.FAILED, {0: EXIT_CODES[Fault.NODE]})
        return job_id


@pytest.mark.prefect
@pytest.mark.long
def test_each_verdict_says_what_follows_it(tmp_path: Path) -> None:
    """The first attempt is followed by another, the second by none."""
    config, platform = ScriptConfig(root=str(tmp_path), script="/train.py"), Breaking()
    attempts = Attempts(index=Index.of(config.root), run="breaking", open=lambda section: platform)

    def make_job(attempt: int) -> Job:
        folder = tmp_path / "runs" / "breaking" / "attempts" / str(attempt)
        return Job(
            name="breaking", attempt=attempt, nodes=1, processes=1, program=("/train.py",), directory=str(folder)
        )

    claim = Claim(attempts=attempts, config=config, platform=platform, make_job=make_job)

    @flow(name="scene")
    def scene() -> None:
        asyncio.run(run_job(claim, max_restarts=1, restarts=RestartSettings(longest_wait=0.05)))

    with pytest.raises(JobFailed, match="node fault on node 0"):
        scene()
    told = stored_events("train-litgpt.", "train-litgpt.run.breaking")
    names = ["train-litgpt.run.started", "train-litgpt.checkpoint.committed", "train-litgpt.verdict"]
    assert [one.event for one in told] == names * 2
    first, last = (one.payload for one in told if one.event == "train-litgpt.verdict")
    assert (first["attempt"], first["fault"], first["node"], first["action"]) == (1, "node fault", 0, "restart")
    assert first["text"] == "breaking: attempt 1 ended as node fault on node 0; another attempt follows"
    assert (last["attempt"], last["action"]) == (2, "stop")
    assert "restarts.node_fault allows 1" in last["reason"]


def test_the_page_of_events_has_all_of_them_with_their_payloads() -> None:
    page = Path("docs/deployments.md").read_text(encoding="utf-8")
    head, _, *rows = page.partition("| event | when |")[2].partition("\n\n")[0].splitlines()
    common = re.findall(r"`(\w+)`", head)
    shown = {cells[1].strip(" `"): re.findall(r"`(\w+)`", cells[3]) for cells in (row.split("|") for row in rows)}
    assert {name: [*common, *own] for name, own in shown.items()} == {
        kind.name: payload_fields(kind) for kind in RUN_EVENTS
    }
