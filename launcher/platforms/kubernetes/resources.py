"""The resources that a pod asks for, as plain numbers: Kubernetes writes texts (`500m`, `200Gi`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from launcher.formatting import bytes_text
from launcher.job import Object

Amounts = dict[str, Decimal]

GPU = "nvidia.com/gpu"


def amount(quantity: str | float) -> Decimal:
    """Return a quantity as a number: CPUs, bytes, or pieces."""
    from kubernetes.utils import parse_quantity

    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]


def shown(resource: str, number: Decimal) -> str:
    """Return an amount of a resource for people to read."""
    if resource.rpartition(".")[2] in {"memory", "ephemeral-storage", "storage"}:
        return bytes_text(int(number))
    return f"{number.normalize():f}"


def requests_of(pod: Object) -> Amounts:
    """Return what the pod's containers together have reserved on a machine; where only a limit is given, the limit."""
    return _of(pod, lambda resources: {**resources.get("limits", {}), **resources.get("requests", {})})


def limits_of(pod: Object) -> Amounts:
    """Return the most that the pod's containers together may use, of what is limited in any of them."""
    return _of(pod, lambda resources: resources.get("limits", {}))


def _of(pod: Object, read: Any) -> Amounts:
    """Add up containers that run side by side; containers before them need their room only in their turn.

    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
    """
    first = pod.get("initContainers", ())
    sidecars = [one for one in first if one.get("restartPolicy") == "Always"]
    together = _sum(read(one.get("resources", {})) for one in (*sidecars, *pod["containers"]))
    for one in first:
        if one.get("restartPolicy") != "Always":
            for resource, quantity in read(one.get("resources", {})).items():
                together[resource] = max(together.get(resource, Decimal(0)), amount(quantity))
    return together


def _sum(parts: Iterable[Mapping[str, str]]) -> Amounts:
    total: Counter[str] = Counter()
    for part in parts:
        for resource, quantity in part.items():
            total[resource] += amount(quantity)  # type: ignore[assignment]  # Counter's numbers are typed as int
    return dict(total)  # type: ignore[arg-type]
