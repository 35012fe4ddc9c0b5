"""What a real API server refuses, the cluster refuses, with the field and the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import kubernetes.client as k8s
import pytest
from cluster_objects import GROUP, VERSION, changed, client, indexed_job, jobset, submit
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.client.exceptions import ApiException
from kubernetes_cluster import ApiError, Cluster, running_cluster
from kubernetes_cluster.environment import expand
from kubernetes_cluster.quantities import amount

JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
NODE = f"{POD}.containers.0"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=1) as made:
        yield made


def refusal(cluster: Cluster, thing: dict[str, Any]) -> str:
    with pytest.raises(ApiException) as error:
        submit(cluster, thing)
    assert error.value.status in (400, 403, 404, 409, 422)
    return str(error.value.body)


BAD_JOBSETS = {
    "unknown field of the pod": (f"{POD}.hostNetwrok", True, "unknown field"),
    "unknown field of the container": (f"{NODE}.imagePullPolcy", "Always", "unknown field"),
    "unknown field of the set": ("spec.restarts", 3, "unknown field"),
    "number as text": (f"{JOB}.completions", "2", "is not of type 'integer'"),
    "number in the environment": (f"{NODE}.env", [{"name": "WORLD_SIZE", "value": 2}], "is not of type 'string'"),
    "unknown action": ("spec.failurePolicy.rules.0.action", "Retry", "is not one of"),
    "unknown reason": ("spec.failurePolicy.rules.0.onJobFailureReasons", ["OOM"], "not a recognized job"),
    "pattern that is none": ("spec.failurePolicy.rules.0.onJobFailureMessagePatterns", ["("], "message pattern"),
    "rule's name": ("spec.failurePolicy.rules.0.name", "not-valid", "invalid failure policy rule name"),
    "rule's target": ("spec.failurePolicy.rules.0.targetReplicatedJobs", ["worker"], "does not appear in"),
    "two rules of one name": ("spec.failurePolicy.rules.0.name", "hopeless", "not unique"),
    "name with an underscore": ("metadata.name", "my_run", "RFC 1123"),
    "name that starts with a digit": ("metadata.name", "7b-run", "DNS-1035"),
    "pod names too long": ("metadata.name", "a" * 49, "pod names generated for this JobSet will exceed 63"),
    "job names too long": ("metadata.name", "a" * 58, "job names generated for this JobSet will exceed 63"),
    "label too long": ("metadata.labels", {"run": "x" * 64}, "must be no more than 63"),
    "label's key": ("metadata.labels", {"a/b/c": "x"}, "prefix part"),
}  # fmt: skip

BAD_TEMPLATES = {
    "label of a pod": (f"{JOB}.template.metadata", {"labels": {"run": "a b"}}, "a valid label must"),
    "podFailurePolicy with restarts in place": (f"{POD}.restartPolicy", "OnFailure", 'only "Never" is supported'),
    "restarts for ever": (f"{POD}.restartPolicy", "Always", "valid values"),
    "exit code 0": (f"{JOB}.podFailurePolicy.rules.1.onExitCodes.values", [0], "must not be 0"),
    "exit codes out of order": (f"{JOB}.podFailurePolicy.rules.1.onExitCodes.values", [42, 40], "must be ordered"),
    "exit code of nobody": (f"{JOB}.podFailurePolicy.rules.1.onExitCodes.containerName", "main", "must be one of the"),
    "index without a limit": (f"{JOB}.podFailurePolicy.rules.1.action", "FailIndex", "backoffLimitPerIndex"),
    "two pods per index": (f"{JOB}.podReplacementPolicy", "TerminatingOrFailed", "podReplacementPolicy"),
    "no containers": (f"{POD}.containers", [], "Required value"),
    "no image": (f"{NODE}.image", "", "image: Required value"),
    "container's name": (f"{NODE}.name", "Node", "RFC 1123"),
    "mount of no volume": (f"{NODE}.volumeMounts", [{"name": "shm", "mountPath": "/dev/shm"}], "Not found"),
    "two volumes in one": (f"{POD}.volumes", [{"name": "a", "emptyDir": {}, "hostPath": {"path": "/"}}], "more than"),
    "probe of an ordinary init container": (
        f"{POD}.initContainers",
        [{"name": "copy", "image": "x", "startupProbe": {"exec": {"command": ["true"]}}}],
        "may not be set for init containers",
    ),
    "sidecar among the containers": (f"{NODE}.restartPolicy", "Always", "for init containers only"),
    "GPUs requested, not limited": (f"{NODE}.resources", {"requests": {"nvidia.com/gpu": "8"}}, "Limit must be set"),
    "more requested than allowed": (
        f"{NODE}.resources",
        {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}},
        "less than or equal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_JOBSETS)
def test_a_jobset_that_cannot_be_is_refused(cluster: Cluster, case: str) -> None:
    path, value, why = BAD_JOBSETS[case]
    assert why in refusal(cluster, changed(jobset(), path, value))
    assert not cluster.objects("jobsets")


@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_a_template_that_cannot_be_is_found_out_when_the_job_is_made(cluster: Cluster, case: str) -> None:
    """Nothing but an event tells of it: the JobSet is there, and there will never be a Job."""
    path, value, why = BAD_TEMPLATES[case]
    made = submit(cluster, changed(jobset("hollow"), path, value))

    def told() -> list[str]:
        uid = made["metadata"]["uid"]
        return [one["message"] for one in cluster.objects("events") if one["involvedObject"]["uid"] == uid]

    text = cluster.wait(told)[0]
    assert text.startswith('job "hollow-nodes-0" creation failed with error: Job.batch "hollow-nodes-0" is invalid: ')
    assert why in text
    assert not cluster.objects("jobs")
    assert "conditions" not in cluster.objects("jobsets")[0].get("status", {})
    k8s.CustomObjectsApi(client(cluster)).delete_namespaced_custom_object(
        GROUP, VERSION, "default", "jobsets", "hollow"
    )
    job = {
        **indexed_job("hollow"),
        "spec": changed(jobset(), path, value)["spec"]["replicatedJobs"][0]["template"]["spec"],
    }
    with pytest.raises(ApiException) as error:
        submit(cluster, job)
    assert why in json.loads(error.value.body)["message"]


def test_a_refusal_is_a_status_with_its_causes(cluster: Cluster) -> None:
    with pytest.raises(ApiException) as error:
        submit(cluster, changed(indexed_job(), "spec.template.spec.restartPolicy", "Always"))
    status = json.loads(error.value.body)
    assert (status["kind"], status["status"], status["reason"], status["code"]) == (
        "Status", "Failure", "Invalid", 422,
    )  # fmt: skip
    assert {key: status["details"][key] for key in ("name", "group", "kind")} == {
        "name": "demo", "group": "batch", "kind": "Job",
    }  # fmt: skip
    assert status["details"]["causes"][0] == {
        "reason": "FieldValueRequired", "field": "spec.template.spec.restartPolicy",
        "message": 'Required value: valid values: "OnFailure", "Never"',
    }  # fmt: skip
    with pytest.raises(ApiException) as error:
        submit(cluster, changed(jobset(), "spec.failurePolicy.rules.0.name", "hopeless"))
    status = json.loads(error.value.body)
    assert status["message"] == (
        'admission webhook "vjobset.kb.io" denied the request: JobSet.jobset.x-k8s.io "demo" is invalid: '
        "<nil>: Internal error: rule names are not unique, several rules have the same name 'hopeless'"
    )
    with pytest.raises(ApiException) as error:
        k8s.BatchV1Api(client(cluster)).read_namespaced_job("gone", "default")
    status = json.loads(error.value.body)
    assert status["details"] == {"name": "gone", "group": "batch", "kind": "jobs"}


def test_an_indexed_job_whose_host_names_are_too_long_is_refused(cluster: Cluster) -> None:
    assert "no more than 63" in refusal(cluster, indexed_job("a" * 62))
    assert "completions" in refusal(cluster, changed(indexed_job(), "spec.completions", None))


def test_all_that_is_wrong_is_said_at_once(cluster: Cluster) -> None:
    thing = changed(changed(jobset(), f"{NODE}.imge", "x"), f"{JOB}.completions", "2")
    message = refusal(cluster, thing)
    assert "imge" in message
    assert "completions" in message


def test_a_namespace_that_is_not_there_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ApiException) as error:
        submit(cluster, jobset(), namespace="nowhere")
    assert error.value.status == 404
    assert 'namespaces \\"nowhere\\" not found' in error.value.body


def test_jobsets_defaults_are_filled_in_with_their_trap(cluster: Cluster) -> None:
    thing = changed(jobset("defaults"), f"{POD}.restartPolicy", None)
    thing = changed(thing, f"{JOB}.podFailurePolicy", None)
    thing["spec"]["suspend"] = True
    made = submit(cluster, thing)
    spec = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert made["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    k8s.CustomObjectsApi(client(cluster)).delete_namespaced_custom_object(
        GROUP, VERSION, "default", "jobsets", "defaults"
    )


def test_only_what_may_change_changes(cluster: Cluster) -> None:
    api = k8s.CustomObjectsApi(client(cluster))
    submit(cluster, jobset("fixed"))

    def patch(spec: dict[str, Any]) -> dict[str, Any]:
        return api.patch_namespaced_custom_object(
            GROUP, VERSION, "default", "jobsets", "fixed", {"spec": spec}, _content_type="application/merge-patch+json"
        )

    assert patch({"suspend": True})["spec"]["suspend"] is True
    for spec in ({"failurePolicy": {"maxRestarts": 9}}, {"network": {"subdomain": "other"}}):
        with pytest.raises(ApiException) as error:
            patch(spec)
        assert "immutable" in error.value.body
    bigger = changed(jobset("fixed"), f"{JOB}.parallelism", 3)["spec"]["replicatedJobs"]
    with pytest.raises(ApiException) as error:
        patch({"replicatedJobs": bigger})
    assert "immutable" in error.value.body
    api.delete_namespaced_custom_object(GROUP, VERSION, "default", "jobsets", "fixed")


def test_status_belongs_to_the_controllers(cluster: Cluster) -> None:
    thing = {**jobset("early"), "status": {"terminalState": "Completed"}}
    thing["spec"]["suspend"] = True
    made = submit(cluster, thing)
    assert "terminalState" not in made.get("status", {})


def pod(name: str = "single", **spec: Any) -> dict[str, Any]:
    container = {"name": "node", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


def test_pods_meet_the_plugins_of_admission(cluster: Cluster) -> None:
    core = k8s.CoreV1Api(client(cluster))
    with pytest.raises(ApiException) as error:
        core.create_namespaced_pod("default", pod(serviceAccountName="trainer"))
    assert error.value.status == 403
    assert 'serviceaccount \\"trainer\\" not found' in error.value.body
    with pytest.raises(ApiException) as error:
        core.create_namespaced_pod("default", pod(priorityClassName="urgent"))
    assert "no PriorityClass with name urgent was found" in error.value.body
    cluster.apply("resourcequotas", {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "4"}}})
    with pytest.raises(ApiException) as error:
        core.create_namespaced_pod("default", pod())
    assert (
        "exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=0, "
        "limited: requests.nvidia.com/gpu=4"
    ) in error.value.body
    core.delete_namespaced_resource_quota("gpus", "default")
    made = core.create_namespaced_pod("default", pod())
    assert [(one.key, one.operator, one.toleration_seconds) for one in made.spec.tolerations] == [
        ("node.kubernetes.io/not-ready", "Exists", 300), ("node.kubernetes.io/unreachable", "Exists", 300),
        ("nvidia.com/gpu", "Exists", None),
    ]  # fmt: skip


def test_an_administrators_objects_are_checked_too(cluster: Cluster) -> None:
    with pytest.raises(ApiError, match="RFC 1035"):
        cluster.apply("services", {"metadata": {"name": "7b"}, "spec": {"clusterIP": "None"}})


@settings(max_examples=40, deadline=None)
@given(st.text("abz019-_.A", min_size=1, max_size=70), st.integers(1, 4096))
def test_whatever_name_is_taken_makes_names_that_dns_knows(cluster: Cluster, name: str, nodes: int) -> None:
    thing = changed(changed(jobset(name), f"{JOB}.completions", nodes), f"{JOB}.parallelism", nodes)
    thing["metadata"]["namespace"] = "default"
    pod_name = f"{name}-nodes-0-{nodes - 1}-abcde"
    good = len(pod_name) <= 63 and name[0] in "abz" and name[-1] != "-" and set(name) <= set("abz019-")
    try:
        cluster.admission.create("jobsets", thing)
    except ApiError:
        assert not good
    else:
        assert good


@pytest.mark.parametrize(
    ("quantity", "number"), [("500m", 0.5), ("8", 8), ("16Gi", 16 * 2**30), ("1.5k", 1500), (8, 8), ("2e3", 2000)]
)
def test_quantities_are_read(quantity: str | int, number: float) -> None:
    assert amount(quantity) == number


def test_references_to_variables_are_expanded_as_kubernetes_does() -> None:
    known = {"A": "1", "B": "$(A)"}
    assert expand("$(A) $(B) $(C) $$(A) $A ${A} $$", known) == "1 $(A) $(C) $(A) $A ${A} $"


def test_an_older_jobset_does_not_know_message_patterns() -> None:
    with running_cluster(simulate=True, nodes=0, jobset="0.9.1") as old:
        assert 'unknown field \\"spec.failurePolicy.rules[0].onJobFailureMessagePatterns\\"' in refusal(old, jobset())
        images = [one["spec"]["template"]["spec"]["containers"][0]["image"] for one in old.objects("deployments")]
        assert images == ["registry.k8s.io/jobset/jobset:v0.9.1"]


def test_an_older_jobset_refuses_without_fields() -> None:
    with running_cluster(simulate=True, nodes=0, jobset="0.11.1") as old:
        with pytest.raises(ApiException) as error:
            submit(old, changed(jobset(), "spec.failurePolicy.rules.0.name", "hopeless"))
        said = json.loads(error.value.body)
        assert (said["code"], said["reason"]) == (403, "Forbidden")
        assert said["message"] == (
            'admission webhook "vjobset.kb.io" denied the request: '
            "rule names are not unique, several rules have the same name 'hopeless'"
        )
