"""The objects of the cluster, their versions, and a history of changes that watches start from."""

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

Object = dict[str, Any]

KUEUE = "kueue.x-k8s.io"


@dataclass(frozen=True)
class Kind:
    """One row of the API: which path serves it and what it holds."""

    api_version: str
    plural: str
    name: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def qualified(self) -> str:
        """As error messages name it: `jobs.batch`."""
        return f"{self.plural}.{self.group}".rstrip(".")


KINDS = {
    kind.plural: kind
    for kind in (
        Kind("v1", "namespaces", "Namespace", namespaced=False),
        Kind("v1", "nodes", "Node", namespaced=False),
        Kind("v1", "pods", "Pod"),
        Kind("v1", "services", "Service"),
        Kind("v1", "serviceaccounts", "ServiceAccount"),
        Kind("v1", "events", "Event"),
        Kind("v1", "secrets", "Secret"),
        Kind("v1", "resourcequotas", "ResourceQuota"),
        Kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
        Kind("batch/v1", "jobs", "Job"),
        Kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
        Kind("apps/v1", "daemonsets", "DaemonSet"),
        Kind("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", namespaced=False),
        Kind("resource.k8s.io/v1", "resourceclaimtemplates", "ResourceClaimTemplate"),
        Kind("authorization.k8s.io/v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False),
        Kind("networking.gke.io/v1", "networks", "Network", namespaced=False),
        Kind("networking.gke.io/v1", "gkenetworkparamsets", "GKENetworkParamSet", namespaced=False),
        Kind("k8s.cni.cncf.io/v1", "network-attachment-definitions", "NetworkAttachmentDefinition"),
        Kind("resource.nvidia.com/v1beta1", "computedomains", "ComputeDomain"),
        Kind("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet"),
        Kind(f"{KUEUE}/v1beta1", "localqueues", "LocalQueue"),
        Kind(f"{KUEUE}/v1beta1", "clusterqueues", "ClusterQueue", namespaced=False),
        Kind(f"{KUEUE}/v1beta1", "workloads", "Workload"),
        Kind(f"{KUEUE}/v1beta1", "workloadpriorityclasses", "WorkloadPriorityClass", namespaced=False),
        Kind(f"{KUEUE}/v1beta1", "topologies", "Topology", namespaced=False),
    )
}


class ApiError(Exception):
    """What the API says no with: a Status, as the real one words it."""

    def __init__(self, status: int, message: str, *, reason: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        self.body: Object = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
        self.body |= {"message": message, "reason": reason or HTTPStatus(status).phrase.replace(" ", "")}


@dataclass(frozen=True)
class Change:
    """One entry of the history."""

    kind: str
    before: Object | None
    """What the object was."""
    now: Object
    """What it has become, with this entry's version; or how it was, where it is no more."""
    gone: bool


def moment() -> str:
    """Now as the API writes it, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def copied(thing: Mapping[str, Any]) -> Object:
    return dict(json.loads(json.dumps(thing)))


def condition(thing: Mapping[str, Any], kind: str) -> Object | None:
    """The condition of that type, if it holds."""
    conditions = thing.get("status", {}).get("conditions", ())
    return next((found for found in conditions if found["type"] == kind and found["status"] == "True"), None)


def set_condition(thing: Object, kind: str, status: str = "True", reason: str = "", message: str = "") -> None:
    """Add the condition, or change it; the time of the transition moves with the status only."""
    conditions = thing.setdefault("status", {}).setdefault("conditions", [])
    found = next((found for found in conditions if found["type"] == kind), None)
    if found is None:
        conditions.append(found := {"type": kind})
    if found.get("status") != status:
        found["lastTransitionTime"] = moment()
    found |= {"status": status, "reason": reason, "message": message}


def finished(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


class Store:
    """All objects by kind. Those that it gives are the stored ones: look, don't touch."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[tuple[str, str], Object]] = {plural: {} for plural in KINDS}
        self.version = self.forgotten = 1000
        """Changes up to `forgotten` cannot be replayed: a watch from there gets 410."""
        self.history: list[Change] = []
        """Those after it, one for each version."""
        self.changed = asyncio.Event()
        """The next change, for which streams wait; another event each time."""

    def wake(self) -> None:
        """Tell all streams that there is something new."""
        self.changed.set()
        self.changed = asyncio.Event()

    def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        return self._objects[kind].get((namespace or "", name))

    def all(self, kind: str, namespace: str | None = None) -> list[Object]:
        return [thing for (space, _), thing in self._objects[kind].items() if namespace in (None, space)]

    def owned(self, kind: str, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        things = self.all(kind, owner["metadata"]["namespace"])
        return [
            thing for thing in things if uid in {ref["uid"] for ref in thing["metadata"].get("ownerReferences", ())}
        ]

    def add(self, kind: str, thing: Mapping[str, Any]) -> Object:
        """Store a new object; the caller has made sure that its name is free."""
        made: Object = {"apiVersion": KINDS[kind].api_version, "kind": KINDS[kind].name, **copied(thing)}
        made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": moment()}
        self._write(kind, None, made)
        return made

    def change(self, kind: str, thing: Object, edit: Callable[[Object], Any]) -> Object | None:
        """Edit the newest state of an object and return it, None where it is gone; equal states are no change."""
        if (before := self._newest(kind, thing)) is None:
            return None
        after = copied(before)
        edit(after)
        meta = after["metadata"]
        if meta.get("deletionTimestamp") and not (meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")):
            self._write(kind, before, None)
            return None
        if after != before:
            self._write(kind, before, after)
        return after

    def remove(self, kind: str, thing: Object) -> None:
        """Take an object away at once, whatever finalizers say."""
        if (before := self._newest(kind, thing)) is not None:
            self._write(kind, before, None)

    def forget(self) -> None:
        """Compaction: no older version can be watched from any more."""
        self.version = self.forgotten = self.version + 1
        self.history.clear()

    def _newest(self, kind: str, thing: Object) -> Object | None:
        found = self.get(kind, thing["metadata"].get("namespace"), thing["metadata"]["name"])
        return found if found is not None and found["metadata"]["uid"] == thing["metadata"]["uid"] else None

    def _write(self, kind: str, before: Object | None, after: Object | None) -> None:
        self.version += 1
        now = after or copied(before or {})
        now["metadata"]["resourceVersion"] = str(self.version)
        key = now["metadata"].get("namespace", ""), now["metadata"]["name"]
        if after is None:
            del self._objects[kind][key]
        else:
            self._objects[kind][key] = now
        self.history.append(Change(kind, before, now, gone=after is None))
