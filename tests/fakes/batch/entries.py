"""Cloud Logging's stand-in: entries, and the part of the query language that is asked of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import grpc
from google.cloud.logging_v2 import types

from .admission import RefusedCallError

_TERM = re.compile(r'(?P<field>[A-Za-z_.]+)\s*(?P<operator>>=|<=|=|>|<|:)\s*"(?P<value>[^"]*)"')


@dataclass
class Entries:
    """Of one project."""

    project: str
    delay: Callable[[], float]
    """Seconds until an entry can be read: each its own, so that they do not come in order."""
    visible: list[types.LogEntry] = field(default_factory=list)
    _last: datetime = datetime(2000, 1, 1, tzinfo=UTC)

    def write(self, log: str, text: str, labels: Mapping[str, str]) -> None:
        entry = types.LogEntry(
            log_name=f"projects/{self.project}/logs/{log}",
            insert_id=f"{random.randrange(36**9):x}",
            timestamp=datetime.now(UTC),
            labels=labels,
            resource={"type": "batch.googleapis.com/Job"},
        )
        structured = _object(text)
        if structured is None:
            entry.text_payload = text
        else:
            entry.json_payload = structured
        wait = self.delay()
        if wait:
            asyncio.get_running_loop().call_later(random.random() * wait, self.visible.append, entry)
        else:
            self.visible.append(entry)

    def read(self, request: types.ListLogEntriesRequest) -> types.ListLogEntriesResponse:
        """`ListLogEntries`.

        Raises:
            RefusedCallError: not what Cloud Logging would answer.
        """
        if list(request.resource_names) != [f"projects/{self.project}"]:
            raise RefusedCallError(grpc.StatusCode.PERMISSION_DENIED, "Permission 'logging.logEntries.list' denied")
        if request.order_by not in ("", "timestamp asc", "timestamp desc"):
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, f"order_by {request.order_by!r} is not supported")
        if not 0 <= request.page_size <= 1000:
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, "page_size must be in [0, 1000]")
        holds = condition(request.filter)
        found = sorted(
            (entry for entry in self.visible if holds(entry)), key=lambda entry: (entry.timestamp, entry.insert_id)
        )
        if request.order_by == "timestamp desc":
            found.reverse()
        start, size = int(request.page_token or 0), request.page_size or 50
        more = str(start + size) if len(found) > start + size else ""
        return types.ListLogEntriesResponse(entries=found[start : start + size], next_page_token=more)


def _object(text: str) -> dict[str, object] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def condition(text: str) -> Callable[[types.LogEntry], bool]:
    """A filter of comparisons joined by AND.

    Raises:
        RefusedCallError: it cannot be parsed.
    """
    terms = []
    for part in text.split(" AND ") if text else []:
        match = _TERM.fullmatch(part.strip())
        if match is None or not _known(match["field"]):
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, f"Unparseable filter: {part}")
        terms.append((match["field"], match["operator"], match["value"]))
    return lambda entry: all(_holds(entry, *term) for term in terms)


def _known(name: str) -> bool:
    return name in {"logName", "timestamp", "textPayload"} or name.startswith("labels.")


def _holds(entry: types.LogEntry, name: str, operator: str, value: str) -> bool:
    if name == "timestamp":
        there, asked = entry.timestamp, datetime.fromisoformat(value)
        return {
            ">=": there >= asked,
            "<=": there <= asked,
            ">": there > asked,
            "<": there < asked,
            "=": there == asked,
        }[operator]
    text = {"logName": entry.log_name, "textPayload": entry.text_payload}.get(
        name, entry.labels.get(name.removeprefix("labels."), "")
    )
    return value in text if operator == ":" else text == value
