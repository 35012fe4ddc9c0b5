"""What becomes of nodes whose kubelet is not heard, and of the pods on them.

Three programs of a real control plane, with their wording: the node lifecycle controller (Unknown and tainted after the
grace period), the taint eviction controller (pods marked and deleted when their toleration is over) and PodGC (pods of
nodes that are no more). A pod that is deleted on a silent node stays, Terminating: only its kubelet, the end of the
node object or a deletion by force takes it away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from .admission import NOT_READY_SECONDS
from .controllers import DELETE, Events, Timing
from .errors import ApiError
from .pods import finished
from .store import Change, Object, Store, condition, moment, set_condition

UNREACHABLE, NOT_READY = "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"
STOPPED = ("NodeStatusUnknown", "Kubelet stopped posting node status.")
READY = ("KubeletReady", "kubelet is posting ready status")
PRESSURES = {
    "MemoryPressure": ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
}
EVICTED = ("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
ORPHANED = ("DeletionByPodGC", "PodGC: node no longer exists")


def post_status(node: Object) -> None:
    """Write what a healthy kubelet says of its node."""
    set_condition(node, "Ready", "True", *READY)
    for kind, words in PRESSURES.items():
        set_condition(node, kind, "False", *words)
    node["spec"]["taints"] = [
        one for one in node["spec"].get("taints") or [] if one["key"] not in (UNREACHABLE, NOT_READY)
    ]


class Nodes:
    def __init__(
        self, store: Store, events: Events, delete: DELETE, timing: Timing, post: Callable[[str], None]
    ) -> None:
        self.store, self.events, self.delete, self.timing = store, events, delete, timing
        self.post = post
        """Lets a node's kubelet say again how its pods are."""
        self.silent: set[str] = set()
        """Nodes whose kubelet is not heard."""
        self._removed_by_cloud: set[str] = set()
        self._paused: list[Callable[[], None]] | None = None
        """While the API is away, what these controllers would have done meanwhile."""
        self._loop = asyncio.get_running_loop()
        self._evictions: dict[tuple[str, str], asyncio.TimerHandle] = {}  # by node and pod's uid
        store.listeners.append(self._note)

    # --- what others tell it ------------------------------------------------------------------------------------------

    def hush(self, node: str, *, removed: bool = False) -> None:
        """The kubelet is not heard any more; `removed`: and the cloud will say that there is no such machine."""
        self.silent.add(node)
        if removed:
            self._removed_by_cloud.add(node)
        self._later(self.timing.node_grace, self._give_up, node)

    def hear(self, node: str) -> None:
        """The kubelet posts its node's status again."""
        self.silent.discard(node)
        self._removed_by_cloud.discard(node)
        thing = self.store.get("nodes", None, node)
        if thing is not None:
            self.store.change("nodes", thing, post_status)
            self._settle()
            self.post(node)

    def not_ready(self, node: str, reason: str, message: str) -> None:
        """The kubelet itself says that its node is not ready."""
        self._mark(node, "False", reason, message)

    def pause(self) -> None:
        """The API is away: these controllers can do nothing, and hear of no kubelet."""
        self._paused = []

    def resume(self, *, away: float) -> None:
        """The API is back. After more than the grace period all nodes are Unknown until their kubelets have posted."""
        waiting, self._paused = self._paused or [], None
        if away > self.timing.node_grace:
            heard = [one["metadata"]["name"] for one in self.store.all("nodes")]
            for name in heard:
                self._mark(name, "Unknown", *STOPPED)
            self._settle()
            for name in heard:
                self._later(self.timing.heartbeat, self._hear_unless_silent, name)
        for work in waiting:
            work()

    # --- what it does -------------------------------------------------------------------------------------------------

    def _later(self, seconds: float, work: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        def due() -> None:
            if self._paused is not None:
                self._paused.append(lambda: work(*args))
            else:
                work(*args)

        return self._loop.call_later(seconds, due)

    def _hear_unless_silent(self, node: str) -> None:
        if node not in self.silent:
            self.hear(node)

    def _give_up(self, node: str) -> None:
        if node not in self.silent or self.store.get("nodes", None, node) is None:
            return
        self._mark(node, "Unknown", *STOPPED)
        self._settle()
        if node in self._removed_by_cloud:
            self._later(self.timing.cloud, self._remove, node)

    def _mark(self, node: str, status: str, reason: str, message: str) -> None:
        thing = self.store.get("nodes", None, node)
        assert thing is not None, node
        key = UNREACHABLE if status == "Unknown" else NOT_READY

        def edit(one: Object) -> None:
            set_condition(one, "Ready", status, reason, message)
            for kind in PRESSURES if status == "Unknown" else ():
                set_condition(one, kind, status, reason, message)
            taints = one["spec"].setdefault("taints", [])
            taints.extend(
                {"key": key, "effect": effect, "timeAdded": moment()}
                for effect in ("NoSchedule", "NoExecute")
                if not any(old["key"] == key and old["effect"] == effect for old in taints)
            )

        self.store.change("nodes", thing, edit)
        self.events(
            {**thing, "kind": "Node", "apiVersion": "v1"}, "NodeNotReady",
            f"Node {node} status is now: NodeNotReady", source="node-controller",
        )  # fmt: skip
        for pod in self._pods_on(node):
            self.store.change("pods", pod, lambda one: set_condition(one, "Ready", "False"))
            self.events(pod, "NodeNotReady", "Node is not ready", source="node-controller", kind="Warning")

    def _settle(self) -> None:
        """Evict from nodes that are not ready, unless none is: then it is rather the network, and nobody is evicted."""
        nodes = list(self.store.all("nodes"))
        bad = [one for one in nodes if (condition(one, "Ready") or {}).get("status") == "Unknown"]
        for node in nodes:
            name = node["metadata"]["name"]
            if node in bad and len(bad) < len(nodes):
                self._tainted(node, added=True)
                self._plan(name)
            else:
                if node in bad:
                    self._tainted(node, added=False)
                for key in [key for key in self._evictions if key[0] == name]:
                    self._evictions.pop(key).cancel()

    def _tainted(self, node: Object, *, added: bool) -> None:
        taint = {"key": UNREACHABLE, "effect": "NoExecute"}

        def edit(one: Object) -> None:
            taints = one["spec"].setdefault("taints", [])
            there = [old for old in taints if taint.items() <= old.items()]
            if added and not there:
                taints.append({**taint, "timeAdded": moment()})
            elif not added:
                one["spec"]["taints"] = [old for old in taints if old not in there]

        self.store.change("nodes", node, edit)

    def _plan(self, node: str) -> None:
        for pod in self._pods_on(node):
            key, patience = (node, pod["metadata"]["uid"]), _patience(pod)
            if key not in self._evictions and patience is not None:
                wait = self.timing.unreachable * patience / NOT_READY_SECONDS
                self._evictions[key] = self._later(wait, self._evict, key, pod)

    def _evict(self, key: tuple[str, str], pod: Object) -> None:
        self._evictions.pop(key, None)
        meta = pod["metadata"]
        marked = self.store.change("pods", pod, lambda one: set_condition(one, "DisruptionTarget", "True", *EVICTED))
        if marked is not None and not marked["metadata"].get("deletionTimestamp"):
            text = f"Marking for deletion Pod {meta['namespace']}/{meta['name']}"
            self.events(pod, "TaintManagerEviction", text, source="taint-eviction-controller")
            self._delete(marked, {})

    def _remove(self, node: str) -> None:
        """The cloud's controller: a node that is not ready, and whose machine there is not, is deleted."""
        thing = self.store.get("nodes", None, node)
        if thing is not None and node in self.silent:
            self.events(
                {**thing, "kind": "Node", "apiVersion": "v1"}, "DeletingNode",
                f"Deleting node {node} because it does not exist in the cloud provider",
                source="cloud-node-lifecycle-controller",
            )  # fmt: skip
            self.store.remove("nodes", thing)

    def _note(self, change: Change) -> None:
        if change.kind == "nodes" and change.after is None and change.before is not None:
            self._later(self.timing.orphans, self._collect, change.before["metadata"]["name"])

    def _collect(self, node: str) -> None:
        """PodGC: the pods of a node that is no more have failed, and are deleted by force."""
        if self.store.get("nodes", None, node) is not None:
            return

        def fail(pod: Object) -> None:
            set_condition(pod, "DisruptionTarget", "True", *ORPHANED)
            pod["status"]["phase"] = "Failed"

        for pod in self._pods_on(node):
            marked = self.store.change("pods", pod, fail)
            self._delete(marked or pod, {"gracePeriodSeconds": 0})

    def _pods_on(self, node: str) -> list[Object]:
        return [one for one in self.store.all("pods") if one["spec"].get("nodeName") == node and not finished(one)]

    def _delete(self, pod: Object, options: Mapping[str, Any]) -> None:
        with contextlib.suppress(ApiError):
            self.delete("pods", pod, options)


def _patience(pod: Object) -> float | None:
    """Seconds that a pod stays on an unreachable node; None is forever."""
    tolerated = [
        one
        for one in pod["spec"].get("tolerations") or []
        if one.get("key") in (None, "", UNREACHABLE) and one.get("effect") in (None, "", "NoExecute")
    ]
    if not tolerated:
        return 0.0
    limits = [one["tolerationSeconds"] for one in tolerated if one.get("tolerationSeconds") is not None]
    return float(min(limits)) if limits else None
