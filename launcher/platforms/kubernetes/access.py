"""Permissions in the cluster, as deployments/rbac.yaml has them, and those in Google Cloud that are asked about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from launcher.errors import LoginProblem, PlatformUnreachable
from launcher.platforms.kubernetes.cluster import (
    ATTACHMENTS,
    CLAIM_TEMPLATES,
    CLAIMS,
    CLUSTER_QUEUES,
    COMPUTE_DOMAINS,
    CRDS,
    DAEMON_SETS,
    EVENTS,
    JOBS,
    JOBSETS,
    LOCAL_QUEUES,
    NAMESPACES,
    NETWORK_PARAMETERS,
    NETWORK_POLICIES,
    NETWORKS,
    NODES,
    PODS,
    PRIORITY_CLASSES,
    QUOTAS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    TOPOLOGIES,
    WORKLOAD_PRIORITIES,
    WORKLOADS,
    Cluster,
    Resource,
)
from launcher.platforms.kubernetes.render import WorkloadObjects, made_of
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import words_of
from litgpt_demo.findings import Finding

if TYPE_CHECKING:
    from google.auth.transport.requests import AuthorizedSession

Verb = Literal["submit", "status", "logs", "cancel", "check"]


@dataclass(frozen=True, kw_only=True)
class Permission:
    """One thing to be allowed."""

    resource: Resource
    verb: str
    why: Verb
    """The verb of ours that fails without it; without one that only `check` has, something is not checked."""
    subresource: str = ""

    def __str__(self) -> str:
        what = f"{self.resource}/{self.subresource}" if self.subresource else str(self.resource)
        return f"{self.verb} {what}"


def _some(resource: Resource, **verbs: Verb) -> tuple[Permission, ...]:
    return tuple(Permission(resource=resource, verb=verb, why=why) for verb, why in verbs.items())


_KINDS: dict[str, Verb] = {"create": "submit", "get": "submit", "list": "status", "watch": "status"}
_GONE: dict[str, Verb] = {"delete": "submit", "deletecollection": "cancel"}

# In the job's namespace.
NEEDED: tuple[Permission, ...] = (
    *_some(JOBSETS, **_KINDS, **_GONE),
    *_some(JOBS, **_KINDS, **_GONE),
    *_some(SERVICES, create="submit", get="submit", list="cancel", delete="cancel"),
    *_some(PODS, list="status", watch="status", deletecollection="cancel"),
    *_some(NETWORK_POLICIES, create="submit", get="submit", list="cancel", delete="submit", deletecollection="cancel"),
    Permission(resource=PODS, subresource="log", verb="get", why="logs"),
    *_some(CLAIM_TEMPLATES, create="submit", get="submit", list="cancel", delete="submit", deletecollection="cancel"),
    *_some(COMPUTE_DOMAINS, create="submit", get="submit", list="cancel", delete="submit", deletecollection="cancel"),
    *_some(EVENTS, list="status"),
    *_some(WORKLOADS, list="status"),
    *_some(PODS, create="check"),
    *_some(QUOTAS, list="check"),
    *_some(SECRETS, get="check"),
    *_some(SERVICE_ACCOUNTS, get="check"),
    *_some(LOCAL_QUEUES, get="check"),
    *_some(CLAIMS, get="check"),
)
# In the whole cluster.
LOOKED_AT: tuple[Permission, ...] = (
    *_some(NAMESPACES, get="check"),
    *_some(NODES, list="check"),
    *_some(CRDS, get="check"),
    *_some(DAEMON_SETS, list="check"),
    *_some(NETWORKS, get="check"),
    *_some(NETWORK_PARAMETERS, get="check"),
    *_some(ATTACHMENTS, get="check"),
    *_some(PRIORITY_CLASSES, get="check"),
    *_some(CLUSTER_QUEUES, get="check"),
    *_some(WORKLOAD_PRIORITIES, get="check"),
    *_some(TOPOLOGIES, list="check"),
)


def needed(settings: GkePlatformConfig, workload: WorkloadObjects) -> Iterator[Permission]:
    """Return the permissions that a run with these settings needs; those for looking alone do not stop it."""
    kinds = made_of(settings)
    other = JOBS if workload == "jobset" else JOBSETS
    for one in NEEDED:
        if one.why == "check":
            continue
        if one.resource in (CLAIM_TEMPLATES, COMPUTE_DOMAINS, NETWORK_POLICIES) and one.resource not in kinds:
            continue
        if one.resource is WORKLOADS and settings.queue is None:
            continue
        # One of the other kind is only looked for, and removed with the rest.
        if one.resource is other and one.verb in ("create", "watch", "delete"):
            continue
        yield one


def missing(cluster: Cluster, settings: GkePlatformConfig, workload: WorkloadObjects) -> list[Permission]:
    """Return the needed permissions that the cluster would refuse us.

    Raises:
        PlatformUnreachable: no answer.
        LoginProblem: the credentials are refused.
    """
    asked = list(needed(settings, workload))
    with ThreadPoolExecutor(max_workers=4) as pool:
        allowed = pool.map(
            lambda one: cluster.allows(one.verb, one.resource, settings.namespace, one.subresource), asked
        )
        return [one for one, may in zip(asked, allowed, strict=True) if not may]


CLUSTER_ROLES = "have the Role of deployments/rbac.yaml bound to your account in that namespace"


def findings_of(lacking: Iterable[Permission], namespace: str) -> Iterator[Finding]:
    for one in lacking:
        what = f"you may not {one} in namespace {namespace}, which {one.why} needs"
        yield Finding("error", "gke.permission", what, _fix([one]))


def require_permissions(lacking: list[Permission], where: str) -> None:
    """Raises:
    LoginProblem: something is lacking; names all of it, and the role that grants it.
    """
    if lacking:
        listed = ", ".join(f"{one} ({one.why})" for one in lacking)
        raise LoginProblem(f"{where} does not let you {listed}", fix=_fix(lacking))


def _fix(lacking: Iterable[Permission]) -> str:
    without = "; or do without a NetworkPolicy: platform.network_policy: false"
    return CLUSTER_ROLES + (without if any(one.resource is NETWORK_POLICIES for one in lacking) else "")


# --- Google Cloud -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GoogleRole:
    """A permission in a Google Cloud project, and the least predefined role that has it."""

    permission: str
    role: str
    why: str


PROJECT_ROLES: tuple[GoogleRole, ...] = (
    GoogleRole(
        permission="container.clusters.get",
        role="roles/container.clusterViewer",
        why="address and certificate of the cluster",
    ),
    GoogleRole(
        permission="container.clusters.connect",
        role="roles/container.clusterViewer",
        why="platform.dns_endpoint: Google lets nobody else through",
    ),
)

RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"


def missing_roles(
    session: AuthorizedSession, project: str, *, dns: bool, manager: str | None = None
) -> list[GoogleRole]:
    """Return the needed permissions of the project that we do not have.

    https://docs.cloud.google.com/resource-manager/reference/rest/v1/projects/testIamPermissions

    Raises:
        PlatformUnreachable: the project cannot be asked; its Resource Manager API may be off.
    """
    import requests
    from google.auth.exceptions import GoogleAuthError

    wanted = [one for one in PROJECT_ROLES if dns or "connect" not in one.permission]
    body = {"permissions": [one.permission for one in wanted]}
    try:
        address = f"{manager or RESOURCE_MANAGER}/v1/projects/{project}:testIamPermissions"
        answer = session.post(address, json=body, timeout=20)
        answer.raise_for_status()
        granted = set(answer.json().get("permissions", ()))
    except (requests.RequestException, GoogleAuthError, ValueError) as error:
        raise PlatformUnreachable(f"project {project} does not tell what you may do: {words_of(error)}") from None
    return [one for one in wanted if one.permission not in granted]
