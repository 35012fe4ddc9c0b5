from threading import Thread

import pytest

from launcher.events import Event, Listener, Note, report


def test_listeners_get_every_event_from_any_thread() -> None:
    """An error of a listener is raised."""
    note = Note(what="100 % of it, {braces} and %s", severity="warning")
    first, second = list[Event](), list[Event]()
    report(note)
    with Listener(first.append), Listener(second.append):
        report(note)
        thread = Thread(target=report, args=(note,))
        thread.start()
        thread.join()
    report(note)
    assert first == second == [note, note]

    def refuse(event: Event) -> None:
        raise ValueError("a bar cannot be drawn")

    with Listener(refuse), pytest.raises(ValueError, match="cannot be drawn"):
        report(note)
