"""What the emulated cluster and a real control plane have in common: the same questions, the same answers.

Neither a kubelet nor an image is needed. On a real cluster (`make test-cluster`) whoever KUBECONFIG names has to be
allowed to make namespaces; each test has one of its own, which is deleted with all that is in it.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import kubernetes.client as k8s
import pytest
import real_cluster
from cluster_objects import GROUP, VERSION, changed, client, indexed_job, jobset
from kubernetes import config
from kubernetes.client.exceptions import ApiException
from kubernetes_cluster import running_cluster
from waiting import until

IMAGE = "registry.k8s.io/pause:3.10"


@dataclass
class Place:
    """A control plane, and a namespace of it that is ours."""

    api: k8s.ApiClient
    namespace: str

    @property
    def core(self) -> k8s.CoreV1Api:
        return k8s.CoreV1Api(self.api)

    def label(self, **labels: str) -> None:
        marks = {f"pod-security.kubernetes.io/{mode}": level for mode, level in labels.items()}
        self.core.patch_namespace(self.namespace, {"metadata": {"labels": marks}})

    def send(self, kind: str, thing: dict[str, Any], *, dry_run: bool = False) -> Any:
        query = [("dryRun", "All")] if dry_run else []
        path = {
            "Pod": f"/api/v1/namespaces/{self.namespace}/pods",
            "LimitRange": f"/api/v1/namespaces/{self.namespace}/limitranges",
            "ResourceQuota": f"/api/v1/namespaces/{self.namespace}/resourcequotas",
            "Job": f"/apis/batch/v1/namespaces/{self.namespace}/jobs",
            "JobSet": f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/jobsets",
        }[kind]
        version = {"Job": "batch/v1", "JobSet": f"{GROUP}/{VERSION}"}.get(kind, "v1")
        return self.api.call_api(
            *self.api.param_serialize(
                "POST", path, query_params=query, body={**thing, "kind": kind, "apiVersion": version},
                header_params={"Content-Type": "application/json", "Accept": "application/json"},
                auth_settings=["BearerToken"],
            )
        )  # fmt: skip

    def refusal(self, kind: str, thing: dict[str, Any], *, dry_run: bool = True) -> dict[str, Any]:
        """The Status with which the object is refused."""
        answer = self.send(kind, thing, dry_run=dry_run)
        body: dict[str, Any] = json.loads(answer.read())
        assert body["kind"] == "Status", body
        assert body["code"] == answer.status
        return body

    def events(self, reason: str) -> list[str]:
        return [one.message for one in self.core.list_namespaced_event(self.namespace).items if one.reason == reason]


@contextlib.contextmanager
def control_plane(which: str) -> Iterator[k8s.ApiClient]:
    if which == "emulated":
        with running_cluster(simulate=True, nodes=2) as cluster:
            yield client(cluster)
    else:
        (kubeconfig,) = real_cluster.needed("KUBECONFIG")
        yield config.new_client_from_config(kubeconfig)


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.cluster)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with control_plane(request.param) as api:
        core, name = k8s.CoreV1Api(api), f"train-litgpt-{uuid.uuid4().hex[:8]}"
        core.create_namespace({"metadata": {"name": name}})
        try:
            until(lambda: core.list_namespaced_service_account(name).items)
            yield Place(api, name)
        finally:
            core.delete_namespace(name)


def pod(**spec: Any) -> dict[str, Any]:
    container = {"name": "node", "image": IMAGE, **spec.pop("container", {})}
    return {"metadata": {"name": "single"}, "spec": {"containers": [container], "restartPolicy": "Never", **spec}}


def needs(**resources: dict[str, str]) -> dict[str, Any]:
    return pod(container={"resources": resources})


def limited(**limits: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": "small"}, "spec": {"limits": [{"type": "Container", **limits}]}}


def quota(**hard: str) -> dict[str, Any]:
    return {"metadata": {"name": "team"}, "spec": {"hard": {key.replace("__", "."): hard[key] for key in hard}}}


FORBIDDEN = {
    "a service account that is not there": (
        None, pod(serviceAccountName="trainer"),
        r'error looking up service account \S+/trainer: serviceaccount "trainer" not found',
    ),
    "a priority that is not there": (
        None, pod(priorityClassName="no-such-priority"), "no PriorityClass with name no-such-priority was found",
    ),
    "more than a container may have": (
        ("LimitRange", limited(max={"cpu": "1"})), needs(limits={"cpu": "2"}),
        "maximum cpu usage per Container is 1, but limit is 2",
    ),
    "less than a container must have": (
        ("LimitRange", limited(min={"memory": "1Gi"})), needs(requests={"memory": "512Mi"}),
        "minimum memory usage per Container is 1Gi, but request is 512Mi",
    ),
    "more than the quota of cpu": (
        ("ResourceQuota", quota(requests__cpu="4")), needs(requests={"cpu": "9000"}),
        "exceeded quota: team, requested: requests.cpu=9k, used: requests.cpu=0, limited: requests.cpu=4",
    ),
    "more than the quota of GPUs": (
        ("ResourceQuota", {
            "metadata": {"name": "team"}, "spec": {"hard": {"requests.nvidia.com/gpu": "4"}},
        }),
        needs(limits={"nvidia.com/gpu": "8"}),
        "exceeded quota: team, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=0, "
        "limited: requests.nvidia.com/gpu=4",
    ),
    "nothing stated where it is counted": (
        ("ResourceQuota", quota(limits__cpu="4", requests__memory="4Gi")), pod(),
        "failed quota: team: must specify limits.cpu for: node; requests.memory for: node",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORBIDDEN)
def test_a_pod_that_may_not_be_is_refused_in_these_words(place: Place, case: str) -> None:
    rule, thing, text = FORBIDDEN[case]
    if rule is not None:
        assert place.send(*rule).status == 201
    if rule is not None and rule[0] == "ResourceQuota":  # it counts once its controller has looked
        until(lambda: place.core.list_namespaced_resource_quota(place.namespace).items[0].status.used)
    said = place.refusal("Pod", thing)
    assert (said["code"], said["reason"]) == (403, "Forbidden")
    assert said["details"] == {"name": "single", "kind": "pods"}
    pattern = text if "\\S" in text else re.escape(text)
    assert re.fullmatch(rf'pods "single" is forbidden: {pattern}', said["message"])


VIOLATIONS = {
    "baseline": (
        pod(hostNetwork=True, container={"ports": [{"containerPort": 29500}]}),
        'host namespaces (hostNetwork=true), hostPort (container "node" uses hostPort 29500)',
    ),
    "restricted": (
        pod(volumes=[{"name": "nccl", "hostPath": {"path": "/x"}}]),
        'allowPrivilegeEscalation != false (container "node" must set securityContext.allowPrivilegeEscalation=false), '
        'unrestricted capabilities (container "node" must set securityContext.capabilities.drop=["ALL"]), '
        'restricted volume types (volume "nccl" uses restricted volume type "hostPath"), '
        'runAsNonRoot != true (pod or container "node" must set securityContext.runAsNonRoot=true), '
        'seccompProfile (pod or container "node" must set securityContext.seccompProfile.type to "RuntimeDefault" or '
        '"Localhost")',
    ),
}


@pytest.mark.parametrize("level", VIOLATIONS)
def test_pod_security_is_enforced_on_pods(place: Place, level: str) -> None:
    thing, text = VIOLATIONS[level]
    place.label(enforce=level)
    said = place.refusal("Pod", thing)
    assert said["message"] == f'pods "single" is forbidden: violates PodSecurity "{level}:latest": {text}'


def test_pod_security_is_a_warning_to_jobs_and_nothing_to_jobsets(place: Place) -> None:
    place.label(enforce="restricted")
    answer = place.send("Job", indexed_job(), dry_run=True)
    assert answer.status == 201
    assert "would violate PodSecurity" in answer.headers["Warning"]
    answer = place.send("JobSet", jobset(), dry_run=True)
    assert answer.status == 201
    assert "Warning" not in answer.headers


def test_a_job_that_cannot_be_is_refused_with_its_causes(place: Place) -> None:
    said = place.refusal("Job", changed(indexed_job(), "spec.template.spec.restartPolicy", "OnFailure"))
    assert (said["code"], said["reason"]) == (422, "Invalid")
    assert said["message"].startswith('Job.batch "demo" is invalid: spec.template.spec.restartPolicy: Invalid value: ')
    assert {key: said["details"][key] for key in ("name", "group", "kind")} == {
        "name": "demo", "group": "batch", "kind": "Job",
    }  # fmt: skip
    cause = said["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldValueInvalid", "spec.template.spec.restartPolicy")


def test_a_jobset_whose_job_cannot_be_is_taken_and_an_event_tells(place: Place) -> None:
    bad = changed(jobset(), "spec.replicatedJobs.0.template.spec.template.spec.restartPolicy", "OnFailure")
    assert place.send("JobSet", bad, dry_run=True).status == 201
    assert place.send("JobSet", bad).status == 201
    told = until(lambda: place.events("JobCreationFailed"))[0]
    assert told.startswith('job "demo-nodes-0" creation failed with error: Job.batch "demo-nodes-0" is invalid: ')
    assert not k8s.BatchV1Api(place.api).list_namespaced_job(place.namespace).items


def test_a_jobset_that_cannot_be_is_refused_by_its_webhook(place: Place) -> None:
    said = place.refusal("JobSet", changed(jobset(), "spec.failurePolicy.rules.0.name", "hopeless"))
    assert said["message"].startswith('admission webhook "vjobset.kb.io" denied the request: ')
    assert "rule names are not unique" in said["message"]


def test_pods_that_are_refused_are_an_event_of_the_job(place: Place) -> None:
    place.send("Job", changed(indexed_job(), "spec.template.spec.serviceAccountName", "trainer"))
    assert until(lambda: place.events("FailedCreate"))[0] == (
        f'Error creating: pods "demo-0-" is forbidden: error looking up service account {place.namespace}/trainer: '
        'serviceaccount "trainer" not found'
    )


def test_a_pod_that_no_machine_takes_says_so(place: Place) -> None:
    minor = int(re.sub(r"\D", "", k8s.VersionApi(place.api).get_code().minor))
    place.send("Pod", pod(nodeSelector={"train-litgpt/no-such": "machine"}))
    message = until(lambda: place.events("FailedScheduling"))[0]
    found = re.fullmatch(
        r"0/(\d+) nodes are available: (.+)\. (no new claims to deallocate, )?"
        r"preemption: 0/(\d+) nodes are available: (\d+) Preemption is not helpful for scheduling\.",
        message,
    )
    assert found is not None, message
    assert found[1] == found[4] == found[5]
    assert "node(s) didn't match Pod's node affinity/selector" in found[2]
    if minor >= 36:
        assert found[3] is not None, message


def test_what_is_not_there_and_what_is_there_already(place: Place) -> None:
    batch = k8s.BatchV1Api(place.api)
    with pytest.raises(ApiException) as error:
        batch.read_namespaced_job("gone", place.namespace)
    said = json.loads(error.value.body)
    assert said["message"] == 'jobs.batch "gone" not found'
    assert said["details"] == {"name": "gone", "group": "batch", "kind": "jobs"}
    thing = changed(indexed_job(), "spec.suspend", True)
    assert place.send("Job", thing).status == 201
    said = place.refusal("Job", thing, dry_run=False)
    assert (said["code"], said["reason"], said["message"]) == (409, "AlreadyExists", 'jobs.batch "demo" already exists')


def test_without_a_cluster_these_tests_fail_and_are_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("CLUSTER_TEST_IMAGE", "x")
    with pytest.raises(pytest.fail.Exception, match=r"^KUBECONFIG: not set.*docs/gke\.md"):
        real_cluster.needed("KUBECONFIG", "CLUSTER_TEST_IMAGE")
