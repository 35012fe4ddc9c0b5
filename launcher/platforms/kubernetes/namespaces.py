"""Checks that the job's namespace admits its pods: quotas, limits, Pod Security level and secrets, read beforehand.

The cluster's own answer to a dry run of one pod is exact, and says nothing of the other pods, of what a limit that is
set by default will do to a training, or of what is missing on the machine: that is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

from launcher.job import Object
from launcher.networks.profile import OTHERS_FILES
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.resources import Amounts, amount, limits_of, requests_of, shown
from litgpt_demo.findings import Finding

_POD_SECURITY = "pod-security.kubernetes.io"
_LEVELS = ("privileged", "baseline", "restricted")
_LOWER = f"kubectl label --overwrite namespace {{0}} {_POD_SECURITY}/enforce={{1}}, or take another platform.namespace"


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
    """Yield that the namespace enforces a Pod Security level which the pods do not keep to, or warns of one.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    labels, space = namespace["metadata"].get("labels", {}), namespace["metadata"]["name"]
    kept = next(level for level in reversed(_LEVELS) if not _violations(level, pod))
    enforced, warned = (labels.get(f"{_POD_SECURITY}/{mode}", "privileged") for mode in ("enforce", "warn"))
    if why := _violations(enforced, pod):
        what = f"namespace {space} enforces the Pod Security level {enforced}, which forbids the pods: {why}"
        yield Finding("error", "gke.pod-security", what, _LOWER.format(space, kept))
    elif why := _violations(warned, pod):
        what = f"namespace {space} warns of pods below the Pod Security level {warned}, and may refuse them soon: {why}"
        yield Finding("warning", "gke.pod-security", what, "ask its administrator, or take another platform.namespace")


def _violations(level: str, pod: Object) -> str:
    """Return what of a pod of ours the level forbids; of what no pod of ours has, nothing is looked at."""
    place = _LEVELS.index(level) if level in _LEVELS else 0
    of_pod = pod.get("securityContext", {})
    contexts = [
        {**{name: of_pod[name] for name in _INHERITED if name in of_pod}, **one.get("securityContext", {})}
        for one in (*pod.get("initContainers", ()), *pod["containers"])
    ]
    found = [reason for checks in _FORBIDDEN[:place] for reason, holds in checks.items() if holds(pod, contexts)]
    return ", ".join(found)


_INHERITED = ("runAsNonRoot", "runAsUser", "seccompProfile")
"""The fields that a container has from its pod, unless it has its own."""

_COMMON = {OTHERS_FILES, "NET_BIND_SERVICE"}
"""Capabilities of our pods that the baseline allows: container runtimes give them to anybody."""

_Holds = Callable[[Object, Sequence[Object]], object]
_BASELINE: Mapping[str, _Holds] = {
    "they use the machine's network": lambda pod, _: pod.get("hostNetwork"),
    "they mount folders of the machine": lambda pod, _: any("hostPath" in one for one in pod.get("volumes", ())),
    "they have privileged containers": lambda _, contexts: any(one.get("privileged") for one in contexts),
    "they ask for capabilities": lambda _, contexts: any(_added(one) - _COMMON for one in contexts),
}
_RESTRICTED: Mapping[str, _Holds] = {
    "containers run as root": lambda _, contexts: any(
        not one.get("runAsNonRoot") or one.get("runAsUser") == 0 for one in contexts
    ),
    "containers may gain privileges": lambda _, contexts: any(
        one.get("allowPrivilegeEscalation") is not False for one in contexts
    ),
    "containers keep capabilities": lambda _, contexts: any(
        "ALL" not in one.get("capabilities", {}).get("drop", ()) or _added(one) for one in contexts
    ),
    "containers have no seccomp profile": lambda _, contexts: any("seccompProfile" not in one for one in contexts),
}
_FORBIDDEN = (_BASELINE, _RESTRICTED)
"""The things that a level forbids on top of the one before it."""


def _added(context: Object) -> set[str]:
    return set(context.get("capabilities", {}).get("add", ()))
