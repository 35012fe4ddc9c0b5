"""What several controllers have to know about a pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .quantities import amount
from .store import Object, holds

INDEX = "batch.kubernetes.io/job-completion-index"
TRACKING = "batch.kubernetes.io/job-tracking"
"""The Job controller's finalizer: a pod stays until it has been counted."""


def requests_of(pod: Mapping[str, Any]) -> dict[str, float]:
    """What a node has to have free for it; what init containers take is free again before the others start."""
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, value in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] = total.get(name, 0.0) + amount(value)
    return total


def is_sidecar(container: Mapping[str, Any]) -> bool:
    """A native one: an init container that keeps running next to the others."""
    return container.get("restartPolicy") == "Always"


def phase(pod: Mapping[str, Any]) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def finished(pod: Mapping[str, Any]) -> bool:
    return phase(pod) in ("Succeeded", "Failed")


def ready(pod: Mapping[str, Any]) -> bool:
    return holds(pod, "Ready")


def index_of(pod: Mapping[str, Any]) -> int:
    return int((pod["metadata"].get("annotations") or {})[INDEX])


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
