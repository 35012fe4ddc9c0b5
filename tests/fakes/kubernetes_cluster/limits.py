"""LimitRange: what a namespace fills in where a pod's containers do not say what they need, and what it allows them.

Behaviour and wording follow the admission plug-in LimitRanger, for containers and pods; claims are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .pods import limits_of, requests_of
from .quantities import amount, written
from .store import Object

ANNOTATION = "kubernetes.io/limit-ranger"
Resources = Mapping[str, Any]


def fill_in(limit_range: Object) -> None:
    """Set what a LimitRange for containers leaves open: a default is the maximum, a default request the default."""
    for item in limit_range["spec"]["limits"]:
        if item["type"] == "Container":
            item["default"] = {**item.get("max", {}), **item.get("default", {})}
            item["defaultRequest"] = {**item.get("min", {}), **item["default"], **item.get("defaultRequest", {})}


def apply_defaults(pod: Object, ranges: Sequence[Object]) -> None:
    """Give the containers the requests and limits that they lack, and say so in an annotation."""
    items = [item for one in ranges for item in one["spec"]["limits"] if item["type"] == "Container"]
    changes = []
    for kind, field in (("container", "containers"), ("init container", "initContainers")):
        for container in pod["spec"].get(field) or []:
            for what, source in (("requests", "defaultRequest"), ("limits", "default")):
                given = container.get("resources", {}).get(what) or {}
                added = {
                    name: str(value)
                    for item in items
                    for name, value in item.get(source, {}).items()
                    if name not in given
                }
                if added:
                    container.setdefault("resources", {})[what] = {**given, **added}
                    changes.append(f"{', '.join(sorted(added))} {what[:-1]} for {kind} {container['name']}")
    if changes:
        text = f"LimitRanger plugin set: {'; '.join(changes)}"
        pod["metadata"].setdefault("annotations", {})[ANNOTATION] = text


def trouble(pod: Object, limit_range: Object) -> str | None:
    """What of a pod the LimitRange does not allow, all at once."""
    found: list[str] = []
    for item in limit_range["spec"]["limits"]:
        if item["type"] == "Container":
            for container in (*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])):
                resources = container.get("resources") or {}
                found += _troubles(item, resources.get("requests") or {}, resources.get("limits") or {})
        elif item["type"] == "Pod":
            found += _troubles(item, requests_of(pod), limits_of(pod))
    if not found:
        return None
    return found[0] if len(found) == 1 else f"[{', '.join(found)}]"


def _troubles(item: Object, requests: Resources, limits: Resources) -> Iterator[str]:
    per = item["type"]
    for name, least in item.get("min", {}).items():
        what = f"minimum {name} usage per {per} is {least}"
        if name not in requests:
            yield f"{what}.  No request is specified"
        elif amount(requests[name]) < amount(least):
            yield f"{what}, but request is {_shown(requests[name])}"
        elif name in limits and amount(limits[name]) < amount(least):
            yield f"{what}, but limit is {_shown(limits[name])}"
    for name, most in item.get("max", {}).items():
        what = f"maximum {name} usage per {per} is {most}"
        if name not in limits:
            yield f"{what}.  No limit is specified"
        elif amount(limits[name]) > amount(most):
            yield f"{what}, but limit is {_shown(limits[name])}"
        elif name in requests and amount(requests[name]) > amount(most):
            yield f"{what}, but request is {_shown(requests[name])}"
    for name, most in item.get("maxLimitRequestRatio", {}).items():
        what = f"{name} max limit to request ratio per {per} is {most}"
        if not amount(requests.get(name, 0)):
            yield f"{what}, but no request is specified or request is 0"
        elif not amount(limits.get(name, 0)):
            yield f"{what}, but no limit is specified or limit is 0"
        elif (ratio := amount(limits[name]) / amount(requests[name])) > amount(most):
            yield f"{what}, but provided ratio is {ratio:f}"


def _shown(quantity: str | float) -> str:
    return quantity if isinstance(quantity, str) else written(quantity, in_binary=quantity >= 1024)
