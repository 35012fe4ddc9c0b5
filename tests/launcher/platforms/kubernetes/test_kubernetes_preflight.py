"""What a cluster lacks is found before anything is created: all of it at once, with the fix; and what it has, too."""

from pathlib import Path
from typing import Any

import pytest
from google.cloud.container_v1.types import Cluster as GoogleCluster
from kubernetes_cluster import Cluster
from kubernetes_jobs import add_tcpx_networks, job, kubernetes

from launcher.networks import tcpx
from launcher.platforms.kubernetes.capacity import pools
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import FailureClass, Finding

H100 = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
TCPX: dict[str, Any] = {"machine": "a3-highgpu-8g", "network": "tcpx"}
RUNS = "gs://training/runs"


def found(cluster: Cluster, **settings: Any) -> dict[str, Finding]:
    """Findings by code, without the good news."""
    findings = findings_of(kubernetes(cluster, **settings))
    return {finding.code: finding for finding in findings if finding.severity != "info"}


def findings_of(platform: KubernetesPlatform) -> list[Finding]:
    settings = platform._settings
    return list(platform.check(platform.render(job(RUNS, processes=settings.processes_per_node, nodes=settings.nodes))))


def test_complete_cluster_passes_each_check(bare: Cluster) -> None:
    bare.add_nodes(2)
    bare.add_queue("research")
    findings = findings_of(kubernetes(bare, queue="research"))
    assert {finding.code for finding in findings if finding.severity == "info"} >= {
        "kubernetes.version", "kubernetes.permission", "kubernetes.namespace", "kubernetes.jobset",
        "kubernetes.queue", "kubernetes.machines",
    }  # fmt: skip
    assert found(bare, queue="research") == {}


def test_missing_namespace_hides_the_findings_that_follow(bare: Cluster) -> None:
    bare.allow([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list"]}])  # and nothing in that namespace
    news = found(bare, namespace="nowhere", service_account="trainer", queue="reserch", topology="block")
    assert list(news) == ["kubernetes.namespace", "kubernetes.topology", "kubernetes.machines"]


@pytest.mark.parametrize(
    ("code", "settings", "fix"),
    [
        ("service-account", {"service_account": "me"}, "kubectl create serviceaccount"),
        ("queue", {"queue": "reserch"}, "kubectl get localqueues"),
        ("priority", {"priority": "high"}, "fix platform.priority"),
        ("secret", {"secrets": {"HF_TOKEN": "hub/token"}}, "kubectl create secret generic hub"),
        ("pull-secret", {"image_pull_secrets": ("login",)}, "kubectl create secret docker-registry login"),
        ("pvc", {"pvc": "shared"}, "fix platform.pvc"),
    ],
)
def test_missing_object_of_a_setting_is_named(bare: Cluster, code: str, settings: dict[str, Any], fix: str) -> None:
    bare.add_nodes(2)
    (news,) = found(bare, **settings).values()
    assert (news.code, news.severity, fix in news.fix) == (f"kubernetes.{code}", "error", True)


# --- what the namespace lets in ---------------------------------------------------------------------------------------


def test_quota_below_the_need_of_all_pods_is_an_error(bare: Cluster) -> None:
    bare.add_nodes(2)
    bare.apply("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}})
    (news,) = found(bare).values()
    assert (news.code, news.severity) == ("kubernetes.quota", "error")
    assert news.what == "quota small allows 1 of pods, but the job needs 2"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ('violates PodSecurity "restricted:latest": runAsUser=0', "kubernetes.pod-security"),
        ("maximum cpu usage per Container is 4, but limit is 32", "kubernetes.limits"),
    ],
)
def test_refusal_of_a_dry_run_is_a_finding_with_its_fix(bare: Cluster, reason: str, code: str) -> None:
    bare.add_nodes(2)
    bare.answer(403, verb="create", resource="pods", message=f'pods "demo-1-000000" is forbidden: {reason}')
    (news,) = found(bare).values()
    assert (news.code, news.severity) == (code, "error")
    assert reason.rpartition(": ")[2] in news.what
    assert news.fix


# --- networks and machines --------------------------------------------------------------------------------------------


def test_missing_networks_and_a_wrong_plugin_are_named(
    bare: Cluster,
) -> None:
    """The findings also name the existing ones."""
    add_tcpx_networks(bare)
    for name in ("vpc2", "vpc4"):
        bare.remove("networks", name)
    labels = {"k8s-app": "nccl-tcpx-installer"}
    pod = {"initContainers": [{"name": "installer", "image": f"{tcpx.PLUGIN_IMAGE}:v3.1.9"}], "containers": []}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}
    bare.apply("daemonsets", {"metadata": {"name": "nccl-tcpx-installer"}, "spec": spec})
    news = found(bare, **TCPX)
    assert news["kubernetes.networks"].what == "the Network objects vpc2, vpc4 are missing (there are vpc1, vpc3)"
    assert "the nodes have tcpx v3.1.9 (DaemonSet nccl-tcpx-installer)" in news["kubernetes.installer"].what
    assert "set platform.network_plugin=v3.1.9" in news["kubernetes.installer"].fix
    assert news["kubernetes.installer"].severity == "error"


def test_too_few_machines_are_reported_with_the_unfit_ones(bare: Cluster) -> None:
    bare.add_nodes(1, gpus=8, labels=H100)
    bare.add_nodes(1, gpus=4, labels=H100)
    bare.add_nodes(1, gpus=8, labels=H100, taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}])
    bare.add_nodes(1)
    news = found(bare, machine="a3-highgpu-8g", nodes=3)["kubernetes.machines"]
    assert news.severity == "error"
    assert "1 machines fit, but the job needs 3" in news.what
    for why in ("with 4 GPUs of 8", "with the taint team=x", "without the label cloud.google.com/gke-accelerator"):
        assert f"1 {why}" in news.what


def test_pool_of_too_small_machines_is_an_error(bare: Cluster) -> None:
    bare.add_nodes(2, labels={"cloud.google.com/gke-nodepool": "small"}, cpu=8)
    assert found(bare, node_pool="small", nodes=3)["kubernetes.machines"].severity == "warning"
    news = found(bare, node_pool="small", cpus="9000")["kubernetes.machines"]
    assert (news.severity, "2 with 8 CPUs of 9000" in news.what) == ("error", True)


def pool(name: str, machine: str = "a3-highgpu-8g", **more: Any) -> dict[str, Any]:
    return {"name": name, "config": {"machine_type": machine}, "locations": ["a", "b"], **more}


GROWING = pool("gpu", autoscaling={"enabled": True, "max_node_count": 2})


@pytest.mark.parametrize(
    ("described", "nodes", "code", "what"),
    [
        ({"node_pools": [pool("small", "e2-standard-4")]}, 2, "kubernetes.pools", "there are small of e2-standard-4"),
        (
            {"node_pools": [pool("gpu", initial_node_count=1)]},
            3,
            "kubernetes.pools",
            "cannot give them (gpu: 2 at most)",
        ),
        ({"node_pools": [GROWING]}, 5, "kubernetes.pools", "cannot give them (gpu: 4 at most)"),
        ({"node_pools": [GROWING]}, 4, "kubernetes.machines", "can grow to it (gpu: 4 at most)"),
        ({"autopilot": {"enabled": True}}, 4, "kubernetes.machines", "GKE creates the others"),
    ],
)
def test_node_pools_are_checked_for_their_largest_size(
    described: dict[str, Any], nodes: int, code: str, what: str
) -> None:
    settings = GkePlatformConfig(kind="gke", cluster="c", location="l", machine="a3-highgpu-8g", nodes=nodes)
    (news,) = pools(GoogleCluster(described), settings, "too few machines are there")
    assert news.code == code
    assert what in news.what


def test_too_old_jobset_is_named_with_the_needed_version(bare: Cluster) -> None:
    bare.add_nodes(2)
    unknown = 'strict decoding error: unknown field "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"'
    bare.answer(400, verb="create", resource="jobsets", message=unknown)
    assert "older than 0.10" in found(bare)["kubernetes.jobset"].what


def test_unreachable_cluster_is_one_finding(cluster: Cluster, tmp_path: Path) -> None:
    (away := tmp_path / "away").write_text(cluster.kubeconfig.read_text().replace(cluster.host, "http://127.0.0.1:1"))
    for path, severity, fault in (
        (tmp_path / "nowhere", "error", FailureClass.USER),
        (away, "unknown", FailureClass.UNREACHABLE),
    ):
        (news,) = found(cluster, kubeconfig=str(path)).values()
        assert (news.code, news.severity, news.fault) == ("kubernetes.cluster", severity, fault)
