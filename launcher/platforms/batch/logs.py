"""A job's lines in Cloud Logging, from a position on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from launcher.job import LogLine, LogPage
from launcher.platforms.log_files import PAGE

if TYPE_CHECKING:
    from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

# Entries come late and not in order; each look goes back so far and leaves out what it has seen.
OVERLAP = timedelta(seconds=60)
_SETTLED = 2 * OVERLAP
"""The age of an entry that no earlier one comes after any more, with as much again for clocks that differ."""
_ENTRIES = 1000  # that an answer of Cloud Logging holds
_NEW = 10_000
"""Entries of a page that the reader has not had. A project may ask for 60 answers a minute, all of its readers together
(https://cloud.google.com/logging/quotas#api-limits), and short lines would need more of them for a page of text."""

# `task/<job uid>-group0-<k>/<retries>/0` (https://cloud.google.com/batch/docs/troubleshooting, on 50002)
_TASK = re.compile(r"-([0-9]{1,6})/")


@dataclass
class Position:
    """The position at which reading stopped."""

    uid: str
    newest: str = ""
    """Timestamp of the newest entry that was read: the next look begins so much before it that none is missed. Where a
    page ended among old entries, it is a later one: nothing comes between those any more (`_behind`)."""
    seen: list[str] = field(default_factory=list)
    """Ids of entries that the next look finds again."""

    @classmethod
    def of(cls, text: str, *, uid: str) -> Position:
        """A position in another job's log is none."""
        there = cls(**json.loads(text)) if text else cls(uid)
        return there if there.uid == uid else cls(uid)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def read(client: LoggingServiceV2Client, *, project: str, uid: str, created: datetime, position: str) -> LogPage:
    """The lines of a job after `position` that are there: all of them, or where that is said, the first ones."""
    there = Position.of(position, uid=uid)
    since = (datetime.fromisoformat(there.newest) if there.newest else created) - OVERLAP
    entries = client.list_log_entries(
        request={
            "resource_names": [f"projects/{project}"],
            "filter": filter_of(project, uid, since),
            "order_by": "timestamp asc",
            "page_size": _ENTRIES,
        }
    )
    return _page(entries, there, datetime.now(UTC))


def filter_of(project: str, uid: str, since: datetime) -> str:
    """The filter in Cloud Logging's query language. The agent's own log is another one: batch_agent_logs."""
    return (
        f'logName="projects/{project}/logs/batch_task_logs" AND labels.job_uid="{uid}" '
        f'AND timestamp>="{since.astimezone(UTC).isoformat()}"'
    )


def _page(entries: Iterable[Any], there: Position, now: datetime) -> LogPage:
    """The page that begins with these entries.

    The quota may be used up between two answers, which Google's client does not wait for. What was read until then is a
    page, and the next one finds the quota still used up, or goes on: nothing is asked for twice that was had once.

    Raises:
        TooManyRequests: it was used up before anything was new.
    """
    from google.api_core.exceptions import TooManyRequests

    known, size, new, more = set(there.seen), 0, 0, False
    lines: list[LogLine] = []
    times: list[tuple[datetime, str]] = []
    try:
        for entry in entries:
            if more := size > PAGE or new >= _NEW:
                break
            times.append((entry.timestamp, entry.insert_id))
            if entry.insert_id in known:
                continue
            new += 1
            if (task := _TASK.search(entry.labels.get("task_id", ""))) is not None:
                text = _text(entry)
                size += len(text)
                lines += [LogLine(int(task[1]), line, entry.timestamp.timestamp()) for line in text.splitlines()]
    except TooManyRequests:
        if not new:
            raise
        more = True
    if not times:
        return LogPage((), str(there))
    return LogPage(tuple(lines), str(_behind(there, times, now, more=more)), more)


def _behind(there: Position, times: list[tuple[datetime, str]], now: datetime, *, more: bool) -> Position:
    """The position behind entries. Where more are there already, the next look need not begin before those that are old
    enough: of a flood it would find again as many as a minute's quota gives, and never come to what is new."""
    newest = max(moment for moment, _ in times)
    since = newest - OVERLAP
    if more:
        since = max(since, min(newest, now - _SETTLED))
    if there.newest:  # what is before this look's beginning is not among what it has seen
        since = max(since, datetime.fromisoformat(there.newest) - OVERLAP)
    seen = [name for moment, name in times if moment >= since]
    return Position(there.uid, (since + OVERLAP).isoformat(), seen)


def _text(entry: Any) -> str:
    """A line that is JSON arrives as its fields."""
    if entry.text_payload:
        return str(entry.text_payload)
    payload = entry.json_payload
    if not payload:
        return ""
    return str(payload["message"]) if set(payload) == {"message"} else json.dumps(_plain(payload))


def _plain(value: Any) -> Any:
    """Cloud Logging keeps numbers as floats; whole ones were whole."""
    if hasattr(value, "items"):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return [_plain(item) for item in value]
