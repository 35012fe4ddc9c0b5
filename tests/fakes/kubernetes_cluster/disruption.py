"""Evictions by the API, and the PodDisruptionBudgets that may forbid them, in the words of Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .controllers import Events
from .errors import ApiError
from .pods import finished, phase, ready
from .selectors import matches
from .store import KINDS, Object, Store, labels_of, set_condition

SOURCE = "controllermanager"
EVICTED = ("EvictionByEvictionAPI", "Eviction API: evicting")
REFUSED = "Cannot evict pod as it would violate the pod's disruption budget."
SEVERAL = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."


class Disruption:
    def __init__(self, store: Store, events: Events) -> None:
        self.store, self.events = store, events

    def evict(self, pod: Object, delete: Callable[[Object], Object], *, dry_run: bool = False) -> None:
        """Delete a pod that nobody's budget protects, marked as disrupted.

        Raises:
            ApiError: A budget forbids it (429), or there are two.
        """
        if phase(pod) == "Running" and not pod["metadata"].get("deletionTimestamp"):
            budgets = [one for one in self._budgets(pod) if matches(one["spec"].get("selector"), labels_of(pod))]
            if len(budgets) > 1:
                raise ApiError(500, SEVERAL)
            for budget in budgets:
                self._spend(budget, pod)
        if not dry_run:
            self.store.change("pods", pod, lambda one: set_condition(one, "DisruptionTarget", "True", *EVICTED))
        delete(pod)

    def review(self) -> None:
        """The disruption controller: write into each budget how many of its pods may go."""
        for budget in list(self.store.all("poddisruptionbudgets")):
            self._count(budget)

    def _budgets(self, pod: Object) -> list[Object]:
        self.review()
        return list(self.store.all("poddisruptionbudgets", pod["metadata"]["namespace"]))

    def _spend(self, budget: Object, pod: Object) -> None:
        status = budget["status"]
        if not ready(pod) and status["currentHealthy"] >= status["desiredHealthy"] > 0:
            return
        if status["disruptionsAllowed"] < 1:
            text = (
                f"The disruption budget {budget['metadata']['name']} needs {status['desiredHealthy']} healthy pods "
                f"and has {status['currentHealthy']} currently"
            )
            raise ApiError(429, REFUSED, details={"causes": [{"reason": "DisruptionBudget", "message": text}]})

    def _count(self, budget: Object) -> None:
        spec, namespace = budget["spec"], budget["metadata"]["namespace"]
        pods = [
            one
            for one in self.store.all("pods", namespace)
            if matches(spec.get("selector"), labels_of(one)) and not finished(one)
        ]
        healthy = sum(ready(one) and not one["metadata"].get("deletionTimestamp") for one in pods)
        problem = _unscalable(pods) if not isinstance(spec.get("minAvailable"), int) else None
        wanted = 0 if problem else _desired(spec, len(pods))
        allowed = 0 if problem else max(healthy - wanted, 0)

        def edit(one: Object) -> None:
            one["status"] = {
                **one.get("status", {}), "currentHealthy": healthy, "desiredHealthy": wanted,
                "disruptionsAllowed": allowed, "expectedPods": 0 if problem else len(pods),
                "observedGeneration": one["metadata"].get("generation", 1),
            }  # fmt: skip
            reason = "SufficientPods" if allowed else "InsufficientPods"
            set_condition(
                one, "DisruptionAllowed", str(allowed > 0), "SyncFailed" if problem else reason, problem or ""
            )

        if self.store.change("poddisruptionbudgets", budget, edit) is not budget and problem:
            text = f"Failed to calculate the number of expected pods: {problem}"
            self.events(budget, "CalculateExpectedPodCountFailed", text, source=SOURCE, kind="Warning")


def _unscalable(pods: list[Object]) -> str | None:
    """Why pods cannot be counted in per cent, or from above: their controller does not say how many there should be."""
    for pod in pods:
        for owner in pod["metadata"].get("ownerReferences", []):
            kind = next(one for one in KINDS.values() if one.name == owner["kind"])
            return f"{kind.qualified} does not implement the scale subresource"
    return None


def _desired(spec: Mapping[str, Any], expected: int) -> int:
    if isinstance(spec.get("minAvailable"), int):
        return int(spec["minAvailable"])
    given = str(spec.get("minAvailable") or spec["maxUnavailable"])
    part = -(-expected * int(given.removesuffix("%")) // 100) if given.endswith("%") else int(given)
    return part if "minAvailable" in spec else expected - part
