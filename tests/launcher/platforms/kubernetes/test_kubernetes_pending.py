"""Why a job waits or is refused, in findings: by what scheduler, kubelets, admission, the autoscaler and Kueue say."""

from pathlib import Path
from typing import Any

import pytest
from kubernetes_cluster import Cluster
from kubernetes_jobs import IMAGE, job, kubernetes
from waiting import until

from launcher.job import JobId, JobState
from launcher.platforms.kubernetes import platform as kubernetes_module
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from launcher.platforms.kubernetes.reasons import advice, refusals, unschedulable
from litgpt_demo.errors import Finding

H100 = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
A3: dict[str, Any] = {"machine": "a3-highgpu-8g", "processes_per_node": 8}


@pytest.fixture(autouse=True)
def _asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_module, "_EXPLAIN", 0.0)


def waiting(cluster: Cluster, folder: Path, **settings: Any) -> tuple[KubernetesPlatform, JobId]:
    """A job that has no machines."""
    platform = kubernetes(cluster, **settings)
    return platform, platform.submit(platform.render(job(folder, processes=settings.get("processes_per_node", 1))))


def told(platform: KubernetesPlatform, job_id: JobId, code: str) -> Finding:
    """The finding of that code, as soon as it is there."""

    def found() -> list[Finding]:
        status = platform.status(job_id)
        assert status.state is JobState.PENDING
        return [finding for finding in status.reasons if finding.code == f"kubernetes.pending.{code}"]

    return until(found)[0]


# --- words ------------------------------------------------------------------------------------------------------------

CLAIMS = "no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
SCHEDULER = {
    # Of Kubernetes 1.30 to 1.33, of 1.34, and of 1.36.
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
    "2 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No preemption victims found.": [
        "taint", "gpus",
    ],
    '0/3 nodes are available: persistentvolumeclaim "shared" not found. ' + CLAIMS: ["pvc"],
    "0/6 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu, 3 node(s) didn't match Pod's "
    "node affinity/selector. " + CLAIMS: ["taint", "resources", "selector"],
    "0/3 nodes are available: 1 a reason of tomorrow, 2 Insufficient cpu. " + CLAIMS: ["unscheduled", "resources"],
}  # fmt: skip


@pytest.mark.parametrize("message", SCHEDULER)
def test_scheduler_message_has_a_finding_for_each_reason(message: str) -> None:
    found = list(unschedulable(message))
    assert [finding.code.removeprefix("kubernetes.pending.") for finding in found] == SCHEDULER[message]
    assert not any("preemption" in finding.what or "deallocate" in finding.what for finding in found)


# In the API servers' own words from 1.30 to 1.36.
ADMISSION = {
    "exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1": ("quota", "have the quota raised"),
    "maximum cpu usage per Container is 4, but request is 32": ("limits", "kubectl get limitranges"),
    'error looking up service account default/trainer: serviceaccount "trainer" not found': (
        "service-account", "kubectl create serviceaccount trainer",
    ),
    'admission webhook "validation.gatekeeper.sh" denied the request: [team] you must provide labels: {"team"}': (
        "policy", "exception",
    ),
    'User "me" cannot create resource "jobsets" in API group "jobset.x-k8s.io" in the namespace "default"': (
        "permission", "deployments/rbac.yaml",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", ADMISSION)
def test_refusal_has_a_finding_with_its_own_fix(reason: str) -> None:
    code, fix = ADMISSION[reason]
    message = f'pods "demo-1-000000-nodes-0-0-x7k2p" is forbidden: {reason}'
    (found,) = refusals(message, "kubernetes")
    assert (found.code, fix in found.fix) == (f"kubernetes.{code}", True)
    assert ("rbac.yaml" in advice(message)) == (code == "permission")


# --- on a cluster -----------------------------------------------------------------------------------------------------


def test_lack_of_gpus_is_one_finding_and_the_job_waits(bare: Cluster, tmp_path: Path) -> None:
    bare.add_nodes(2, gpus=4, labels=H100)
    platform, job_id = waiting(bare, tmp_path, admission_timeout=0, **A3)
    found = told(platform, job_id, "gpus")
    assert found.what == "2 nodes (node 0 first): 2 machines have not enough free GPUs"
    assert "platform.nodes" in found.fix
    assert platform.status(job_id).refused is None


def test_image_that_cannot_be_pulled_is_a_named_error(bare: Cluster, tmp_path: Path) -> None:
    bare.add_nodes(2)
    bare.break_image(IMAGE)
    found = told(*waiting(bare, tmp_path), "image")
    assert (found.severity, IMAGE in found.what) == ("error", True)
    assert "roles/artifactregistry.reader" in found.fix


@pytest.mark.parametrize(
    ("event", "message", "code"),
    [
        ("FailedMount", "MountVolume.SetUp failed: no such bucket", "volume"),
        ("FailedCreatePodSandBox", "networks.networking.gke.io vpc3 not found", "network"),
        ("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached", "scale-up"),
        ("FailedScaleUp", "Node scale up in zones europe-west4-b failed: GCE out of resources", "capacity"),
        ("FailedScaleUp", "Node scale up failed: GCE quota exceeded", "project-quota"),
    ],
)
def test_event_of_a_pod_is_a_finding(bare: Cluster, tmp_path: Path, event: str, message: str, code: str) -> None:
    platform, job_id = waiting(bare, tmp_path)
    bare.tell(until(lambda: bare.pods("nodes-0-0-"))[0]["metadata"]["name"], event, message, source="test")
    assert message in told(platform, job_id, code).what


def test_lasting_refusal_ends_the_run_but_a_passing_one_does_not(bare: Cluster, tmp_path: Path) -> None:
    bare.apply("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}})
    platform, job_id = waiting(bare, tmp_path, admission_timeout=1)
    refused = until(lambda: platform.status(job_id).refused)
    assert (refused.code, "have the quota raised" in refused.fix) == ("kubernetes.pending.quota", True)
    bare.remove("resourcequotas", "small")
    until(lambda: [reason.code for reason in platform.status(job_id).reasons] == ["kubernetes.pending.nodes"])
    assert platform.status(job_id).refused is None


def test_deactivated_workload_of_kueue_ends_the_run(bare: Cluster, tmp_path: Path) -> None:
    """Kueue does so by itself, as after too many requeues; nothing but an edit of the Workload undoes it."""
    platform, job_id = waiting(bare, tmp_path, queue="research", admission_timeout=0)
    bare.workload("demo-1-000000", active=False, Evicted=("True", "DeactivatedDueToRequeuingLimitExceeded", "limit"))
    refused = until(lambda: platform.status(job_id).refused)
    assert (refused.code, refused.severity) == ("kubernetes.pending.deactivated", "error")
    assert "DeactivatedDueToRequeuingLimitExceeded" in refused.what
    assert "kubectl patch workload jobset-demo-1-000000" in refused.fix


@pytest.mark.parametrize(
    ("conditions", "code", "severity", "message"),
    [
        ({"QuotaReserved": ("False", "Pending", "insufficient quota, 1 more needed")}, "queue", "warning", "1 more"),
        ({"QuotaReserved": ("False", "Pending", "request > maximum capacity")}, "queue", "error", "maximum capacity"),
        ({"Evicted": ("True", "Preempted", "for another")}, "evicted", "warning", "taken the machines back"),
        ({}, "queue", "warning", "has not yet created a Workload"),
    ],
)
def test_conditions_of_kueue_are_findings(
    bare: Cluster, tmp_path: Path, conditions: dict[str, Any], code: str, severity: str, message: str
) -> None:
    platform, job_id = waiting(bare, tmp_path, queue="research")
    if conditions:
        bare.workload("demo-1-000000", **conditions)
    found = until(lambda: [reason for reason in platform.status(job_id).reasons if message in reason.what])
    assert [(reason.code, reason.severity) for reason in found] == [(f"kubernetes.pending.{code}", severity)]
    assert platform.status(job_id).native == "JobSet Suspended"
