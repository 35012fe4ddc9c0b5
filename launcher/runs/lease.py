"""The lease of a run: one of several orchestrators starts attempts and collects, the others follow.

index/<run>/lease/<term>.json            the holder of the term; created if absent, so that only one caller gets it
index/<run>/lease/<term>.beat            a number that the holder raises every other second
index/<run>/lease/<term>.released.json   the holder has released it, and the attempt after which it stopped for good

`Index.create` guarantees that an attempt starts once, with or without the lease: an orchestrator that was suspended
past its term can only follow. The lease decides who records diagnoses, whose count of restarts holds, and who collects.

No clock is compared with another machine's. A holder is dead when its number has not changed for LEASE_TIMEOUT seconds
of the observer's own monotonic clock, so that a clock that jumps by an hour changes nothing.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event, Lock, Thread
from typing import Literal, Self, TypeVar

from launcher.runs.index import INDEX, Index, whoami
from litgpt_demo.config import Settings
from litgpt_demo.documents import parse_json, with_checksum
from litgpt_demo.errors import DataError, TrainLitgptError
from litgpt_demo.storage import Storage

HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats: a bucket takes one write of an object a second."""
LEASE_TIMEOUT = 7.0
"""Seconds without a heartbeat after which a holder has lost its lease; another one has it within 10."""
POLL_INTERVAL = 0.5
"""Seconds between two attempts of a follower to take the lease."""

_TERM = re.compile(r"([0-9]{1,9})\.json")
_MOST = 1 << 16  # bytes of each file

T = TypeVar("T")


class Holder(Settings):
    """The orchestrator that took a term."""

    format: Literal[1] = 1
    token: str
    """Random, so that two processes of one user are two holders."""
    user: str
    host: str
    flow_run: str | None = None
    """The outermost flow run, which has the count of restarts."""

    def __str__(self) -> str:
        return f"{self.user} on {self.host}"


class FolderLease:
    """One process's side of the lease in a folder. While it is entered, a thread keeps a taken lease alive."""

    def __init__(
        self, folder: Storage, *, flow_run: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # If a loss of power undoes a heartbeat, its holder is dead anyway.
        self._folder = replace(folder, durable=False)
        self._restrict_permissions: Callable[[], None] = lambda: None
        user, host = whoami()
        self._self = Holder(token=secrets.token_hex(8), user=user, host=host, flow_run=flow_run)
        self._clock = clock
        self._term = 0
        # The term of another holder, its last heartbeat, and when that was first observed.
        self._last_observation: tuple[int, int | None, float] = (0, None, 0.0)
        self._observed_alive = False
        self._taking = Lock()
        self._closed = False
        self._stop = Event()
        self._beating: Thread | None = None
        self.holder: Holder | None = None
        """The other process that had it when this one last tried to take it."""
        self.inherited: str | None = None
        """The flow run of a holder that died while this process followed, which continues its count of restarts."""

    def __enter__(self) -> Self:
        self._closed = False
        return self

    def __exit__(self, *exception: object) -> None:
        with self._taking:  # from now on no thread takes the lease, because none would release it
            self._closed = True
        with suppress(TrainLitgptError):  # it then expires
            self.release()

    def take(self, *, unless_stopped_after: int = 0) -> bool:
        """Take the lease if it is free, and return whether this process has it. A holder that has stopped for good
        after the attempt `unless_stopped_after` keeps it."""
        with self._taking:
            return not self._closed and self._take(unless_stopped_after)

    def _take(self, unless_stopped_after: int) -> bool:
        newest = self._newest()
        if self._term and newest == self._term:
            return True
        self._drop()
        if newest and not self._is_free(newest, unless_stopped_after):
            return False
        self._restrict_permissions()
        record = with_checksum(self._self.model_dump_json(indent=1).encode(), "record")
        if not self._folder.create(f"{newest + 1}.json", record):
            return False  # another process was faster
        self.inherited = None
        if self._observed_alive and self.holder is not None:
            self.inherited = self.holder.flow_run
        self._term, self.holder = newest + 1, None
        self._stop = Event()
        self._beating = Thread(target=self._beat, args=(self._term, self._stop), name="lease", daemon=True)
        self._beating.start()
        return True

    @property
    def is_held(self) -> bool:
        """Whether this process has the lease, as far as its last heartbeat showed."""
        return bool(self._term)

    def stopped_after(self, attempt: int) -> bool:
        """Return whether the last holder released it because no attempt may follow this one."""
        return bool(attempt) and self._released(self._newest()) == attempt

    def beat_of(self, flow_run: str) -> tuple[int, int | None] | None:
        """Return the term of a flow run and its last heartbeat; None if it does not hold the lease."""
        newest = self._newest()
        holder = self._read(f"{newest}.json", Holder) if self._released(newest) is None else None
        return (newest, self._read(f"{newest}.beat", int)) if holder and holder.flow_run == flow_run else None

    def release(self, *, stopped: int = 0) -> None:
        """Release the lease, if it is held; another process can take it at once."""
        with self._taking:
            term = self._term
            self._drop()
        if term:
            content = json.dumps({"stopped": stopped}, indent=1)
            self._folder.create(f"{term}.released.json", with_checksum(content.encode(), "record"))

    def _newest(self) -> int:
        matches = map(_TERM.fullmatch, self._folder.list())
        return max((int(match[1]) for match in matches if match), default=0)

    def _is_free(self, term: int, unless_stopped_after: int) -> bool:
        stopped = self._released(term)
        if stopped is not None:
            self._observed_alive = False  # it counted to its end
            return not (unless_stopped_after and stopped == unless_stopped_after)
        beat, now = self._read(f"{term}.beat", int), self._clock()
        observed_term, observed_beat, since = self._last_observation
        if observed_term != term:
            self.holder = self._read(f"{term}.json", Holder)
        elif beat == observed_beat:
            return now - since >= LEASE_TIMEOUT
        self._observed_alive = observed_term == term
        self._last_observation = (term, beat, now)
        return False

    def _released(self, term: int) -> int | None:
        released = self._read(f"{term}.released.json", dict[str, int], damaged={})
        if released is None:
            return None
        return released.get("stopped", 0)

    def _read(self, path: str, kind: type[T], *, damaged: T | None = None) -> T | None:
        try:
            return parse_json(self._folder.read(path, most=_MOST), kind, where=path, fix="its holder counts as dead")
        except FileNotFoundError:
            return None
        except DataError:
            return damaged

    def _beat(self, term: int, stop: Event) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            # The next heartbeat tries again, also if a user has deleted the root. A silent holder loses its lease.
            with suppress(TrainLitgptError, OSError):
                self._folder.write(f"{term}.beat", str(count).encode())
                # Another process has the lease after this one was suspended, or the folder was deleted and made again.
                # A thread that was replaced while it was stuck must not drop the newer term of this process.
                if self._newest() != term and self._term == term:
                    self._term = 0
                    return
            stop.wait(HEARTBEAT_INTERVAL)

    def _drop(self) -> None:
        self._term = 0
        self._stop.set()
        if self._beating is not None:
            self._beating.join(timeout=HEARTBEAT_INTERVAL)
            self._beating = None


class Lease(FolderLease):
    """One orchestrator's side of the lease of a run."""

    def __init__(
        self, index: Index, run: str, *, flow_run: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(index.root.within(f"{INDEX}/{run}/lease"), flow_run=flow_run, clock=clock)
        self._restrict_permissions = partial(index.restrict_permissions, run)
