"""The least role: enough for all that a run does, every entry needed, and what is missing named beforehand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gke_jobs import gke, job
from kubernetes_cluster import Cluster, running_cluster
from waiting import until

from launcher.errors import LauncherError, LoginProblem, PlatformRefused
from launcher.job import JobState
from launcher.platforms.kubernetes import access
from launcher.platforms.kubernetes.access import LOOKED_AT, NEEDED, Permission
from launcher.platforms.kubernetes.platform import GkePlatform

DEPLOYMENTS = Path(__file__).parents[4] / "deployments"
RULES: list[dict[str, Any]] = [
    rule
    for document in yaml.safe_load_all((DEPLOYMENTS / "rbac.yaml").read_text())
    for rule in document.get("rules", ())
]
SHIPPED = {
    (group, resource, verb)
    for rule in RULES
    for group in rule["apiGroups"]
    for resource in rule["resources"]
    for verb in rule["verbs"]
}
EVERYTHING: dict[str, Any] = {
    "queue": "research", "priority": "high", "topology": "block", "service_account": "trainer", "claim": "shared",
    "secrets": {"HF_TOKEN": "hub/token"},
}  # fmt: skip


def key(one: Permission) -> tuple[str, str, str]:
    what = f"{one.resource.plural}/{one.subresource}" if one.subresource else one.resource.plural
    return one.resource.group, what, one.verb


@pytest.fixture(scope="module")
def furnished() -> Iterator[Cluster]:
    """A cluster that has all that a job may refer to."""
    with running_cluster(simulate=True, nodes=0, kueue=True) as cluster:
        labels = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
        cluster.add_nodes(4, gpus=8, machine="a3-highgpu-8g", labels=labels)
        cluster.add_nodes(2, prefix="plain")
        cluster.add_queue("research")
        cluster.apply("workloadpriorityclasses", {"metadata": {"name": "high"}, "value": 1})
        levels = {"levels": [{"nodeLabel": "cloud.google.com/gce-topology-block"}]}
        cluster.apply("topologies", {"metadata": {"name": "gke"}, "spec": levels})
        cluster.apply("serviceaccounts", {"metadata": {"name": "trainer"}})
        cluster.apply("secrets", {"metadata": {"name": "hub"}, "data": {"token": "aGY="}})
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
        cluster.apply("persistentvolumeclaims", {"metadata": {"name": "shared"}, "spec": claim})
        for number in range(1, 5):
            reference = {"group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": f"vpc{number}"}
            spec = {"type": "Device", "parametersRef": reference}
            cluster.apply("networks", {"metadata": {"name": f"vpc{number}"}, "spec": spec})
            cluster.apply("gkenetworkparamsets", {"metadata": {"name": f"vpc{number}"}, "spec": {"vpc": "v"}})
        yield cluster


@pytest.fixture
def cluster(furnished: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("launcher.platforms.kubernetes.platform._EXPLAIN", 0.0)
    furnished.allow(RULES)
    furnished.traffic.clear()
    yield furnished
    furnished.allow(None)


def a_whole_life(cluster: Cluster, folder: Path, name: str, *, waits: bool = False, **settings: Any) -> None:
    """Checked, submitted, submitted again, waiting, running if it does not wait for ever, read, cancelled."""
    platform = gke(cluster, **settings)
    asked = job(folder, name, processes=platform._settings.processes)
    submission = platform.render(asked)
    platform.check_access()
    unseen = [one for one in platform.check(submission) if one.code in ("gke.unseen", "gke.permission")]
    assert [str(one) for one in unseen if "image" not in one.what] == []
    watched = cluster.traffic.calls["watch", "pods"]
    job_id = platform.submit(submission)
    platform.submit(submission)
    until(lambda: platform.status(job_id).reasons if waits else platform.status(job_id).state is JobState.RUNNING)
    platform.logs(job_id)
    until(lambda: platform.status(job_id) and cluster.traffic.calls["watch", "pods"] > watched)
    platform.cancel(job_id)
    platform.close()


def test_the_file_holds_what_the_code_asks_for() -> None:
    assert {key(one) for one in (*NEEDED, *LOOKED_AT)} == SHIPPED


def test_the_role_is_enough_and_all_of_it_is_used(cluster: Cluster, tmp_path: Path) -> None:
    a_whole_life(cluster, tmp_path, "queued", waits=True, **EVERYTHING)
    a_whole_life(cluster, tmp_path, "plain-job", workload="job", priority=None)
    a_whole_life(cluster, tmp_path, "tcpx", machine="a3-highgpu-8g", network="tcpx", network_install="pod")
    a_whole_life(cluster, tmp_path, "claims", waits=True, **CLAIMS)
    a_whole_life(cluster, tmp_path, "roce", waits=True, **ROCE)
    halves(cluster, tmp_path)
    remains(cluster, tmp_path)
    cluster.allow(RULES)
    with contextlib.suppress(LauncherError):
        list(gke(cluster, priority="batch").check(gke(cluster, priority="batch").render(job(tmp_path, "batch"))))
    used = {(verb, what) for verb, what in cluster.traffic.calls if what[0] != "/"}
    used.discard(("create", "selfsubjectaccessreviews"))  # which everybody may
    assert {(what, verb) for verb, what in used} == {(what, verb) for _, what, verb in SHIPPED}


def halves(cluster: Cluster, folder: Path) -> None:
    """A submission that fails half-way takes back what it has made: each kind in turn."""
    for name, taken, settings in (
        ("half-a", "half-a-1-rdma", {}),
        ("half-b", "half-b-1", {"workload": "job"}),
    ):
        platform = gke(cluster, machine="a4x-highgpu-4g", network="gib", network_attach="dra", **settings)
        plural = "services" if settings else "resourceclaimtemplates"
        spec: dict[str, Any] = {"clusterIP": "None"} if settings else {"spec": {"devices": {}}}
        cluster.apply(plural, {"metadata": {"name": taken}, "spec": spec})
        with pytest.raises(PlatformRefused, match="belongs to something else"):
            platform.submit(platform.render(job(folder, name, processes=4)))


CLAIMS: dict[str, Any] = {"machine": "a4x-highgpu-4g", "network": "gib", "network_attach": "dra"}
PLURALS = {
    "ResourceClaimTemplate": "resourceclaimtemplates", "ComputeDomain": "computedomains",
    "NetworkPolicy": "networkpolicies",
}  # fmt: skip


def remains(cluster: Cluster, folder: Path) -> None:
    """What others have cut loose from its owner: all of it carries the job's labels."""
    labels = {"train-litgpt/run": "loose", "train-litgpt/attempt": "1"}
    platform = gke(cluster, machine="a4x-highgpu-4g", network="gib", network_attach="dra")
    items = platform.render(job(folder, "loose", processes=4)).body["items"]
    pod = items[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    plain = {"containers": [{"name": "node", "image": "x"}], "restartPolicy": "Never"}
    assert pod["restartPolicy"] == "Never"
    cluster.apply("pods", {"metadata": {"name": "loose-1-0", "labels": labels}, "spec": plain})
    cluster.apply("services", {"metadata": {"name": "loose-1", "labels": labels}, "spec": {"clusterIP": "None"}})
    for item in items:
        plural = PLURALS.get(item["kind"])
        if plural is not None:
            cluster.apply(plural, item)
    platform.cancel(platform.render(job(folder, "loose", processes=4)).job_id)


ROCE: dict[str, Any] = {"gpus": 8, "network": "roce", "roce_network": "rails", "roce_resource": "rdma/shared"}
"""Which job uses what, where the one with everything does not."""


def without(lacking: Permission) -> list[dict[str, Any]]:
    return [
        {"apiGroups": [group], "resources": [what], "verbs": [verb]}
        for group, what, verb in SHIPPED
        if (group, what, verb) != key(lacking)
    ]


@pytest.mark.parametrize(
    ("resource", "verb", "ours"),
    [
        ("jobsets", "create", "submit"), ("jobsets", "get", "submit again"), ("jobs", "get", "submit"),
        ("jobsets", "list", "status"), ("pods", "list", "status"), ("jobsets", "watch", "status"),
        ("pods", "watch", "status"), ("jobsets", "deletecollection", "cancel"), ("services", "list", "cancel"),
    ],
)  # fmt: skip
def test_the_verb_that_needs_it_is_refused(
    cluster: Cluster, tmp_path: Path, resource: str, verb: str, ours: str
) -> None:
    platform = gke(cluster)
    submission = platform.render(job(tmp_path, f"{resource}-{verb}"))
    if ours != "submit":
        platform.submit(submission)
    lacking = next(one for one in NEEDED if key(one)[1:] == (resource, verb))
    cluster.allow(without(lacking))
    verbs = {
        "submit": lambda: platform.submit(submission),
        "submit again": lambda: platform.submit(submission),
        "status": lambda: until(lambda: not platform.status(submission.job_id)),
        "cancel": lambda: platform.cancel(submission.job_id),
    }
    with pytest.raises(PlatformRefused, match=f'cannot {verb} resource "{resource}"'):
        verbs[ours]()
    platform.close()
    cluster.allow(None)
    GkePlatform(platform._settings).cancel(submission.job_id)


def test_reaching_a_cluster_without_permissions_names_all_of_them(cluster: Cluster) -> None:
    cluster.allow([])
    with pytest.raises(LoginProblem) as refused:
        gke(cluster).check_access()
    for one in access.needed(gke(cluster)._settings, "jobset"):
        assert str(one) in str(refused.value)
    assert "deployments/rbac.yaml" in str(refused.value)
