"""Which node a pod goes to, or why none: labels, taints and what is free, as kube-scheduler words it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .controllers import Events
from .pods import finished, requests_of
from .quantities import amount
from .selectors import expression, matches
from .store import Change, Object, Store, condition, labels_of, set_condition

SOURCE = "default-scheduler"
GATED = "Scheduling is blocked due to non-empty scheduling gates"


class Scheduler:
    """Tries all that wait whenever something that may matter has changed."""

    def __init__(self, store: Store, events: Events) -> None:
        self.store, self.events = store, events
        self._stale = True
        self._start = 0
        store.listeners.append(self._note)

    def _note(self, change: Change) -> None:
        if change.kind in ("nodes", "persistentvolumeclaims", "resourceclaimtemplates"):
            self._stale = True
        elif change.kind == "pods":
            new, gone = change.before is None, change.after is None
            ended = change.after is not None and finished(change.after)
            ungated = bool(change.before and change.before["spec"].get("schedulingGates"))
            self._stale = self._stale or new or gone or ended or ungated

    def schedule(self) -> None:
        if not self._stale:
            return
        self._stale = False
        waiting, used = [], {}
        for pod in self.store.all("pods"):
            if finished(pod):
                continue
            if node := pod["spec"].get("nodeName"):
                total = used.setdefault(node, Counter())
                total.update({**requests_of(pod), "pods": 1.0})
            elif not pod["metadata"].get("deletionTimestamp"):
                waiting.append(pod)
        nodes = list(self.store.all("nodes"))
        for pod in sorted(waiting, key=lambda one: int(one["metadata"]["resourceVersion"])):
            self._place(pod, nodes, used)

    def _place(self, pod: Object, nodes: Sequence[Object], used: dict[str, Counter[str]]) -> None:
        if pod["spec"].get("schedulingGates"):
            self._mark(pod, "SchedulingGated", GATED)
            return
        if missing := self._missing(pod):
            self._mark(pod, "Unschedulable", f"0/{len(nodes)} nodes are available: {missing}.")
            return
        asked = {**requests_of(pod), "pods": 1.0}
        reasons: Counter[str] = Counter()
        for offset in range(len(nodes)):
            node = nodes[(self._start + offset) % len(nodes)]
            name = node["metadata"]["name"]
            against = list(_against(pod, node, asked, used.get(name, Counter())))
            if not against and (rival := self._unwelcome(pod, node)):
                against = [rival]
            if not against:
                self._start += offset + 1
                used.setdefault(name, Counter()).update(asked)
                self._bind(pod, name)
                return
            reasons.update(against)
        listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        ask = f"0/{len(nodes)} nodes are available: {listed}." if nodes else "no nodes available to schedule pods"
        unhelpful = (
            f"preemption: 0/{len(nodes)} nodes are available: {len(nodes)} Preemption is not helpful for scheduling."
        )
        self._mark(pod, "Unschedulable", f"{ask} {unhelpful}" if nodes else ask)

    def _missing(self, pod: Object) -> str | None:
        """What must be there before any node is looked at."""
        namespace = pod["metadata"]["namespace"]
        for volume in pod["spec"].get("volumes") or []:
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim and self.store.get("persistentvolumeclaims", namespace, claim) is None:
                return f'persistentvolumeclaim "{claim}" not found'
        for claim in pod["spec"].get("resourceClaims") or []:
            template = claim.get("resourceClaimTemplateName")
            if template and self.store.get("resourceclaimtemplates", namespace, template) is None:
                text = f'resourceclaimtemplate.resource.k8s.io "{template}" not found'
                what = f"PodResourceClaim {claim['name']}: failed to create ResourceClaim: {text}"
                self.events(pod, "FailedResourceClaimCreation", what, source="resource_claim", kind="Warning")
                return f"waiting for dynamic resource controller to create the resourceclaim for {claim['name']}"
        return None

    def _bind(self, pod: Object, node: str) -> None:
        def edit(thing: Object) -> None:
            thing["spec"]["nodeName"] = node
            set_condition(thing, "PodScheduled", "True")

        self.store.change("pods", pod, edit)
        meta = pod["metadata"]
        message = f"Successfully assigned {meta['namespace']}/{meta['name']} to {node}"
        self.events(pod, "Scheduled", message, source=SOURCE)

    def _mark(self, pod: Object, reason: str, message: str) -> None:
        known = condition(pod, "PodScheduled")
        if known is not None and known["message"] == message:
            return
        self.store.change("pods", pod, lambda thing: set_condition(thing, "PodScheduled", "False", reason, message))
        if reason == "Unschedulable":
            self.events(pod, "FailedScheduling", message, source=SOURCE, kind="Warning")

    def _unwelcome(self, pod: Object, node: Object) -> str | None:
        """Required podAffinity and podAntiAffinity, by the pods on nodes of the same topology domain."""
        affinity = pod["spec"].get("affinity") or {}
        for field, wanted in (("podAffinity", True), ("podAntiAffinity", False)):
            for term in (affinity.get(field) or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or []:
                domain = labels_of(node).get(term["topologyKey"])
                there = any(
                    matches(term.get("labelSelector"), labels_of(one))
                    and self._domain(one, term["topologyKey"]) == domain
                    for one in self.store.all("pods", pod["metadata"]["namespace"])
                    if one["spec"].get("nodeName") and not finished(one)
                )
                if domain is None or there != wanted:
                    what = "pod affinity" if wanted else "pod anti-affinity"
                    return f"node(s) didn't match {what} rules"
        return None

    def _domain(self, pod: Object, key: str) -> str | None:
        node = self.store.get("nodes", None, pod["spec"]["nodeName"])
        return None if node is None else labels_of(node).get(key)


def _against(pod: Object, node: Object, asked: Mapping[str, float], used: Mapping[str, float]) -> Sequence[str]:
    """The first filter that says no, as kube-scheduler runs them; several shortages count each."""
    spec, tolerations = node.get("spec", {}), pod["spec"].get("tolerations") or []
    if spec.get("unschedulable"):
        return ["node(s) were unschedulable"]
    for taint in spec.get("taints") or []:
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(one, taint) for one in tolerations):
            return [f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"]
    if not _wanted(pod, node):
        return ["node(s) didn't match Pod's node affinity/selector"]
    free = node["status"]["allocatable"]
    short = [name for name, value in asked.items() if used.get(name, 0.0) + value > amount(free.get(name, 0)) + 1e-9]
    return ["Too many pods" if name == "pods" else f"Insufficient {name}" for name in sorted(short)]


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    exists = toleration.get("operator", "Equal") == "Exists"
    return exists or (bool(toleration.get("key")) and toleration.get("value", "") == taint.get("value", ""))


def _wanted(pod: Object, node: Object) -> bool:
    labels = labels_of(node)
    if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return False
    required = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if required is None:
        return True
    fields = {"metadata.name": node["metadata"]["name"]}
    return any(
        all(expression(one, labels) for one in term.get("matchExpressions") or [])
        and all(expression(one, fields) for one in term.get("matchFields") or [])
        for term in required["nodeSelectorTerms"]
        if term.get("matchExpressions") or term.get("matchFields")
    )
