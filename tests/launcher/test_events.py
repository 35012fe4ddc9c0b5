from __future__ import annotations

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


def test_listeners_get_every_event_of_their_time_as_it_was_told_and_in_order(
    capfd: pytest.CaptureFixture[str],
) -> None:
    first: list[Event] = []
    second: list[Event] = []
    report(EVENTS[0])
    with Listener(first.append), Listener(second.append):
        for event in EVENTS:
            report(event)
    report(EVENTS[1])
    assert first == second == EVENTS
    assert capfd.readouterr() == ("", ""), "a program's own log does not see them"


def test_events_of_other_threads_are_heard_and_a_listener_that_fails_is_not_passed_over() -> None:
    heard: list[Event] = []
    with Listener(heard.append):
        threads = [threading.Thread(target=report, args=(event,)) for event in EVENTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(repr, heard)) == sorted(map(repr, EVENTS))

    def refuse(event: Event) -> None:
        raise ValueError("a bar cannot be drawn")

    with Listener(refuse), pytest.raises(ValueError, match="cannot be drawn"):
        report(EVENTS[0])
