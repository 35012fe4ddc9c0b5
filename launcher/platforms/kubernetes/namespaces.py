"""Checks that the job's namespace admits its pods: quotas, limits, Pod Security level and secrets, read beforehand.

The cluster's own answer to a dry run of one pod is exact, and says nothing of the other pods, of what a limit that is
set by default will do to a training, or of what is missing on the machine: that is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from launcher.job import Object
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.resources import Amounts, amount, limits_of, requests_of, shown
from litgpt_demo.findings import Finding

_ENFORCE = "pod-security.kubernetes.io/enforce"
_LEVELS = ("privileged", "baseline", "restricted")
_LOWER = f"kubectl label --overwrite namespace {{0}} {_ENFORCE}={{1}}, or take another platform.namespace"


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


def out_of_limits(limit_ranges: Iterable[Object], pod: Object) -> Iterator[Finding]:
    """Yield what a LimitRange allows no container or pod to ask for."""
    whole = [("Pod", "the pod", requests_of(pod))]
    parts = [("Container", f"container {one['name']}", requests_of({"containers": [one]})) for one in pod["containers"]]
    for limit_range in limit_ranges:
        for rule in limit_range["spec"]["limits"]:
            for kind, who, asked in (*whole, *parts):
                if kind == rule["type"]:
                    yield from _against(limit_range["metadata"]["name"], rule, who, asked)


def _against(name: str, rule: Object, who: str, asked: Amounts) -> Iterator[Finding]:
    for word, bound, beyond in (("at most", "max", 1), ("at least", "min", -1)):
        for resource, limit in rule.get(bound, {}).items():
            if resource in asked and asked[resource].compare(amount(limit)) == beyond:
                allowed = f"LimitRange {name} allows {word} {shown(resource, amount(limit))} of {resource}"
                what = f"{allowed}, and {who} asks for {shown(resource, asked[resource])}"
                yield Finding("error", "gke.limits", what, f"change platform.{_SETTING.get(resource, resource)}, or it")


_SETTING = {"cpu": "cpus"}


def limited(admitted: Object, pod: Object) -> Iterator[Finding]:
    """Yield the limits that the namespace would give the container that trains, and nobody has asked for."""
    given = {name: value for name, value in _limits(admitted).items() if name not in _limits(pod)}
    if given:
        listed = ", ".join(f"{resource}={quantity}" for resource, quantity in sorted(given.items()))
        what = f"a LimitRange of the namespace limits every node to {listed}: beyond its memory a training is killed"
        yield Finding("warning", "gke.limits", what, "have its default raised, or take another platform.namespace")


def _limits(pod: Object) -> Mapping[str, str]:
    found: Object = next((one for one in pod["containers"] if one["name"] == names.NODE), {})
    limits: Mapping[str, str] = found.get("resources", {}).get("limits", {})
    return limits


def forbidden(namespace: Object, pod: Object) -> Iterator[Finding]:
    """Yield that the namespace enforces a Pod Security level which the pods do not keep to.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    enforced = namespace["metadata"].get("labels", {}).get(_ENFORCE, "privileged")
    kept, why = _level(pod)
    if enforced in _LEVELS and _LEVELS.index(enforced) > _LEVELS.index(kept):
        space = namespace["metadata"]["name"]
        what = f"namespace {space} enforces the Pod Security level {enforced}, which forbids the pods: {why}"
        yield Finding("error", "gke.pod-security", what, _LOWER.format(space, kept))


def _level(pod: Object) -> tuple[str, str]:
    """Return the strictest level that the pod keeps to, and what keeps it from a stricter one."""
    contexts = [one.get("securityContext", {}) for one in (*pod.get("initContainers", ()), *pod["containers"])]
    reasons = {
        "they use the machine's network": pod.get("hostNetwork"),
        "they mount folders of the machine": any("hostPath" in one for one in pod.get("volumes", ())),
        "they have privileged containers": any(one.get("privileged") for one in contexts),
        "they ask for capabilities": any(one.get("capabilities", {}).get("add") for one in contexts),
    }
    if used := [reason for reason, holds in reasons.items() if holds]:
        return "privileged", ", ".join(used)
    # Whether an image runs as root is its author's choice, which the pods leave alone.
    return "baseline", "they do not demand to run as another user than root"
