"""Checks of a submission and of its cluster, before anything is created.

All checks run, whatever an earlier one finds. A check without the permission to look is a warning.
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
from launcher.platforms.kubernetes.capacity import Survey, error, info, limits, machines, quotas, warning
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Resource
from launcher.platforms.kubernetes.connection import gke_cluster
from launcher.platforms.kubernetes.reasons import CLUSTER_ROLES, refusals
from launcher.platforms.kubernetes.render import WorkloadObjects, made_of
from launcher.platforms.kubernetes.settings import UID, GkePlatformConfig, KubernetesSettings
from launcher.platforms.kubernetes.states import condition, container_of, pod_of, workload_of
from litgpt_demo.errors import Finding, Severity
from litgpt_demo.storage import is_remote

LEAST_KUBERNETES = (1, 29)
"""Native sidecars are on by default (KEP-753), and pods know their index by a label."""

_JOBSET = "0.10"
"""The first JobSet version with onJobFailureMessagePatterns, which distinguish exit codes."""
_INJECTOR = "nri-device-injector"
_NETWORKS = "https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"


def examine_cluster(cluster: Cluster, settings: KubernetesSettings, items: Sequence[ApiObject]) -> Iterator[Finding]:
    """Yield the findings of all checks of the cluster. A passed check is a finding of severity `info`."""
    survey, version = Survey(cluster, settings, items), cluster.version()
    number = re.match(r"v?(\d+)\.(\d+)", version)  # of v1.33.5-gke.1080000
    if number is not None:
        survey.version = (int(number[1]), int(number[2]))
    if survey.version < LEAST_KUBERNETES:
        least = ".".join(map(str, LEAST_KUBERNETES))
        yield error(
            "kubernetes.version", f"{cluster.where} is {version}; sidecars need {least} or newer", "upgrade the cluster"
        )
    else:
        yield info("kubernetes.version", f"{cluster.where} answers: {version}")
    known: dict[str, Severity] = {}
    for name, check in (CHECKS | WITHIN).items():
        if name in WITHIN and "kubernetes.namespace" in known:
            continue  # the namespace is missing
        before = known.copy()
        try:
            for finding in check(survey):
                # The dry runs repeat each other, and the more precise findings of earlier checks.
                if finding.severity == "info" or before.get(finding.code) not in ("error", finding.severity):
                    yield finding
                if finding.severity in ("error", "warning"):
                    known[finding.code] = finding.severity
        except api.Forbidden as problem:
            yield warning("kubernetes.unseen", f"{name}: not checked, because {problem.message}", CLUSTER_ROLES)
        except LauncherError as problem:
            yield warning("kubernetes.unseen", f"{name}: not checked, because {problem}", "try again later")


def check_settings(settings: KubernetesSettings, items: Sequence[ApiObject]) -> Iterator[Finding]:
    """Yield the errors and risks of the config itself."""
    fabric, node = settings.fabric, container_of(pod_of(workload_of(items)))
    yield from fabric.problems
    # Logs, checkpoints and datasets are in a place that outlives the pods and that all nodes see.
    volume = settings.pvc_path.rstrip("/") if settings.pvc else None
    for word, address in pairwise(node["command"]):
        if word not in {"--log-uri", "--stage", "--code"}:
            continue
        if not is_remote(address) and not (volume and f"{address}/".startswith(f"{volume}/")):
            what = f"{address} is a folder of the pod: it is deleted with the pod, and other nodes do not see it"
            fix = "set root to gs://bucket/prefix, or to a folder in platform.pvc_path with platform.pvc"
            yield error("kubernetes.root-not-shared", what, fix)
    if settings.host_network and settings.service_account is not None:
        what = "pods on the host's network may get the node's identity instead of platform.service_account's"
        fix = "give the node pool's service account access to the root, or leave platform.host_network out"
        yield warning("kubernetes.host-network-identity", what, fix)
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: 30 s from the notice to the end.
    if settings.spot and settings.grace_period > 25:
        what = f"platform.grace_period={settings.grace_period} s, but Spot VMs are gone 30 s after their notice"
        yield warning("kubernetes.spot-grace", what, "set platform.grace_period to 25 or less")
    if settings.uid == 0 and not fabric.root:  # some networks need root
        what = "platform.uid=0: the training is root in its container, and so is any script and package that it loads"
        yield warning("kubernetes.root", what, f"leave platform.uid out, with an image whose files user {UID} can read")


def needed(settings: KubernetesSettings, workload: WorkloadObjects) -> list[tuple[str, Resource]]:
    """Return the permissions that a run with these settings needs, without those that only the checks use."""
    verbs = dict.fromkeys(made_of(settings), "create get list delete deletecollection")
    # An object of the other kind is only looked for, and removed with the rest.
    verbs[api.JOBS if workload == "jobset" else api.JOBSETS] = "get list deletecollection"
    verbs |= {api.SERVICES: "create get list delete", api.PODS: "list watch deletecollection"}
    verbs |= {api.LOGS: "get", api.EVENTS: "list"}
    if settings.queue is not None:
        verbs[api.WORKLOADS] = "list"
    return [(verb, resource) for resource, several in verbs.items() for verb in several.split()]


def permissions(cluster: Cluster, settings: KubernetesSettings, workload: WorkloadObjects) -> Finding:
    """Return whether we have all permissions that a run needs. The finding names the missing ones."""
    wanted = needed(settings, workload)
    with ThreadPoolExecutor(max_workers=4) as pool:
        allowed = pool.map(lambda right: cluster.allows(right[0], right[1], settings.namespace), wanted)
        lacking = [right for right, is_allowed in zip(wanted, allowed, strict=True) if not is_allowed]
    if not lacking:
        return info("kubernetes.permission", f"you may do all that a run does in namespace {settings.namespace}")
    listed = ", ".join(f"{verb} {resource}" for verb, resource in lacking)
    return error("kubernetes.permission", f"{cluster.where} does not let you {listed}", CLUSTER_ROLES)


def _jobset(survey: Survey) -> Iterator[Finding]:
    """Check that JobSet is installed. The dry run of the objects shows its version (`_accepted`)."""
    if survey.kind == "jobset" and survey.cluster.serves(api.JOBSETS):
        yield info("kubernetes.jobset", "JobSet is installed")
    elif survey.kind == "jobset":
        fix = f"install JobSet {_JOBSET} or newer (docs/platforms/kubernetes.md), or set platform.workload=job"
        yield error("kubernetes.jobset", f"{survey.cluster.where} has no JobSet", fix)


def networks(survey: Survey) -> Iterator[Finding]:
    """Check the networks of the pods: Network objects and their parameters, or Multus' attachment definitions.

    https://docs.cloud.google.com/kubernetes-engine/docs/how-to/setup-multinetwork-support-for-pods
    """
    settings, rows = survey.settings, json.loads(survey.annotations.get(INTERFACES, "[]"))
    if (
        rows
        and isinstance(settings, GkePlatformConfig)
        and not gke_cluster(settings)[1].network_config.enable_multi_networking
    ):
        what = f"cluster {settings.cluster} has no multi-networking, which {settings.network} needs"
        fix = "make one with --enable-dataplane-v2 --enable-ip-alias --enable-multi-networking: it cannot be added"
        yield error("kubernetes.multi-networking", what, fix)
    found = {row["network"]: survey.get(api.NETWORKS, row["network"]) for row in rows if row["network"] != "default"}
    lacking = [name for name, thing in found.items() if thing is None]
    if lacking:
        existing = ", ".join(name for name in found if name not in lacking) or "none"
        what = f"the Network objects {', '.join(lacking)} are missing (there are {existing})"
        fix = f"create them with their VPCs, or see that the cluster has multi-networking: {_NETWORKS}"
        yield error("kubernetes.networks", what, fix)
    for name, thing in found.items():
        parameters = (((thing or {}).get("spec") or {}).get("parametersRef") or {}).get("name")
        if parameters and survey.get(api.NETWORK_PARAMETERS, parameters) is None:
            what = f"Network {name} names the GKENetworkParamSet {parameters}, which does not exist"
            yield error("kubernetes.networks", what, f"create it: {_NETWORKS}")
    wanted = [item.partition("@")[0] for item in survey.annotations.get(MULTUS, "").split(",") if item]
    places = [(name.rpartition("/")[0] or survey.namespace, name.rpartition("/")[2]) for name in wanted]
    away = [place for place in places if survey.cluster.get(api.ATTACHMENTS, *place) is None]
    if away:
        what = f"the NetworkAttachmentDefinitions {', '.join(map('/'.join, away))} are missing, or Multus is"
        fix = "name those of kubectl get network-attachment-definitions -A; a bare name is one of platform.namespace"
        yield error("kubernetes.networks", what, fix)
    if (found or wanted) and not (lacking or away):
        yield info("kubernetes.networks", f"the networks {', '.join(found or wanted)}")


def _release(survey: Survey) -> Iterator[Finding]:
    pairs, pair, network = survey.fabric.known, survey.fabric.pair, survey.settings.network
    for number, known in enumerate(pairs):
        if known.since is None or survey.version < known.since:
            continue
        if pair is not None and pair.plugin not in {newer.plugin for newer in pairs[: number + 1]}:
            since = ".".join(map(str, known.since))
            what = f"{network} {pair.plugin} is older than what Kubernetes from {since} on is made for ({known.plugin})"
            fix = f"upgrade the DaemonSet that installs it, and set platform.network_plugin={known.plugin}"
            yield warning("kubernetes.network-release", what, fix)
        return


def daemon_sets(survey: Survey) -> Iterator[Finding]:
    """Check the DaemonSets that install the network's plugin on the nodes, and give pods the GPUs' devices."""
    yield from _release(survey)
    network, installer, pair = survey.settings.network, survey.fabric.installer, survey.fabric.pair
    is_injected = any(key.startswith(DEVICES) for key in survey.annotations)
    if installer is None and not is_injected:
        return
    installed: dict[str, str] = {}
    has_injector = False
    incomplete: list[Finding] = []
    for daemon_set in survey.cluster.list(api.DAEMON_SETS, None)[0]:
        name, pod, code = daemon_set["metadata"]["name"], daemon_set["spec"]["template"]["spec"], ""
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            image, _, tag = container.get("image", "").partition("@")[0].rpartition(":")
            if installer is not None and image in installer.images:
                installed[name], code = tag, "kubernetes.installer"
            if is_injected and _INJECTOR in container.get("image", ""):
                has_injector, code = True, "kubernetes.device-injector"
        status = daemon_set.get("status", {})
        ready, nodes = status.get("numberReady", 0), status.get("desiredNumberScheduled", 0)
        if code and ready < nodes:
            what = f"DaemonSet {name} is ready on {ready} of {nodes} nodes"
            incomplete.append(warning(code, what, "kubectl describe daemonset; jobs on the other nodes fail"))
    if installer is not None:
        wanted = pair.plugin if pair is not None else None
        if not installed:
            fix = f"{_apply(installer.manifest)}, or set platform.network_install=pod"
            yield error("kubernetes.installer", f"no DaemonSet installs the plugin of {network} on the nodes", fix)
        elif wanted not in installed.values():
            name, tag = next(iter(installed.items()))
            what = f"the nodes have {network} {tag} (DaemonSet {name}), but the job is made for {wanted}"
            yield error("kubernetes.installer", what, f"set platform.network_plugin={tag}, or upgrade the DaemonSet")
        else:
            yield info("kubernetes.installer", f"the nodes have {network} {wanted}")
    if is_injected and not has_injector:
        what = "the DaemonSet device-injector is missing: pods would not get the devices of the GPUs they request"
        yield error("kubernetes.device-injector", what, _apply(f"{CEA}/nri_device_injector/{_INJECTOR}.yaml"))
    yield from incomplete


def _apply(address: str) -> str:
    return f"kubectl apply -f {address.replace('github.com', 'raw.githubusercontent.com').replace('/blob/', '/')}"


# The dry run of a pod shows whether its service account and its PriorityClass exist.
def _namespace(survey: Survey) -> Iterator[Finding]:
    name = survey.namespace
    fix = f"kubectl create namespace {name}, or fix platform.namespace"
    lacking = error("kubernetes.namespace", f"there is no namespace {name}; what is in it was not checked", fix)
    yield lacking if survey.get(api.NAMESPACES, name) is None else info("kubernetes.namespace", f"namespace {name}")


def _queue(survey: Survey) -> Iterator[Finding]:
    name, space = survey.settings.queue, survey.namespace
    if name is None:
        return
    found = survey.get(api.LOCAL_QUEUES, name)
    if found is None:
        fix = f"set platform.queue to one of `kubectl get localqueues --namespace {space}`, or install Kueue"
        yield error("kubernetes.queue", f"there is no LocalQueue {name} in namespace {space}", fix)
        return
    behind = found["spec"]["clusterQueue"]  # without it, the LocalQueue is not active
    cluster_queue = survey.get(api.CLUSTER_QUEUES, behind) or {"spec": {}}
    for thing, what in ((found, f"LocalQueue {name}"), (cluster_queue, f"ClusterQueue {behind}")):
        stopped = condition(thing, "Active", "False")
        if stopped is not None:
            yield error(
                "kubernetes.queue",
                f"{what} is not active: {stopped.get('message', '')}",
                "fix it, or take another queue",
            )
    covered = {name for group in cluster_queue["spec"].get("resourceGroups", ()) for name in group["coveredResources"]}
    if survey.settings.node_gpus and "nvidia.com/gpu" not in covered:
        what = f"ClusterQueue {behind} covers {', '.join(sorted(covered)) or 'nothing'}, but not nvidia.com/gpu"
        yield error("kubernetes.queue", what, "add it to the queue's resource groups, or take another platform.queue")
    yield info("kubernetes.queue", f"queue {name} of {behind}")


def _kueue(survey: Survey) -> Iterator[Finding]:
    settings, name = survey.settings, survey.settings.priority
    if settings.queue and name and survey.get(api.WORKLOAD_PRIORITIES, name) is None:
        fix = "set platform.priority to one that `kubectl get workloadpriorityclasses` lists"
        yield error("kubernetes.priority", f"there is no WorkloadPriorityClass {name}", fix)
    if settings.topology is not None:
        label = next(value for key, value in survey.annotations.items() if key.endswith("-topology"))
        listed, _ = survey.cluster.list(api.TOPOLOGIES, None)
        levels = [level["nodeLabel"] for topology in listed for level in topology["spec"]["levels"]]
        if label not in levels:
            known = f"there are {', '.join(levels)}" if levels else "the cluster has no Topology"
            yield error(
                "kubernetes.topology", f"{label} is not a level of Kueue's Topology; {known}", "fix platform.topology"
            )


def _pvc(survey: Survey) -> Iterator[Finding]:
    name, nodes = survey.settings.pvc, survey.settings.nodes
    if name is None:
        return
    found = survey.get(api.PVCS, name)
    if found is None:
        what = f"there is no PersistentVolumeClaim {name} in {survey.namespace}"
        yield error("kubernetes.pvc", what, "create it, or fix platform.pvc")
        return
    modes = found["spec"].get("accessModes", ())
    if nodes > 1 and "ReadWriteMany" not in modes:
        what = f"PersistentVolumeClaim {name} is {', '.join(modes)}, but {nodes} nodes write to it"
        yield error("kubernetes.pvc", what, "take a ReadWriteMany one (Filestore), or a bucket for the root")


def _secrets(survey: Survey) -> Iterator[Finding]:
    """Check that the Secrets exist. Their entries are checked on the nodes, for we cannot read them."""
    settings, space = survey.settings, survey.namespace
    login = "--docker-server=HOST --docker-username=NAME --docker-password=…"
    wanted = [("kubernetes.secret", entry.split("/")[0], "secrets") for entry in settings.secrets.values()]
    wanted += [("kubernetes.pull-secret", name, "image_pull_secrets") for name in settings.image_pull_secrets]
    for code, name, setting in dict.fromkeys(wanted):
        if not survey.cluster.has_secret(space, name):
            kind, content = (
                ("generic", "--from-literal=KEY=VALUE") if code == "kubernetes.secret" else ("docker-registry", login)
            )
            fix = f"kubectl create secret {kind} {name} --namespace {space} {content}, or fix platform.{setting}"
            yield error(code, f"there is no Secret {name} of platform.{setting} in namespace {space}", fix)


def _accepted(survey: Survey, items: Iterable[ApiObject], *, parts: bool) -> Iterator[Finding]:
    """The cluster accepts a JobSet without a look at its Job's template, and a Job without the rules for its pods:
    `parts` are the objects that controllers create from the others."""
    for item in items:
        name = f"{item['kind']} {item['metadata']['name']}"
        try:
            survey.try_out(item)
        except (api.AlreadyExists, api.NotFound):
            continue  # `submit` handles an existing object; `_namespace` and `_jobset` have reported a missing one
        except api.ApiRefused as refusal:
            found = [
                replace(reason, what=f"{name}: {reason.what}") for reason in refusals(refusal.message, "kubernetes")
            ]
            if "onJobFailureMessagePatterns" in refusal.message:
                what = f"its JobSet is older than {_JOBSET}, which cannot distinguish preemptions from mistakes"
                yield error(
                    "kubernetes.jobset", what, f"install JobSet {_JOBSET} or newer, or set platform.workload=job"
                )
            elif not parts:
                # `permissions` has reported the missing roles, all of them.
                yield from (reason for reason in found if reason.code != "kubernetes.permission")
            elif any(reason.code == "kubernetes.permission" for reason in found):
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
"""The checks of the whole cluster, the namespace first."""
WITHIN: dict[str, Check] = {
    "permissions": lambda survey: [permissions(survey.cluster, survey.settings, survey.kind)],
    "secrets": _secrets,
    "queue": _queue,
    "pvc": _pvc,
    "quotas": quotas,
    "limits": limits,
    "what the cluster would take": lambda survey: _accepted(survey, survey.items, parts=False),
    "what its controllers would make": lambda survey: _accepted(survey, survey.parts, parts=True),
}
"""The checks of the job's namespace, which fail without it."""
