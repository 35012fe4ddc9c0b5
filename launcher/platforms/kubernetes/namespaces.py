"""Checks that the job's namespace has room for all its pods, and does not limit them by itself.

The cluster's own answer to a dry run of one pod is exact for limits, Pod Security and policies. It says nothing of the
other pods, or of what a limit that is set by default will do to a training: that is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from launcher.job import Object
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.resources import Amounts, amount, limits_of, requests_of, shown
from litgpt_demo.findings import Finding


def overdrawn(quotas: Iterable[Object], wanted: Amounts) -> Iterator[Finding]:
    """Yield what the job as a whole asks for and a ResourceQuota has not got, now or ever.

    Quotas with scopes are left to the dry run of the pod: the API server knows which of them count.
    """
    for quota in quotas:
        name, spec = quota["metadata"]["name"], quota["spec"]
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue
        used = quota.get("status", {}).get("used", {})
        for resource, most in spec.get("hard", {}).items():
            if (asked := wanted.get(resource)) is None:
                continue
            free = amount(most) - amount(used.get(resource, "0"))
            said = f"quota {name} allows {shown(resource, amount(most))} of {resource}, and the job asks for "
            if asked > amount(most):
                fix = "have it raised, or ask for less (platform.nodes, cpus, memory)"
                yield Finding("error", "gke.quota", said + shown(resource, asked), fix)
            elif asked > free:
                what = f"{said}{shown(resource, asked)}, of which {shown(resource, max(free, Decimal(0)))} is free now"
                fix = "wait for other jobs to end, have it raised, or ask for less (platform.nodes, cpus, memory)"
                yield Finding("warning", "gke.quota", what, fix)


def quota_amounts(pod: Object, *, nodes: int, kind: str) -> Amounts:
    """Return what quotas count of a job: by pod and resource, and by object."""
    amounts: Amounts = {"pods": Decimal(nodes), "count/pods": Decimal(nodes), "count/jobs.batch": Decimal(1)}
    amounts |= {"services": Decimal(1), "count/services": Decimal(1)}
    if kind == "JobSet":
        amounts["count/jobsets.jobset.x-k8s.io"] = Decimal(1)
    for resource, quantity in requests_of(pod).items():
        amounts[f"requests.{resource}"] = quantity * nodes
        if "/" not in resource:
            amounts[resource] = quantity * nodes
    return amounts | {f"limits.{resource}": quantity * nodes for resource, quantity in limits_of(pod).items()}


def limited(admitted: Object, pod: Object) -> Iterator[Finding]:
    """Yield the limits that the namespace would give the container that trains, and nobody has asked for."""
    given = {name: value for name, value in _limits(admitted).items() if name not in _limits(pod)}
    if given:
        listed = ", ".join(f"{resource}={quantity}" for resource, quantity in sorted(given.items()))
        what = f"a LimitRange of the namespace limits every node to {listed}: more memory ends it, more cpu waits"
        yield Finding("warning", "gke.limits", what, "have its default raised, or take another platform.namespace")


def _limits(pod: Object) -> Mapping[str, str]:
    found: Object = next((one for one in pod["containers"] if one["name"] == names.NODE), {})
    limits: Mapping[str, str] = found.get("resources", {}).get("limits", {})
    return limits
