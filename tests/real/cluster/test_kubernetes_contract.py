"""What the emulated cluster and a real control plane have in common: the same questions, the same answers.

Neither a kubelet nor an image is needed. On a real cluster (`make test-cluster`) whoever KUBECONFIG names has to be
allowed to make namespaces; each test has one of its own, which is deleted with all that is in it.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import real_cluster
from kubernetes_cluster import running_cluster
from waiting import until

from launcher.platforms.kubernetes import cluster as kinds
from launcher.platforms.kubernetes.connection import connect
from launcher.platforms.kubernetes.settings import GkePlatformConfig

Spec = dict[str, Any]


@dataclass
class Place:
    """A control plane, and a namespace of it that is ours."""

    cluster: kinds.Cluster
    namespace: str

    def send(self, kind: str, spec: Spec) -> str:
        """Create the object; return the words with which it is refused."""
        resource = {**kinds.SENT, "Pod": kinds.PODS}[kind]
        version = f"{resource.group}/{resource.version}".lstrip("/")
        thing = {"apiVersion": version, "kind": kind, "metadata": {"name": "demo"}, "spec": spec}
        try:
            self.cluster.create(resource, self.namespace, thing)
        except kinds.ApiRefused as error:
            return error.message
        return ""

    def told(self, reason: str) -> str:
        """The message of the first event of that reason."""

        def messages() -> list[str]:
            listed, _ = self.cluster.list(kinds.EVENTS, self.namespace)
            return [one["message"] for one in listed if one["reason"] == reason]

        return until(messages)[0]


@pytest.fixture(params=["emulated", "real"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        if request.param == "real":
            (kubeconfig,) = real_cluster.needed("KUBECONFIG")
        else:
            kubeconfig = str(stack.enter_context(running_cluster(simulate=True)).kubeconfig)
        cluster = connect(GkePlatformConfig(kind="gke", kubeconfig=kubeconfig))
        name = f"train-litgpt-{uuid.uuid4().hex[:8]}"
        cluster.create(kinds.NAMESPACES, None, {"metadata": {"name": name}})
        try:
            until(lambda: cluster.list(kinds.SERVICE_ACCOUNTS, name)[0])
            yield Place(cluster, name)
        finally:
            cluster.ask("DELETE", kinds.NAMESPACES.path(None, name))


def pod(**more: Any) -> Spec:
    container = {"name": "node", "image": "registry.k8s.io/pause:3.10"}
    return {"containers": [container], "restartPolicy": "Never", **more}


def job(**more: Any) -> Spec:
    rules = [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    indexed = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 0}
    return {**indexed, "podFailurePolicy": {"rules": rules}, "template": {"spec": pod(**more)}}


NO_ACCOUNT = r'error looking up service account \S+/trainer: serviceaccount "trainer" not found'


def test_a_pod_that_may_not_be_is_refused_and_one_of_a_job_is_an_event(place: Place) -> None:
    assert re.fullmatch(
        rf'pods "demo" is forbidden: {NO_ACCOUNT}', place.send("Pod", pod(serviceAccountName="trainer"))
    )
    words = 'pods "demo" is forbidden: no PriorityClass with name high was found'
    assert place.send("Pod", pod(priorityClassName="high")) == words
    assert place.send("Job", job(serviceAccountName="trainer")) == ""
    assert re.fullmatch(rf'Error creating: pods "demo-0-" is forbidden: {NO_ACCOUNT}', place.told("FailedCreate"))


def test_a_job_that_cannot_be_is_refused_and_a_jobset_of_it_is_taken_and_an_event_tells(place: Place) -> None:
    invalid = job(restartPolicy="OnFailure")
    words = 'Job.batch "demo" is invalid: spec.template.spec.restartPolicy: Invalid value: '
    assert place.send("Job", invalid).startswith(words)
    assert place.send("JobSet", {"replicatedJobs": [{"name": "nodes", "template": {"spec": invalid}}]}) == ""
    words = 'job "demo-nodes-0" creation failed with error: Job.batch "demo-nodes-0" is invalid: '
    assert place.told("JobCreationFailed").startswith(words)


def test_a_pod_that_no_machine_takes_says_so(place: Place) -> None:
    anywhere = [{"operator": "Exists"}]  # a real cluster's machines may all have a taint
    place.send("Pod", pod(nodeSelector={"train-litgpt/no-such": "machine"}, tolerations=anywhere))
    words = r"0/\d+ nodes are available: .*node\(s\) didn't match Pod's node affinity/selector"
    assert re.match(words, place.told("FailedScheduling"))


def test_what_is_not_there_and_what_is_there_already_is_said_in_these_words(place: Place) -> None:
    with pytest.raises(kinds.NotThere, match=r'jobs\.batch "demo" not found'):
        place.cluster.ask("GET", kinds.JOBS.path(place.namespace, "demo"))
    place.send("Job", job())
    assert place.send("Job", job()) == 'jobs.batch "demo" already exists'
