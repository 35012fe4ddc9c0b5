"""What a cluster lacks is found before anything is created: all of it at once, with the fix; and what it has, too."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gke_jobs import IMAGE, gke, job
from google.cloud.container_v1.types import Cluster as GoogleCluster
from kubernetes_cluster import Cluster, running_cluster

from launcher.errors import ConfigProblem
from launcher.networks import tcpx
from launcher.platforms.kubernetes.machines import pools
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.findings import Finding

H100 = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
TCPX: dict[str, Any] = {"machine": "a3-highgpu-8g", "network": "tcpx"}
RUNS = "gs://training/runs"
SAYS_NOTHING = {"gke.image"}
"""No test's image is in a registry."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=0, kueue=True) as made:
        yield made


def found(cluster: Cluster, name: str = "demo", **settings: Any) -> dict[str, Finding]:
    """Findings by code, the good news left out, and those of the image."""
    platform = gke(cluster, **settings)
    asked = job(RUNS, name, processes=platform._settings.processes, nodes=platform._settings.nodes)
    news = platform.check(platform.render(asked))
    return {one.code: one for one in news if one.severity != "info" and one.code not in SAYS_NOTHING}


def for_tcpx(cluster: Cluster, *, plugin: str = tcpx.PAIRS[0].plugin, nodes: int = 2) -> None:
    """All that A3 High needs."""
    cluster.add_nodes(nodes, gpus=8, machine="a3-highgpu-8g", labels=H100)
    for number in range(1, 5):
        reference = {"group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": f"vpc{number}"}
        cluster.apply("networks", {
            "metadata": {"name": f"vpc{number}"}, "spec": {"type": "Device", "parametersRef": reference},
        })  # fmt: skip
        cluster.apply("gkenetworkparamsets", {"metadata": {"name": f"vpc{number}"}, "spec": {"vpc": "v"}})
    daemon_set(cluster, "nccl-tcpx-installer", f"{tcpx.PLUGIN_IMAGE}:{plugin}")
    daemon_set(cluster, "device-injector", "gcr.io/gke-release/nri-device-injector@sha256:" + 64 * "6")


def daemon_set(cluster: Cluster, name: str, image: str, *, ready: int = 2) -> None:
    labels = {"k8s-app": name}
    pause = {"name": "pause", "image": "gke.gcr.io/pause:3.8"}
    pod = {"initContainers": [{"name": "installer", "image": image}], "containers": [pause]}
    cluster.apply("daemonsets", {
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
        "status": {"numberReady": ready, "desiredNumberScheduled": 2, "currentNumberScheduled": 2,
                   "numberMisscheduled": 0},
    })  # fmt: skip


def test_a_cluster_that_has_everything_is_found_good_and_says_so(cluster: Cluster) -> None:
    for_tcpx(cluster)
    cluster.add_queue("research")
    platform = gke(cluster, queue="research", **TCPX)
    news = [one for one in platform.check(platform.render(job(RUNS, processes=8))) if one.code != "gke.image"]
    assert [str(one) for one in news if one.severity != "info"] == []
    assert {one.code for one in news} >= {
        "gke.version", "gke.permissions", "gke.namespace", "gke.jobset", "gke.queue", "gke.networks", "gke.installer",
        "gke.machines",
    }  # fmt: skip


def test_a_missing_namespace_is_the_first_finding_and_what_follows_from_it_is_not_told(cluster: Cluster) -> None:
    cluster.allow([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list"]}])  # and nothing in that namespace
    settings: dict[str, Any] = {
        "service_account": "trainer",
        "queue": "reserch",
        "claim": "shared",
        "topology": "block",
    }
    platform = gke(cluster, namespace="nowhere", **settings)
    news = [one for one in platform.check(platform.render(job(RUNS))) if one.severity != "info"]
    assert news[0].what.startswith("there is no namespace nowhere")
    assert {one.code for one in news} - SAYS_NOTHING == {"gke.namespace", "gke.topology", "gke.machines"}
    with pytest.raises(ConfigProblem, match="kubectl create namespace nowhere"):
        platform.check_access()


MISSING: Mapping[str, tuple[dict[str, Any], str, str]] = {
    "namespace": ({"namespace": "nowhere"}, "there is no namespace nowhere", "kubectl create namespace nowhere"),
    "service-account": ({"service_account": "me"}, "there is no service account me", "kubectl create serviceaccount"),
    "queue": ({"queue": "reserch"}, "no LocalQueue reserch in namespace default", "kubectl get localqueues"),
    "priority": ({"priority": "high"}, "there is no PriorityClass high", "fix platform.priority"),
    "secret": ({"secrets": {"HF_TOKEN": "hub/token"}}, "there is no Secret hub", "kubectl create secret generic hub"),
    "claim": ({"claim": "shared"}, "there is no PersistentVolumeClaim shared", "fix platform.claim"),
}


@pytest.mark.parametrize("code", MISSING)
def test_what_the_job_refers_to_and_is_not_there_is_named(cluster: Cluster, code: str) -> None:
    cluster.add_nodes(2)
    settings, what, fix = MISSING[code]
    told = found(cluster, **settings)
    assert set(told) == {f"gke.{code}"}
    assert what in told[f"gke.{code}"].what
    assert fix in told[f"gke.{code}"].fix


def login(name: str, kind: str = "kubernetes.io/dockerconfigjson") -> dict[str, Any]:
    entry = ".dockerconfigjson" if kind.endswith("json") else "token"
    config = json.dumps({"auths": {IMAGE.partition("/")[0]: {"auth": "YTpi"}}}).encode()
    return {"metadata": {"name": name}, "type": kind, "data": {entry: base64.b64encode(config).decode()}}


def test_a_pull_secret_has_to_be_there_and_to_be_a_login(cluster: Cluster) -> None:
    """Pods are created without it all the same, and wait for their image on machines that are paid for."""
    cluster.add_nodes(2)
    cluster.apply("secrets", login("good"))
    cluster.apply("secrets", login("token", "Opaque"))
    assert found(cluster, image_pull_secrets=("good",)) == {}
    missing = found(cluster, image_pull_secrets=("good", "nowhere"))["gke.pull-secret"]
    assert "there is no Secret nowhere in namespace default" in missing.what
    assert "kubectl create secret docker-registry nowhere --namespace default" in missing.fix
    wrong = found(cluster, image_pull_secrets=("token",))["gke.pull-secret"]
    assert "Secret token is of type Opaque" in wrong.what
    assert wrong.severity == missing.severity == "error"


# --- what the namespace lets in ---------------------------------------------------------------------------------------


def test_a_quota_that_can_never_hold_all_pods(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    cluster.apply("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}})
    told = found(cluster)
    assert {code: one.severity for code, one in told.items()} == {"gke.quota": "error"}
    assert told["gke.quota"].what == "quota small allows 1 of pods, and the job asks for 2"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ('violates PodSecurity "restricted:latest": runAsUser=0', "gke.pod-security"),
        ("maximum cpu usage per Container is 4, but limit is 32", "gke.limits"),
    ],
)
def test_what_admission_says_to_a_pod_that_is_only_tried_out_is_told_with_its_fix(
    cluster: Cluster, words: str, code: str
) -> None:
    cluster.add_nodes(2)
    cluster.answer(403, verb="create", resource="pods", message=f'pods "demo-1" is forbidden: {words}')
    told = found(cluster)
    assert {code: one.severity for code, one in told.items()} == {code: "error"}
    assert words.rpartition(": ")[2] in told[code].what
    assert told[code].fix


# --- networks ---------------------------------------------------------------------------------------------------------


def test_networks_that_are_missing_are_named_beside_those_there_are(cluster: Cluster) -> None:
    for_tcpx(cluster)
    for name in ("vpc2", "vpc4"):
        cluster.remove("networks", name)
    told = found(cluster, **TCPX)
    assert told["gke.networks"].what == "the Network objects vpc2, vpc4 are missing (there are vpc1, vpc3)"


def test_a_plug_in_on_the_nodes_that_is_not_the_jobs(cluster: Cluster) -> None:
    for_tcpx(cluster, plugin="v3.1.9")
    told = found(cluster, **TCPX)
    assert told["gke.installer"].severity == "error"
    assert "the nodes have tcpx v3.1.9 (DaemonSet nccl-tcpx-installer)" in told["gke.installer"].what
    assert "set platform.network_plugin=v3.1.9" in told["gke.installer"].fix
    assert "gke.installer" not in found(cluster, network_plugin="v3.1.9", **TCPX)


# --- machines ---------------------------------------------------------------------------------------------------------


def test_too_few_machines_are_told_with_what_is_wrong_with_the_others(cluster: Cluster) -> None:
    cluster.add_nodes(1, gpus=8, labels=H100)
    cluster.add_nodes(1, gpus=4, labels=H100)
    cluster.add_nodes(1, gpus=8, labels=H100, taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}])
    cluster.add_nodes(1)
    told = found(cluster, machine="a3-highgpu-8g", nodes=3)["gke.machines"]
    assert told.severity == "error"
    assert "only 1 of 3 machines are there" in told.what
    for why in ("with 4 GPUs of 8", "with the taint team=x", "without the label cloud.google.com/gke-accelerator"):
        assert f"1 {why}" in told.what


def pool(name: str, machine: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "config": {"machine_type": machine}, "locations": ["a", "b"], **more}


@pytest.mark.parametrize(
    ("described", "code", "what"),
    [
        ({"node_pools": [pool("small", "e2-standard-4")]}, "gke.pools", "there are small of e2-standard-4"),
        (
            {"node_pools": [pool("gpu", "a3-highgpu-8g", initial_node_count=1)]},
            "gke.pools", "cannot give them (gpu: 2 at most)",
        ),
        (
            {"node_pools": [
                pool("gpu", "a3-highgpu-8g", autoscaling={"enabled": True, "max_node_count": 2}),
                pool("more", "a3-highgpu-8g", autoscaling={"enabled": True, "total_max_node_count": 3}),
            ]},
            "gke.pools", "gpu: 4 at most, more: 3 at most",
        ),
        (
            {"node_pools": [pool("gpu", "a3-highgpu-8g", autoscaling={"enabled": True, "max_node_count": 4})]},
            "gke.machines", "can grow to it (gpu: 8 at most)",
        ),
        ({"autopilot": {"enabled": True}}, "gke.machines", "GKE makes the others"),
    ],
)  # fmt: skip
def test_node_pools_can_give_so_many_machines_and_no_more(described: dict[str, Any], code: str, what: str) -> None:
    settings = GkePlatformConfig(kind="gke", cluster="c", location="l", machine="a3-highgpu-8g", nodes=8)
    (told,) = pools(GoogleCluster(described), settings, "only 0 of 8 machines are there")
    assert told.code == code
    assert what in told.what


# --- the cluster ------------------------------------------------------------------------------------------------------


def test_a_jobset_that_is_too_old_to_tell_failures_apart(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    unknown = 'strict decoding error: unknown field "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"'
    cluster.answer(400, verb="create", resource="jobsets", message=unknown)
    assert "older than 0.10" in found(cluster)["gke.jobset"].what


def test_what_the_cluster_would_refuse_is_told_in_its_words(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    platform = gke(cluster)
    submission = platform.render(job(RUNS))
    spec = submission.body["items"][-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    spec["volumes"].append({"name": "scratch", "emptyDir": {}})
    told = [one for one in platform.check(submission) if one.code == "gke.refused"]
    assert len(told) == 1
    assert 'Duplicate value: "scratch"' in told[0].what
    assert cluster.objects("jobsets") == []


def test_a_cluster_that_cannot_be_reached_is_one_finding(tmp_path: Path) -> None:
    platform = GkePlatform(GkePlatformConfig(kind="gke", kubeconfig=str(tmp_path / "nowhere"), nodes=2))
    told = list(platform.check(platform.render(job(RUNS))))
    assert [one.code for one in told if one.severity == "error"] == ["gke.cluster"]
