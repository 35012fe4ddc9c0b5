"""Checks of a cluster for a submission before anything is created; and what it has, for `doctor`.

All of it is looked at, whatever is found on the way. What may not be looked at is a warning: it was not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from launcher.errors import ImageProblem, LauncherError
from launcher.images.oci import ImageReference, find_digest
from launcher.job import UNBUILT
from launcher.networks.profile import INTERFACES
from launcher.platforms.kubernetes import access
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.capacity import limits, machines, quotas
from launcher.platforms.kubernetes.checks import Survey
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster
from launcher.platforms.kubernetes.connection import google_way
from launcher.platforms.kubernetes.fabric import attachments, daemon_sets, networks, release
from launcher.platforms.kubernetes.reasons import refusals
from launcher.platforms.kubernetes.render import LEAST_JOBSET
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from launcher.platforms.kubernetes.states import condition
from litgpt_demo.findings import Finding, Severity

LEAST_KUBERNETES = (1, 29)
"""Native sidecars are on by default (KEP-753), and pods know their index by a label."""

_JOBSET = ".".join(map(str, LEAST_JOBSET))


Check = Callable[[Survey], Iterable[Finding]]


def examine_cluster(cluster: Cluster, settings: GkePlatformConfig, items: Sequence[ApiObject]) -> Iterator[Finding]:
    """Everything that can be known beforehand, good news (`info`) included.

    Raises:
        PlatformUnreachable, LoginProblem: nothing can be known.
    """
    survey = Survey(cluster, settings, items)
    yield from _version(survey)
    told: dict[str, Severity] = {}
    there = True
    for what, check in (*CHECKS.items(), *WITHIN.items()):
        if what in WITHIN and not there:
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
            unseen = f"{what}: not checked, for {error.message}"
            yield Finding("warning", "gke.unseen", unseen, access.CLUSTER_ROLES)
        except LauncherError as error:
            yield Finding("warning", "gke.unseen", f"{what}: not checked, for {error}", "try again later")
        there = there and "gke.namespace" not in told


def _good(code: str, what: str) -> Finding:
    return Finding("info", f"gke.{code}", what)


def _bad(code: str, what: str, fix: str) -> Finding:
    return Finding("error", f"gke.{code}", what, fix)


# --- the cluster ------------------------------------------------------------------------------------------------------


def _version(survey: Survey) -> Iterator[Finding]:
    told = survey.control_plane
    if survey.version < LEAST_KUBERNETES:
        least = ".".join(map(str, LEAST_KUBERNETES))
        yield _bad("version", f"{survey.cluster.where} is {told}; we need {least}, for sidecars", "upgrade the cluster")
    else:
        yield _good("version", f"{survey.cluster.where} answers: {told}")


def _permissions(survey: Survey) -> Iterator[Finding]:
    lacking = access.missing(survey.cluster, survey.settings, survey.kind)
    for one in lacking:
        what = f"you may not {one} in namespace {survey.namespace}, which {one.why} needs"
        yield _bad("permission", what, access.fix_of([one]))
    if not lacking:
        yield _good("permissions", f"you may do all that a run does in namespace {survey.namespace}")


def _jobset(survey: Survey) -> Iterator[Finding]:
    """The version of JobSet shows when it is asked to take the objects (`_accepted`)."""
    if survey.kind != "jobset":
        return
    crd = survey.get(api.CRDS, "jobsets.jobset.x-k8s.io")
    if crd is None:
        fix = f"install JobSet {_JOBSET} or newer (docs/gke.md), or set platform.workload=job"
        yield _bad("jobset", f"{survey.cluster.where} has no JobSet", fix)
    elif not any(one["name"] == "v1alpha2" and one["served"] for one in crd["spec"]["versions"]):
        yield _bad("jobset", "its JobSet does not serve v1alpha2", f"install JobSet {_JOBSET} or newer")
    else:
        yield _good("jobset", "JobSet is installed")


def _multi_networking(survey: Survey) -> Iterator[Finding]:
    """https://docs.cloud.google.com/kubernetes-engine/docs/how-to/setup-multinetwork-support-for-pods"""
    settings = survey.settings
    if settings.cluster is None or INTERFACES not in survey.annotations:
        return
    if not google_way(settings)[1].network_config.enable_multi_networking:
        what = f"cluster {settings.cluster} has no multi-networking, which {settings.network} needs"
        fix = "make one with --enable-dataplane-v2 --enable-ip-alias --enable-multi-networking: it cannot be added"
        yield _bad("multi-networking", what, fix)


# --- what the job refers to -------------------------------------------------------------------------------------------


def _namespace(survey: Survey) -> Iterator[Finding]:
    name = survey.namespace
    found = survey.get(api.NAMESPACES, name)
    if found is None:
        fix = f"kubectl create namespace {name}, or fix platform.namespace"
        yield _bad("namespace", f"there is no namespace {name}; what is in it was not checked", fix)
    elif found.get("status", {}).get("phase") == "Terminating":
        fix = "take another platform.namespace, or wait and create it again"
        yield _bad("namespace", f"namespace {name} is being removed", fix)
    else:
        yield _good("namespace", f"namespace {name}")


def _service_account(survey: Survey) -> Iterator[Finding]:
    name, space = survey.settings.service_account, survey.namespace
    if name is None:
        return
    found = survey.get(api.SERVICE_ACCOUNTS, name)
    if found is None:
        fix = f"kubectl create serviceaccount {name} --namespace {space}, or fix platform.service_account"
        yield _bad("service-account", f"there is no service account {name} in {space}", fix)
        return
    google = found["metadata"].get("annotations", {}).get("iam.gke.io/gcp-service-account")
    # Since 2024 roles may be granted to the Kubernetes account itself, which cannot be seen from here.
    yield _good("service-account", f"service account {name}" + (f", which stands for {google}" if google else ""))


def _queue(survey: Survey) -> Iterator[Finding]:
    name, space = survey.settings.queue, survey.namespace
    if name is None:
        return
    found = survey.get(api.LOCAL_QUEUES, name)
    if found is None:
        known = survey.get(api.CRDS, "localqueues.kueue.x-k8s.io") is not None
        fix = f"kubectl get localqueues --namespace {space}, and fix platform.queue" if known else "install Kueue"
        what = f"there is no LocalQueue {name} in namespace {space}" if known else "Kueue is not installed"
        yield _bad("queue", what, f"{fix}, or leave platform.queue out")
        return
    behind = found["spec"]["clusterQueue"]
    cluster_queue = survey.get(api.CLUSTER_QUEUES, behind)
    if cluster_queue is None:
        yield _bad("queue", f"LocalQueue {name} belongs to ClusterQueue {behind}, which is not there", "create it")
        return
    for thing, what in ((found, f"LocalQueue {name}"), (cluster_queue, f"ClusterQueue {behind}")):
        if (told := condition(thing, "Active", "False")) is not None:
            yield _bad("queue", f"{what} is not active: {told.get('message', '')}", "fix it, or take another queue")
    covered = {name for group in cluster_queue["spec"].get("resourceGroups", ()) for name in group["coveredResources"]}
    if survey.settings.node_gpus and "nvidia.com/gpu" not in covered:
        what = f"ClusterQueue {behind} covers {', '.join(sorted(covered))}, and not nvidia.com/gpu"
        yield _bad("queue", what, "add it to the queue's resource groups, or take another platform.queue")
    yield _good("queue", f"queue {name} of {behind}")


def _priority(survey: Survey) -> Iterator[Finding]:
    resource, kind = api.PRIORITY_CLASSES, "PriorityClass"
    if survey.settings.queue:
        resource, kind = api.WORKLOAD_PRIORITIES, "WorkloadPriorityClass"
    if (name := survey.settings.priority) is not None and survey.get(resource, name) is None:
        yield _bad("priority", f"there is no {kind} {name}", f"kubectl get {resource.plural}; fix platform.priority")


def _topology(survey: Survey) -> Iterator[Finding]:
    if survey.settings.topology is None:
        return
    label = next((value for key, value in survey.annotations.items() if key.endswith("-topology")), None)
    listed, _ = survey.cluster.list(api.TOPOLOGIES, None)
    levels = [level["nodeLabel"] for one in listed for level in one["spec"]["levels"]]
    if label not in levels:
        known = f"there are {', '.join(levels)}" if levels else "there is no Topology at all"
        yield _bad("topology", f"{label} is no level of Kueue's Topology; {known}", "fix platform.topology")


def _claim(survey: Survey) -> Iterator[Finding]:
    name, nodes = survey.settings.claim, survey.settings.nodes
    if name is None:
        return
    found = survey.get(api.CLAIMS, name)
    if found is None:
        what = f"there is no PersistentVolumeClaim {name} in {survey.namespace}"
        yield _bad("claim", what, "create it, or fix platform.claim")
    elif nodes > 1 and "ReadWriteMany" not in (modes := found["spec"].get("accessModes", ())):
        what = f"PersistentVolumeClaim {name} is {', '.join(modes)}, and {nodes} nodes write to it"
        yield _bad("claim", what, "take a ReadWriteMany one (Filestore), or a bucket for the root")


def _image(survey: Survey) -> Iterator[Finding]:
    """Only the nodes know whether they may pull it."""
    name = survey.node["image"]
    if name == UNBUILT:
        return
    try:
        if find_digest(ImageReference.parse(name), timeout=5.0, patience=0.0) is None:
            yield _bad("image", f"there is no image {name}", "build and push it, or fix image.reference")
    except (ImageProblem, ValueError) as error:
        what = f"image {name} was not looked at: {error}"
        yield Finding("warning", "gke.image", what, "it may be there all the same")


def _secrets(survey: Survey) -> Iterator[Finding]:
    """Only a node finds out whether they have the right entries."""
    for name in sorted({entry.split("/")[0] for entry in survey.settings.secrets.values()}):
        if survey.cluster.secret_type(survey.namespace, name) is None:
            what = f"there is no Secret {name} in namespace {survey.namespace}, and platform.secrets names it"
            fix = f"kubectl create secret generic {name} --namespace {survey.namespace} --from-literal=KEY=VALUE"
            yield _bad("secret", what, fix)


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
            yield _bad("pull-secret", what, fix)
        elif kind not in _LOGINS:
            what = f"Secret {name} is of type {kind}, and kubelets take logins of registries from {_LOGINS[0]} alone"
            yield _bad("pull-secret", what, f"delete it, then {fix}")


# --- what the cluster would take --------------------------------------------------------------------------------------


def _accepted(survey: Survey) -> Iterator[Finding]:
    for item in survey.items:
        name = f"{item['kind']} {item['metadata']['name']}"
        try:
            survey.try_out(item)
        except api.AlreadyThere:
            yield _good("there", f"{name} is there already, and will be taken up if it is the same")
        except api.NotThere:
            continue  # `_namespace` and `_jobset` have said it
        except api.ApiRefused as error:
            if "onJobFailureMessagePatterns" in error.message:
                what = f"its JobSet is older than {_JOBSET}: it cannot tell a preemption from a mistake in the program"
                yield _bad("jobset", what, f"install JobSet {_JOBSET} or newer, or set platform.workload=job")
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


CHECKS: dict[str, Check] = {
    "namespace": _namespace,
    "JobSet": _jobset,
    "priority": _priority,
    "topology": _topology,
    "multi-networking": _multi_networking,
    "the network's release": release,
    "networks": networks,
    "attachments": attachments,
    "the network's DaemonSets": daemon_sets,
    "machines": machines,
    "image": _image,
}
"""The checks of the cluster as a whole; the namespace first."""
WITHIN: dict[str, Check] = {
    "permissions": _permissions,
    "service account": _service_account,
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
