"""Which node a pod goes to, or why none: labels, taints and what is free, as kube-scheduler words it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .controllers import Events
from .pods import finished, requests_of
from .quantities import amount
from .selectors import expression
from .store import Change, Object, Store, condition, labels_of, set_condition

SOURCE = "default-scheduler"


class Scheduler:
    """Tries all that wait whenever pods or nodes have changed."""

    def __init__(self, store: Store, events: Events) -> None:
        self.store, self.events = store, events
        self._stale, self._start = True, 0
        store.listeners.append(self._note)

    def _note(self, change: Change) -> None:
        self._stale = self._stale or change.kind in ("nodes", "pods")

    def schedule(self) -> None:
        if not self._stale:
            return
        self._stale = False
        waiting: list[Object] = []
        used: dict[str, Counter[str]] = {}
        for pod in self.store.all("pods"):
            if finished(pod):
                continue
            if node := pod["spec"].get("nodeName"):
                used.setdefault(node, Counter()).update(requests_of(pod))
            elif not pod["metadata"].get("deletionTimestamp"):
                waiting.append(pod)
        nodes = list(self.store.all("nodes"))
        for pod in waiting:
            self._place(pod, nodes, used)

    def _place(self, pod: Object, nodes: Sequence[Object], used: dict[str, Counter[str]]) -> None:
        asked, reasons = requests_of(pod), Counter[str]()
        for offset in range(len(nodes)):
            node = nodes[(self._start + offset) % len(nodes)]
            name = node["metadata"]["name"]
            against = _against(pod, node, asked, used.get(name, Counter()))
            if not against:
                self._start += offset + 1
                used.setdefault(name, Counter()).update(asked)
                self.store.change("pods", pod, partial(_bind, node=name))
                return
            reasons.update(against)
        listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        message = f"0/{len(nodes)} nodes are available: {listed}." if nodes else "no nodes available to schedule pods"
        known = condition(pod, "PodScheduled")
        if known is None or known["message"] != message:
            self.store.change(
                "pods", pod, lambda thing: set_condition(thing, "PodScheduled", "False", "Unschedulable", message)
            )
            self.events(pod, "FailedScheduling", message, source=SOURCE)


def _bind(pod: Object, *, node: str) -> None:
    pod["spec"]["nodeName"] = node
    set_condition(pod, "PodScheduled", "True")


def _against(pod: Object, node: Object, asked: Mapping[str, float], used: Mapping[str, float]) -> Sequence[str]:
    """The first filter that says no, as kube-scheduler runs them; several shortages count each."""
    for taint in node["spec"].get("taints") or []:
        if not any(_tolerates(one, taint) for one in pod["spec"].get("tolerations") or []):
            return ["node(s) had untolerated taint(s)"]
    if not _wanted(pod, labels_of(node)):
        return ["node(s) didn't match Pod's node affinity/selector"]
    free = node["status"]["allocatable"]
    short = [name for name, value in asked.items() if used.get(name, 0.0) + value > amount(free.get(name, 0))]
    return [f"Insufficient {name}" for name in sorted(short)]


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, taint["effect"]) or toleration.get("key") not in (None, taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _wanted(pod: Object, labels: Mapping[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return False
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return required is None or any(
        all(expression(one, labels) for one in term.get("matchExpressions") or [])
        for term in required["nodeSelectorTerms"]
    )
