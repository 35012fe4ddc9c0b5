"""The objects of the cluster, their versions, who is told of changes, and a history to resume a watch from."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str]  # namespace ("" for what has none), name


KUEUE = "kueue.x-k8s.io"


@dataclass(frozen=True)
class Kind:
    """One row of the API: which path serves it and what it holds."""

    group: str
    versions: tuple[str, ...]
    plural: str
    name: str
    namespaced: bool = True
    subresources: tuple[str, ...] = ("status",)

    @property
    def api_versions(self) -> tuple[str, ...]:
        return tuple(f"{self.group}/{version}" if self.group else version for version in self.versions)

    @property
    def custom(self) -> bool:
        """By a CRD, not built in."""
        return self.group in (KUEUE, "jobset.x-k8s.io", "networking.gke.io", "resource.nvidia.com")

    @property
    def qualified(self) -> str:
        """As error messages name it: `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified_name(self) -> str:
        """As refusals of what is not valid name it: `Job.batch`."""
        return f"{self.name}.{self.group}" if self.group else self.name


KINDS = {
    kind.plural: kind
    for kind in (
        Kind("", ("v1",), "namespaces", "Namespace", namespaced=False),
        Kind("", ("v1",), "nodes", "Node", namespaced=False),
        Kind("", ("v1",), "pods", "Pod", subresources=("status", "log")),
        Kind("", ("v1",), "services", "Service"),
        Kind("", ("v1",), "serviceaccounts", "ServiceAccount", subresources=()),
        Kind("", ("v1",), "events", "Event", subresources=()),
        Kind("", ("v1",), "secrets", "Secret", subresources=()),
        Kind("", ("v1",), "resourcequotas", "ResourceQuota"),
        Kind("", ("v1",), "persistentvolumeclaims", "PersistentVolumeClaim"),
        Kind("batch", ("v1",), "jobs", "Job"),
        Kind("networking.k8s.io", ("v1",), "networkpolicies", "NetworkPolicy", subresources=()),
        Kind("apps", ("v1",), "daemonsets", "DaemonSet"),
        Kind("scheduling.k8s.io", ("v1",), "priorityclasses", "PriorityClass", namespaced=False, subresources=()),
        Kind("resource.k8s.io", ("v1",), "resourceclaimtemplates", "ResourceClaimTemplate", subresources=()),
        Kind("networking.gke.io", ("v1",), "networks", "Network", namespaced=False),
        Kind("networking.gke.io", ("v1",), "gkenetworkparamsets", "GKENetworkParamSet", namespaced=False),
        Kind("k8s.cni.cncf.io", ("v1",), "network-attachment-definitions", "NetworkAttachmentDefinition"),
        Kind(
            "apiextensions.k8s.io", ("v1",), "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
        ),
        Kind("resource.nvidia.com", ("v1beta1",), "computedomains", "ComputeDomain"),
        Kind("jobset.x-k8s.io", ("v1alpha2",), "jobsets", "JobSet"),
        Kind(KUEUE, ("v1beta1", "v1beta2"), "localqueues", "LocalQueue"),
        Kind(KUEUE, ("v1beta1", "v1beta2"), "clusterqueues", "ClusterQueue", namespaced=False),
        Kind(KUEUE, ("v1beta1", "v1beta2"), "workloads", "Workload"),
        Kind(KUEUE, ("v1beta1", "v1beta2"), "workloadpriorityclasses", "WorkloadPriorityClass", namespaced=False),
        Kind(KUEUE, ("v1beta1", "v1beta2"), "topologies", "Topology", namespaced=False, subresources=()),
    )
}


@dataclass(frozen=True)
class Change:
    """One entry of the history: what an object was, and what it has become (None: it was not, or is no more)."""

    version: int
    kind: str
    before: Object | None
    after: Object | None


def moment() -> str:
    """Now as the API writes it, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def copied(thing: Any) -> Any:
    """A copy of what JSON can hold; copy.deepcopy takes five times as long."""
    if isinstance(thing, dict):
        return {key: copied(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [copied(value) for value in thing]
    return thing


def labels_of(thing: Mapping[str, Any]) -> dict[str, str]:
    return thing["metadata"].get("labels") or {}


def condition(thing: Mapping[str, Any], kind: str) -> Object | None:
    """The condition of that type, whatever its status."""
    found = [one for one in (thing.get("status") or {}).get("conditions", []) if one["type"] == kind]
    return found[0] if found else None


def holds(thing: Mapping[str, Any], kind: str) -> bool:
    found = condition(thing, kind)
    return found is not None and found["status"] == "True"


def set_condition(thing: Object, kind: str, status: str, reason: str = "", message: str = "") -> None:
    """Add the condition, or change it; the time of the transition moves with the status only."""
    conditions = thing.setdefault("status", {}).setdefault("conditions", [])
    old = next((one for one in conditions if one["type"] == kind), None)
    new = {"type": kind, "status": status, "reason": reason, "message": message}
    new["lastTransitionTime"] = old["lastTransitionTime"] if old and old["status"] == status else moment()
    if old is None:
        conditions.append(new)
    else:
        conditions[conditions.index(old)] = {**old, **new}


@dataclass
class Store:
    """All objects by kind, with a history of changes that watches start from."""

    objects: dict[str, dict[Key, Object]] = field(default_factory=lambda: {plural: {} for plural in KINDS})
    version: int = 1000
    history: deque[Change] = field(default_factory=lambda: deque(maxlen=50_000))
    forgotten: int = 1000
    """Changes up to this version cannot be replayed: a watch from there gets 410."""
    listeners: list[Callable[[Change], None]] = field(default_factory=list)

    def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """The stored object itself: look, don't touch."""
        return self.objects[kind].get((namespace or "", name))

    def all(self, kind: str, namespace: str | None = None) -> Iterator[Object]:
        yield from (thing for (space, _), thing in list(self.objects[kind].items()) if namespace in (None, space))

    def owned(self, kind: str, owner: Mapping[str, Any]) -> list[Object]:
        uid, namespace = owner["metadata"]["uid"], owner["metadata"].get("namespace")
        return [
            thing
            for thing in self.all(kind, namespace)
            if any(one["uid"] == uid for one in thing["metadata"].get("ownerReferences", []))
        ]

    def add(self, kind: str, thing: Object) -> Object:
        """Store a new object; the caller has made sure that its name is free."""
        made = copied(thing)
        meta = made["metadata"]
        made.setdefault("apiVersion", KINDS[kind].api_versions[0])
        made.setdefault("kind", KINDS[kind].name)
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": moment()}
        return self._write(kind, None, made)

    def change(self, kind: str, thing: Mapping[str, Any], edit: Callable[[Object], None]) -> Object | None:
        """Edit the newest state of an object; nothing happens where it is gone, or where nothing differs."""
        meta = thing["metadata"]
        before = self.get(kind, meta.get("namespace"), meta["name"])
        if before is None or before["metadata"]["uid"] != meta["uid"]:
            return None
        after = copied(before)
        edit(after)
        if after == before:
            return before
        held = after["metadata"].get("finalizers") or after["metadata"].get("deletionGracePeriodSeconds")
        if after["metadata"].get("deletionTimestamp") and not held:
            return self._write(kind, before, None)
        return self._write(kind, before, after)

    def remove(self, kind: str, thing: Mapping[str, Any]) -> None:
        """Take an object away at once, whatever finalizers say."""
        meta = thing["metadata"]
        before = self.get(kind, meta.get("namespace"), meta["name"])
        if before is not None and before["metadata"]["uid"] == meta["uid"]:
            self._write(kind, before, None)

    def forget(self) -> None:
        """Compaction: no older version can be watched from any more."""
        self.version += 1
        self.history.clear()
        self.forgotten = self.version

    def _write(self, kind: str, before: Object | None, after: Object | None) -> Object | None:
        self.version += 1
        if after is not None:
            after["metadata"]["resourceVersion"] = str(self.version)
            self.objects[kind][_key(after)] = after
        elif before is not None:
            del self.objects[kind][_key(before)]
        if len(self.history) == self.history.maxlen:
            self.forgotten = self.history[0].version
        entry = Change(self.version, kind, before, after)
        self.history.append(entry)
        for listener in list(self.listeners):
            listener(entry)
        return after


def _key(thing: Mapping[str, Any]) -> Key:
    return thing["metadata"].get("namespace") or "", thing["metadata"]["name"]
