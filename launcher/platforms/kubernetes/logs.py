"""The logs of all nodes, merged: every line once, whatever breaks in between.

The API gives a container's log from a moment on, in whole seconds, in the order of the file. So where a reader is in a
log is told by a second, and by how many lines of the log since that second it has had. A connection that breaks is
opened again there, by any reader with that position.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from launcher.errors import LauncherError
from launcher.job import LogLine, LogPage
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.cluster import ApiObject, ApiRefused, Cluster, NotThere, Stream
from launcher.platforms.kubernetes.informer import JobName, JobWatch
from launcher.platforms.kubernetes.states import began, ended, index_of, restart_of, uid_of
from launcher.platforms.log_files import PAGE, share_of_page, terminal_text

FOLLOWED = 32
"""Nodes, from node 0 on, whose logs are shown as they are written. The others' are read when they have ended: the API
server holds a connection per log, and of a thousand nodes nobody can read along. All nodes' logs are in the run."""

_PAUSES = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Seconds before a log is asked for again."""
_TOGETHER = 8
"""Logs of ended nodes that are read at the same time."""
_END = 30.0
"""Seconds that an open connection has to bring the last lines of a container that has ended."""


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


def _open(cluster: Cluster, namespace: str, pod: ApiObject, place: Place, *, follow: bool) -> Stream:
    """Open the log at a place."""
    since = place.since if place.pod == uid_of(pod) and place.since else None
    return cluster.log(namespace, pod["metadata"]["name"], names.NODE, since=since, follow=follow)


def _lines(stream: Stream, place: Place, pod: str) -> Iterator[tuple[str, Place]]:
    """Yield the lines behind a place, each with the place behind it."""
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
        yield terminal_text(text), (place := _behind(place, moment))


def _utc(stamp: str) -> str:
    """Return the moment of a line's stamp, such that later ones sort behind it; empty where it is none.

    Container runtimes stamp in their machine's zone, whose offset from UTC may change within a log.
    """
    try:
        moment = datetime.fromisoformat(stamp)
        return moment.astimezone(UTC).isoformat(timespec="microseconds") if moment.tzinfo else ""
    except (ValueError, OverflowError):
        return ""


def _behind(place: Place, moment: str) -> Place:
    """The place behind one more line. Lines of the two output streams may be a little out of order."""
    second, last = moment and moment[: len("2026-01-01T00:00:00")] + "Z", max(place.last, moment)
    if second < place.since:
        return replace(place, last=last)
    return replace(place, since=second, seen=place.seen + 1 if second == place.since else 1, last=last)


# --- pages ------------------------------------------------------------------------------------------------------------

Places = dict[int, Place]
"""Positions by node."""


def parse(position: str) -> Places:
    """Return the position that `written` stands for; empty is the beginning."""
    return {int(node): Place(*row) for node, row in json.loads(position or "{}").items()}


def written(places: Places) -> str:
    rows = {node: [one.pod, one.since, one.seen, one.last] for node, one in sorted(places.items())}
    return json.dumps(rows, separators=(",", ":"))


def log_page(cluster: Cluster, job: JobName, pods: list[ApiObject], position: str) -> LogPage:
    """Return the lines after a position, read now: a call for each of the first nodes, and of those that have ended.

    Raises:
        PlatformUnreachable: no answer; the page is asked for again as a whole.
    """
    places = parse(position)
    waiting = []
    for pod in _in_order(pods):
        node = index_of(pod)
        place = places.get(node, Place())
        later = {uid_of(one) for one in pods if index_of(one) == node and restart_of(one) > restart_of(pod)}
        if _readable(pod) and place.pod not in later:
            waiting.append((pod, place))

    share = share_of_page(len(waiting))

    def behind(one: tuple[ApiObject, Place]) -> tuple[list[tuple[str, Place]], bool]:
        try:
            stream = _open(cluster, job.namespace, *one, follow=False)
            return _first_lines(_lines(stream, one[1], uid_of(one[0])), share)
        except ApiRefused:
            return [], False  # gone, or not there yet: its watch will tell

    lines, full = [], set[int]()
    with ThreadPoolExecutor(max_workers=_TOGETHER) as pool:
        for (pod, _), (found, is_full) in zip(waiting, pool.map(behind, waiting), strict=True):
            node = index_of(pod)
            if node in full:
                continue  # its last life goes on in the next page, and this one's log comes after it
            if is_full:
                full.add(node)
            lines += [LogLine(node, text) for text, _ in found]
            if found:
                places[node] = found[-1][1]
    return LogPage(tuple(lines), written(places), more=bool(full))


def _first_lines(lines: Iterator[tuple[str, Place]], most: int) -> tuple[list[tuple[str, Place]], bool]:
    """Return the first lines, until they have `most` characters, and whether that ended them."""
    found, size = [], 0
    for text, place in lines:
        found.append((text, place))
        size += len(text) + 1
        if size >= most:
            return found, True
    return found, False


def _readable(pod: ApiObject) -> bool:
    return began(pod) and (ended(pod) or index_of(pod) < FOLLOWED)


def _in_order(pods: list[ApiObject]) -> list[ApiObject]:
    return sorted(pods, key=lambda pod: (restart_of(pod), index_of(pod)))


class Follower:
    """Reads the logs of a watched job in the background, and hands them out page by page."""

    def __init__(self, cluster: Cluster, watch: JobWatch, position: str) -> None:
        self.cluster, self.job = cluster, watch.job
        self.turns = threading.BoundedSemaphore(_TOGETHER)
        self._watch = watch
        self._places = parse(position)
        self._lines: list[LogLine] = []
        self._given = LogPage((), position)
        self._before = position
        self._readers: dict[str, _Reader] = {}
        self._newest: dict[int, str] = {}
        self._lock = threading.Condition()
        self._size = 0

    def knows(self, position: str) -> bool:
        """Return True if it can go on from there. Otherwise a new one has to begin."""
        return position in (self._given.position, self._before)

    def page(self, position: str, *, last: bool) -> LogPage:
        """The lines behind a position. The same position again gives the same lines again, and those since.

        Args:
            last: the job has ended: wait until all of it is read.
        """
        self._tend()
        if last:
            for reader in list(self._readers.values()):
                reader.finish()
        with self._lock:
            again = self._given.lines if position != self._given.position else ()
            lines, self._lines = (*again, *self._lines), []
            self._before = position
            self._given = LogPage(lines, written(self._places), more=last and self.is_full)
            self._size = 0
            self._lock.notify_all()
            return self._given

    def stop(self) -> None:
        for reader in self._readers.values():
            reader.stop()

    @property
    def is_full(self) -> bool:
        """Return whether a page is full; readers then wait until it is fetched."""
        return self._size >= PAGE

    def wake(self) -> None:
        """Say that a reader is over."""
        with self._lock:
            self._lock.notify_all()

    def wait_until(self, over: Callable[[], bool], seconds: float) -> None:
        """Wait until a reader is over, or a page is full and has to be fetched first; at most so many seconds."""
        with self._lock:
            self._lock.wait_for(lambda: self.is_full or over(), seconds)

    def add(self, pod: ApiObject, text: str, place: Place, stopped: threading.Event) -> None:
        """A line that a reader has got, and where it is now; where a page is full already, wait until it is fetched."""
        node = index_of(pod)
        with self._lock:
            while self.is_full and not stopped.is_set():
                self._lock.wait(1.0)
            self._size += len(text) + 1
            if self.is_full:
                self._lock.notify_all()
            self._lines.append(LogLine(node, text))
            if self._newest[node] == uid_of(pod):
                self._places[node] = place

    def _tend(self) -> None:
        """A reader for every pod that has something to read, and word to each whose container has ended."""
        pods = self._watch.pods()
        for pod in _in_order(pods):
            node, uid = index_of(pod), uid_of(pod)
            if uid not in self._readers and _readable(pod):
                self._newest[node] = uid
                self._readers[uid] = _Reader(self, pod, self._places.get(node, Place()))
        over = {uid_of(pod): ended(pod) for pod in pods}
        for uid, reader in self._readers.items():
            reader.ended = reader.ended or over.get(uid, True)


class _Reader:
    """Reads one pod's log to its end, in a thread."""

    def __init__(self, follower: Follower, pod: ApiObject, place: Place) -> None:
        self.ended = ended(pod)
        """The container has ended, as far as the watch knows: one more reading gets all there is."""
        self._follower, self._pod, self._place = follower, pod, place
        self._stopped, self._over = threading.Event(), threading.Event()
        self._stream: Stream | None = None
        self._thread = threading.Thread(target=self._run, name=f"log {pod['metadata']['name']}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is read, or a page is full. A connection that neither speaks nor ends is given up."""
        self.ended = True
        for hang_up in (True, False):
            self._follower.wait_until(self._over.is_set, _END)
            if self._over.is_set() or self._follower.is_full:
                return
            if hang_up:
                self._hang_up()

    def stop(self) -> None:
        self._stopped.set()
        self._hang_up()

    def _hang_up(self) -> None:
        if (stream := self._stream) is not None:
            stream.close()

    def _run(self) -> None:
        try:
            self._read_all()
        finally:
            self._over.set()
            self._follower.wake()

    def _read_all(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            last = self.ended
            try:
                if last:
                    with self._follower.turns:
                        self._read(follow=False)
                    return
                self._read(follow=True)
                failures = 0
            except NotThere:
                return  # removed; what of it was not read is in the run's own folder
            except LauncherError:
                failures += 1  # broken off, or not started yet: again, from where we are
            self._stopped.wait(0.05 if self.ended else _PAUSES[min(failures, len(_PAUSES) - 1)])

    def _read(self, *, follow: bool) -> None:
        follower = self._follower
        self._stream = _open(follower.cluster, follower.job.namespace, self._pod, self._place, follow=follow)
        for text, place in _lines(self._stream, self._place, uid_of(self._pod)):
            self._place = place
            follower.add(self._pod, text, place, self._stopped)
