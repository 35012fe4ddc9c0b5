"""Checks of a cluster for a submission before anything is created, our permissions in it among them.

All of it is looked at, whatever is found on the way. What may not be looked at is a warning: it was not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from launcher.errors import ImageProblem, LauncherError
from launcher.images.oci import ImageReference, find_digest
from launcher.job import UNBUILT
from launcher.networks.profile import INTERFACES
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.capacity import limits, machines, quotas
from launcher.platforms.kubernetes.checks import Survey, attachments, bad, daemon_sets, good, networks, risk
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Resource
from launcher.platforms.kubernetes.connection import google_way
from launcher.platforms.kubernetes.reasons import CLUSTER_ROLES, refusals
from launcher.platforms.kubernetes.render import LEAST_JOBSET, WorkloadObjects, made_of
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from launcher.platforms.kubernetes.states import condition
from litgpt_demo.findings import Finding, Severity

LEAST_KUBERNETES = (1, 29)
"""Native sidecars are on by default (KEP-753), and pods know their index by a label."""

_JOBSET = ".".join(map(str, LEAST_JOBSET))

Permission = tuple[str, Resource, str]
"""Something to be allowed: a verb of the API, what it is for, and the verb of ours that fails without it."""


def examine_cluster(cluster: Cluster, settings: GkePlatformConfig, items: Sequence[ApiObject]) -> Iterator[Finding]:
    """Everything that can be known beforehand, good news (`info`) included.

    Raises:
        PlatformUnreachable, LoginProblem: nothing can be known.
    """
    survey, version = Survey(cluster, settings, items), cluster.version()
    if (number := re.match(r"v?(\d+)\.(\d+)", version)) is not None:  # of v1.33.5-gke.1080000
        survey.version = (int(number[1]), int(number[2]))
    if survey.version < LEAST_KUBERNETES:
        least = ".".join(map(str, LEAST_KUBERNETES))
        yield bad("version", f"{cluster.where} is {version}; we need {least}, for sidecars", "upgrade the cluster")
    else:
        yield good("version", f"{cluster.where} answers: {version}")
    told: dict[str, Severity] = {}
    for what, check in (CHECKS | WITHIN).items():
        if what in WITHIN and "gke.namespace" in told:
            continue  # what follows from a namespace that is missing says nothing more
        before = told.copy()
        try:
            for finding in check(survey):
                # The dry runs repeat each other, and what has been found with better words before.
                if finding.severity == "info" or before.get(finding.code) not in ("error", finding.severity):
                    yield finding
                if finding.severity in ("error", "warning"):
                    told[finding.code] = finding.severity
        except api.Forbidden as error:
            yield risk("unseen", f"{what}: not checked, for {error.message}", CLUSTER_ROLES)
        except LauncherError as error:
            yield risk("unseen", f"{what}: not checked, for {error}", "try again later")


# --- permissions ------------------------------------------------------------------------------------------------------


def needed(settings: GkePlatformConfig, workload: WorkloadObjects) -> list[Permission]:
    """Return the permissions that a run with these settings needs, as deployments/rbac.yaml has them. Without those for
    looking alone, which only the checks have, something is not checked."""
    made = {"create": "submit", "get": "submit", "delete": "submit", "deletecollection": "cancel"}
    kind, other = (api.JOBSETS, api.JOBS) if workload == "jobset" else (api.JOBS, api.JOBSETS)
    table: dict[Resource, dict[str, str]] = {
        kind: {"list": "status", "watch": "status", **made},
        # One of the other kind is only looked for, and removed with the rest.
        other: {"get": "submit", "list": "status", "deletecollection": "cancel"},
        api.SERVICES: {"create": "submit", "get": "submit", "list": "cancel", "delete": "cancel"},
        api.PODS: {"list": "status", "watch": "status", "deletecollection": "cancel"},
        api.LOGS: {"get": "logs"},
        api.EVENTS: {"list": "status"},
    }
    for resource in made_of(settings):
        table.setdefault(resource, {"list": "cancel", **made})
    if settings.queue is not None:
        table[api.WORKLOADS] = {"list": "status"}
    return [(verb, resource, why) for resource, verbs in table.items() for verb, why in verbs.items()]


def missing(cluster: Cluster, settings: GkePlatformConfig, workload: WorkloadObjects) -> list[Permission]:
    """Return the needed permissions that the cluster would refuse us."""
    asked = needed(settings, workload)
    with ThreadPoolExecutor(max_workers=4) as pool:
        allowed = pool.map(lambda one: cluster.allows(one[0], one[1], settings.namespace), asked)
        return [one for one, may in zip(asked, allowed, strict=True) if not may]


def fix_of(lacking: Iterable[Permission]) -> str:
    """Return what to do about permissions that are lacking."""
    without = "; or do without a NetworkPolicy: platform.network_policy: false"
    return CLUSTER_ROLES + (without if any(one[1] is api.NETWORK_POLICIES for one in lacking) else "")


def _permissions(survey: Survey) -> Iterator[Finding]:
    lacking = missing(survey.cluster, survey.settings, survey.kind)
    for verb, resource, why in lacking:
        what = f"you may not {verb} {resource} in namespace {survey.namespace}, which {why} needs"
        yield bad("permission", what, fix_of([(verb, resource, why)]))
    if not lacking:
        yield good("permissions", f"you may do all that a run does in namespace {survey.namespace}")


# --- the cluster ------------------------------------------------------------------------------------------------------


def _release(survey: Survey) -> Iterator[Finding]:
    """Check that the plug-in fits nodes of this Kubernetes version. `daemon_sets` reads what nodes really have."""
    made, pairs = survey.fabric, survey.fabric.known
    place = next((place for place, pair in enumerate(pairs) if pair.since and survey.version >= pair.since), None)
    if place is None or made.pair is None or made.pair.plugin in {pair.plugin for pair in pairs[: place + 1]}:
        return
    least, since = pairs[place].plugin, ".".join(map(str, pairs[place].since or ()))
    what = f"{made.name} {made.pair.plugin} is older than what Kubernetes from {since} on is made for ({least})"
    yield risk(f"{made.name}-release", what, f"upgrade the DaemonSet that installs it; network_plugin={least}")


def _jobset(survey: Survey) -> Iterator[Finding]:
    """The version of JobSet shows when it is asked to take the objects (`_accepted`)."""
    if survey.kind == "jobset" and survey.cluster.serves(api.JOBSETS):
        yield good("jobset", "JobSet is installed")
    elif survey.kind == "jobset":
        fix = f"install JobSet {_JOBSET} or newer (docs/gke.md), or set platform.workload=job"
        yield bad("jobset", f"{survey.cluster.where} has no JobSet", fix)


def _multi_networking(survey: Survey) -> Iterator[Finding]:
    """https://docs.cloud.google.com/kubernetes-engine/docs/how-to/setup-multinetwork-support-for-pods"""
    settings = survey.settings
    if settings.cluster is None or INTERFACES not in survey.annotations:
        return
    if not google_way(settings)[1].network_config.enable_multi_networking:
        what = f"cluster {settings.cluster} has no multi-networking, which {settings.network} needs"
        fix = "make one with --enable-dataplane-v2 --enable-ip-alias --enable-multi-networking: it cannot be added"
        yield bad("multi-networking", what, fix)


# --- what the job refers to -------------------------------------------------------------------------------------------
# Of a service account and a PriorityClass the dry run of a pod says whether they are there.


def _namespace(survey: Survey) -> Iterator[Finding]:
    name = survey.namespace
    if survey.get(api.NAMESPACES, name) is None:
        fix = f"kubectl create namespace {name}, or fix platform.namespace"
        yield bad("namespace", f"there is no namespace {name}; what is in it was not checked", fix)
    else:
        yield good("namespace", f"namespace {name}")


def _queue(survey: Survey) -> Iterator[Finding]:
    name, space = survey.settings.queue, survey.namespace
    if name is None:
        return
    if (found := survey.get(api.LOCAL_QUEUES, name)) is None:
        known = survey.cluster.serves(api.LOCAL_QUEUES)
        fix = f"kubectl get localqueues --namespace {space}, and fix platform.queue" if known else "install Kueue"
        what = f"there is no LocalQueue {name} in namespace {space}" if known else "Kueue is not installed"
        yield bad("queue", what, f"{fix}, or leave platform.queue out")
        return
    behind = found["spec"]["clusterQueue"]
    if (cluster_queue := survey.get(api.CLUSTER_QUEUES, behind)) is None:
        yield bad("queue", f"LocalQueue {name} belongs to ClusterQueue {behind}, which is not there", "create it")
        return
    for thing, what in ((found, f"LocalQueue {name}"), (cluster_queue, f"ClusterQueue {behind}")):
        if (told := condition(thing, "Active", "False")) is not None:
            yield bad("queue", f"{what} is not active: {told.get('message', '')}", "fix it, or take another queue")
    covered = {name for group in cluster_queue["spec"].get("resourceGroups", ()) for name in group["coveredResources"]}
    if survey.settings.node_gpus and "nvidia.com/gpu" not in covered:
        what = f"ClusterQueue {behind} covers {', '.join(sorted(covered))}, and not nvidia.com/gpu"
        yield bad("queue", what, "add it to the queue's resource groups, or take another platform.queue")
    yield good("queue", f"queue {name} of {behind}")


def _priority(survey: Survey) -> Iterator[Finding]:
    name = survey.settings.priority if survey.settings.queue else None
    if name is not None and survey.get(api.WORKLOAD_PRIORITIES, name) is None:
        fix = "kubectl get workloadpriorityclasses; fix platform.priority"
        yield bad("priority", f"there is no WorkloadPriorityClass {name}", fix)


def _topology(survey: Survey) -> Iterator[Finding]:
    if survey.settings.topology is None:
        return
    label = next((value for key, value in survey.annotations.items() if key.endswith("-topology")), None)
    listed, _ = survey.cluster.list(api.TOPOLOGIES, None)
    levels = [level["nodeLabel"] for one in listed for level in one["spec"]["levels"]]
    if label not in levels:
        known = f"there are {', '.join(levels)}" if levels else "there is no Topology at all"
        yield bad("topology", f"{label} is no level of Kueue's Topology; {known}", "fix platform.topology")


def _claim(survey: Survey) -> Iterator[Finding]:
    name, nodes = survey.settings.claim, survey.settings.nodes
    if name is None:
        return
    if (found := survey.get(api.CLAIMS, name)) is None:
        what = f"there is no PersistentVolumeClaim {name} in {survey.namespace}"
        yield bad("claim", what, "create it, or fix platform.claim")
    elif nodes > 1 and "ReadWriteMany" not in (modes := found["spec"].get("accessModes", ())):
        what = f"PersistentVolumeClaim {name} is {', '.join(modes)}, and {nodes} nodes write to it"
        yield bad("claim", what, "take a ReadWriteMany one (Filestore), or a bucket for the root")


def _image(survey: Survey) -> Iterator[Finding]:
    """Only the nodes know whether they may pull it."""
    name = survey.node["image"]
    if name == UNBUILT:
        return
    try:
        if find_digest(ImageReference.parse(name), timeout=5.0, patience=0.0) is None:
            yield bad("image", f"there is no image {name}", "build and push it, or fix image.reference")
    except (ImageProblem, ValueError) as error:
        what = f"image {name} was not looked at: {error}"
        yield risk("image", what, "it may be there all the same")


def _secrets(survey: Survey) -> Iterator[Finding]:
    """Only a node finds out whether they have the right entries."""
    for name in sorted({entry.split("/")[0] for entry in survey.settings.secrets.values()}):
        if survey.cluster.secret_type(survey.namespace, name) is None:
            what = f"there is no Secret {name} in namespace {survey.namespace}, and platform.secrets names it"
            fix = f"kubectl create secret generic {name} --namespace {survey.namespace} --from-literal=KEY=VALUE"
            yield bad("secret", what, fix)


# https://kubernetes.io/docs/concepts/configuration/secret/#docker-config-secrets; the second is the older format.
_LOGINS = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")


def _pull_secrets(survey: Survey) -> Iterator[Finding]:
    """A pod is created without these logins too, and waits for its image."""
    for name in survey.settings.image_pull_secrets:
        kind = survey.cluster.secret_type(survey.namespace, name)
        fix = (
            f"kubectl create secret docker-registry {name} --namespace {survey.namespace} --docker-server=HOST "
            "--docker-username=NAME --docker-password=…, or fix platform.image_pull_secrets"
        )
        if kind is None:
            what = f"there is no Secret {name} of platform.image_pull_secrets in namespace {survey.namespace}"
            yield bad("pull-secret", what, fix)
        elif kind not in _LOGINS:
            what = f"Secret {name} is of type {kind}, and kubelets take logins of registries from {_LOGINS[0]} alone"
            yield bad("pull-secret", what, f"delete it, then {fix}")


# --- what the cluster would take --------------------------------------------------------------------------------------


def _accepted(survey: Survey) -> Iterator[Finding]:
    for item in survey.items:
        name = f"{item['kind']} {item['metadata']['name']}"
        try:
            survey.try_out(item)
        except api.AlreadyThere:
            yield good("there", f"{name} is there already, and will be taken up if it is the same")
        except api.NotThere:
            continue  # `_namespace` and `_jobset` have said it
        except api.ApiRefused as error:
            if "onJobFailureMessagePatterns" in error.message:
                what = f"its JobSet is older than {_JOBSET}: it cannot tell a preemption from a mistake in the program"
                yield bad("jobset", what, f"install JobSet {_JOBSET} or newer, or set platform.workload=job")
            else:
                # A role that is missing has been found by `_permissions`, which names all of them.
                yield from (one for one in _refused(item, error) if one.code != "gke.permission")


def _parts_accepted(survey: Survey) -> Iterator[Finding]:
    """A JobSet is accepted whatever its Job's template says, and a Job whatever the namespace thinks of its pods."""
    for item in survey.parts:
        try:
            survey.try_out(item)
        except (api.AlreadyThere, api.NotThere):
            continue
        except api.ApiRefused as error:
            found = _refused(item, error)
            if any(one.code == "gke.permission" for one in found):
                raise
            yield from found
            return  # an invalid Job has the same invalid pods


def _refused(item: ApiObject, error: api.ApiRefused) -> list[Finding]:
    name = f"{item['kind']} {item['metadata']['name']}"
    return [replace(one, what=f"{name}: {one.what}") for one in refusals(error.message, "gke")]


Check = Callable[[Survey], Iterable[Finding]]

CHECKS: dict[str, Check] = {
    "namespace": _namespace,
    "JobSet": _jobset,
    "priority": _priority,
    "topology": _topology,
    "multi-networking": _multi_networking,
    "the network's release": _release,
    "networks": networks,
    "attachments": attachments,
    "the network's DaemonSets": daemon_sets,
    "machines": machines,
    "image": _image,
}
"""The checks of the cluster as a whole; the namespace first."""
WITHIN: dict[str, Check] = {
    "permissions": _permissions,
    "secrets": _secrets,
    "pull secrets": _pull_secrets,
    "queue": _queue,
    "claim": _claim,
    "quotas": quotas,
    "limits": limits,
    "what the cluster would take": _accepted,
    "what its controllers would make": _parts_accepted,
}
"""The checks of the job's namespace: without it none of them can succeed."""
