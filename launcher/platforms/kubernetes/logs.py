"""The logs of all nodes, merged: every line once, whatever breaks in between.

The API gives a container's log from a moment on, in whole seconds, in the order of the file. So where a reader is in a
log is told by a second, and by how many lines of the log since that second it has had. A connection that breaks is
opened again there, by any reader with that position.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from copy import copy
from dataclasses import astuple, dataclass, field, replace
from datetime import UTC, datetime

from pydantic import NonNegativeInt, TypeAdapter

from launcher.errors import LauncherError
from launcher.formatting import terminal_text
from launcher.job import LogLine, LogPage
from launcher.platforms.kubernetes.cluster import ApiObject, ApiRefused, Cluster, NotThere, Stream
from launcher.platforms.kubernetes.render import NODE
from launcher.platforms.kubernetes.states import JobName, began, ended, index_of, restart_of, uid_of
from launcher.platforms.log_files import PAGE

FOLLOWED = 32
"""Nodes, from node 0 on, whose logs are shown as they are written. The others' are read when they have ended: the API
server holds a connection per log, and of a thousand nodes nobody can read along. All nodes' logs are in the run."""

_PAUSES = (1.0, 2.0, 5.0, 15.0, 30.0)  # seconds before a log is asked for again
_TOGETHER = 8  # logs of ended nodes that are read at the same time
_END = 30.0  # seconds that an open connection has to bring the last lines of a container that has ended


@dataclass(frozen=True)
class Place:
    """The position of a reader in the log of one node."""

    pod: str = ""
    """Its uid: the next life of the node has a log of its own."""
    since: str = ""
    """The second of the last line."""
    seen: int = 0
    """Lines since then that were read, the last one among them."""
    last: str = ""
    """When the newest line was written, in UTC and to the microsecond."""


_PLACES = TypeAdapter(dict[int, tuple[str, str, NonNegativeInt, str]])
"""A position of the log as it is stored: a Place for each node. A malformed one is a ValueError."""


def _lines(stream: Iterator[bytes] | Stream, place: Place, pod: str) -> Iterator[tuple[str, Place]]:
    if place.pod != pod:
        place = Place(pod=pod)
    skip, number = place.seen, 0
    for raw in stream:
        line = raw.decode(errors="replace")
        stamp, _, text = line.partition(" ")
        if not (moment := _utc(stamp)):
            moment, text = place.last, line  # of the kubelet itself, which has trouble with the log
        # A log that was rotated has lost lines of that second: what is later than our last line is new all the same.
        if number < skip and moment <= place.last:
            number += 1
            continue
        skip = 0
        second = moment and moment[: len("2026-01-01T00:00:00")] + "Z"
        place = replace(place, last=max(place.last, moment))
        if second >= place.since:  # lines of the two output streams may be a little out of order
            place = replace(place, since=second, seen=place.seen + 1 if second == place.since else 1)
        yield terminal_text(text), place


def _utc(stamp: str) -> str:
    """Return the moment of a line's stamp, such that later ones sort behind it; empty where it is none.

    Container runtimes stamp in their machine's zone, whose offset from UTC may change within a log.
    """
    try:
        moment = datetime.fromisoformat(stamp)
        return moment.astimezone(UTC).isoformat(timespec="microseconds") if moment.tzinfo else ""
    except (ValueError, OverflowError):
        return ""


class Follower:
    """Reads the logs of a job in the background, a thread for each, and hands them out page by page.

    Args:
        position: where to begin, as a page's `position` has it; empty is the beginning.
        once: no more than one page is asked for, and where there is no answer, it is asked for again as a whole.
    """

    def __init__(self, cluster: Cluster, job: JobName, position: str, *, once: bool = False) -> None:
        self._cluster, self._job, self._once = cluster, job, once
        self._trouble: LauncherError | None = None
        self.position = position
        """Behind the last page."""
        self._places = {node: Place(*row) for node, row in _PLACES.validate_json(position or "{}").items()}
        self._turns = threading.BoundedSemaphore(_TOGETHER)
        self._lines: list[LogLine] = []
        self._size = 0
        self._readers: dict[str, _Reader] = {}
        self._newest: dict[int, str] = {}
        self._lock = threading.Condition()

    def page(self, pods: list[ApiObject], *, last: bool) -> LogPage:
        """The lines since the last page.

        Args:
            pods: the job's as they are now.
            last: wait until all that is there is read, or a page is full. What neither speaks nor ends is given up.
        """
        over = {uid_of(pod): ended(pod) for pod in pods}
        for pod in sorted(pods, key=lambda pod: (restart_of(pod), index_of(pod))):
            node, uid = index_of(pod), uid_of(pod)
            if uid not in self._readers and began(pod) and (over[uid] or node < FOLLOWED):
                self._newest[node] = uid
                self._readers[uid] = reader = _Reader(pod, self._places.get(node, Place()), ended=over[uid] or last)
                threading.Thread(target=self._read, args=(reader,), name=f"log {uid}", daemon=True).start()
        for uid, reader in self._readers.items():
            reader.ended = reader.ended or last or over.get(uid, True)

        def all_read() -> bool:
            return all(reader.over for reader in self._readers.values())

        with self._lock:
            if last and not self._lock.wait_for(lambda: all_read() or self._size >= PAGE, _END):
                for reader in self._readers.values():
                    reader.hang_up()
                self._lock.wait_for(lambda: all_read() or self._size >= PAGE, _END)
            if self._trouble is not None:
                raise copy(self._trouble)  # as in JobWatch.pods
            rows = {node: astuple(place) for node, place in sorted(self._places.items())}
            self.position = json.dumps(rows, separators=(",", ":"))
            page = LogPage(tuple(self._lines), self.position, last and bool(self._lines) and not all_read())
            self._lines, self._size = [], 0
            self._lock.notify_all()
            return page

    def stop(self) -> None:
        for reader in self._readers.values():
            reader.stopped.set()
            reader.hang_up()

    def _read(self, reader: _Reader) -> None:
        uid, node, failures = uid_of(reader.pod), index_of(reader.pod), 0
        try:
            while not reader.stopped.is_set():
                last = reader.ended  # the container has ended: one more reading gets all there is
                since = reader.place.since if reader.place.pod == uid else ""
                try:
                    with self._turns if last else nullcontext():
                        name = reader.pod["metadata"]["name"]
                        reader.stream = self._cluster.log(self._job.namespace, name, NODE, since=since, follow=not last)
                        for text, place in _lines(reader.stream, reader.place, uid):
                            reader.place = place
                            with self._lock:
                                while self._size >= PAGE and not reader.stopped.is_set():
                                    self._lock.wait(1.0)  # until the page is fetched, which is full
                                self._size += len(text) + 1
                                when = datetime.fromisoformat(place.last).timestamp() if place.last else 0.0
                                self._lines.append(LogLine(node, text, when))
                                if self._newest[node] == uid:
                                    self._places[node] = place
                                if self._size >= PAGE:
                                    self._lock.notify_all()
                    failures = 0
                    if last:
                        return
                except NotThere:
                    return  # removed; what of it was not read is in the run's own folder
                except LauncherError as error:
                    if self._once and not isinstance(error, ApiRefused):
                        self._trouble = error
                    if self._once:
                        return
                    failures += 1  # broken off, or not started yet: again, from where we are
                reader.stopped.wait(0.05 if reader.ended else _PAUSES[min(failures, len(_PAUSES) - 1)])
        finally:
            with self._lock:
                reader.over = True
                self._lock.notify_all()


@dataclass
class _Reader:
    pod: ApiObject
    place: Place
    ended: bool
    """The container has ended, as far as the watch knows."""
    over: bool = False
    stopped: threading.Event = field(default_factory=threading.Event)
    stream: Stream | None = None

    def hang_up(self) -> None:
        if self.stream is not None:
            self.stream.close()
