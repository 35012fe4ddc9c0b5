"""ResourceQuota: what a namespace's objects may use in sum, at admission and in the quota's own status.

Behaviour and wording follow the admission plug-in ResourceQuota and its evaluator of pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import forbidden
from .pods import finished, limits_of, requests_of
from .quantities import amount, binary, written
from .selectors import expression
from .store import KINDS, Kind, Object, Store

DEMANDED = {"cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory"}
"""What every container has to state where a quota counts it."""
COUNTED = {"services", "secrets", "configmaps", "persistentvolumeclaims", "resourcequotas"}
"""Kinds that a quota may count by their bare name; all can be counted as `count/jobs.batch`."""
COMPUTE = ("cpu", "memory", "ephemeral-storage")


class Quotas:
    def __init__(self, store: Store) -> None:
        self.store = store

    def admit(self, kind: Kind, thing: Object) -> None:
        """Let an object in that every quota of its namespace has room for.

        Raises:
            ApiError: One has not, or a container does not say what it needs of what is counted.
        """
        meta = thing["metadata"]
        for quota in self.store.all("resourcequotas", meta["namespace"]) if kind.namespaced else ():
            if kind.plural == "pods" and not _in_scope(quota, thing):
                continue
            name, hard = quota["metadata"]["name"], quota["spec"].get("hard", {})
            if kind.plural == "pods" and (missing := _unstated(thing, hard.keys() & DEMANDED)):
                raise forbidden(kind.qualified, meta["name"], f"failed quota: {name}: must specify {missing}")
            asked, used = usage_of(kind, thing), self.used(quota)
            over = sorted(one for one in hard.keys() & asked.keys() if asked[one] + used[one] > amount(hard[one]))
            if over:
                requested, in_use = (
                    ",".join(f"{one}={_shown(one, rows[one], hard)}" for one in over) for rows in (asked, used)
                )
                limited = ",".join(f"{one}={hard[one]}" for one in over)
                why = f"exceeded quota: {name}, requested: {requested}, used: {in_use}, limited: {limited}"
                raise forbidden(kind.qualified, meta["name"], why)

    def used(self, quota: Mapping[str, Any]) -> dict[str, float]:
        """What the namespace uses of all that the quota limits."""
        total = dict.fromkeys(quota["spec"].get("hard", {}), 0.0)
        for kind in {_kind_of(name) for name in total}:
            for thing in self.store.all(kind.plural, quota["metadata"]["namespace"]):
                if kind.plural != "pods" or _in_scope(quota, thing):
                    for name, value in usage_of(kind, thing).items():
                        total[name] = total.get(name, 0.0) + value
        return total

    def review(self) -> None:
        """The quota controller: write into each quota what is used of it."""
        for quota in list(self.store.all("resourcequotas")):
            hard, used = quota["spec"].get("hard", {}), self.used(quota)
            status = {
                "hard": {name: str(value) for name, value in hard.items()},
                "used": {name: _shown(name, used[name], hard) for name in hard},
            }
            self.store.change("resourcequotas", quota, lambda one, now=status: one.__setitem__("status", now))


def usage_of(kind: Kind, thing: Object) -> dict[str, float]:
    """What an object counts for, by the names that quotas have for it."""
    counted = {f"count/{kind.qualified}": 1.0}
    if kind.plural in COUNTED:
        counted[kind.plural] = 1.0
    if kind.plural != "pods" or finished(thing):
        return counted
    counted["pods"] = 1.0
    for name, value in requests_of(thing).items():
        counted[f"requests.{name}"] = value
        if name in COMPUTE:
            counted[name] = value
    return counted | {f"limits.{name}": value for name, value in limits_of(thing).items() if name in COMPUTE}


def _kind_of(resource: str) -> Kind:
    name = resource.removeprefix("count/")
    found = next((kind for kind in KINDS.values() if kind.qualified == name), None)
    return found if found is not None and (resource != name or name in COUNTED) else KINDS["pods"]


def _unstated(pod: Object, demanded: set[str]) -> str:
    """What containers do not state though a quota counts it: `limits.cpu for: node; …`."""
    missing: dict[str, list[str]] = {}
    for container in (*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])):
        resources = container.get("resources") or {}
        for name in demanded:
            what, _, resource = name.rpartition(".")
            if resource not in (resources.get(what or "requests") or {}):
                missing.setdefault(name, []).append(container["name"])
    return "; ".join(f"{name} for: {','.join(sorted(who))}" for name, who in sorted(missing.items()))


def _in_scope(quota: Mapping[str, Any], pod: Object) -> bool:
    spec = quota["spec"]
    selectors = [{"scopeName": scope, "operator": "Exists"} for scope in spec.get("scopes") or []]
    selectors += (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    return all(_matches(one, pod) for one in selectors)


def _matches(selector: Mapping[str, Any], pod: Object) -> bool:
    scope = selector["scopeName"]
    if scope == "PriorityClass":
        name = pod["spec"].get("priorityClassName")
        return bool(expression({**selector, "key": scope}, {scope: name} if name else {}))
    if scope in ("Terminating", "NotTerminating"):
        return ("activeDeadlineSeconds" in pod["spec"]) == (scope == "Terminating")
    if scope in ("BestEffort", "NotBestEffort"):
        stated = any(name in COMPUTE for name in {**requests_of(pod), **limits_of(pod)})
        return stated == (scope == "NotBestEffort")
    return False


def _shown(name: str, value: float, hard: Mapping[str, Any]) -> str:
    """Memory in powers of 1024, as everybody states it, unless the quota itself does otherwise."""
    return written(value, in_binary="memory" in name or "storage" in name or binary(hard[name]))
