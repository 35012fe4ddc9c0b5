"""What checks look at, a submission and its cluster; the checks of a config, which need no cluster, and of networks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from launcher.job import Object
from launcher.networks.profile import DEVICES, INTERFACES, MULTUS
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Resource
from launcher.platforms.kubernetes.render import WorkloadObjects, job_name, pod_host
from launcher.platforms.kubernetes.settings import UID, GkePlatformConfig
from launcher.platforms.kubernetes.states import container_of, job_of, pod_of, workload_of
from launcher.sources import CEA, GKE
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NETWORK
from litgpt_demo.storage import is_remote

INJECTOR = "nri-device-injector"
_INJECTOR_MANIFEST = f"{CEA}/nri_device_injector/nri-device-injector.yaml"
_NETWORKS = f"{GKE}/how-to/gpu-bandwidth-gpudirect-tcpx"


def good(code: str, what: str) -> Finding:
    return Finding("info", f"gke.{code}", what)


def risk(code: str, what: str, fix: str) -> Finding:
    return Finding("warning", f"gke.{code}", what, fix)


def bad(code: str, what: str, fix: str) -> Finding:
    return Finding("error", f"gke.{code}", what, fix)


class Survey:
    """A question to the cluster: what is asked, and about what."""

    def __init__(self, cluster: Cluster, settings: GkePlatformConfig, items: Sequence[ApiObject]) -> None:
        self.cluster, self.settings, self.items = cluster, settings, items
        self.namespace, self.fabric = settings.namespace, settings.fabric
        self.workload = workload_of(items)
        self.kind: WorkloadObjects = "jobset" if self.workload["kind"] == "JobSet" else "job"
        self.meta: Object = job_of(self.workload)["template"]["metadata"]
        self.annotations: dict[str, str] = self.meta.get("annotations", {})
        self.pod = pod_of(self.workload)
        self.node = container_of(self.pod)
        self.version = (0, 0)

    def get(self, resource: Resource, name: str) -> ApiObject | None:
        return self.cluster.get(resource, self.namespace, name)

    def try_out(self, item: ApiObject) -> ApiObject:
        """Ask the cluster to judge an object without storing it (dryRun=All); returns what would be stored."""
        resource = api.PODS if item["kind"] == "Pod" else api.SENT[item["kind"]]
        return self.cluster.create(resource, self.namespace, item, dry_run=True)

    @property
    def parts(self) -> list[ApiObject]:
        """Return what controllers make of the JobSet or Job: the Job of a JobSet, and the pod of node 0."""
        name = self.workload["metadata"]["name"]
        metadata = {**self.meta, "name": f"{pod_host(self.kind, name, 0)}-check", "namespace": self.namespace}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.pod}
        if self.kind == "job":
            return [pod]
        metadata = {"name": job_name(name), "namespace": self.namespace, "labels": self.meta["labels"]}
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_of(self.workload)}, pod]

    @cached_property
    def admitted_pod(self) -> Object:
        """The pod with what the namespace adds to it; as it was rendered where the cluster does not say."""
        try:
            spec: Object = self.try_out(self.parts[-1])["spec"]
        except api.ApiRefused:
            return self.pod
        return spec


def check_settings(settings: GkePlatformConfig, items: Sequence[ApiObject]) -> Iterator[Finding]:
    """Yield everything that cannot be, or is a risk, by what the config says alone."""
    fabric, node = settings.fabric, container_of(pod_of(workload_of(items)))
    yield from fabric.problems
    # A plug-in works with the daemon that it was released with; other pairs are somebody's own risk.
    known = {pair.plugin: pair.daemon for pair in fabric.known}
    if (chosen := fabric.pair) is not None and chosen.plugin not in known:
        what = f"platform.network_plugin={chosen.plugin} is no release that we know, so that nothing says what it needs"
        yield risk("network-release", what, f"the newest that we know is {next(iter(known))}")
    elif chosen is not None and chosen.daemon != (expected := known[chosen.plugin]):
        what = f"plug-in {chosen.plugin} expects the daemon {expected}, and platform.network_daemon={chosen.daemon}"
        yield risk("network-pair", what, "leave platform.network_daemon out")
    # Variables that name cards name cards that are there: `platform.overrides` may say others. Variables that are read
    # from the pod's fields have no value here.
    environment = {one["name"]: one.get("value", "") for one in node["env"]}
    there = json.loads(environment.get(NETWORK, "{}")).get("interfaces", ())
    for variable in fabric.named_interfaces:
        named = [name for name in environment.get(variable, "").split(",") if name]
        if there and (missing := [name for name in named if name not in there]):
            what = f"{variable} names {', '.join(missing)}, which the pod has not got"
            yield bad("interface-unknown", what, f"it has {', '.join(sorted(there))}")
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
    for name in environment:
        if name.startswith("PET_"):
            what = f"{name} is a flag of torchrun, which the node sets itself and takes away"
            yield risk("torchrun-variable", what, "leave it out")


# --- the network ------------------------------------------------------------------------------------------------------


def networks(survey: Survey) -> Iterator[Finding]:
    """Check the Network objects that the pods are attached to, and their parameters."""
    rows = json.loads(survey.annotations.get(INTERFACES, "[]"))
    found = {row["network"]: survey.get(api.NETWORKS, row["network"]) for row in rows if row["network"] != "default"}
    if lacking := [name for name, thing in found.items() if thing is None]:
        there = ", ".join(name for name in found if name not in lacking) or "none of them"
        what = f"the Network objects {', '.join(lacking)} are missing (there are {there})"
        fix = f"create them with their VPCs, or see that the cluster has multi-networking: {_NETWORKS}"
        yield bad("networks", what, fix)
    for name, thing in found.items():
        parameters = (((thing or {}).get("spec") or {}).get("parametersRef") or {}).get("name")
        if parameters and survey.get(api.NETWORK_PARAMETERS, parameters) is None:
            what = f"Network {name} names the GKENetworkParamSet {parameters}, which is not there"
            yield bad("networks", what, f"create it: {_NETWORKS}")
    if found and not lacking:
        yield good("networks", f"the networks {', '.join(found)}")


def attachments(survey: Survey) -> Iterator[Finding]:
    """Check that the NetworkAttachmentDefinitions are there that Multus attaches the pods to."""
    wanted = [one.partition("@")[0] for one in survey.annotations.get(MULTUS, "").split(",") if one]
    places = [(one.rpartition("/")[0] or survey.namespace, one.rpartition("/")[2]) for one in wanted]
    if lacking := [place for place in places if survey.cluster.get(api.ATTACHMENTS, *place) is None]:
        what = f"the NetworkAttachmentDefinitions {', '.join(map('/'.join, lacking))} are missing, or Multus is"
        fix = "name those of kubectl get network-attachment-definitions -A; a name alone is one of platform.namespace"
        yield bad("networks", what, fix)
    elif wanted:
        yield good("networks", f"the attachments {', '.join(wanted)}")


def daemon_sets(survey: Survey) -> Iterator[Finding]:
    """Check that the nodes have the plug-in that the pods' daemon and variables are made for."""
    network, installer, pair = survey.settings.network, survey.fabric.installer, survey.fabric.pair
    injected = any(key.startswith(DEVICES) for key in survey.annotations)
    if installer is None and not injected:
        return
    tags: dict[str, str] = {}
    used: dict[str, list[ApiObject]] = {"installer": [], "device-injector": []}
    for one in survey.cluster.list(api.DAEMON_SETS, None)[0]:
        pod = one["spec"]["template"]["spec"]
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            name, _, tag = container.get("image", "").partition("@")[0].rpartition(":")
            if installer is not None and name in installer.images:
                tags[one["metadata"]["name"]] = tag
                used["installer"].append(one)
            if injected and INJECTOR in container.get("image", ""):
                used["device-injector"].append(one)
    if installer is not None:
        wanted = pair.plugin if pair is not None else None
        if not tags:
            fix = f"kubectl apply -f {_raw(installer.manifest)}, or set platform.network_install=pod"
            yield bad("installer", f"no DaemonSet installs the plug-in of {network} on the nodes", fix)
        elif wanted not in tags.values():
            name, tag = next(iter(tags.items()))
            what = f"the nodes have {network} {tag} (DaemonSet {name}), and the job is made for {wanted}"
            yield bad("installer", what, f"set platform.network_plugin={tag}, or upgrade the DaemonSet")
        else:
            yield good("installer", f"the nodes have {network} {wanted}")
    if injected and not used["device-injector"]:
        what = "the DaemonSet device-injector is missing: pods would not get the GPUs' devices they ask for"
        yield bad("device-injector", what, f"kubectl apply -f {_raw(_INJECTOR_MANIFEST)}")
    for code, sets in used.items():
        for name, status in {one["metadata"]["name"]: one.get("status", {}) for one in sets}.items():
            ready, wished = status.get("numberReady", 0), status.get("desiredNumberScheduled", 0)
            if ready < wished:
                what = f"DaemonSet {name} is ready on {ready} of {wished} nodes"
                yield risk(code, what, "kubectl describe it; jobs on the other nodes fail their checks")


def _raw(address: str) -> str:
    return address.replace("github.com", "raw.githubusercontent.com").replace("/blob/", "/")
