"""Pod Security admission: what the namespace's labels let pods do.

    pod-security.kubernetes.io/enforce: restricted        pods that violate it are refused
    pod-security.kubernetes.io/warn: baseline             pods and Jobs that would are warned of

Checks and wording follow k8s.io/pod-security-admission at 1.36, for what pods of this project meet; AppArmor, SELinux,
sysctls, hosts of probes and Windows are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .store import Object, labels_of

PREFIX = "pod-security.kubernetes.io"
LEVELS = ("privileged", "baseline", "restricted")
CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
SECCOMP = ("RuntimeDefault", "Localhost")
Spec = Mapping[str, Any]
Violation = tuple[str, str]
"""(reason, detail), as in `host namespaces (hostNetwork=true)`."""


def refusal(namespace: Object, spec: Spec) -> str | None:
    """Why the namespace does not take this pod."""
    level, version = _policy(namespace, "enforce")
    found = violations(level, spec)
    return f'violates PodSecurity "{level}:{version}": {found}' if found else None


def warnings(namespace: Object, spec: Spec) -> list[str]:
    """What is said to somebody who creates such a pod, or a Job of such pods."""
    enforced, warned = _policy(namespace, "enforce"), _policy(namespace, "warn")
    if f"{PREFIX}/warn" not in labels_of(namespace) and LEVELS.index(enforced[0]) > LEVELS.index(warned[0]):
        warned = enforced
    found = violations(warned[0], spec)
    return [f'would violate PodSecurity "{warned[0]}:{warned[1]}": {found}'] if found else []


def violations(level: str, spec: Spec) -> str:
    """All that the level does not allow, in one line; empty where it allows all."""
    found = [one for check in CHECKS[level] for one in check(spec)]
    return ", ".join(f"{reason} ({detail})" for reason, detail in found)


def _policy(namespace: Object, mode: str) -> tuple[str, str]:
    labels = labels_of(namespace)
    return labels.get(f"{PREFIX}/{mode}", "privileged"), labels.get(f"{PREFIX}/{mode}-version", "latest")


# --- baseline ---------------------------------------------------------------------------------------------------------


def _capabilities(spec: Spec) -> Iterator[Violation]:
    added = {name: _added(one) - CAPABILITIES for name, one in _contexts(spec)}
    if bad := [name for name, more in added.items() if more]:
        listed = _quoted(sorted(set().union(*added.values())))
        detail = f"{_containers(bad)} must not include {listed} in securityContext.capabilities.add"
        yield "non-default capabilities", detail


def _host_namespaces(spec: Spec) -> Iterator[Violation]:
    if used := [f"{name}=true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]:
        yield "host namespaces", ", ".join(used)


def _host_paths(spec: Spec) -> Iterator[Violation]:
    if bad := [one["name"] for one in spec.get("volumes") or [] if "hostPath" in one]:
        yield "hostPath volumes", f"{_many('volume', bad)} {_quoted(bad)}"


def _host_ports(spec: Spec) -> Iterator[Violation]:
    used = {
        one["name"]: [str(port["hostPort"]) for port in one.get("ports") or [] if port.get("hostPort")]
        for one in _all_containers(spec)
    }
    if bad := [name for name, ports in used.items() if ports]:
        ports = sorted({port for row in used.values() for port in row})
        detail = f"{_containers(bad)} {_use(bad)} {_many('hostPort', ports)} {', '.join(ports)}"
        yield "hostPort", detail


def _privileged(spec: Spec) -> Iterator[Violation]:
    if bad := [name for name, one in _contexts(spec) if one.get("privileged")]:
        yield "privileged", f"{_containers(bad)} must not set securityContext.privileged=true"


def _seccomp_baseline(spec: Spec) -> Iterator[Violation]:
    yield from _forbidden_seccomp(spec)


# --- restricted -------------------------------------------------------------------------------------------------------


def _escalation(spec: Spec) -> Iterator[Violation]:
    if bad := [name for name, one in _contexts(spec) if one.get("allowPrivilegeEscalation") is not False]:
        detail = f"{_containers(bad)} must set securityContext.allowPrivilegeEscalation=false"
        yield "allowPrivilegeEscalation != false", detail


def _all_capabilities_dropped(spec: Spec) -> Iterator[Violation]:
    details = []
    if bad := [name for name, one in _contexts(spec) if "ALL" not in _capability(one, "drop")]:
        details.append(f'{_containers(bad)} must set securityContext.capabilities.drop=["ALL"]')
    added = {name: _added(one) - {"NET_BIND_SERVICE"} for name, one in _contexts(spec)}
    if bad := [name for name, more in added.items() if more]:
        listed = _quoted(sorted(set().union(*added.values())))
        details.append(f"{_containers(bad)} must not include {listed} in securityContext.capabilities.add")
    if details:
        yield "unrestricted capabilities", "; ".join(details)


def _restricted_volumes(spec: Spec) -> Iterator[Violation]:
    kinds = {one["name"]: next(kind for kind in one if kind != "name") for one in spec.get("volumes") or []}
    if bad := [name for name, kind in kinds.items() if kind not in VOLUMES]:
        types = sorted({kinds[name] for name in bad})
        detail = f"{_many('volume', bad)} {_quoted(bad)} {_use(bad)} {_many('restricted volume type', types)}"
        yield "restricted volume types", f"{detail} {_quoted(types)}"


def _not_root(spec: Spec) -> Iterator[Violation]:
    if spec.get("hostUsers") is False:
        return
    of_pod = (spec.get("securityContext") or {}).get("runAsNonRoot")
    said = {name: one.get("runAsNonRoot") for name, one in _contexts(spec)}
    setters = _setters(of_pod is False, [name for name, value in said.items() if value is False])
    if setters:
        yield "runAsNonRoot != true", f"{setters} must not set securityContext.runAsNonRoot=false"
    elif not of_pod and (silent := [name for name, value in said.items() if value is None]):
        yield "runAsNonRoot != true", f"pod or {_containers(silent)} must set securityContext.runAsNonRoot=true"


def _user(spec: Spec) -> Iterator[Violation]:
    if spec.get("hostUsers") is False:
        return
    of_pod = (spec.get("securityContext") or {}).get("runAsUser")
    bad = [name for name, one in _contexts(spec) if one.get("runAsUser") == 0]
    if setters := _setters(of_pod == 0, bad):
        yield "runAsUser=0", f"{setters} must not set runAsUser=0"


def _seccomp(spec: Spec) -> Iterator[Violation]:
    found = list(_forbidden_seccomp(spec))
    of_pod = _seccomp_of(spec.get("securityContext") or {})
    silent = [name for name, one in _contexts(spec) if of_pod is None and _seccomp_of(one) is None]
    yield from found
    if silent and not found:
        must = 'must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
        yield "seccompProfile", f"pod or {_containers(silent)} {must}"


CHECKS: dict[str, tuple[Callable[[Spec], Iterable[Violation]], ...]] = {
    "privileged": (),
    "baseline": (_capabilities, _host_namespaces, _host_paths, _host_ports, _privileged, _seccomp_baseline),
    # Restricted has its own of capabilities, volumes and seccomp; the baseline's come first.
    "restricted": (
        _host_namespaces, _host_ports, _privileged,
        _escalation, _all_capabilities_dropped, _restricted_volumes, _not_root, _user, _seccomp,
    ),
}  # fmt: skip
"""By level, in the order in which they are told."""


# --- what checks have in common ---------------------------------------------------------------------------------------


def _all_containers(spec: Spec) -> list[Object]:
    return [*(spec.get("initContainers") or []), *spec["containers"]]


def _contexts(spec: Spec) -> list[tuple[str, Object]]:
    return [(one["name"], one.get("securityContext") or {}) for one in _all_containers(spec)]


def _capability(context: Object, what: str) -> list[str]:
    return (context.get("capabilities") or {}).get(what) or []


def _added(context: Object) -> set[str]:
    return set(_capability(context, "add"))


def _seccomp_of(context: Object) -> str | None:
    return (context.get("seccompProfile") or {}).get("type")


def _forbidden_seccomp(spec: Spec) -> Iterator[Violation]:
    of_pod = _seccomp_of(spec.get("securityContext") or {})
    said = {name: _seccomp_of(one) for name, one in _contexts(spec)}
    bad = [name for name, value in said.items() if value not in (None, *SECCOMP)]
    if setters := _setters(of_pod not in (None, *SECCOMP), bad):
        values = sorted({value for value in (of_pod, *said.values()) if value not in (None, *SECCOMP)} - {None})
        yield "seccompProfile", f"{setters} must not set securityContext.seccompProfile.type to {_quoted(values)}"


def _setters(by_pod: bool, containers: list[str]) -> str:
    return " and ".join([*(["pod"] if by_pod else []), *([_containers(containers)] if containers else [])])


def _containers(names: list[str]) -> str:
    return f"{_many('container', names)} {_quoted(names)}"


def _many(word: str, things: list[Any]) -> str:
    return word if len(things) == 1 else f"{word}s"


def _use(things: list[Any]) -> str:
    return "uses" if len(things) == 1 else "use"


def _quoted(names: Iterable[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)
