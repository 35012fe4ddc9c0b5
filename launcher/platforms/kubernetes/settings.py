"""The `platform` section of a config for Kubernetes, on GKE or anywhere else."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from launcher.machines import MACHINES, require_gpus
from launcher.networks import DEFAULT, InPods, PodSettings, chosen_network, require_fit
from launcher.networks.profile import Carrier, Network
from launcher.platforms.settings import ClusterSettings, PlatformSettings, only_recorded
from litgpt_demo.config import Count, PositiveCount, WholeSeconds, discriminator

if TYPE_CHECKING:
    from launcher.platforms.base import Platform

QUANTITY = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"

UID = 1000
"""The user of litgpt_demo/Dockerfile."""

SecretEntry = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[-._a-zA-Z0-9]+$")]


class KubernetesSettings(PodSettings, ClusterSettings):
    """The settings of every Kubernetes cluster."""

    opens: ClassVar[str] = "launcher.platforms.kubernetes.platform:KubernetesPlatform"

    namespace: str = Field("default", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    """Namespace of the job, which must exist."""
    workload: Literal["auto", "jobset", "job"] = "auto"
    """The kind of object: a JobSet, a plain Indexed Job with a Service, or, with `auto`, a JobSet if installed."""
    machine: str | None = None
    """Machine type (a3-highgpu-8g, g2-standard-48, …); empty: any node with the `gpus`, `cpus`, `memory` given here."""
    nodes: Count = Field(1, gt=0, le=4096)
    """The number of machines."""
    gpus: PositiveCount | None = None
    """GPUs per node, if `machine` is empty."""
    cpus: str | None = Field(None, pattern=r"^[0-9]+(\.[0-9]+)?m?$")
    """CPU cores that each pod requests (`32`, `500m`)."""
    memory: str | None = Field(None, pattern=QUANTITY)
    """Memory that each pod requests (`200Gi`)."""
    node_pool: str | None = None
    """Only nodes of this GKE node pool."""
    node_selector: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Only nodes with these labels."""
    exclude_nodes: tuple[str, ...] = ()
    """Never these nodes, by their kubernetes.io/hostname."""
    network: InPods = DEFAULT
    host_network: bool = False
    """Pods share the nodes' network namespace; with GPUDirect they are then privileged."""
    network_policy: bool = True
    """Pods accept connections only from the other pods of their attempt, by a NetworkPolicy."""
    allow_tcp_fallback: bool = False
    """Continue if NCCL uses plain sockets instead of the network; otherwise such a run stops."""
    queue: str | None = Field(None, pattern=OBJECT_NAME)
    """Kueue LocalQueue that admits the job."""
    priority: str | None = Field(None, pattern=OBJECT_NAME)
    """Kueue's WorkloadPriorityClass with a `queue`, otherwise the pods' PriorityClass."""
    topology: str | None = None
    """Keep the nodes together: block, subblock, host, or any label that is a level of Kueue's Topology."""
    topology_required: bool = False
    """Wait until the whole job fits into one such domain, rather than prefer it."""
    slice_nodes: PositiveCount | None = None
    """Number of nodes to place together in one subblock; A4X recipes take 16, of the 18 that share NVLink."""
    spot: bool = False
    """Spot VMs: cheap, and taken away at any time with a notice of 30 seconds."""
    flex_start: bool = False
    """Dynamic Workload Scheduler: wait until all machines can start together, for `flex_start_duration` of use."""
    flex_start_duration: WholeSeconds | None = Field(None, gt=0)
    """The time that flex-start machines are used, such as 48h or 172800 seconds."""
    reservation: str | None = None
    """Only machines of this Compute Engine reservation."""
    service_account: str | None = Field(None, pattern=OBJECT_NAME)
    """Kubernetes service account, bound to a Google one by Workload Identity that may read and write the root."""
    uid: Count = Field(UID, ge=0, lt=2**31)
    """User id of the training, and its group's; 0 is root, for images that cannot do without. Networks that need root
    have it anyway."""
    pvc: str | None = Field(None, pattern=OBJECT_NAME)
    """PersistentVolumeClaim that all nodes can write to, for a root that is a folder."""
    pvc_path: str = Field("/shared", pattern=r"^/")
    """The folder where the PersistentVolumeClaim is mounted, which contains the root."""
    secrets: dict[str, SecretEntry] = Field({}, json_schema_extra={"default": {}})
    """Environment variable to the entry of a Kubernetes secret that holds its value, `name/key`."""
    image_pull_secrets: tuple[Annotated[str, Field(pattern=OBJECT_NAME)], ...] = ()
    """Kubernetes secrets (kubernetes.io/dockerconfigjson) with the logins of private registries. Artifact Registry
    needs none: the nodes' service account pulls from it."""
    dataset_access: Literal["copy", "fuse"] = "copy"
    """The dataset is copied to each node and verified, or read from a mounted bucket (GCS FUSE) and not verified."""
    local_ssd: bool = False
    """Only nodes whose scratch space is local SSD."""
    shm: str | None = Field(None, pattern=QUANTITY)
    """Size of /dev/shm; empty is what the network profile's publishers use."""
    in_place_restarts: Count = Field(1, ge=0)
    """Restarts of the whole job in place after a fault or a preemption, by JobSet. Then a new attempt."""
    admission_timeout: WholeSeconds = Field(600, ge=0)
    """Seconds that the cluster may refuse a job's pods (a quota, a policy, an image) before the run ends with that."""
    ttl: WholeSeconds = Field(86_400, ge=0)
    """Seconds that an ended job is kept in the cluster."""

    @property
    def fabric(self) -> Network:
        return chosen_network(self, Carrier.PODS, host_network=self.host_network)

    @property
    def isolated(self) -> bool:
        """Return whether a NetworkPolicy keeps others out. It does not apply to pods on the host's network.

        https://kubernetes.io/docs/concepts/services-networking/network-policies/#networkpolicy-and-hostnetwork-pods
        """
        return self.network_policy and not self.host_network

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.machine is not None and self.machine not in MACHINES:
            near = difflib.get_close_matches(self.machine, MACHINES, n=3) or MACHINES
            what = f"platform.machine={self.machine!r} is not in the table of machines"
            fix = "For any other, leave it out and set platform.gpus (and platform.cpus, platform.memory)"
            raise ValueError(f"{what}; did you mean {' or '.join(near)}? {fix}")
        require_gpus(self.machine, gpus=self.gpus, processes=self.processes_per_node)
        if self.queue is None and (self.topology, self.slice_nodes) != (None, None):
            raise ValueError("platform.topology and platform.slice_nodes need Kueue; set platform.queue")
        if self.slice_nodes is not None and self.nodes % self.slice_nodes:
            raise ValueError(f"platform.nodes={self.nodes} is not a multiple of slice_nodes={self.slice_nodes}")
        if self.flex_start != (self.flex_start_duration is not None):
            raise ValueError("platform.flex_start=true needs platform.flex_start_duration, and the reverse; set both")
        if self.spot and self.flex_start:
            raise ValueError("platform.spot and platform.flex_start are two ways to buy a machine; keep one")
        if self.workload == "job" and self.in_place_restarts > 1:
            what = f"platform.in_place_restarts={self.in_place_restarts} needs a JobSet"
            raise ValueError(f"{what}, because a plain Job cannot restart as a whole; set platform.workload=jobset")
        if self.dataset_access == "fuse" and self.service_account is None:
            raise ValueError("platform.dataset_access=fuse mounts the bucket as platform.service_account; set it")
        return self

    _network_fits = model_validator(mode="after")(require_fit)


class KubernetesPlatformConfig(KubernetesSettings, title="Kubernetes"):
    """A Kubernetes cluster that a kubeconfig names, or the one that this runs in."""

    kind: Literal["kubernetes"] = discriminator("kubernetes")

    kubeconfig: str | None = None
    """Path of a kubeconfig; empty is $KUBECONFIG or ~/.kube/config."""
    context: str | None = None
    """The context of the kubeconfig; empty is its current one."""
    in_cluster: bool = False
    """Use the service account of the pod that this runs in."""

    @model_validator(mode="before")
    @classmethod
    def _is_not_on_gke(cls, section: Any) -> Any:
        if not isinstance(section, Mapping):
            return section
        google = ("cluster", "location", "project", "dns_endpoint")
        for name in google:
            if section.get(name):
                raise ValueError(f"platform.{name} belongs to a GKE cluster; set platform.kind=gke, or leave it out")
        return {name: value for name, value in section.items() if name not in google}

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.kubeconfig and self.in_cluster:
            what = "platform.kubeconfig and platform.in_cluster name different ways to a cluster"
            raise ValueError(f"{what}; keep one")
        return self


class GkePlatformConfig(KubernetesSettings, title="GKE"):
    """A cluster of Google Kubernetes Engine, with its GPU networks."""

    kind: Literal["gke"] = discriminator("gke")

    cluster: str
    """The name of the cluster."""
    location: str
    """Region or zone of the cluster."""
    project: str | None = None
    """Google Cloud project of the cluster; empty is the credentials' own."""
    dns_endpoint: bool = False
    """Reach the cluster by its DNS endpoint, which needs no network path to the control plane's address."""

    @model_validator(mode="before")
    @classmethod
    def _names_a_cluster(cls, section: Any) -> Any:
        if isinstance(section, Mapping) and not (section.get("cluster") and section.get("location")):
            what = "platform.kind=gke needs platform.cluster and platform.location"
            raise ValueError(f"{what}; set both, or set platform.kind=kubernetes for another cluster")
        return section

    def open_recorded(self, config: PlatformSettings | None) -> Platform:
        """Refuse to send Google's token to a cluster of a project that neither the user's config nor the environment
        names, because the owner of the cluster could use it."""
        own = config.project if isinstance(config, GkePlatformConfig) else None
        variable = "GOOGLE_CLOUD_PROJECT"
        if self.project and self.project not in {own, os.environ.get(variable)}:
            statement = f"the cluster {self.cluster} of the project {self.project} is yours"
            raise only_recorded(statement, variable=variable, value=self.project)
        return self.open()
