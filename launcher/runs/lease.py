"""The lease of a run: of several orchestrators one starts attempts and collects, the others follow.

index/<run>/lease/<term>.json            who took the term; created if absent, so that of several callers one has it
index/<run>/lease/<term>.beat            a number that the holder raises every other second
index/<run>/lease/<term>.released.json   the holder has let go, and after which attempt it stopped for good

That no attempt is started twice is the run index's doing (`Index.create`), and holds without a lease: an orchestrator
that was paused, and does not know that its term is over, can at worst follow. The lease settles what the index does
not: who judges an attempt that ended, whose count of restarts holds, and who collects.

No clock is compared with another machine's. A holder is dead when its number has not changed for DEAD seconds of the
observer's own monotonic clock, which nobody sets; an hour that any clock jumps by changes nothing.
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

BEAT = 2.0
"""Seconds between two beats: a bucket takes one write of an object a second."""
DEAD = 7.0
"""Seconds without a beat after which a holder has lost its lease: with the looks at it, the next goes on within 10."""
LOOK = 0.5
"""Seconds between two looks of one that waits."""

_TERM = re.compile(r"([0-9]{1,9})\.json")
_MOST = 1 << 16  # bytes of each file

T = TypeVar("T")


class Holder(Settings):
    """The orchestrator that took a term."""

    format: Literal[1] = 1
    token: str
    """Random: two callers with the same words are still two."""
    user: str
    host: str
    flow_run: str | None = None
    """The outermost flow run, under which its count of restarts is kept."""

    def __str__(self) -> str:
        return f"{self.user} on {self.host}"


class FolderLease:
    """One process's side of the lease in a folder. While it is entered, what it took is kept alive by a thread."""

    def __init__(
        self, folder: Storage, *, flow_run: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # A beat that a loss of power undoes was its holder's last anyway.
        self._folder = replace(folder, durable=False)
        self._close: Callable[[], None] = lambda: None
        user, host = whoami()
        self._me = Holder(token=secrets.token_hex(8), user=user, host=host, flow_run=flow_run)
        self._clock = clock
        self._term = 0
        # The term of another holder, its last beat, and when that was first seen.
        self._seen: tuple[int, int | None, float] = (0, None, 0.0)
        self._lived = False
        self._looking = Lock()
        self._closed = False
        self._stop = Event()
        self._beating: Thread | None = None
        self.holder: Holder | None = None
        """The other one that has it, as far as the last look showed."""
        self.inherited: str | None = None
        """The flow run of a holder that died while this one followed: its count of restarts goes on."""

    def __enter__(self) -> Self:
        self._closed = False
        return self

    def __exit__(self, *exception: object) -> None:
        with self._looking:  # a look on its way ends first, and none takes the lease when nobody would let go of it
            self._closed = True
        with suppress(TrainLitgptError):  # then it is lost by its silence
            self.release()

    def take(self, *, unless_stopped_after: int = 0) -> bool:
        """Look once; return whether the lease is this one's now. Who stopped for good after that attempt keeps it."""
        with self._looking:
            return not self._closed and self._take(unless_stopped_after)

    def _take(self, unless_stopped_after: int) -> bool:
        newest = self._newest()
        if self._term and newest == self._term:
            return True
        self._lose()
        if newest and not self._is_free(newest, unless_stopped_after):
            return False
        self._close()
        if not self._folder.create(
            f"{newest + 1}.json", with_checksum(self._me.model_dump_json(indent=1).encode(), "record")
        ):
            return False  # somebody was faster
        self.inherited = self.holder.flow_run if self._lived and self.holder else None
        self._term, self.holder = newest + 1, None
        self._stop = Event()
        self._beating = Thread(target=self._beat, args=(self._term, self._stop), name="lease", daemon=True)
        self._beating.start()
        return True

    @property
    def held(self) -> bool:
        """Whether the lease was this one's at the last look."""
        return bool(self._term)

    def stopped_after(self, attempt: int) -> bool:
        """Return whether the last holder let go because none may follow this attempt."""
        return bool(attempt) and self._released(self._newest()) == attempt

    def beat_of(self, flow_run: str) -> tuple[int, int | None] | None:
        """Return the term of a flow run and its last beat; None if it does not hold the lease."""
        newest = self._newest()
        holder = self._read(f"{newest}.json", Holder) if self._released(newest) is None else None
        return (newest, self._read(f"{newest}.beat", int)) if holder and holder.flow_run == flow_run else None

    def release(self, *, stopped: int = 0) -> None:
        """Let go of it, if it is held; the next may take it at once."""
        with self._looking:
            term = self._term
            self._lose()
        if term:
            content = json.dumps({"stopped": stopped}, indent=1)
            self._folder.create(f"{term}.released.json", with_checksum(content.encode(), "record"))

    def _newest(self) -> int:
        return max((int(found[1]) for path in self._folder.list() if (found := _TERM.fullmatch(path))), default=0)

    def _is_free(self, term: int, unless_stopped_after: int) -> bool:
        if (stopped := self._released(term)) is not None:
            self._lived = False  # it counted to its end
            return not (unless_stopped_after and stopped == unless_stopped_after)
        beat, now, (seen, before, since) = self._read(f"{term}.beat", int), self._clock(), self._seen
        if seen != term:
            self.holder = self._read(f"{term}.json", Holder)
        elif beat == before:
            return now - since >= DEAD
        self._lived = seen == term
        self._seen = (term, beat, now)
        return False

    def _released(self, term: int) -> int | None:
        """The attempt after which the holder of a term decided that none follows, 0 where it only gave it back."""
        released = self._read(f"{term}.released.json", dict[str, int], damaged={})
        return None if released is None else released.get("stopped", 0)

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
            # The next beat tries again, also where somebody deleted the root. One that stays silent has lost its lease.
            with suppress(TrainLitgptError, OSError):
                self._folder.write(f"{term}.beat", str(count).encode())
            stop.wait(BEAT)

    def _lose(self) -> None:
        self._term = 0
        self._stop.set()
        if self._beating is not None:
            self._beating.join(timeout=BEAT)
            self._beating = None


class Lease(FolderLease):
    """One orchestrator's side of the lease of a run."""

    def __init__(
        self, index: Index, run: str, *, flow_run: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(index.root.within(f"{INDEX}/{run}/lease"), flow_run=flow_run, clock=clock)
        self._close = partial(index.restrict_permissions, run)
