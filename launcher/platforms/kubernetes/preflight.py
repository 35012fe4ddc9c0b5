"""Checks of a cluster for a submission before anything is created; and what it has, for `doctor`.

All of it is looked at, whatever is found on the way. What may not be looked at is a warning: it was not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from launcher.errors import ImageProblem, LauncherError
from launcher.images.oci import ImageReference, find_digest
from launcher.job import UNBUILT
from launcher.networks.profile import INTERFACES
from launcher.platforms.kubernetes import access, names
from launcher.platforms.kubernetes.checks import Submitted
from launcher.platforms.kubernetes.cluster import (
    CLAIMS,
    CLUSTER_QUEUES,
    CRDS,
    LOCAL_QUEUES,
    NAMESPACES,
    PODS,
    PRIORITY_CLASSES,
    QUOTAS,
    SECRETS,
    SENT,
    SERVICE_ACCOUNTS,
    TOPOLOGIES,
    WORKLOAD_PRIORITIES,
    AlreadyThere,
    ApiObject,
    ApiRefused,
    Cluster,
    Forbidden,
    NotThere,
    Resource,
)
from launcher.platforms.kubernetes.connection import google_way
from launcher.platforms.kubernetes.fabric import attachments, daemon_sets, networks, release
from launcher.platforms.kubernetes.jobset import LEAST_VERSION
from launcher.platforms.kubernetes.machines import machines
from launcher.platforms.kubernetes.namespaces import limited, overdrawn, quota_amounts
from launcher.platforms.kubernetes.refusals import refusals
from launcher.platforms.kubernetes.render import WorkloadObjects
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.findings import Finding, Severity

LEAST_KUBERNETES = (1, 29)
"""Native sidecars are on by default (KEP-753), and pods know their index by a label."""


@dataclass
class Survey:
    """A question to the cluster: what is asked, and about what."""

    cluster: Cluster
    settings: GkePlatformConfig
    items: Sequence[ApiObject]

    @property
    def submitted(self) -> Submitted:
        return Submitted(self.items, self.settings)

    def get(self, resource: Resource, name: str) -> ApiObject | None:
        return self.cluster.get(resource, self.settings.namespace, name)

    def try_out(self, item: ApiObject) -> ApiObject:
        """Ask the cluster to judge an object without storing it; returns what would be stored.

        Raises:
            ApiRefused: it would be refused.
        """
        return self.cluster.create(_TRIED[item["kind"]], self.settings.namespace, item, dry_run=True)

    @property
    def parts(self) -> list[ApiObject]:
        """Return what controllers make of the JobSet or Job: the Job of a JobSet, and the pod of node 0."""
        workload, template = self.submitted.workload, self.submitted.template
        name, space = workload["metadata"]["name"], self.settings.namespace
        labels = template["metadata"]["labels"]
        kind: WorkloadObjects = "jobset" if workload["kind"] == "JobSet" else "job"
        metadata = {**template["metadata"], "name": f"{names.pod_host(kind, name, 0)}-check", "namespace": space}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        if kind == "job":
            return [pod]
        metadata = {"name": names.job_name(name), "namespace": space, "labels": labels}
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": self.submitted.job}, pod]

    @cached_property
    def admitted_pod(self) -> Mapping[str, Any]:
        """The pod with what the namespace adds to it; as it was rendered where the cluster does not say."""
        try:
            spec: Mapping[str, Any] = self.try_out(self.parts[-1])["spec"]
        except ApiRefused:
            return self.submitted.pod
        return spec


# What is tried out: what is sent, and what controllers make of it.
_TRIED = {**SENT, "Pod": PODS}

Check = Callable[[Survey], Iterable[Finding]]


def examine_cluster(cluster: Cluster, settings: GkePlatformConfig, items: Sequence[ApiObject]) -> Iterator[Finding]:
    """Everything that can be known beforehand, good news (`info`) included.

    Raises:
        PlatformUnreachable, LoginProblem: nothing can be known.
    """
    survey = Survey(cluster, settings, items)
    yield from version(survey)
    told: dict[str, Severity] = {}
    there = True
    for what, check in (*CHECKS.items(), *WITHIN.items()):
        if what in WITHIN and not there:
            continue  # what follows from a namespace that is missing says nothing more
        before = told.copy()
        for finding in _checked(what, check, survey):
            # The dry runs repeat each other, and what has been found with better words before.
            if finding.severity == "info" or before.get(finding.code) not in ("error", finding.severity):
                yield finding
            if finding.severity == "error" or (finding.severity == "warning" and finding.code != "gke.unseen"):
                told[finding.code] = finding.severity
        there = there and "gke.namespace" not in told


def _checked(what: str, check: Check, survey: Survey) -> Iterator[Finding]:
    try:
        yield from check(survey)
    except Forbidden as error:
        yield Finding("warning", "gke.unseen", f"{what}: not checked, for {error.message}", access.CLUSTER_ROLES)
    except LauncherError as error:
        yield Finding("warning", "gke.unseen", f"{what}: not checked, for {error}", "try again later")


def _good(code: str, what: str) -> Finding:
    return Finding("info", f"gke.{code}", what)


def _bad(code: str, what: str, fix: str) -> Finding:
    return Finding("error", f"gke.{code}", what, fix)


# --- the cluster ------------------------------------------------------------------------------------------------------


def version(survey: Survey) -> Iterator[Finding]:
    """Check that the control plane is new enough."""
    told = survey.cluster.version()
    if numbers(told) < LEAST_KUBERNETES:
        least = ".".join(map(str, LEAST_KUBERNETES))
        yield _bad("version", f"{survey.cluster.where} is {told}; we need {least}, for sidecars", "upgrade the cluster")
    else:
        yield _good("version", f"{survey.cluster.where} answers: {told}")


def numbers(version: str) -> tuple[int, int]:
    """v1.33.5-gke.1080000 is (1, 33)."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def permissions(survey: Survey) -> Iterator[Finding]:
    """Check that we may do what the run does."""
    workload: WorkloadObjects = "jobset" if survey.submitted.workload["kind"] == "JobSet" else "job"
    lacking = access.missing(survey.cluster, survey.settings, workload)
    yield from access.findings_of(lacking, survey.settings.namespace)
    if not lacking:
        yield _good("permissions", f"you may do all that a run does in namespace {survey.settings.namespace}")


def google_roles(survey: Survey) -> Iterator[Finding]:
    """Check that we may do in the Google Cloud project what a run does there."""
    settings = survey.settings
    if settings.cluster is None:
        return
    from google.auth.transport.requests import AuthorizedSession

    way = google_way(settings)
    session = AuthorizedSession(way.credentials)  # type: ignore[no-untyped-call]
    for one in access.missing_roles(session, way.project, dns=settings.dns_endpoint):
        what = f"you have not got {one.permission} in project {way.project} ({one.why})"
        yield _bad("permission", what, f"have {one.role} granted; deployments/iam.yaml lists all roles")


def jobset(survey: Survey) -> Iterator[Finding]:
    """Check that JobSet is installed. Its version shows when it is asked to take the objects (`accepted`)."""
    if survey.submitted.workload["kind"] != "JobSet":
        return
    crd = survey.get(CRDS, "jobsets.jobset.x-k8s.io")
    least = ".".join(map(str, LEAST_VERSION))
    if crd is None:
        fix = f"install JobSet {least} or newer (docs/gke.md), or set platform.workload=job"
        yield _bad("jobset", f"{survey.cluster.where} has no JobSet", fix)
    elif not any(one["name"] == "v1alpha2" and one["served"] for one in crd["spec"]["versions"]):
        yield _bad("jobset", "its JobSet does not serve v1alpha2", f"install JobSet {least} or newer")
    else:
        yield _good("jobset", "JobSet is installed")


def multi_networking(survey: Survey) -> Iterator[Finding]:
    """Check in the GKE API that the cluster's pods can have more than one interface.

    https://docs.cloud.google.com/kubernetes-engine/docs/how-to/setup-multinetwork-support-for-pods
    """
    settings = survey.settings
    if settings.cluster is None or INTERFACES not in survey.submitted.annotations:
        return
    way = google_way(settings)
    if not way.described.network_config.enable_multi_networking:
        what = f"cluster {settings.cluster} has no multi-networking, which {settings.network} needs"
        fix = "make one with --enable-dataplane-v2 --enable-ip-alias --enable-multi-networking: it cannot be added"
        yield _bad("multi-networking", what, fix)


# --- what the job refers to -------------------------------------------------------------------------------------------


def namespace(survey: Survey) -> Iterator[Finding]:
    """Check that it is there."""
    name = survey.settings.namespace
    found = survey.get(NAMESPACES, name)
    if found is None:
        fix = f"kubectl create namespace {name}, or fix platform.namespace"
        yield _bad("namespace", f"there is no namespace {name}; what is in it was not checked", fix)
    elif found.get("status", {}).get("phase") == "Terminating":
        fix = "take another platform.namespace, or wait and create it again"
        yield _bad("namespace", f"namespace {name} is being removed", fix)
    else:
        yield _good("namespace", f"namespace {name}")


def service_account(survey: Survey) -> Iterator[Finding]:
    """Check that it is there, and stands for a Google Cloud service account where a bucket is used."""
    settings = survey.settings
    name = settings.service_account
    if name is None:
        return
    found = survey.get(SERVICE_ACCOUNTS, name)
    if found is None:
        fix = f"kubectl create serviceaccount {name} --namespace {settings.namespace}, or fix platform.service_account"
        yield _bad("service-account", f"there is no service account {name} in {settings.namespace}", fix)
        return
    google = found["metadata"].get("annotations", {}).get("iam.gke.io/gcp-service-account")
    # Since 2024 roles may be granted to the Kubernetes account itself, which cannot be seen from here.
    yield _good("service-account", f"service account {name}" + (f", which stands for {google}" if google else ""))


def queue(survey: Survey) -> Iterator[Finding]:
    """Check that Kueue is there, and that its queue lets jobs in."""
    name, space = survey.settings.queue, survey.settings.namespace
    if name is None:
        return
    found = survey.get(LOCAL_QUEUES, name)
    if found is None:
        known = survey.get(CRDS, "localqueues.kueue.x-k8s.io") is not None
        fix = f"kubectl get localqueues --namespace {space}, and fix platform.queue" if known else "install Kueue"
        what = f"there is no LocalQueue {name} in namespace {space}" if known else "Kueue is not installed"
        yield _bad("queue", what, f"{fix}, or leave platform.queue out")
        return
    behind = found["spec"]["clusterQueue"]
    cluster_queue = survey.get(CLUSTER_QUEUES, behind)
    if cluster_queue is None:
        yield _bad("queue", f"LocalQueue {name} belongs to ClusterQueue {behind}, which is not there", "create it")
        return
    for thing, what in ((found, f"LocalQueue {name}"), (cluster_queue, f"ClusterQueue {behind}")):
        conditions = thing.get("status", {}).get("conditions") or ()
        told = next((one for one in conditions if one["type"] == "Active" and one["status"] == "False"), None)
        if told is not None:
            yield _bad("queue", f"{what} is not active: {told.get('message', '')}", "fix it, or take another queue")
    wants = {"nvidia.com/gpu"} if survey.settings.node_gpus else set()
    covered = {name for group in cluster_queue["spec"].get("resourceGroups", ()) for name in group["coveredResources"]}
    if lacking := wants - covered:
        what = f"ClusterQueue {behind} covers {', '.join(sorted(covered))}, and not {', '.join(lacking)}"
        yield _bad("queue", what, "add it to the queue's resource groups, or take another platform.queue")
    yield _good("queue", f"queue {name} of {behind}")


def priority(survey: Survey) -> Iterator[Finding]:
    """Check that the class is there."""
    name = survey.settings.priority
    if name is None:
        return
    resource = WORKLOAD_PRIORITIES if survey.settings.queue else PRIORITY_CLASSES
    kind = "WorkloadPriorityClass" if survey.settings.queue else "PriorityClass"
    if survey.get(resource, name) is None:
        yield _bad("priority", f"there is no {kind} {name}", f"kubectl get {resource.plural}; fix platform.priority")


def topology(survey: Survey) -> Iterator[Finding]:
    """Check that the label is a level that Kueue knows."""
    if survey.settings.topology is None:
        return
    annotations = survey.submitted.annotations
    label = next((value for key, value in annotations.items() if key.endswith("-topology")), None)
    listed, _ = survey.cluster.list(TOPOLOGIES, None)
    levels = [level["nodeLabel"] for one in listed for level in one["spec"]["levels"]]
    if label not in levels:
        known = f"there are {', '.join(levels)}" if levels else "there is no Topology at all"
        yield _bad("topology", f"{label} is no level of Kueue's Topology; {known}", "fix platform.topology")


def claim(survey: Survey) -> Iterator[Finding]:
    """Check that all nodes can write to it."""
    name = survey.settings.claim
    if name is None:
        return
    found = survey.get(CLAIMS, name)
    if found is None:
        what = f"there is no PersistentVolumeClaim {name} in {survey.settings.namespace}"
        yield _bad("claim", what, "create it, or fix platform.claim")
        return
    modes = found["spec"].get("accessModes", ())
    if survey.settings.nodes > 1 and "ReadWriteMany" not in modes:
        what = f"PersistentVolumeClaim {name} is {', '.join(modes)}, and {survey.settings.nodes} nodes write to it"
        yield _bad("claim", what, "take a ReadWriteMany one (Filestore), or a bucket for the root")


def image(survey: Survey) -> Iterator[Finding]:
    """Check that it is in its registry. Only the nodes know whether they may pull it."""
    name = survey.submitted.node.get("image", UNBUILT)
    if name == UNBUILT:
        return
    try:
        found = find_digest(ImageReference.parse(name), timeout=5.0, patience=0.0)
    except (ImageProblem, ValueError) as error:
        what = f"image {name} was not looked at: {error}"
        yield Finding("warning", "gke.image", what, "it may be there all the same")
        return
    if found is None:
        yield _bad("image", f"there is no image {name}", "build and push it, or fix image.reference")


# --- what the cluster would take --------------------------------------------------------------------------------------


def secrets(survey: Survey) -> Iterator[Finding]:
    """Check that they are there. Only a node finds out whether they have the right entries."""
    settings = survey.settings
    for name in sorted({entry.split("/")[0] for entry in settings.secrets.values()}):
        if not survey.cluster.has(SECRETS, settings.namespace, name):
            what = f"there is no Secret {name} in namespace {settings.namespace}, and platform.secrets names it"
            fix = f"kubectl create secret generic {name} --namespace {settings.namespace} --from-literal=KEY=VALUE"
            yield _bad("secret", what, fix)


def pull_secrets(survey: Survey) -> Iterator[Finding]:
    """Check that they are there and are logins: a pod is created without them too, and waits for its image."""
    settings = survey.settings
    for name in settings.image_pull_secrets:
        kind = survey.cluster.secret_type(settings.namespace, name)
        if kind in _LOGINS:
            continue
        fix = (
            f"kubectl create secret docker-registry {name} --namespace {settings.namespace} --docker-server=HOST "
            "--docker-username=NAME --docker-password=…, or fix platform.image_pull_secrets"
        )
        if kind is None:
            what = f"there is no Secret {name} of platform.image_pull_secrets in namespace {settings.namespace}"
            yield _bad("pull-secret", what, fix)
        else:
            what = f"Secret {name} is of type {kind}, and kubelets take logins of registries from {_LOGINS[0]} alone"
            yield _bad("pull-secret", what, f"delete it, then {fix}")


def quotas(survey: Survey) -> Iterator[Finding]:
    """Check that the namespace has room for all pods of the job."""
    listed, _ = survey.cluster.list(QUOTAS, survey.settings.namespace)
    submitted = survey.submitted
    wanted = quota_amounts(survey.admitted_pod, nodes=survey.settings.nodes, kind=submitted.workload["kind"])
    yield from overdrawn(listed, wanted)


def accepted(survey: Survey) -> Iterator[Finding]:
    """Check that the cluster would take the objects: it is asked without storing them (dryRun=All)."""
    for item in survey.items:
        name = f"{item['kind']} {item['metadata']['name']}"
        try:
            survey.try_out(item)
        except AlreadyThere:
            yield _good("there", f"{name} is there already, and will be taken up if it is the same")
        except NotThere:
            continue  # `namespace` and `jobset` have said it
        except ApiRefused as error:
            if "onJobFailureMessagePatterns" in error.message:
                least = ".".join(map(str, LEAST_VERSION))
                what = f"its JobSet is older than {least}: it cannot tell a preemption from a mistake in the program"
                yield _bad("jobset", what, f"install JobSet {least} or newer, or set platform.workload=job")
            else:
                # A role that is missing has been found by `permissions`, which names all of them.
                yield from (one for one in _refused(name, error) if one.code != "gke.permission")


def parts_accepted(survey: Survey) -> Iterator[Finding]:
    """Check that the cluster would take what its controllers will make of the objects.

    A JobSet is accepted whatever its Job's template says, and a Job whatever the namespace thinks of its pods.

    Raises:
        Forbidden: may not be tried out.
    """
    for item in survey.parts:
        try:
            survey.try_out(item)
        except (AlreadyThere, NotThere):
            continue
        except ApiRefused as error:
            found = _refused(f"{item['kind']} {item['metadata']['name']}", error)
            if any(one.code == "gke.permission" for one in found):
                raise
            yield from found
            return  # an invalid Job has the same invalid pods


def _refused(name: str, error: ApiRefused) -> list[Finding]:
    return [replace(one, what=f"{name}: {one.what}") for one in refusals(error.message, "gke")]


# https://kubernetes.io/docs/concepts/configuration/secret/#docker-config-secrets; the second is the older format.
_LOGINS = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")

CHECKS: dict[str, Check] = {
    "namespace": namespace,
    "roles in Google Cloud": google_roles,
    "JobSet": jobset,
    "priority": priority,
    "topology": topology,
    "multi-networking": multi_networking,
    "the network's release": lambda survey: release(numbers(survey.cluster.version()), survey.submitted),
    "networks": lambda survey: networks(survey.cluster, survey.submitted),
    "attachments": lambda survey: attachments(survey.cluster, survey.submitted),
    "the network's DaemonSets": lambda survey: daemon_sets(survey.cluster, survey.submitted),
    "machines": lambda survey: machines(survey.cluster, survey.submitted),
    "image": image,
}
"""The checks of the cluster as a whole; the namespace first."""
WITHIN: dict[str, Check] = {
    "permissions": permissions,
    "service account": service_account,
    "secrets": secrets,
    "pull secrets": pull_secrets,
    "queue": queue,
    "claim": claim,
    "quotas": quotas,
    "limits": lambda survey: limited(survey.admitted_pod, survey.submitted.pod),
    "what the cluster would take": accepted,
    "what its controllers would make": parts_accepted,
}
"""The checks of the job's namespace: without it none of them can succeed."""
