"""A job's lines in Cloud Logging, from a position on."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from launcher.job import LogLine, LogPage
from launcher.platforms.log_files import PAGE

if TYPE_CHECKING:
    from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

# Entries come late and not in order; each look goes back so far and leaves out what it has seen.
OVERLAP = timedelta(seconds=60)

# `task/<job uid>-group0-<k>/<retries>/0` (https://cloud.google.com/batch/docs/troubleshooting, on 50002)
_TASK = re.compile(r"-([0-9]{1,6})/")


@dataclass
class Position:
    """The position at which reading stopped."""

    uid: str
    newest: str = ""
    """Timestamp of the newest entry that was read."""
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
    """All lines of a job after `position` that are there."""
    there = Position.of(position, uid=uid)
    since = (datetime.fromisoformat(there.newest) if there.newest else created) - OVERLAP
    entries = client.list_log_entries(
        request={
            "resource_names": [f"projects/{project}"],
            # The agent's own log is another one: batch_agent_logs.
            "filter": f'logName="projects/{project}/logs/batch_task_logs" AND labels.job_uid="{uid}" '
            f'AND timestamp>="{since.astimezone(UTC).isoformat()}"',
            "order_by": "timestamp asc",
            "page_size": 1000,  # entries that an answer of Cloud Logging holds
        }
    )
    known, size, more = set(there.seen), 0, False
    lines: list[LogLine] = []
    times: list[tuple[datetime, str]] = []
    for entry in entries:
        if more := size > PAGE:
            break
        times.append((entry.timestamp, entry.insert_id))
        task = _TASK.search(entry.labels.get("task_id", ""))
        if entry.insert_id in known or task is None:
            continue
        text, payload = str(entry.text_payload), entry.json_payload
        if not text and payload:  # a line that is JSON arrives as its fields
            text = str(payload["message"]) if set(payload) == {"message"} else json.dumps(_plain(payload))
        size += len(text)
        lines += [LogLine(int(task[1]), line) for line in text.splitlines()]
    if not times:
        return LogPage((), str(there))
    newest = max(moment for moment, _ in times)
    seen = [name for moment, name in times if moment >= newest - OVERLAP]
    return LogPage(tuple(lines), str(Position(there.uid, newest.isoformat(), seen)), more)


def _plain(value: Any) -> Any:
    """Cloud Logging keeps numbers as floats; whole ones were whole."""
    if hasattr(value, "items"):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return [_plain(item) for item in value]
