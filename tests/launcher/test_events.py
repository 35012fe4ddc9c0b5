from __future__ import annotations

import threading

import pytest

from launcher.events import Event, Listener, Note, Output, Step, StepDone, report

EVENTS: list[Event] = [
    StepDone(step=Step.DATASET, what="all", reused=True),
    Output(line="100 % of it, {braces} and %s"),
    Note(what="read this", severity="warning"),
]


def test_listeners_get_every_event_of_their_time_from_any_thread_and_one_that_fails_is_not_passed_over() -> None:
    first: list[Event] = []
    second: list[Event] = []
    report(EVENTS[0])
    with Listener(first.append), Listener(second.append):
        for event in EVENTS:
            thread = threading.Thread(target=report, args=(event,))
            thread.start()
            thread.join()
    report(EVENTS[1])
    assert first == second == EVENTS

    def refuse(event: Event) -> None:
        raise ValueError("a bar cannot be drawn")

    with Listener(refuse), pytest.raises(ValueError, match="cannot be drawn"):
        report(EVENTS[0])
