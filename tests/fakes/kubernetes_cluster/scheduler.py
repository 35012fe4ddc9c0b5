"""Which node a pod goes to, or why none: labels, taints and what is free, as kube-scheduler words it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .controllers import Events
from .pods import finished, requests_of
from .quantities import amount
from .selectors import expression, matches
from .store import Change, Object, Store, condition, labels_of, set_condition

SOURCE = "default-scheduler"
GATED = "Scheduling is blocked due to non-empty scheduling gates"
NO_VICTIMS = "No preemption victims found for incoming pod"
NOT_HELPFUL = "Preemption is not helpful for scheduling"
SHORTAGES = ("Insufficient ", "Too many pods", "node(s) didn't match pod anti-affinity rules")
"""Reasons that room on the node would fix, if somebody of lower priority had it."""


@dataclass(frozen=True)
class Wording:
    """What a release says of a node that is tainted, and before what preemption could do."""

    taint: str
    claims: str = ""


WORDINGS = (
    (36, Wording("node(s) had untolerated taint(s)", "no new claims to deallocate, ")),
    (34, Wording("node(s) had untolerated taint {{{key}: {value}}}", "no new claims to deallocate, ")),
    (0, Wording("node(s) had untolerated taint {{{key}: {value}}}")),
)
"""By the first minor version; seen of 1.33 and 1.36, INFERRED for those between."""


def wording(version: str) -> Wording:
    """The wording of a version such as `v1.36.2-gke.1034000`."""
    minor = int(version.split(".")[1])
    return next(words for since, words in WORDINGS if minor >= since)


class Scheduler:
    """Tries all that wait whenever something that may matter has changed."""

    def __init__(self, store: Store, events: Events, wording: Wording) -> None:
        self.store, self.events, self.wording = store, events, wording
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
            self._mark(
                pod, "Unschedulable", self._refused(pod, missing, Counter({NOT_HELPFUL: len(nodes)}), len(nodes))
            )
            return
        asked = {**requests_of(pod), "pods": 1.0}
        reasons: Counter[str] = Counter()
        preemption: Counter[str] = Counter()
        for offset in range(len(nodes)):
            node = nodes[(self._start + offset) % len(nodes)]
            name = node["metadata"]["name"]
            against = list(_against(pod, node, asked, used.get(name, Counter()), self.wording))
            if not against and (rival := self._unwelcome(pod, node)):
                against = [rival]
            if not against:
                self._start += offset + 1
                used.setdefault(name, Counter()).update(asked)
                self._bind(pod, name)
                return
            reasons.update(against)
            preemption[_after_preemption(against, node, asked)] += 1
        self._mark(pod, "Unschedulable", self._refused(pod, _listed(reasons), preemption, len(nodes)))

    def _refused(self, pod: Object, why: str, preemption: Counter[str], nodes: int) -> str:
        if not nodes:
            return "no nodes available to schedule pods"
        preempted = f"0/{nodes} nodes are available: {_listed(preemption)}."
        if pod["spec"].get("preemptionPolicy") == "Never":
            preempted = "not eligible due to preemptionPolicy=Never."
        return f"0/{nodes} nodes are available: {why}. {self.wording.claims}preemption: {preempted}"

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


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))


def _after_preemption(against: Sequence[str], node: Object, asked: Mapping[str, float]) -> str:
    """Whether the node could be made free for the pod at all."""
    room = node["status"]["allocatable"]
    too_large = any(value > amount(room.get(name, 0)) + 1e-9 for name, value in asked.items())
    return NO_VICTIMS if all(one.startswith(SHORTAGES) for one in against) and not too_large else NOT_HELPFUL


def _against(
    pod: Object, node: Object, asked: Mapping[str, float], used: Mapping[str, float], wording: Wording
) -> Sequence[str]:
    """The first filter that says no, as kube-scheduler runs them; several shortages count each."""
    spec, tolerations = node.get("spec", {}), pod["spec"].get("tolerations") or []
    if spec.get("unschedulable"):
        return ["node(s) were unschedulable"]
    for taint in spec.get("taints") or []:
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(one, taint) for one in tolerations):
            return [wording.taint.format(key=taint["key"], value=taint.get("value", ""))]
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
