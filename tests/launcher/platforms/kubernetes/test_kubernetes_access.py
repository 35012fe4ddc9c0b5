"""The least role: enough for all that a run does, every entry needed, and what is missing named beforehand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_cluster import Cluster, running_cluster
from kubernetes_jobs import add_tcpx_networks, job, kubernetes
from waiting import until

from launcher.errors import LoginProblem
from launcher.job import JobState
from launcher.platforms.kubernetes.preflight import needed

RULES: list[dict[str, Any]] = [
    rule
    for document in yaml.safe_load_all((Path(__file__).parents[4] / "deployments" / "rbac.yaml").read_text())
    for rule in document.get("rules", ())
]
SHIPPED = {
    (group, resource, verb)
    for rule in RULES
    for group in rule["apiGroups"]
    for resource in rule["resources"]
    for verb in rule["verbs"]
}
LIVES: dict[str, dict[str, Any]] = {
    "queued": {
        "queue": "research", "priority": "high", "topology": "block", "service_account": "trainer", "pvc": "shared",
        "secrets": {"HF_TOKEN": "hub/token"},
    },
    "claims": {"machine": "a4x-highgpu-4g", "network": "gib", "network_attach": "dra"},
    "roce": {"gpus": 8, "network": "roce", "roce_network": "rails", "roce_resource": "rdma/shared"},
    "tcp-job": {"workload": "job"},
    "tcpx": {"machine": "a3-highgpu-8g", "network": "tcpx", "network_install": "pod"},
}  # fmt: skip
"""What is asked for, so that between them jobs use all of the role; the first three have no machine in this cluster."""


@pytest.fixture
def furnished(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that has all that a job may refer to, and lets us do what the role says."""
    monkeypatch.setattr("launcher.platforms.kubernetes.platform._EXPLAIN", 0.0)
    with running_cluster(simulate=True, kueue=True) as cluster:
        labels = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
        cluster.add_nodes(2, gpus=8, machine="a3-highgpu-8g", labels=labels)
        cluster.add_queue("research")
        cluster.apply("workloadpriorityclasses", {"metadata": {"name": "high"}, "value": 1})
        levels = {"levels": [{"nodeLabel": "cloud.google.com/gce-topology-block"}]}
        cluster.apply("topologies", {"metadata": {"name": "gke"}, "spec": levels})
        cluster.apply("serviceaccounts", {"metadata": {"name": "trainer"}})
        cluster.apply("secrets", {"metadata": {"name": "hub"}, "data": {"token": "aGY="}})
        pvc = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
        cluster.apply("persistentvolumeclaims", {"metadata": {"name": "shared"}, "spec": pvc})
        add_tcpx_networks(cluster)
        cluster.allow(RULES)
        cluster.traffic.clear()
        yield cluster


def a_whole_life(cluster: Cluster, folder: Path, name: str) -> None:
    """Checked, submitted, submitted again, waiting, running if it does not wait for ever, read, cancelled."""
    platform = kubernetes(cluster, **LIVES[name])
    submission = platform.render(job(folder, name, processes=platform._settings.processes_per_node))
    platform.check_access()
    assert [
        finding
        for finding in platform.check(submission)
        if finding.severity != "info" and finding.code in ("kubernetes.unseen", "kubernetes.permission")
    ] == []
    watched = cluster.traffic.calls["watch", "pods"]
    job_id = platform.submit(submission)
    platform.submit(submission)
    runs = name in ("tcp-job", "tcpx")
    until(lambda: platform.status(job_id).state is JobState.RUNNING if runs else platform.status(job_id).reasons)
    platform.logs(job_id)
    until(lambda: platform.status(job_id) and cluster.traffic.calls["watch", "pods"] > watched)
    platform.cancel(job_id)
    platform.close()


def test_role_is_sufficient_and_has_no_unused_rule(furnished: Cluster, tmp_path: Path) -> None:
    for name in LIVES:
        a_whole_life(furnished, tmp_path, name)
    platform = kubernetes(furnished, priority="batch")
    assert "kubernetes.priority" in {
        finding.code for finding in platform.check(platform.render(job(tmp_path, "batch")))
    }
    used = {(what, verb) for verb, what in furnished.traffic.calls if what[0] != "/"}
    made = {what for what, verb in used if verb == "create"}
    # What is made may be deleted: with its job, after it, or when its submission fails half-way.
    taken_back = {(what, verb) for _, what, verb in SHIPPED if verb.startswith("delete") and what in made}
    used.discard(("selfsubjectaccessreviews", "create"))  # which everybody may
    assert used | taken_back == {(what, verb) for _, what, verb in SHIPPED}


def test_check_access_names_all_missing_permissions(cluster: Cluster) -> None:
    cluster.allow([])
    platform = kubernetes(cluster)
    with pytest.raises(LoginProblem, match=r"deployments/rbac\.yaml") as refused:
        platform.check_access()
    rights = [f"{verb} {resource}" for verb, resource in needed(platform._settings, "jobset")]
    assert [right for right in rights if right not in str(refused.value)] == []
