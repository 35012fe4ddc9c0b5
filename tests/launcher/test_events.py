from __future__ import annotations

import logging
import threading

import pytest

from launcher.events import Event, Listener, MetricsRow, Note, Output, Step, StepDone, StepProgress, StepStarted, report

EVENTS: list[Event] = [
    StepStarted(step=Step.DATASET),
    StepProgress(step=Step.DATASET, what="half", fraction=0.5),
    StepDone(step=Step.DATASET, what="all", reused=True),
    MetricsRow(row={"kind": "step", "step": 1}),
    Output(line="100 % of it, {braces} and %s"),
    Note(what="read this", severity="warning"),
]


def test_a_listener_gets_every_event_as_it_was_told_and_in_order() -> None:
    heard: list[Event] = []
    with Listener(heard.append):
        for event in EVENTS:
            report(event)
    assert heard == EVENTS


def test_nobody_hears_what_is_told_before_and_after() -> None:
    heard: list[Event] = []
    report(EVENTS[0])
    with Listener(heard.append):
        pass
    report(EVENTS[1])
    assert heard == []


def test_two_listeners_hear_the_same() -> None:
    first: list[Event] = []
    second: list[Event] = []
    with Listener(first.append), Listener(second.append):
        report(EVENTS[0])
    assert first == second == [EVENTS[0]]


def test_events_of_other_threads_are_heard() -> None:
    """Steps do their work in threads."""
    heard: list[Event] = []
    with Listener(heard.append):
        threads = [threading.Thread(target=report, args=(event,)) for event in EVENTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(repr, heard)) == sorted(map(repr, EVENTS))


def test_a_programs_own_logging_does_not_see_them(capfd: pytest.CaptureFixture[str]) -> None:
    """They would drown it: a training tells one for each of its steps."""
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        for event in EVENTS:
            report(event)
    finally:
        root.removeHandler(handler)
    assert seen == []
    assert capfd.readouterr() == ("", "")


def test_a_listener_that_fails_is_not_passed_over() -> None:
    def refuse(event: Event) -> None:
        raise ValueError("a bar cannot be drawn")

    with Listener(refuse), pytest.raises(ValueError, match="cannot be drawn"):
        report(EVENTS[0])


def test_the_five_steps_are_the_pipeline_in_order() -> None:
    assert [f"{step.place} {step}" for step in Step] == [
        "1/5 dataset", "2/5 image", "3/5 credentials", "4/5 training", "5/5 checkpoints",
    ]  # fmt: skip
