"""Checks of a submission, and of its cluster, before anything is created.

All of it is looked at, whatever is found on the way. What may not be looked at is a warning: it was not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

from launcher.errors import LauncherError
from launcher.machines import CEA
from launcher.networks.profile import DEVICES, INTERFACES, MULTUS
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.capacity import Survey, bad, good, limits, machines, quotas, risk
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Resource
from launcher.platforms.kubernetes.connection import google_way
from launcher.platforms.kubernetes.reasons import CLUSTER_ROLES, refusals
from launcher.platforms.kubernetes.render import WorkloadObjects, made_of
from launcher.platforms.kubernetes.settings import UID, GkePlatformConfig
from launcher.platforms.kubernetes.states import condition, container_of, pod_of, workload_of
from litgpt_demo.errors import Finding, Severity
from litgpt_demo.storage import is_remote

LEAST_KUBERNETES = (1, 29)
"""Native sidecars are on by default (KEP-753), and pods know their index by a label."""

_JOBSET = "0.10"
"""The first JobSet version with onJobFailureMessagePatterns, which tell exit codes apart."""
_INJECTOR = "nri-device-injector"
_NETWORKS = "https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"


def examine_cluster(cluster: Cluster, settings: GkePlatformConfig, items: Sequence[ApiObject]) -> Iterator[Finding]:
    """Everything that can be known beforehand, good news (`info`) included."""
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


def check_settings(settings: GkePlatformConfig, items: Sequence[ApiObject]) -> Iterator[Finding]:
    """Yield everything that cannot be, or is a risk, by what the config says alone."""
    fabric, node = settings.fabric, container_of(pod_of(workload_of(items)))
    yield from fabric.problems
    # Logs, checkpoints and datasets are in a place that outlives the pods and that all nodes see.
    claim = settings.claim_path.rstrip("/") if settings.claim else None
    for word, address in pairwise(node["command"]):
        if word not in {"--log-uri", "--stage", "--code"}:
            continue
        if not is_remote(address) and not (claim and f"{address}/".startswith(f"{claim}/")):
            what = f"{address} is a folder of the pod, which goes with it and which other nodes do not see"
            fix = "root: gs://bucket/prefix, or a folder in platform.claim_path with platform.claim"
            yield bad("root-not-shared", what, fix)
    # What may be wished for, and does not end well.
    if settings.host_network and settings.service_account is not None:
        what = "pods on the host's network may get the node's identity instead of platform.service_account's"
        fix = "give the node pool's service account access to the root, or leave platform.host_network out"
        yield risk("host-network-identity", what, fix)
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: 30 s from the notice to the end.
    if settings.spot and settings.grace > 25:
        what = f"ranks are given {settings.grace} s to save, and Spot VMs are gone 30 s after their notice"
        yield risk("spot-grace", what, "set platform.grace to 25 or less")
    if settings.uid == 0 and not fabric.root:  # what a network needs is no choice
        what = "platform.uid=0: the training is root in its container, and so is any script and package that it loads"
        yield risk("root", what, f"leave platform.uid out, with an image whose files user {UID} can read")


def needed(settings: GkePlatformConfig, workload: WorkloadObjects) -> list[tuple[str, Resource]]:
    """Return what a run with these settings has to be allowed, as deployments/rbac.yaml has it: verbs of the API, and
    what they are for. What only the checks look at is not among it.
    """
    verbs = dict.fromkeys(made_of(settings), "create get list delete deletecollection")
    # One of the other kind is only looked for, and removed with the rest.
    verbs[api.JOBS if workload == "jobset" else api.JOBSETS] = "get list deletecollection"
    verbs |= {api.SERVICES: "create get list delete", api.PODS: "list watch deletecollection"}
    verbs |= {api.LOGS: "get", api.EVENTS: "list"}
    if settings.queue is not None:
        verbs[api.WORKLOADS] = "list"
    return [(verb, resource) for resource, several in verbs.items() for verb in several.split()]


def permissions(cluster: Cluster, settings: GkePlatformConfig, workload: WorkloadObjects) -> Finding:
    """Return whether the cluster lets us do all that a run does; of what it does not, all is named."""
    asked = needed(settings, workload)
    with ThreadPoolExecutor(max_workers=4) as pool:
        allowed = pool.map(lambda one: cluster.allows(one[0], one[1], settings.namespace), asked)
        lacking = [one for one, may in zip(asked, allowed, strict=True) if not may]
    if not lacking:
        return good("permissions", f"you may do all that a run does in namespace {settings.namespace}")
    listed = ", ".join(f"{verb} {resource}" for verb, resource in lacking)
    return bad("permission", f"{cluster.where} does not let you {listed}", CLUSTER_ROLES)


def _jobset(survey: Survey) -> Iterator[Finding]:
    """The version of JobSet shows when it is asked to take the objects (`_accepted`)."""
    if survey.kind == "jobset" and survey.cluster.serves(api.JOBSETS):
        yield good("jobset", "JobSet is installed")
    elif survey.kind == "jobset":
        fix = f"install JobSet {_JOBSET} or newer (docs/gke.md), or set platform.workload=job"
        yield bad("jobset", f"{survey.cluster.where} has no JobSet", fix)


def networks(survey: Survey) -> Iterator[Finding]:
    """Check what the pods are attached to: Network objects and their parameters, or what Multus attaches them to.

    https://docs.cloud.google.com/kubernetes-engine/docs/how-to/setup-multinetwork-support-for-pods
    """
    settings, rows = survey.settings, json.loads(survey.annotations.get(INTERFACES, "[]"))
    if rows and settings.cluster and not google_way(settings)[1].network_config.enable_multi_networking:
        what = f"cluster {settings.cluster} has no multi-networking, which {settings.network} needs"
        fix = "make one with --enable-dataplane-v2 --enable-ip-alias --enable-multi-networking: it cannot be added"
        yield bad("multi-networking", what, fix)
    found = {row["network"]: survey.get(api.NETWORKS, row["network"]) for row in rows if row["network"] != "default"}
    lacking = [name for name, thing in found.items() if thing is None]
    if lacking:
        there = ", ".join(name for name in found if name not in lacking) or "none of them"
        what = f"the Network objects {', '.join(lacking)} are missing (there are {there})"
        fix = f"create them with their VPCs, or see that the cluster has multi-networking: {_NETWORKS}"
        yield bad("networks", what, fix)
    for name, thing in found.items():
        parameters = (((thing or {}).get("spec") or {}).get("parametersRef") or {}).get("name")
        if parameters and survey.get(api.NETWORK_PARAMETERS, parameters) is None:
            what = f"Network {name} names the GKENetworkParamSet {parameters}, which is not there"
            yield bad("networks", what, f"create it: {_NETWORKS}")
    wanted = [one.partition("@")[0] for one in survey.annotations.get(MULTUS, "").split(",") if one]
    places = [(one.rpartition("/")[0] or survey.namespace, one.rpartition("/")[2]) for one in wanted]
    if away := [place for place in places if survey.cluster.get(api.ATTACHMENTS, *place) is None]:
        what = f"the NetworkAttachmentDefinitions {', '.join(map('/'.join, away))} are missing, or Multus is"
        fix = "name those of kubectl get network-attachment-definitions -A; a name alone is one of platform.namespace"
        yield bad("networks", what, fix)
    if (found or wanted) and not (lacking or away):
        yield good("networks", f"the networks {', '.join(found or wanted)}")


def daemon_sets(survey: Survey) -> Iterator[Finding]:
    """Check that the nodes have, and at this Kubernetes version can have, the plug-in that the pods are made for."""
    pairs = survey.fabric.known
    place = next((place for place, one in enumerate(pairs) if one.since and survey.version >= one.since), None)
    network, installer, pair = survey.settings.network, survey.fabric.installer, survey.fabric.pair
    if place is not None and pair is not None and pair.plugin not in {one.plugin for one in pairs[: place + 1]}:
        least, since = pairs[place].plugin, ".".join(map(str, pairs[place].since or ()))
        what = f"{network} {pair.plugin} is older than what Kubernetes from {since} on is made for ({least})"
        yield risk(f"{network}-release", what, f"upgrade the DaemonSet that installs it; network_plugin={least}")
    injected = any(key.startswith(DEVICES) for key in survey.annotations)
    if installer is None and not injected:
        return
    tags: dict[str, str] = {}
    used: dict[str, tuple[str, ApiObject]] = {}
    for one in survey.cluster.list(api.DAEMON_SETS, None)[0]:
        name, pod = one["metadata"]["name"], one["spec"]["template"]["spec"]
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            image, _, tag = container.get("image", "").partition("@")[0].rpartition(":")
            if installer is not None and image in installer.images:
                tags[name], used[name] = tag, ("installer", one.get("status", {}))
            if injected and _INJECTOR in container.get("image", ""):
                used[name] = ("device-injector", one.get("status", {}))
    if installer is not None:
        wanted = pair.plugin if pair is not None else None
        if not tags:
            fix = f"{_apply(installer.manifest)}, or set platform.network_install=pod"
            yield bad("installer", f"no DaemonSet installs the plug-in of {network} on the nodes", fix)
        elif wanted not in tags.values():
            name, tag = next(iter(tags.items()))
            what = f"the nodes have {network} {tag} (DaemonSet {name}), and the job is made for {wanted}"
            yield bad("installer", what, f"set platform.network_plugin={tag}, or upgrade the DaemonSet")
        else:
            yield good("installer", f"the nodes have {network} {wanted}")
    if injected and not any(code == "device-injector" for code, _ in used.values()):
        what = "the DaemonSet device-injector is missing: pods would not get the GPUs' devices they ask for"
        yield bad("device-injector", what, _apply(f"{CEA}/nri_device_injector/{_INJECTOR}.yaml"))
    for name, (code, status) in used.items():
        ready, wished = status.get("numberReady", 0), status.get("desiredNumberScheduled", 0)
        if ready < wished:
            what = f"DaemonSet {name} is ready on {ready} of {wished} nodes"
            yield risk(code, what, "kubectl describe it; jobs on the other nodes fail their checks")


def _apply(address: str) -> str:
    return f"kubectl apply -f {address.replace('github.com', 'raw.githubusercontent.com').replace('/blob/', '/')}"


# Of a service account and a PriorityClass the dry run of a pod says whether they are there.
def _namespace(survey: Survey) -> Iterator[Finding]:
    name = survey.namespace
    fix = f"kubectl create namespace {name}, or fix platform.namespace"
    lacking = bad("namespace", f"there is no namespace {name}; what is in it was not checked", fix)
    yield lacking if survey.get(api.NAMESPACES, name) is None else good("namespace", f"namespace {name}")


def _queue(survey: Survey) -> Iterator[Finding]:
    name, space = survey.settings.queue, survey.namespace
    if name is None:
        return
    if (found := survey.get(api.LOCAL_QUEUES, name)) is None:
        fix = f"kubectl get localqueues --namespace {space}, and fix platform.queue; or install Kueue, if it is missing"
        yield bad("queue", f"there is no LocalQueue {name} in namespace {space}", fix)
        return
    behind = found["spec"]["clusterQueue"]  # without it, the LocalQueue is not active
    cluster_queue = survey.get(api.CLUSTER_QUEUES, behind) or {"spec": {}}
    for thing, what in ((found, f"LocalQueue {name}"), (cluster_queue, f"ClusterQueue {behind}")):
        if (told := condition(thing, "Active", "False")) is not None:
            yield bad("queue", f"{what} is not active: {told.get('message', '')}", "fix it, or take another queue")
    covered = {name for group in cluster_queue["spec"].get("resourceGroups", ()) for name in group["coveredResources"]}
    if survey.settings.node_gpus and "nvidia.com/gpu" not in covered:
        what = f"ClusterQueue {behind} covers {', '.join(sorted(covered)) or 'nothing'}, and not nvidia.com/gpu"
        yield bad("queue", what, "add it to the queue's resource groups, or take another platform.queue")
    yield good("queue", f"queue {name} of {behind}")


def _kueue(survey: Survey) -> Iterator[Finding]:
    settings, name = survey.settings, survey.settings.priority
    if settings.queue and name and survey.get(api.WORKLOAD_PRIORITIES, name) is None:
        fix = "kubectl get workloadpriorityclasses; fix platform.priority"
        yield bad("priority", f"there is no WorkloadPriorityClass {name}", fix)
    if settings.topology is not None:
        label = next(value for key, value in survey.annotations.items() if key.endswith("-topology"))
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


def _secrets(survey: Survey) -> Iterator[Finding]:
    """Only a node finds out whether they have the right entries. Without a login a pod is created too, and waits."""
    settings, space = survey.settings, survey.namespace
    create, login = "kubectl create secret", "--docker-server=HOST --docker-username=NAME --docker-password=…"
    wanted = [("secret", entry.split("/")[0], "secrets") for entry in settings.secrets.values()]
    wanted += [("pull-secret", name, "image_pull_secrets") for name in settings.image_pull_secrets]
    for code, name, setting in dict.fromkeys(wanted):
        if not survey.cluster.has_secret(space, name):
            kind, given = ("generic", "--from-literal=KEY=VALUE") if code == "secret" else ("docker-registry", login)
            fix = f"{create} {kind} {name} --namespace {space} {given}, or fix platform.{setting}"
            yield bad(code, f"there is no Secret {name} of platform.{setting} in namespace {space}", fix)


def _accepted(survey: Survey, items: Iterable[ApiObject], *, parts: bool) -> Iterator[Finding]:
    """Try out the objects, or what controllers make of them (`parts`).

    A JobSet is accepted whatever its Job's template says, and a Job whatever the namespace thinks of its pods.
    """
    for item in items:
        name = f"{item['kind']} {item['metadata']['name']}"
        try:
            survey.try_out(item)
        except (api.AlreadyThere, api.NotThere):
            continue  # `submit` takes it up, or refuses; `_namespace` and `_jobset` have said it
        except api.ApiRefused as error:
            found = [replace(one, what=f"{name}: {one.what}") for one in refusals(error.message, "gke")]
            if "onJobFailureMessagePatterns" in error.message:
                what = f"its JobSet is older than {_JOBSET}: it cannot tell a preemption from a mistake in the program"
                yield bad("jobset", what, f"install JobSet {_JOBSET} or newer, or set platform.workload=job")
            elif not parts:
                # A role that is missing has been found by `permissions`, which names all of them.
                yield from (one for one in found if one.code != "gke.permission")
            elif any(one.code == "gke.permission" for one in found):
                raise
            else:
                yield from found
                return  # an invalid Job has the same invalid pods


Check = Callable[[Survey], Iterable[Finding]]

CHECKS: dict[str, Check] = {
    "namespace": _namespace,
    "JobSet": _jobset,
    "Kueue": _kueue,
    "networks": networks,
    "the network's DaemonSets": daemon_sets,
    "machines": machines,
}
"""The checks of the cluster as a whole; the namespace first."""
WITHIN: dict[str, Check] = {
    "permissions": lambda survey: [permissions(survey.cluster, survey.settings, survey.kind)],
    "secrets": _secrets,
    "queue": _queue,
    "claim": _claim,
    "quotas": quotas,
    "limits": limits,
    "what the cluster would take": lambda survey: _accepted(survey, survey.items, parts=False),
    "what its controllers would make": lambda survey: _accepted(survey, survey.parts, parts=True),
}
"""The checks of the job's namespace: without it none of them can succeed."""
