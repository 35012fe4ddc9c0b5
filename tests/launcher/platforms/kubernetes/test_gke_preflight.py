"""What a cluster lacks is found before anything is created: all of it at once, with the fix; and what it has, too."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gke_jobs import IMAGE, gke, job, started
from google.cloud.container_v1.types import Cluster as GoogleCluster
from kubernetes_cluster import Cluster, podsecurity, running_cluster
from waiting import until

from launcher.errors import ConfigProblem
from launcher.networks import tcpx
from launcher.platforms.kubernetes import cluster as cluster_module
from launcher.platforms.kubernetes.cluster import SECRETS
from launcher.platforms.kubernetes.machines import pools
from launcher.platforms.kubernetes.namespaces import forbidden
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.preflight import multi_networked, numbers
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.findings import Finding

H100 = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
TCPX: dict[str, Any] = {"machine": "a3-highgpu-8g", "network": "tcpx"}
ROCE: dict[str, Any] = {"network": "roce", "gpus": 8, "roce_network": "rails/a@rail0,b", "roce_resource": "rdma/shared"}
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
    cluster.add_queue("research", quota={"nvidia.com/gpu": 16})
    platform = gke(cluster, queue="research", **TCPX)
    news = [one for one in platform.check(platform.render(job(RUNS, processes=8))) if one.code != "gke.image"]
    assert [str(one) for one in news if one.severity != "info"] == []
    assert {one.code for one in news} >= {
        "gke.version", "gke.permissions", "gke.namespace", "gke.jobset", "gke.queue", "gke.networks", "gke.installer",
        "gke.machines",
    }  # fmt: skip


def test_everything_that_is_wrong_is_told_at_once_and_nothing_is_created(cluster: Cluster) -> None:
    wrong = {
        "service_account": "trainer", "queue": "reserch", "priority": "high",
        "topology": "block", "claim": "shared", **TCPX,
    }  # fmt: skip
    told = found(cluster, **wrong)
    assert set(told) >= {
        "gke.service-account", "gke.queue", "gke.priority", "gke.topology", "gke.claim",
        "gke.networks", "gke.installer", "gke.device-injector", "gke.machines",
    }  # fmt: skip
    assert all(one.fix for one in told.values())
    assert cluster.objects("jobsets") == cluster.objects("services") == []


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


def test_the_values_of_a_pull_secret_stay_in_the_cluster(cluster: Cluster) -> None:
    cluster.apply("secrets", login("good"))
    assert gke(cluster).cluster.secret_type("default", "good") == "kubernetes.io/dockerconfigjson"
    assert gke(cluster).cluster.secret_type("default", "nowhere") is None
    told = gke(cluster).cluster.ask("GET", SECRETS.path("default", "good"), accept=cluster_module._TABLE)
    assert "YTpi" not in json.dumps(told)


def test_a_claim_that_one_node_alone_can_write_to(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}
    cluster.apply("persistentvolumeclaims", {"metadata": {"name": "shared"}, "spec": spec})
    assert "ReadWriteOnce, and 2 nodes write to it" in found(cluster, claim="shared")["gke.claim"].what


def test_a_queue_that_covers_no_gpus(cluster: Cluster) -> None:
    cluster.add_nodes(2, gpus=8, labels=H100)
    cluster.add_queue("research", quota={"cpu": 16})
    told = found(cluster, queue="research", machine="a3-highgpu-8g")
    assert "covers cpu, and not nvidia.com/gpu" in told["gke.queue"].what


def test_a_topology_level_that_kueue_does_not_know(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    cluster.add_queue("research", quota={"cpu": 16})
    levels = {"levels": [{"nodeLabel": "cloud.google.com/gce-topology-block"}]}
    cluster.apply("topologies", {"metadata": {"name": "gke"}, "spec": levels})
    assert "gke.topology" not in found(cluster, queue="research", topology="block")
    told = found(cluster, queue="research", topology="rack")
    assert "there are cloud.google.com/gce-topology-block" in told["gke.topology"].what


# --- what the namespace lets in ---------------------------------------------------------------------------------------


def quota(cluster: Cluster, **hard: str) -> None:
    named = {name.replace("_", "."): value for name, value in hard.items()}
    cluster.apply("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": named}})


def test_a_quota_that_can_never_hold_all_pods(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    quota(cluster, pods="1")
    told = found(cluster)
    assert {code: one.severity for code, one in told.items()} == {"gke.quota": "error"}
    assert told["gke.quota"].what == "quota small allows 1 of pods, and the job asks for 2"


def test_a_quota_on_cpu_counts_all_nodes(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    quota(cluster, requests_cpu="12")
    assert found(cluster, cpus="6") == {}
    told = found(cluster, cpus="8")["gke.quota"]
    assert (told.severity, told.what) == (
        "error", "quota small allows 12 of requests.cpu, and the job asks for 16",
    )  # fmt: skip


def test_a_quota_that_others_use_is_worth_waiting_for(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(4)
    quota(cluster, pods="3")
    started(cluster, gke(cluster), job(tmp_path, "other"))
    told = until(lambda: found(cluster).get("gke.quota"))
    assert (told.severity, "of which 1 is free now" in told.what) == ("warning", True)


def test_a_quota_that_counts_what_the_pods_do_not_state(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    quota(cluster, requests_memory="1Ti")
    assert "must specify" not in (told := found(cluster)["gke.quota"]).what
    assert (told.severity, "requests.memory for: node" in told.what) == ("error", True)
    assert "set platform.cpus and platform.memory" in told.fix


def limit_range(cluster: Cluster, **rule: Any) -> None:
    spec = {"limits": [{"type": "Container", **rule}]}
    cluster.apply("limitranges", {"metadata": {"name": "sizes"}, "spec": spec})


def test_a_limit_range_that_allows_no_such_container(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    limit_range(cluster, max={"cpu": "4"})
    told = found(cluster, cpus="32")
    assert {code: one.severity for code, one in told.items()} == {"gke.limits": "error"}
    assert told["gke.limits"].what == "LimitRange sizes allows at most 4 of cpu, and container node asks for 32"
    assert "platform.cpus" in told["gke.limits"].fix


def test_a_limit_that_is_given_to_every_container_is_told(cluster: Cluster) -> None:
    """A training that knows nothing of it is killed for memory."""
    cluster.add_nodes(2)
    limit_range(cluster, default={"memory": "512Mi"})
    told = found(cluster)["gke.limits"]
    assert (told.severity, "limits every node to memory=512Mi" in told.what) == ("warning", True)


def enforce(cluster: Cluster, level: str, mode: str = "enforce") -> None:
    space = next(one for one in cluster.objects("namespaces") if one["metadata"]["name"] == "default")
    labels = {f"pod-security.kubernetes.io/{mode}": level}
    cluster.call(lambda: cluster.store.change("namespaces", space, lambda one: one["metadata"].update(labels=labels)))


@pytest.mark.parametrize(
    ("level", "settings", "why"),
    [
        ("restricted", {"uid": 0}, "runAsUser=0"),
        ("restricted", ROCE, "unrestricted capabilities"),
        ("baseline", ROCE, "non-default capabilities"),
        ("baseline", {"host_network": True}, "host namespaces (hostNetwork=true)"),
        ("baseline", TCPX, "hostPath volumes"),
    ],
)
def test_pod_security_that_forbids_the_pods_is_found_and_its_words_are_told(
    cluster: Cluster, level: str, settings: dict[str, Any], why: str
) -> None:
    cluster.add_nodes(2)
    enforce(cluster, level)
    told = found(cluster, **settings)["gke.pod-security"]
    assert told.severity == "error"
    assert why in told.what
    assert "pod-security.kubernetes.io/enforce" in told.fix


@pytest.mark.parametrize("level", ["baseline", "restricted"])
@pytest.mark.parametrize("mode", ["enforce", "warn"])
def test_plain_pods_keep_to_every_level(cluster: Cluster, level: str, mode: str) -> None:
    cluster.add_nodes(2)
    enforce(cluster, level, mode)
    assert found(cluster) == {}


def test_a_level_that_a_namespace_warns_of_is_told_and_stops_nothing(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    enforce(cluster, "restricted", "warn")
    told = found(cluster, uid=0)
    assert {code: one.severity for code, one in told.items()} == {"gke.root": "warning", "gke.pod-security": "warning"}
    assert "warns of pods below the Pod Security level restricted" in told["gke.pod-security"].what
    assert "containers run as root" in told["gke.pod-security"].what


PODS = [{}, {"uid": 0}, {"host_network": True}, TCPX, {**TCPX, "host_network": True}, ROCE, {"claim": "shared"}]


@pytest.mark.parametrize("level", ["baseline", "restricted"])
@pytest.mark.parametrize("settings", PODS, ids=str)
def test_what_is_read_beforehand_agrees_with_the_admission_of_kubernetes(level: str, settings: dict[str, Any]) -> None:
    given = GkePlatformConfig.model_validate({"kind": "gke", "workload": "job", **settings})
    submission = GkePlatform(given).render(job(RUNS, processes=given.processes))
    pod = submission.body["items"][-1]["spec"]["template"]["spec"]
    labels = {"pod-security.kubernetes.io/enforce": level}
    namespace = {"metadata": {"name": "default", "labels": labels}}
    assert bool(list(forbidden(namespace, pod))) == bool(podsecurity.violations(level, pod))


def test_whoever_may_not_try_out_a_pod_learns_the_same_from_what_may_be_read(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    enforce(cluster, "restricted")
    limit_range(cluster, max={"cpu": "4"})
    quota(cluster, pods="1")
    cluster.allow([
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch", "delete", "deletecollection"]},
        {"apiGroups": ["*"], "resources": ["jobsets", "services", "networkpolicies"], "verbs": ["create"]},
    ])  # fmt: skip
    told = found(cluster, cpus="32", uid=0)
    assert set(told) == {"gke.quota", "gke.limits", "gke.pod-security", "gke.unseen", "gke.root"}
    assert told["gke.limits"].what == ("LimitRange sizes allows at most 4 of cpu, and container node asks for 32")
    assert "kubectl label --overwrite namespace default" in told["gke.pod-security"].fix
    assert "cannot create resource" in told["gke.unseen"].what


def test_of_a_secret_only_its_name_is_asked_for(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    cluster.apply("secrets", {"metadata": {"name": "hub"}, "data": {"token": "aGY="}})
    assert found(cluster, secrets={"HF_TOKEN": "hub/token"}) == {}


# --- networks ---------------------------------------------------------------------------------------------------------


def test_networks_that_are_missing_are_named_beside_those_there_are(cluster: Cluster) -> None:
    for_tcpx(cluster)
    for name in ("vpc2", "vpc4"):
        thing = next(one for one in cluster.objects("networks") if one["metadata"]["name"] == name)
        cluster.call(lambda thing=thing: cluster.store.remove("networks", thing))
    told = found(cluster, **TCPX)
    assert told["gke.networks"].what == "the Network objects vpc2, vpc4 are missing (there are vpc1, vpc3)"


def test_a_network_without_its_parameters(cluster: Cluster) -> None:
    for_tcpx(cluster)
    thing = cluster.objects("gkenetworkparamsets")[0]
    cluster.call(lambda: cluster.store.remove("gkenetworkparamsets", thing))
    told = found(cluster, **TCPX)
    assert "names the GKENetworkParamSet vpc1, which is not there" in told["gke.networks"].what


def test_attachments_of_multus_are_looked_for_in_their_namespaces(cluster: Cluster) -> None:
    cluster.add_nodes(2, gpus=8, extended={"rdma/shared": "63"})
    told = found(cluster, **ROCE)["gke.networks"]
    assert (told.severity, "rails/a, default/b are missing" in told.what) == ("error", True)
    cluster.apply("namespaces", {"metadata": {"name": "rails"}})
    for namespace, name in (("rails", "a"), ("default", "b")):
        metadata = {"namespace": namespace, "name": name}
        cluster.apply("network-attachment-definitions", {"metadata": metadata, "spec": {}})
    assert found(cluster, **ROCE) == {}


def test_machines_without_the_rdma_cards_that_pods_ask_for(cluster: Cluster) -> None:
    cluster.add_nodes(2, gpus=8)
    told = found(cluster, host_network=True, **{**ROCE, "roce_network": None})["gke.machines"]
    assert (told.severity, "with 0 rdma/shared of 1" in told.what) == ("error", True)


def test_a_plug_in_on_the_nodes_that_is_not_the_jobs(cluster: Cluster) -> None:
    for_tcpx(cluster, plugin="v3.1.9")
    told = found(cluster, **TCPX)
    assert told["gke.installer"].severity == "error"
    assert "the nodes have tcpx v3.1.9 (DaemonSet nccl-tcpx-installer)" in told["gke.installer"].what
    assert "set platform.network_plugin=v3.1.9" in told["gke.installer"].fix
    assert "gke.installer" not in found(cluster, network_plugin="v3.1.9", **TCPX)


def test_a_plug_in_that_was_installed_from_a_mirror_is_found_by_the_mirrors_name(cluster: Cluster) -> None:
    cluster.add_nodes(2, gpus=8, machine="a3-highgpu-8g", labels=H100)
    name = tcpx.PLUGIN_IMAGE.replace("us-docker.pkg.dev", "mirror.example")
    daemon_set(cluster, "nccl-tcpx-installer", f"{name}:{tcpx.PAIRS[0].plugin}")
    assert "no DaemonSet installs the plug-in" in found(cluster, **TCPX)["gke.installer"].what
    assert "gke.installer" not in found(cluster, network_registry="mirror.example", **TCPX)


def test_a_plug_in_that_the_pod_brings_needs_no_daemon_set(cluster: Cluster) -> None:
    cluster.add_nodes(2, gpus=8, labels=H100)
    assert "gke.installer" in found(cluster, **TCPX)
    assert "gke.installer" not in found(cluster, network_install="pod", **TCPX)


def test_a_daemon_set_that_is_not_ready_everywhere(cluster: Cluster) -> None:
    for_tcpx(cluster)
    thing = cluster.objects("daemonsets")[0]
    cluster.call(lambda: cluster.store.change("daemonsets", thing, lambda one: one["status"].update(numberReady=1)))
    told = list(found(cluster, **TCPX).values())
    assert [(one.severity, "ready on 1 of 2 nodes" in one.what) for one in told] == [("warning", True)]


def test_an_older_tcpx_on_nodes_of_gke_1_34() -> None:
    with running_cluster(simulate=True, nodes=0, version="v1.34.1-gke.1") as cluster:
        for_tcpx(cluster, plugin="v3.1.9")
        told = found(cluster, network_plugin="v3.1.9", **TCPX)
        assert {code: one.severity for code, one in told.items()} == {"gke.tcpx-release": "warning"}
        assert "v3.1.12" in told["gke.tcpx-release"].fix


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cluster_that_gives_pods_one_interface_only(enabled: bool) -> None:
    described = GoogleCluster({"name": "here", "network_config": {"enable_multi_networking": enabled}})
    settings = GkePlatformConfig(kind="gke", cluster="here", location="l", **TCPX)
    assert [one.code for one in multi_networked(described, settings)] == ([] if enabled else ["gke.multi-networking"])


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


def test_machines_that_are_too_small_for_a_pod_are_told(cluster: Cluster) -> None:
    """With enough GPUs alone a pod would wait for ever."""
    cluster.add_nodes(2, cpu=8, memory="32Gi")
    assert found(cluster, cpus="8", memory="32Gi") == {}
    assert "2 with 8 CPUs of 9000" in found(cluster, cpus="9000")["gke.machines"].what
    assert "2 with 34.4 GB memory of 215 GB" in found(cluster, memory="200Gi")["gke.machines"].what


def test_excluded_machines_do_not_count(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    assert found(cluster) == {}
    told = found(cluster, exclude_nodes=("node-1",))["gke.machines"]
    assert "1 excluded by platform.exclude_nodes" in told.what


@pytest.mark.parametrize(
    ("nodes", "labels", "spare"), [(2, {}, 0), (4, {}, 2), (4, {"cloud.google.com/gke-nodepool": "default"}, None)]
)
def test_a_job_can_do_without_the_machines_that_it_does_not_need(
    cluster: Cluster, nodes: int, labels: dict[str, str], spare: int | None, tmp_path: Path
) -> None:
    cluster.add_nodes(nodes, labels=labels)
    most, fix = gke(cluster).avoidable(job(tmp_path))
    assert most == spare
    assert "cordon" in fix


def test_on_gke_machines_may_come_when_they_are_asked_for(cluster: Cluster) -> None:
    cluster.add_nodes(1, labels={"cloud.google.com/gke-nodepool": "default"})
    assert found(cluster)["gke.machines"].severity == "warning"


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


def test_a_cluster_without_jobset() -> None:
    with running_cluster(simulate=True, jobset=None) as cluster:
        told = found(cluster, workload="jobset")
        assert set(told) == {"gke.jobset"}
        assert "set platform.workload=job" in told["gke.jobset"].fix
        assert found(cluster, workload="job") == {}


def test_a_jobset_that_is_too_old_to_tell_failures_apart() -> None:
    with running_cluster(simulate=True, jobset="0.9.0") as cluster:
        told = found(cluster)["gke.jobset"]
        assert "older than 0.10" in told.what


def test_a_kubernetes_that_is_too_old() -> None:
    with running_cluster(simulate=True, version="v1.28.9-gke.1") as cluster:
        told = found(cluster)["gke.version"]
        assert (told.severity, told.fix) == ("error", "upgrade the cluster")


@pytest.mark.parametrize(("text", "told"), [("v1.33.5-gke.1080000", (1, 33)), ("1.29", (1, 29)), ("?", (0, 0))])
def test_versions_are_read(text: str, told: tuple[int, int]) -> None:
    assert numbers(text) == told


def test_a_job_that_is_there_is_taken_up_and_no_obstacle(cluster: Cluster) -> None:
    cluster.add_nodes(2)
    platform = gke(cluster)
    submission = platform.render(job(RUNS))
    cluster.apply("jobsets", submission.body["items"][-1])
    assert found(cluster) == {}


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


def test_a_server_that_fails_in_between_leaves_that_unchecked_and_the_rest_is_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.platforms.kubernetes.cluster._PAUSES", ())
    cluster.answer(500, resource="nodes")
    told = found(cluster, service_account="me")
    assert set(told) == {"gke.unseen", "gke.service-account"}
    assert told["gke.unseen"].what.startswith("machines: not checked")
