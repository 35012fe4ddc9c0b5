"""What several controllers have to know about a pod."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .quantities import amount
from .store import Object

INDEX = "batch.kubernetes.io/job-completion-index"
TRACKING = "batch.kubernetes.io/job-tracking"
"""The Job controller's finalizer: a pod stays until it has been counted."""
FINISHED = ("Succeeded", "Failed")


def requests_of(pod: Mapping[str, Any]) -> dict[str, float]:
    """What a node has to have free for it: the containers' sum with the sidecars', or the largest init container's."""
    return _in_sum(pod, _requests)


def limits_of(pod: Mapping[str, Any]) -> dict[str, float]:
    """What its containers may use at most, summed in the same way."""
    return _in_sum(pod, _limits)


def _in_sum(pod: Mapping[str, Any], of: Callable[[Mapping[str, Any]], dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    largest: dict[str, float] = {}
    spec = pod["spec"]
    before = spec.get("initContainers") or []
    for container in (*spec["containers"], *(one for one in before if is_sidecar(one))):
        for name, value in of(container).items():
            total[name] = total.get(name, 0.0) + value
    for container in before:
        if not is_sidecar(container):
            for name, value in of(container).items():
                largest[name] = max(largest.get(name, 0.0), value)
    return {name: max(total.get(name, 0.0), largest.get(name, 0.0)) for name in total.keys() | largest.keys()}


def _requests(container: Mapping[str, Any]) -> dict[str, float]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: amount(value) for name, value in wanted.items()}


def _limits(container: Mapping[str, Any]) -> dict[str, float]:
    given = (container.get("resources") or {}).get("limits") or {}
    return {name: amount(value) for name, value in given.items()}


def is_sidecar(container: Mapping[str, Any]) -> bool:
    """A native one: an init container that keeps running next to the others."""
    return container.get("restartPolicy") == "Always"


def phase(pod: Mapping[str, Any]) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def finished(pod: Mapping[str, Any]) -> bool:
    return phase(pod) in FINISHED


def ready(pod: Mapping[str, Any]) -> bool:
    return any(
        one["type"] == "Ready" and one["status"] == "True" for one in pod.get("status", {}).get("conditions", [])
    )


def index_of(pod: Mapping[str, Any]) -> int | None:
    found = (pod["metadata"].get("annotations") or {}).get(INDEX)
    return None if found is None else int(found)


def untrack(pod: Object) -> None:
    finalizers = pod["metadata"].get("finalizers", [])
    if TRACKING in finalizers:
        finalizers.remove(TRACKING)


def owner_reference(thing: Object) -> Object:
    meta = thing["metadata"]
    return {
        "apiVersion": thing["apiVersion"], "kind": thing["kind"], "name": meta["name"], "uid": meta["uid"],
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
