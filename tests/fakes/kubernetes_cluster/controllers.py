"""What every controller has: a queue of things to look at again, events, and the garbage collector.

Controllers look at the store, never at a change: told that something happened to an object, they bring it one step
nearer to what it should be, and are told again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ApiError
from .pods import owner_reference, untrack
from .store import KINDS, Change, Object, Store, moment

Key = tuple[str, str, str]  # plural, namespace, name
DELETE = Callable[[str, Object, Mapping[str, Any]], Object]
DOMAIN_CHANNELS = "compute-domain-default-channel.nvidia.com"
SIMILAR = 10
"""So many events that differ in their message only are written; the others are combined into one (client-go)."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timing:
    """Seconds, far shorter than a real cluster's; the comment says what that has."""

    batch: float = 0.03  # 1: the Job controller gathers what happens to pods
    retry_pod: float = 0.3  # 10, 20, 40, … up to 360: a failed pod's replacement
    retry_create: float = 0.5  # 0.2 doubling up to 1000: a pod that admission refused
    image_backoff: float = 0.3  # 10, 20, … up to 300: ErrImagePull turns to ImagePullBackOff, and is tried again
    crash_backoff: float = 0.3  # 10, 20, … up to 300: a container restarted in place
    node_grace: float = 0.2  # 50: node-monitor-grace-period (40 before 1.32): a silent node becomes Unknown
    unreachable: float = 0.5  # 300: tolerationSeconds of not-ready and unreachable nodes; others in proportion
    cloud: float = 0.1  # 5: the cloud's controller removes a node that is not ready and that has no machine
    orphans: float = 0.1  # 40 to 60: PodGC takes the pods of a node that is no more
    heartbeat: float = 0.2  # 10: a kubelet posts its node's status, also the first time after an outage of the API


class Events:
    """Writes Event objects; what repeats is counted, as event recorders do."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._names: dict[tuple[str, str, str], str] = {}
        self._messages: dict[tuple[str, str, str], set[str]] = {}

    def __call__(
        self, about: Mapping[str, Any], reason: str, message: str, *, source: str, kind: str = "Normal"
    ) -> None:
        meta = about["metadata"]
        namespace = meta.get("namespace") or "default"
        told = self._messages.setdefault((meta["uid"], reason, source), set())
        told.add(message)
        if len(told) > SIMILAR:
            key = (meta["uid"], reason, "")
            message = f"(combined from similar events): {message}"
        else:
            key = (meta["uid"], reason, message)
        known = self.store.get("events", namespace, self._names.get(key, ""))
        if known is not None:

            def again(event: Object) -> None:
                event |= {"count": event["count"] + 1, "lastTimestamp": moment(), "message": message}

            self.store.change("events", known, again)
            return
        name = f"{meta['name']}.{self.store.version:016x}"
        self._names[key] = name
        self.store.add("events", {
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "kind": about["kind"], "apiVersion": about["apiVersion"], "name": meta["name"],
                "namespace": meta.get("namespace"), "uid": meta["uid"],
            },
            "reason": reason, "message": message, "type": kind, "count": 1, "firstTimestamp": moment(),
            "lastTimestamp": moment(), "source": {"component": source}, "reportingComponent": source,
        })  # fmt: skip


class Queue:
    """Things to look at again, each once however often it was asked for, by the controller of their kind."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.controllers: dict[str, Callable[[Object], None]] = {}
        self.always: list[Callable[[], None]] = []
        """Called after each round: what looks at everything, such as the scheduler."""
        self._dirty: dict[Key, None] = {}
        self._later: dict[Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._loop = asyncio.get_running_loop()

    def look(self, plural: str, namespace: str | None, name: str, *, after: float = 0.0) -> None:
        """Look now, or after so many seconds: of several times that were asked for, the first counts."""
        key = (plural, namespace or "", name)
        if after > 0:
            set_before = self._later.get(key)
            if set_before is not None:
                if set_before.when() <= self._loop.time() + after:
                    return
                set_before.cancel()
            self._later[key] = self._loop.call_later(after, self._due, key)
        else:
            self._dirty[key] = None
            self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def pause(self) -> None:
        """The API is away: no controller does anything."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def _due(self, key: Key) -> None:
        self._later.pop(key, None)
        self.look(*key)

    async def run(self) -> None:
        """Until cancelled. A controller's own fault is logged and does not end the others."""
        while True:
            await self._wake.wait()
            await self._running.wait()
            self._wake.clear()
            while self._dirty:
                keys, self._dirty = list(self._dirty), {}
                for plural, namespace, name in keys:
                    thing = self.store.get(plural, namespace, name)
                    if thing is not None and plural in self.controllers:
                        try:
                            self.controllers[plural](thing)
                        except Exception:
                            log.exception("%s %s/%s", plural, namespace, name)
                await asyncio.sleep(0)
            for task in self.always:
                try:
                    task()
                except Exception:
                    log.exception("%s", task)


def compute_domains(store: Store) -> Callable[[Object], None]:
    """The controller of ComputeDomains, whose claim template it makes."""

    def reconcile(domain: Object) -> None:
        meta, name = domain["metadata"], domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
        if store.get("resourceclaimtemplates", meta["namespace"], name) is None:
            devices = {"requests": [{"name": "channel", "exactly": {"deviceClassName": DOMAIN_CHANNELS}}]}
            owned = {"name": name, "namespace": meta["namespace"], "ownerReferences": [owner_reference(domain)]}
            store.add("resourceclaimtemplates", {"metadata": owned, "spec": {"spec": {"devices": devices}}})

    return reconcile


class Garbage:
    """Deletes what is owned by what is gone, and holds back what is deleted in the foreground until it has nothing."""

    OWNED = ("resourceclaimtemplates", "jobs", "pods", "services", "networkpolicies", "workloads", "jobsets")
    FINALIZERS = ("foregroundDeletion", "orphan")

    def __init__(self, store: Store, queue: Queue, delete: DELETE) -> None:
        self.store, self.queue, self.delete = store, queue, delete
        self._pending: dict[str, Object] = {}
        self._gone: list[Object] = []
        store.listeners.append(self._note)
        queue.always.append(self.collect)

    def _note(self, change: Change) -> None:
        if change.after is None and change.before is not None and change.kind != "pods":
            self._gone.append(change.before)
        some = change.after
        if some is not None and set(some["metadata"].get("finalizers", [])) & set(self.FINALIZERS):
            self._pending[some["metadata"]["uid"]] = some
        self.queue.wake()

    def collect(self) -> None:
        gone, self._gone = self._gone, []
        for owner in gone:
            self._pending.pop(owner["metadata"]["uid"], None)
            for plural, thing in self._dependents(owner):
                if plural == "pods":
                    self.store.change("pods", thing, untrack)  # its Job counts no more
                if not thing["metadata"].get("deletionTimestamp"):
                    self._try_delete(plural, thing, {"propagationPolicy": "Background"})
        for uid, seen in list(self._pending.items()):
            self._foreground_or_orphan(uid, seen)

    def _foreground_or_orphan(self, uid: str, seen: Object) -> None:
        plural = _plural(seen)
        owner = self.store.get(plural, seen["metadata"].get("namespace"), seen["metadata"]["name"])
        if owner is None or owner["metadata"]["uid"] != uid:
            self._pending.pop(uid, None)
            return
        finalizers, dependents = owner["metadata"].get("finalizers", []), self._dependents(owner)
        if "orphan" in finalizers:
            for kind, thing in dependents:
                self.store.change(kind, thing, lambda one: _disown(one, uid))
            self._release(plural, owner, "orphan")
        elif "foregroundDeletion" in finalizers:
            for kind, thing in dependents:
                if not thing["metadata"].get("deletionTimestamp"):
                    self._try_delete(
                        kind, thing, {"propagationPolicy": "Foreground" if kind != "pods" else "Background"}
                    )
            if not self._dependents(owner):
                self._release(plural, owner, "foregroundDeletion")
        else:
            self._pending.pop(uid, None)

    def _dependents(self, owner: Object) -> list[tuple[str, Object]]:
        return [(plural, thing) for plural in self.OWNED for thing in self.store.owned(plural, owner)]

    def _release(self, plural: str, owner: Object, finalizer: str) -> None:
        self.store.change(plural, owner, lambda thing: thing["metadata"]["finalizers"].remove(finalizer))

    def _try_delete(self, plural: str, thing: Object, options: Mapping[str, Any]) -> None:
        try:
            self.delete(plural, thing, options)
        except ApiError:
            log.exception("garbage: %s", thing["metadata"]["name"])


def _disown(thing: Object, uid: str) -> None:
    untrack(thing)
    meta = thing["metadata"]
    meta["ownerReferences"] = [one for one in meta.get("ownerReferences", []) if one["uid"] != uid]


def _plural(thing: Object) -> str:
    return next(kind.plural for kind in KINDS.values() if kind.name == thing["kind"])
