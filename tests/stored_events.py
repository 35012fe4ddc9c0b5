"""The events that the tests' Prefect server has kept."""

from __future__ import annotations

from uuid import uuid4

from prefect.client.orchestration import get_client
from prefect.events import Event, emit_event
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from waiting import until


def stored_events(prefix: str, *resources: str) -> list[Event]:
    """Return what was told of these resources until now by events whose names begin so, oldest first.

    Events arrive in the order in which this process emits them: the last one here says that the others are there.
    """
    last = f"tests.{uuid4()}"
    assert emit_event(last, resource={"prefect.resource.id": "tests"}) is not None
    with get_client(sync_client=True) as client:
        until(lambda: client.read_events(EventFilter(event=EventNameFilter(name=[last])), limit=1).events)
        wanted = EventFilter(event=EventNameFilter(prefix=[prefix]), resource=EventResourceFilter(id=[*resources]))
        found = client.read_events(wanted, limit=50).events
    return sorted(found, key=lambda one: one.occurred)
