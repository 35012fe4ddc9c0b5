"""Jobs on a test's cluster, through the platform as a run uses it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kubernetes_cluster import Cluster
from waiting import until

from launcher.job import Job, JobId, JobState, JobStatus
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from launcher.platforms.kubernetes.settings import KubernetesPlatformConfig

T = TypeVar("T")
IMAGE = "127.0.0.1:1/litgpt/train@sha256:" + 64 * "1"
"""In a registry that says at once that it is not there."""


def kubernetes(cluster: Cluster, *, removal: float = 60.0, **settings: Any) -> KubernetesPlatform:
    """The platform, by the cluster's kubeconfig."""
    settings = {
        "kind": "kubernetes",
        "kubeconfig": str(cluster.kubeconfig),
        "nodes": 2,
        "grace_period": 1,
        "network_test": 0,
    } | settings
    return KubernetesPlatform(KubernetesPlatformConfig.model_validate(settings), removal=removal)


def job(folder: Path | str, name: str = "demo", **changes: Any) -> Job:
    directory = f"{folder}/{name}"
    made = Job(name=name, attempt=1, nodes=2, processes=1, program=("train.py",), directory=directory, image=IMAGE)
    return replace(made, **changes)


def started(cluster: Cluster, platform: KubernetesPlatform, job: Job) -> JobId:
    """Submitted, watched, and running on all nodes."""
    job_id = platform.submit(platform.render(job))
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    return job_id


def begun(cluster: Cluster, folder: Path, **settings: Any) -> tuple[KubernetesPlatform, JobId]:
    """A platform with these settings, and a job that runs on it."""
    platform = kubernetes(cluster, **settings)
    return platform, started(cluster, platform, job(folder))


def end_of(platform: KubernetesPlatform, job_id: JobId) -> JobStatus:
    until(lambda: not platform.status(job_id).state.is_live)
    return platform.status(job_id)


def add_tcpx_networks(cluster: Cluster) -> None:
    """The networks of an A3 High's four additional interfaces, as GKE has them."""
    for name in ("vpc1", "vpc2", "vpc3", "vpc4"):
        reference = {"group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": name}
        spec = {"type": "Device", "parametersRef": reference}
        cluster.apply("networks", {"metadata": {"name": name}, "spec": spec})
        cluster.apply("gkenetworkparamsets", {"metadata": {"name": name}, "spec": {"vpc": "v"}})
