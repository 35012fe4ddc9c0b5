"""Cloud Logging's stand-in: entries, and the part of the query language that is asked of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import grpc
from google.cloud.logging_v2 import types

from .admission import RefusedCallError

_TERM = re.compile(r'(?P<field>logName|timestamp|labels\.\w+)(?P<operator>>=|=)"(?P<value>[^"]*)"')


@dataclass
class Entries:
    """Of one project."""

    project: str
    held: bool = False
    """Entries that come now cannot be read yet."""
    visible: list[types.LogEntry] = field(default_factory=list)
    waiting: list[types.LogEntry] = field(default_factory=list)

    def write(self, log: str, text: str, labels: Mapping[str, str]) -> None:
        entry = types.LogEntry(
            log_name=f"projects/{self.project}/logs/{log}",
            insert_id=f"{random.randrange(36**9):x}",
            timestamp=datetime.now(UTC),
            labels=labels,
        )
        try:
            structured = json.loads(text)
        except ValueError:
            structured = None
        if isinstance(structured, dict):
            entry.json_payload = structured
        else:
            entry.text_payload = text
        (self.waiting if self.held else self.visible).append(entry)

    def release(self, count: int) -> None:
        """Let some of those that were held be read, and not in order."""
        random.shuffle(self.waiting)
        self.visible += self.waiting[:count]
        del self.waiting[:count]

    def read(self, request: types.ListLogEntriesRequest) -> types.ListLogEntriesResponse:
        """`ListLogEntries`.

        Raises:
            RefusedCallError: not what Cloud Logging would answer.
        """
        if list(request.resource_names) != [f"projects/{self.project}"]:
            raise RefusedCallError(grpc.StatusCode.PERMISSION_DENIED, "Permission 'logging.logEntries.list' denied")
        if request.order_by != "timestamp asc" or not 0 <= request.page_size <= 1000:
            text = f"order_by {request.order_by!r} or page_size {request.page_size} is not supported"
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, text)
        holds = condition(request.filter)
        found = sorted(
            (entry for entry in list(self.visible) if holds(entry)),
            key=lambda entry: (entry.timestamp, entry.insert_id),
        )
        start, size = int(request.page_token or 0), request.page_size or 50
        more = str(start + size) if len(found) > start + size else ""
        return types.ListLogEntriesResponse(entries=found[start : start + size], next_page_token=more)


def condition(text: str) -> Callable[[types.LogEntry], bool]:
    """A filter of comparisons joined by AND.

    Raises:
        RefusedCallError: it cannot be parsed.
    """
    terms = []
    for part in text.split(" AND "):
        if (match := _TERM.fullmatch(part)) is None:
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, f"Unparseable filter: {part}")
        terms.append((match["field"], match["value"]))
    return lambda entry: all(_holds(entry, *term) for term in terms)


def _holds(entry: types.LogEntry, name: str, value: str) -> bool:
    if name == "timestamp":
        return bool(entry.timestamp >= datetime.fromisoformat(value))
    return value == (entry.log_name if name == "logName" else entry.labels.get(name.removeprefix("labels."), ""))
