"""Permissions in the cluster, as deployments/rbac.yaml has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from launcher.errors import LoginProblem
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.cluster import Cluster, Resource
from launcher.platforms.kubernetes.render import WorkloadObjects, made_of
from launcher.platforms.kubernetes.settings import GkePlatformConfig

Verb = Literal["submit", "status", "logs", "cancel"]


@dataclass(frozen=True, kw_only=True)
class Permission:
    """One thing to be allowed."""

    resource: Resource
    verb: str
    why: Verb
    """The verb of ours that fails without it."""
    subresource: str = ""

    def __str__(self) -> str:
        what = f"{self.resource}/{self.subresource}" if self.subresource else str(self.resource)
        return f"{self.verb} {what}"


def _some(*resources: Resource, **verbs: Verb) -> tuple[Permission, ...]:
    return tuple(Permission(resource=one, verb=verb, why=why) for one in resources for verb, why in verbs.items())


_MADE: dict[str, Verb] = {"create": "submit", "get": "submit", "delete": "submit", "deletecollection": "cancel"}

_NEEDED: tuple[Permission, ...] = (
    *_some(api.JOBSETS, api.JOBS, list="status", watch="status", **_MADE),
    *_some(api.SERVICES, create="submit", get="submit", list="cancel", delete="cancel"),
    *_some(api.PODS, list="status", watch="status", deletecollection="cancel"),
    Permission(resource=api.PODS, subresource="log", verb="get", why="logs"),
    *_some(api.NETWORK_POLICIES, api.CLAIM_TEMPLATES, api.COMPUTE_DOMAINS, list="cancel", **_MADE),
    *_some(api.EVENTS, api.WORKLOADS, list="status"),
)


def needed(settings: GkePlatformConfig, workload: WorkloadObjects) -> Iterator[Permission]:
    """Return the permissions that a run with these settings needs. Without those for looking alone, which only the
    checks have, something is not checked."""
    kinds, parts = made_of(settings), (api.CLAIM_TEMPLATES, api.COMPUTE_DOMAINS, api.NETWORK_POLICIES)
    other = api.JOBS if workload == "jobset" else api.JOBSETS
    for one in _NEEDED:
        if one.resource not in kinds and one.resource in parts:
            continue
        if one.resource is api.WORKLOADS and settings.queue is None:
            continue
        # One of the other kind is only looked for, and removed with the rest.
        if one.resource is other and one.verb in ("create", "watch", "delete"):
            continue
        yield one


def missing(cluster: Cluster, settings: GkePlatformConfig, workload: WorkloadObjects) -> list[Permission]:
    """Return the needed permissions that the cluster would refuse us."""

    def refused(one: Permission) -> bool:
        return not cluster.allows(one.verb, one.resource, settings.namespace, one.subresource)

    asked = list(needed(settings, workload))
    with ThreadPoolExecutor(max_workers=4) as pool:
        return [one for one, lacks in zip(asked, pool.map(refused, asked), strict=True) if lacks]


CLUSTER_ROLES = "have the Role of deployments/rbac.yaml bound to your account in that namespace"


def fix_of(lacking: Iterable[Permission]) -> str:
    """Return what to do about permissions that are lacking."""
    without = "; or do without a NetworkPolicy: platform.network_policy: false"
    return CLUSTER_ROLES + (without if any(one.resource is api.NETWORK_POLICIES for one in lacking) else "")


def require_permissions(cluster: Cluster, settings: GkePlatformConfig, workload: WorkloadObjects) -> None:
    """Refuse to go on without all permissions of a run; names what is lacking, and the role that grants it."""
    if lacking := missing(cluster, settings, workload):
        listed = ", ".join(f"{one} ({one.why})" for one in lacking)
        raise LoginProblem(f"{cluster.where} does not let you {listed}; {fix_of(lacking)}")
