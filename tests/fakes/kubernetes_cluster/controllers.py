"""What every controller has: a queue of things to look at again, events, and the garbage collector.

Controllers look at the store, never at a change: told that something happened to an object, they bring it one step
nearer to what it should be, and are told again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .pods import untrack
from .store import KINDS, Change, Object, Store, moment

DELETE = Callable[[str, Object, Mapping[str, Any]], Object]
RETRY = 0.3
"""Seconds between tries of what was refused, or is not there yet; a real cluster has up to minutes."""
TURN = 0.02
log = logging.getLogger(__name__)


async def turn() -> None:
    """Let others do what they have to, for so many seconds."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(TURN, over.set)
    await over.wait()


class Events:
    """Writes Event objects; what repeats is counted, as event recorders do."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._names: dict[tuple[str, str, str], str] = {}

    def __call__(self, about: Mapping[str, Any], reason: str, message: str, *, source: str) -> None:
        meta = about["metadata"]
        known = self.store.get("events", meta["namespace"], self._names.get((meta["uid"], reason, message), ""))
        if known is not None:
            self.store.change("events", known, lambda one: one.update(count=one["count"] + 1, lastTimestamp=moment()))
            return
        name = f"{meta['name']}.{self.store.version:016x}"
        self._names[meta["uid"], reason, message] = name
        self.store.add("events", {
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "involvedObject": {
                "kind": about["kind"], "name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"],
            },
            "reason": reason, "message": message, "count": 1, "firstTimestamp": moment(), "lastTimestamp": moment(),
            "source": {"component": source},
        })  # fmt: skip


class Queue:
    """Things to look at again, each once however often it was asked for, by the controller of their kind."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.controllers: dict[str, Callable[[Object], None]] = {}
        self.always: list[Callable[[], None]] = []
        """Called after each round: what looks at everything, such as the scheduler."""
        self._dirty: dict[tuple[str, str, str], None] = {}
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def look(self, plural: str, namespace: str | None, name: str, *, after: float = 0.0) -> None:
        """Look now, or after so many seconds."""
        if after > 0:
            self._loop.call_later(after, self.look, plural, namespace, name)
        else:
            self._dirty[plural, namespace or "", name] = None
            self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. A controller's own fault is logged and does not end the others."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            keys, self._dirty = list(self._dirty), {}
            there = [(plural, self.store.get(plural, namespace, name)) for plural, namespace, name in keys]
            known = self.controllers
            work = [partial(known[plural], thing) for plural, thing in there if thing and plural in known]
            for task in (*work, *self.always):
                try:
                    task()
                except Exception:
                    log.exception("%s", task)
            await turn()  # what happens to many pods is looked at together


class Garbage:
    """Deletes what is owned by what is gone, and holds back what is deleted in the foreground until it has nothing."""

    OWNED = ("resourceclaimtemplates", "computedomains", "jobs", "pods", "services", "networkpolicies")

    def __init__(self, store: Store, queue: Queue, delete: DELETE) -> None:
        self.store, self.delete = store, delete
        self._pending: dict[str, Object] = {}
        self._gone: list[Object] = []
        store.listeners.append(self._note)
        queue.always.append(self.collect)

    def _note(self, change: Change) -> None:
        if change.after is None and change.before is not None and change.kind != "pods":
            self._gone.append(change.before)
        elif change.after is not None and "foregroundDeletion" in _finalizers(change.after):
            self._pending[change.after["metadata"]["uid"]] = change.after

    def collect(self) -> None:
        gone, self._gone = self._gone, []
        for owner in gone:
            self._pending.pop(owner["metadata"]["uid"], None)
            self._delete_owned(owner, "Background")
        for uid, seen in list(self._pending.items()):
            plural = next(kind.plural for kind in KINDS.values() if kind.name == seen["kind"])
            owner = self.store.get(plural, seen["metadata"].get("namespace"), seen["metadata"]["name"])
            if owner is None or owner["metadata"]["uid"] != uid:
                self._pending.pop(uid)
            else:
                self._delete_owned(owner, "Foreground")
                if not self._owned(owner):
                    self.store.change(plural, owner, lambda one: _finalizers(one).remove("foregroundDeletion"))

    def _delete_owned(self, owner: Object, policy: str) -> None:
        for plural, thing in self._owned(owner):
            if plural == "pods":
                self.store.change("pods", thing, untrack)  # its Job counts no more
            if not thing["metadata"].get("deletionTimestamp"):
                self.delete(plural, thing, {"propagationPolicy": policy if plural != "pods" else "Background"})

    def _owned(self, owner: Object) -> list[tuple[str, Object]]:
        return [(plural, thing) for plural in self.OWNED for thing in self.store.owned(plural, owner)]


def _finalizers(thing: Object) -> list[str]:
    found: list[str] = thing["metadata"].get("finalizers", [])
    return found
