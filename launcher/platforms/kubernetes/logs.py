"""The logs of all nodes of a job, merged. Each line is returned once, also after a broken connection.

The API returns a container's log from a moment on, in whole seconds and in the order of the file. A cursor therefore
holds a second and the number of lines of that second that were read. Any reader continues from it.

The copies in the run's folder do not replace these logs: their lines have no time, which `logs --since` needs, and to
look at them takes a request for each node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from pydantic import NonNegativeInt, TypeAdapter

from launcher.errors import LauncherError
from launcher.formatting import terminal_text
from launcher.job import LogLine, LogPage
from launcher.platforms.kubernetes.cluster import ApiObject, ApiRefused, Cluster, NotFound, Stream
from launcher.platforms.kubernetes.render import NODE
from launcher.platforms.kubernetes.states import JobName, began, ended, index_of, restart_of, uid_of
from launcher.platforms.log_files import PAGE

FOLLOWED = 32
"""The number of nodes, from node 0 on, whose logs are returned as they are written. The others' are read at their end:
the API server holds a connection for each followed log. The run's folder has the logs of all nodes."""

_PAUSES = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Seconds before a log is requested again."""
_PARALLEL = 8
"""Logs of ended nodes that are read in parallel."""
_LAST_LINES = 30.0
"""Seconds that an open connection has to deliver the last lines of a container that has ended."""


class LogCursor(NamedTuple):
    """The position of a reader in the log of one node."""

    pod: str = ""
    """Its uid: the next life of the node has a log of its own."""
    since: str = ""
    """The second of the last line."""
    seen: NonNegativeInt = 0
    """The number of lines since then that were read, the last one included."""
    last: str = ""
    """When the newest line was written, in UTC and to the microsecond."""


_CURSORS = TypeAdapter(dict[int, LogCursor])
"""A position of the log as it is stored: a cursor for each node. A malformed one is a ValueError."""


def _lines(stream: Iterator[bytes] | Stream, cursor: LogCursor, pod: str) -> Iterator[tuple[str, LogCursor]]:
    """Yield the lines of a pod's log that the cursor has not seen, each with the cursor behind it."""
    if cursor.pod != pod:
        cursor = LogCursor(pod=pod)
    skip, number = cursor.seen, 0
    for raw in stream:
        line = raw.decode(errors="replace")
        stamp, _, text = line.partition(" ")
        moment = _utc(stamp)
        if not moment:  # a line of the kubelet itself, which has trouble with the log
            moment, text = cursor.last, line
        # A rotated log has lost lines of that second. A line that is later than our last one is new in any case.
        if number < skip and moment <= cursor.last:
            number += 1
            continue
        skip = 0
        second = f"{moment[: len('2026-01-01T00:00:00')]}Z" if moment else ""
        cursor = cursor._replace(last=max(cursor.last, moment))
        if second == cursor.since:
            cursor = cursor._replace(seen=cursor.seen + 1)
        elif second > cursor.since:  # lines of the two output streams may be a little out of order
            cursor = cursor._replace(since=second, seen=1)
        yield terminal_text(text), cursor


def _utc(stamp: str) -> str:
    """Container runtimes stamp in their machine's zone, whose offset from UTC may change within a log."""
    try:
        moment = datetime.fromisoformat(stamp)
        if moment.tzinfo is None:
            return ""
        return moment.astimezone(UTC).isoformat(timespec="microseconds")
    except (ValueError, OverflowError):
        return ""


class Follower:
    """Reads the logs of a job in the background from a position on, one thread for each, and returns them page by page.
    With `once` only one page is read, again after an error."""

    def __init__(self, cluster: Cluster, job: JobName, position: str, *, once: bool = False) -> None:
        self._cluster, self._job, self._once = cluster, job, once
        self._error: LauncherError | None = None
        self.position = position
        """The position behind the last page."""
        self._cursors = _CURSORS.validate_json(position or "{}")
        self._turns = threading.BoundedSemaphore(_PARALLEL)
        self._lines: list[LogLine] = []
        self._size = 0
        self._readers: dict[str, _Reader] = {}
        self._newest: dict[int, str] = {}
        self._changed = threading.Condition()

    def page(self, pods: list[ApiObject], *, last: bool) -> LogPage:
        """Return the lines since the last page; with `last`, wait until everything is read, or a page is full. A silent
        log that does not end is given up."""
        has_ended = {uid_of(pod): ended(pod) for pod in pods}
        for pod in sorted(pods, key=lambda pod: (restart_of(pod), index_of(pod))):
            node, uid = index_of(pod), uid_of(pod)
            if uid not in self._readers and began(pod) and (has_ended[uid] or node < FOLLOWED):
                reader = _Reader(pod, self._cursors.get(node, LogCursor()), has_ended=has_ended[uid] or last)
                self._newest[node], self._readers[uid] = uid, reader
                threading.Thread(target=self._read, args=(reader,), name=f"log {uid}", daemon=True).start()
        for uid, reader in self._readers.items():
            reader.has_ended = reader.has_ended or last or has_ended.get(uid, True)

        with self._changed:
            if last and not self._changed.wait_for(self._is_complete, _LAST_LINES):
                for reader in self._readers.values():
                    reader.close()
                self._changed.wait_for(self._is_complete, _LAST_LINES)
            if self._error is not None:
                raise copy(self._error)  # as in JobWatch.pods
            self.position = _CURSORS.dump_json(self._cursors).decode()
            more = last and bool(self._lines) and not all(reader.is_done for reader in self._readers.values())
            page = LogPage(tuple(self._lines), self.position, more)
            self._lines, self._size = [], 0
            self._changed.notify_all()
            return page

    def _is_complete(self) -> bool:
        return self._size >= PAGE or all(reader.is_done for reader in self._readers.values())

    def stop(self) -> None:
        for reader in self._readers.values():
            reader.stopped.set()
            reader.close()

    def _read(self, reader: _Reader) -> None:
        failures = 0
        try:
            while not reader.stopped.is_set():
                is_last = reader.has_ended  # one more reading then gets all that there is
                try:
                    with self._turns if is_last else nullcontext():
                        self._read_stream(reader, follow=not is_last)
                    failures = 0
                    if is_last:
                        return
                except NotFound:
                    return  # the pod was removed; the run's folder has its whole log
                except LauncherError as error:
                    if self._once and not isinstance(error, ApiRefused):
                        self._error = error
                    if self._once:
                        return
                    failures += 1  # the connection broke, or the container has not started: continue at the cursor
                reader.stopped.wait(0.05 if reader.has_ended else _PAUSES[min(failures, len(_PAUSES) - 1)])
        finally:
            with self._changed:
                reader.is_done = True
                self._changed.notify_all()

    def _read_stream(self, reader: _Reader, *, follow: bool) -> None:
        node, uid, name = index_of(reader.pod), uid_of(reader.pod), reader.pod["metadata"]["name"]
        since = reader.cursor.since if reader.cursor.pod == uid else ""
        reader.stream = self._cluster.log(self._job.namespace, name, NODE, since=since, follow=follow)
        for text, cursor in _lines(reader.stream, reader.cursor, uid):
            reader.cursor = cursor
            written = datetime.fromisoformat(cursor.last).timestamp() if cursor.last else 0.0
            with self._changed:
                while self._size >= PAGE and not reader.stopped.is_set():
                    self._changed.wait(1.0)  # until the full page is fetched
                self._size += len(text) + 1
                self._lines.append(LogLine(node, text, written))
                if self._newest[node] == uid:
                    self._cursors[node] = cursor
                if self._size >= PAGE:
                    self._changed.notify_all()


@dataclass
class _Reader:
    pod: ApiObject
    cursor: LogCursor
    has_ended: bool
    """The container has ended, as far as the watch knows."""
    is_done: bool = False
    stopped: threading.Event = field(default_factory=threading.Event)
    stream: Stream | None = None

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
