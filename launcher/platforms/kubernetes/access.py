"""Permissions in the cluster, as deployments/rbac.yaml has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from launcher.errors import LoginProblem
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.cluster import Cluster, Resource
from launcher.platforms.kubernetes.render import WorkloadObjects, made_of
from launcher.platforms.kubernetes.settings import GkePlatformConfig

Verb = Literal["submit", "status", "logs", "cancel"]


class Permission(NamedTuple):
    """One thing to be allowed."""

    resource: Resource
    verb: str
    why: Verb
    """The verb of ours that fails without it."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


def _some(*resources: Resource, **verbs: Verb) -> Iterator[Permission]:
    return (Permission(one, verb, why) for one in resources for verb, why in verbs.items())


def needed(settings: GkePlatformConfig, workload: WorkloadObjects) -> Iterator[Permission]:
    """Return the permissions that a run with these settings needs. Without those for looking alone, which only the
    checks have, something is not checked."""
    made: dict[str, Verb] = {"create": "submit", "get": "submit", "delete": "submit", "deletecollection": "cancel"}
    kind, other = (api.JOBSETS, api.JOBS) if workload == "jobset" else (api.JOBS, api.JOBSETS)
    kinds = made_of(settings)
    parts = [one for one in (api.NETWORK_POLICIES, api.CLAIM_TEMPLATES, api.COMPUTE_DOMAINS) if one in kinds]
    yield from _some(kind, list="status", watch="status", **made)
    # One of the other kind is only looked for, and removed with the rest.
    yield from _some(other, get="submit", list="status", deletecollection="cancel")
    yield from _some(api.SERVICES, create="submit", get="submit", list="cancel", delete="cancel")
    yield from _some(api.PODS, list="status", watch="status", deletecollection="cancel")
    yield from _some(api.LOGS, get="logs")
    yield from _some(*parts, list="cancel", **made)
    yield from _some(api.EVENTS, *([] if settings.queue is None else [api.WORKLOADS]), list="status")


def missing(cluster: Cluster, settings: GkePlatformConfig, workload: WorkloadObjects) -> list[Permission]:
    """Return the needed permissions that the cluster would refuse us."""

    def refused(one: Permission) -> bool:
        return not cluster.allows(one.verb, one.resource, settings.namespace)

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
        raise LoginProblem(f"{cluster.where} does not let you {listed}", fix=fix_of(lacking))
