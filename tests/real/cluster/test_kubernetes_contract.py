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
from kubernetes import config
from kubernetes_cluster import running_cluster
from waiting import until

Object = dict[str, Any]
JOBSETS = "jobset.x-k8s.io/v1alpha2"


@dataclass
class Place:
    """A control plane, and a namespace of it that is ours."""

    api: k8s.ApiClient
    namespace: str

    def send(self, plural: str, thing: Object, *, dry_run: bool = False) -> Object:
        """The answer to an object that is created: the object, or the Status with which it is refused."""
        root = f"/apis/{thing['apiVersion']}" if "/" in thing["apiVersion"] else "/api/v1"
        answer = self.api.call_api(
            *self.api.param_serialize(
                "POST", f"{root}/namespaces/{self.namespace}/{plural}", body=thing, auth_settings=["BearerToken"],
                query_params=[("dryRun", "All")] if dry_run else [],
                header_params={"Content-Type": "application/json", "Accept": "application/json"},
            )
        )  # fmt: skip
        body: Object = json.loads(answer.read())
        return body

    def events(self, reason: str) -> list[str]:
        listed = k8s.CoreV1Api(self.api).list_namespaced_event(self.namespace).items
        return [one.message for one in listed if one.reason == reason]


@contextlib.contextmanager
def control_plane(which: str) -> Iterator[k8s.ApiClient]:
    if which == "real":
        yield config.new_client_from_config(*real_cluster.needed("KUBECONFIG"))
    else:
        with running_cluster(simulate=True, nodes=2) as cluster:
            yield config.new_client_from_config(str(cluster.kubeconfig))


@pytest.fixture(params=["emulated", "real"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with control_plane(request.param) as api:
        core, name = k8s.CoreV1Api(api), f"train-litgpt-{uuid.uuid4().hex[:8]}"
        core.create_namespace({"metadata": {"name": name}})
        try:
            until(lambda: core.list_namespaced_service_account(name).items)
            yield Place(api, name)
        finally:
            core.delete_namespace(name)


def pod(**spec: Any) -> Object:
    container = {"name": "node", "image": "registry.k8s.io/pause:3.10"}
    template = {"containers": [container], "restartPolicy": "Never", **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "single"}, "spec": template}


def job(**spec: Any) -> Object:
    rules = [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    template = {"spec": pod(**spec)["spec"]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "demo"}, "spec": {
        "completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules}, "template": template,
    }}  # fmt: skip


def jobset(**spec: Any) -> Object:
    jobs = [{"name": "nodes", "template": {"spec": job(**spec)["spec"]}}]
    return {"apiVersion": JOBSETS, "kind": "JobSet", "metadata": {"name": "demo"}, "spec": {"replicatedJobs": jobs}}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"serviceAccountName": "trainer"},
            r'error looking up service account \S+/trainer: serviceaccount "trainer" not found',
        ),
        ({"priorityClassName": "no-such-priority"}, "no PriorityClass with name no-such-priority was found"),
    ],
)
def test_a_pod_that_may_not_be_is_refused_in_these_words(place: Place, spec: Object, words: str) -> None:
    said = place.send("pods", pod(**spec), dry_run=True)
    assert (said["code"], said["reason"]) == (403, "Forbidden")
    assert said["details"] == {"name": "single", "kind": "pods"}
    assert re.fullmatch(rf'pods "single" is forbidden: {words}', said["message"])


def test_a_job_that_cannot_be_is_refused_and_a_jobset_of_it_is_taken_and_an_event_tells(place: Place) -> None:
    said = place.send("jobs", job(restartPolicy="OnFailure"))
    assert (said["code"], said["reason"]) == (422, "Invalid")
    assert said["message"].startswith('Job.batch "demo" is invalid: spec.template.spec.restartPolicy: Invalid value: ')
    assert place.send("jobsets", jobset(restartPolicy="OnFailure"))["kind"] == "JobSet"
    told = until(lambda: place.events("JobCreationFailed"))[0]
    assert told.startswith('job "demo-nodes-0" creation failed with error: Job.batch "demo-nodes-0" is invalid: ')


def test_pods_that_are_refused_are_an_event_of_the_job(place: Place) -> None:
    place.send("jobs", job(serviceAccountName="trainer"))
    assert until(lambda: place.events("FailedCreate"))[0] == (
        f'Error creating: pods "demo-0-" is forbidden: error looking up service account {place.namespace}/trainer: '
        'serviceaccount "trainer" not found'
    )


def test_a_pod_that_no_machine_takes_says_so(place: Place) -> None:
    place.send("pods", pod(nodeSelector={"train-litgpt/no-such": "machine"}))
    message = until(lambda: place.events("FailedScheduling"))[0]
    assert re.match(r"0/(\d+) nodes are available: .*node\(s\) didn't match Pod's node affinity/selector", message)


def test_what_is_not_there_and_what_is_there_already(place: Place) -> None:
    batch = k8s.BatchV1Api(place.api)
    with pytest.raises(k8s.ApiException) as error:
        batch.read_namespaced_job("gone", place.namespace)
    said = json.loads(error.value.body)
    assert said["message"] == 'jobs.batch "gone" not found'
    assert said["details"] == {"name": "gone", "group": "batch", "kind": "jobs"}
    assert place.send("jobs", job())["kind"] == "Job"
    said = place.send("jobs", job())
    assert (said["code"], said["reason"], said["message"]) == (409, "AlreadyExists", 'jobs.batch "demo" already exists')
