"""What checks look at: a submission and its cluster; and the checks of what a config says, which need no cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Resource
from launcher.platforms.kubernetes.pods import NODE, job_name, pod_host
from launcher.platforms.kubernetes.render import WorkloadObjects
from launcher.platforms.kubernetes.settings import UID, GkePlatformConfig
from launcher.platforms.kubernetes.states import job_of
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NETWORK
from litgpt_demo.storage import is_remote


class Submitted:
    """The parts of a submission that checks look at."""

    def __init__(self, items: Sequence[dict[str, Any]], settings: GkePlatformConfig) -> None:
        self.items, self.settings, self.fabric = items, settings, settings.fabric
        self.workload = next(item for item in items if item["kind"] in {"JobSet", "Job"})
        self.job = job_of(self.workload)
        """The specification of the Indexed Job."""
        self.template: dict[str, Any] = self.job["template"]
        self.annotations: dict[str, str] = self.template["metadata"].get("annotations", {})
        self.pod: dict[str, Any] = self.template["spec"]
        self.node: dict[str, Any] = next(one for one in self.pod["containers"] if one["name"] == NODE)
        """The container that trains."""


class Survey(Submitted):
    """A question to the cluster: what is asked, and about what."""

    def __init__(self, cluster: Cluster, settings: GkePlatformConfig, items: Sequence[ApiObject]) -> None:
        super().__init__(items, settings)
        self.cluster, self.namespace = cluster, settings.namespace
        self.kind: WorkloadObjects = "jobset" if self.workload["kind"] == "JobSet" else "job"

    @cached_property
    def control_plane(self) -> str:
        return self.cluster.version()

    @property
    def version(self) -> tuple[int, int]:
        """The control plane's: v1.33.5-gke.1080000 is (1, 33)."""
        found = re.match(r"v?(\d+)\.(\d+)", self.control_plane)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def get(self, resource: Resource, name: str) -> ApiObject | None:
        return self.cluster.get(resource, self.namespace, name)

    def try_out(self, item: ApiObject) -> ApiObject:
        """Ask the cluster to judge an object without storing it (dryRun=All); returns what would be stored."""
        resource = api.PODS if item["kind"] == "Pod" else api.SENT[item["kind"]]
        return self.cluster.create(resource, self.namespace, item, dry_run=True)

    @property
    def parts(self) -> list[ApiObject]:
        """Return what controllers make of the JobSet or Job: the Job of a JobSet, and the pod of node 0."""
        name, meta = self.workload["metadata"]["name"], self.template["metadata"]
        metadata = {**meta, "name": f"{pod_host(self.kind, name, 0)}-check", "namespace": self.namespace}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.pod}
        if self.kind == "job":
            return [pod]
        metadata = {"name": job_name(name), "namespace": self.namespace, "labels": meta["labels"]}
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": self.job}, pod]

    @cached_property
    def admitted_pod(self) -> Mapping[str, Any]:
        """The pod with what the namespace adds to it; as it was rendered where the cluster does not say."""
        try:
            spec: Mapping[str, Any] = self.try_out(self.parts[-1])["spec"]
        except api.ApiRefused:
            return self.pod
        return spec


def check_settings(submitted: Submitted) -> Iterator[Finding]:
    """Yield everything that cannot be, or is a risk, by what the config says alone."""
    settings, fabric = submitted.settings, submitted.fabric
    yield from fabric.problems
    # A plug-in works with the daemon that it was released with; other pairs are somebody's own risk.
    if (chosen := fabric.pair) is not None:
        pairs = fabric.known
        known = {pair.plugin: pair.daemon for pair in pairs}
        if chosen.plugin not in known:
            what = f"platform.network_plugin={chosen.plugin} is no release that we know"
            what += ", so that nothing says what it needs"
            fix = f"the newest that we know is {pairs[0].plugin}"
            yield Finding("warning", "gke.network-release", what, fix)
        elif chosen.daemon != (expected := known[chosen.plugin]):
            what = f"plug-in {chosen.plugin} expects the daemon {expected}, and platform.network_daemon={chosen.daemon}"
            yield Finding("warning", "gke.network-pair", what, "leave platform.network_daemon out")
    # Variables that name cards name cards that are there: `platform.overrides` may say others. Variables that are read
    # from the pod's fields have no value here.
    environment = {one["name"]: one.get("value", "") for one in submitted.node["env"]}
    there = json.loads(environment.get(NETWORK, "{}")).get("interfaces", ())
    for variable in fabric.named_interfaces:
        named = [name for name in environment.get(variable, "").split(",") if name]
        if there and (missing := [name for name in named if name not in there]):
            what = f"{variable} names {', '.join(missing)}, which the pod has not got"
            yield Finding("error", "gke.interface-unknown", what, f"it has {', '.join(sorted(there))}")
    # Logs, checkpoints and datasets are in a place that outlives the pods and that all nodes see.
    claim = settings.claim_path.rstrip("/") if settings.claim else None
    for word, address in pairwise(submitted.node["command"]):
        if word not in {"--log-uri", "--stage", "--code"}:
            continue
        if not is_remote(address) and not (claim and f"{address}/".startswith(f"{claim}/")):
            what = f"{address} is a folder of the pod, which goes with it and which other nodes do not see"
            fix = "root: gs://bucket/prefix, or a folder in platform.claim_path with platform.claim"
            yield Finding("error", "gke.root-not-shared", what, fix)
    # What may be wished for, and does not end well.
    if settings.host_network and settings.service_account is not None:
        what = "pods on the host's network may get the node's identity instead of platform.service_account's"
        fix = "give the node pool's service account access to the root, or leave platform.host_network out"
        yield Finding("warning", "gke.host-network-identity", what, fix)
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: 30 s from the notice to the end.
    if settings.spot and settings.grace > 25:
        what = f"ranks are given {settings.grace} s to save, and Spot VMs are gone 30 s after their notice"
        yield Finding("warning", "gke.spot-grace", what, "set platform.grace to 25 or less")
    if settings.uid == 0 and not fabric.root:  # what a network needs is no choice
        what = "platform.uid=0: the training is root in its container, and so is any script and package that it loads"
        fix = f"leave platform.uid out, with an image whose files user {UID} can read"
        yield Finding("warning", "gke.root", what, fix)
    for name in environment:
        if name.startswith("PET_"):
            what = f"{name} is a flag of torchrun, which the node sets itself and takes away"
            yield Finding("warning", "gke.torchrun-variable", what, "leave it out")
