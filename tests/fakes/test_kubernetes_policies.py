"""What a namespace allows: Pod Security, LimitRange, ResourceQuota and disruption budgets, in Kubernetes' own words."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import kubernetes.client as k8s
import pytest
from cluster_objects import GROUP, VERSION, changed, client, indexed_job, jobset, submit
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client.exceptions import ApiException
from kubernetes_cluster import Cluster, running_cluster
from kubernetes_cluster.podsecurity import violations
from kubernetes_cluster.quantities import amount, binary, written


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=4) as made:
        yield made


def pod(name: str = "single", *, container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    node = {"name": "node", "image": "x", **(container or {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [node], **spec},
    }


def needs(limits: dict[str, str] | None = None, requests: dict[str, str] | None = None) -> dict[str, Any]:
    return {"resources": {"limits": limits or {}, "requests": requests or {}}}


def create(cluster: Cluster, thing: dict[str, Any], **options: Any) -> k8s.V1Pod:
    return k8s.CoreV1Api(client(cluster)).create_namespaced_pod("default", thing, **options)


def refused(cluster: Cluster, thing: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The Status of a pod that is forbidden."""
    with pytest.raises(ApiException) as error:
        create(cluster, thing, **options)
    status: dict[str, Any] = json.loads(error.value.body)
    assert (error.value.status, status["code"], status["reason"]) == (403, 403, "Forbidden")
    assert status["details"] == {"name": thing["metadata"]["name"], "kind": "pods"}
    return status


def why(cluster: Cluster, thing: dict[str, Any], **options: Any) -> str:
    """What follows `pods "single" is forbidden: `."""
    before, _, reason = refused(cluster, thing, **options)["message"].partition(" is forbidden: ")
    assert before == f'pods "{thing["metadata"]["name"]}"'
    return str(reason)


def events(cluster: Cluster, reason: str) -> list[str]:
    return [one["message"] for one in cluster.objects("events") if one["reason"] == reason]


# --- Pod Security -----------------------------------------------------------------------------------------------------

RESTRICTED = (
    'allowPrivilegeEscalation != false (container "node" must set securityContext.allowPrivilegeEscalation=false), '
    'unrestricted capabilities (container "node" must set securityContext.capabilities.drop=["ALL"]), '
    'runAsNonRoot != true (pod or container "node" must set securityContext.runAsNonRoot=true), '
    'seccompProfile (pod or container "node" must set securityContext.seccompProfile.type to "RuntimeDefault" or '
    '"Localhost")'
)
HARMLESS = {
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
VIOLATIONS = {
    "host network": (
        "baseline",
        pod(hostNetwork=True, container={"ports": [{"containerPort": 29500}]}),
        'host namespaces (hostNetwork=true), hostPort (container "node" uses hostPort 29500)',
    ),
    "volumes of the host": (
        "baseline",
        pod(volumes=[{"name": "nccl", "hostPath": {"path": "/x"}}, {"name": "dev", "hostPath": {"path": "/y"}}]),
        'hostPath volumes (volumes "nccl", "dev")',
    ),
    "volumes of the host, restricted": (
        "restricted",
        pod(container={"securityContext": HARMLESS}, volumes=[{"name": "nccl", "hostPath": {"path": "/x"}}]),
        'restricted volume types (volume "nccl" uses restricted volume type "hostPath")',
    ),
    "privileged": (
        "baseline",
        pod(container={"securityContext": {"privileged": True, "capabilities": {"add": ["IPC_LOCK"]}}}),
        'non-default capabilities (container "node" must not include "IPC_LOCK" in securityContext.capabilities.add), '
        'privileged (container "node" must not set securityContext.privileged=true)',
    ),
    "an ordinary pod": ("restricted", pod(), RESTRICTED),
    "root": (
        "restricted",
        pod(container={"securityContext": {**HARMLESS, "runAsUser": 0}}),
        'runAsUser=0 (container "node" must not set runAsUser=0)',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_pod_that_the_namespaces_level_forbids_is_refused(cluster: Cluster, case: str) -> None:
    level, thing, text = VIOLATIONS[case]
    create(cluster, {**thing, "metadata": {"name": "before"}})
    cluster.secure(level)
    assert why(cluster, thing) == f'violates PodSecurity "{level}:latest": {text}'
    assert why(cluster, thing, dry_run="All") == f'violates PodSecurity "{level}:latest": {text}'


def test_a_pod_that_keeps_to_the_level_is_let_in(cluster: Cluster) -> None:
    cluster.secure("restricted")
    assert create(cluster, pod(container={"securityContext": HARMLESS}))


def test_a_job_is_warned_of_and_its_pods_are_refused(cluster: Cluster) -> None:
    cluster.secure("restricted")
    request = urllib.request.Request(
        f"{cluster.host}/apis/batch/v1/namespaces/default/jobs",
        json.dumps(indexed_job()).encode(),
        {"Authorization": f"Bearer {cluster.token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        warning = answer.headers["Warning"]
    escaped = RESTRICTED.replace('"', '\\"')
    assert warning == f'299 - "would violate PodSecurity \\"restricted:latest\\": {escaped}"'
    message = cluster.wait(lambda: events(cluster, "FailedCreate"))[0]
    assert message.startswith('Error creating: pods "demo-0-')
    assert message.endswith(f' is forbidden: violates PodSecurity "restricted:latest": {RESTRICTED}')
    assert not cluster.pods(live=False)


def test_a_jobset_is_taken_without_a_word_where_its_pods_are_refused(cluster: Cluster) -> None:
    cluster.secure("restricted")
    assert submit(cluster, jobset())
    assert cluster.wait(lambda: events(cluster, "FailedCreate"))
    assert cluster.objects("jobs")


@given(st.sampled_from(["baseline", "restricted"]), st.booleans(), st.booleans())
def test_what_the_baseline_forbids_restricted_does_too(level: str, network: bool, privileged: bool) -> None:
    container = {"securityContext": {**HARMLESS, "privileged": privileged}}
    assert bool(violations(level, pod(hostNetwork=network, container=container)["spec"])) == (network or privileged)


# --- LimitRange -------------------------------------------------------------------------------------------------------


def limit(cluster: Cluster, kind: str = "Container", **limits: dict[str, str]) -> None:
    cluster.apply("limitranges", {"metadata": {"name": "small"}, "spec": {"limits": [{"type": kind, **limits}]}})


def test_a_limit_range_fills_in_what_containers_do_not_say(cluster: Cluster) -> None:
    limit(cluster, default={"cpu": "2", "memory": "1Gi"}, defaultRequest={"cpu": "500m"})
    made = create(cluster, pod(container=needs(limits={"cpu": "4"})))
    assert made.spec.containers[0].resources.limits == {"cpu": "4", "memory": "1Gi"}
    assert made.spec.containers[0].resources.requests == {"cpu": "4", "memory": "1Gi"}
    assert made.metadata.annotations["kubernetes.io/limit-ranger"] == (
        "LimitRanger plugin set: memory request for container node; memory limit for container node"
    )


LIMITS = {
    "too much": ({"max": {"cpu": "1"}}, needs({"cpu": "2"}), "maximum cpu usage per Container is 1, but limit is 2"),
    "too little": (
        {"min": {"memory": "1Gi"}},
        needs(requests={"memory": "512Mi"}),
        "minimum memory usage per Container is 1Gi, but request is 512Mi",
    ),
    "two at once": (
        {"max": {"cpu": "1", "memory": "1Gi"}},
        needs({"cpu": "2", "memory": "1536Mi"}),
        "[maximum cpu usage per Container is 1, but limit is 2, "
        "maximum memory usage per Container is 1Gi, but limit is 1536Mi]",
    ),
    "ratio": (
        {"maxLimitRequestRatio": {"cpu": "2"}},
        needs({"cpu": "2"}, {"cpu": "500m"}),
        "cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000",
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_container_beyond_the_limit_range_is_refused(cluster: Cluster, case: str) -> None:
    limits, container, text = LIMITS[case]
    limit(cluster, **limits)
    assert why(cluster, pod(container=container)) == text
    assert why(cluster, pod(container=container), dry_run="All") == text


def test_a_pod_is_limited_in_sum(cluster: Cluster) -> None:
    limit(cluster, "Pod", max={"cpu": "3"})
    thing = pod(container=needs({"cpu": "2"}))
    thing["spec"]["containers"].append({"name": "other", "image": "x", **needs({"cpu": "2"})})
    assert why(cluster, thing) == "maximum cpu usage per Pod is 3, but limit is 4"


# --- ResourceQuota ----------------------------------------------------------------------------------------------------


def quota(cluster: Cluster, name: str = "team", **spec: Any) -> None:
    cluster.apply("resourcequotas", {"metadata": {"name": name}, "spec": spec})


QUOTAS = {
    "cpu": ({"requests.cpu": "100"}, needs(requests={"cpu": "9000"}), "requests.cpu=9k", "requests.cpu=0"),
    "memory": (
        {"limits.memory": "1Gi"}, needs({"memory": "1536Mi"}), "limits.memory=1536Mi", "limits.memory=0",
    ),
    "GPUs": (
        {"requests.nvidia.com/gpu": "4"}, needs({"nvidia.com/gpu": "8"}), "requests.nvidia.com/gpu=8",
        "requests.nvidia.com/gpu=0",
    ),
    "pods": ({"pods": "0"}, {}, "pods=1", "pods=0"),
    "several": (
        {"cpu": "1", "limits.cpu": "2", "pods": "9"}, needs({"cpu": "3"}), "cpu=3,limits.cpu=3", "cpu=0,limits.cpu=0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
def test_what_a_quota_has_no_room_for_is_refused(cluster: Cluster, case: str) -> None:
    hard, container, asked, used = QUOTAS[case]
    quota(cluster, hard=hard)
    limited = ",".join(f"{part.split('=')[0]}={hard[part.split('=')[0]]}" for part in asked.split(","))
    text = f"exceeded quota: team, requested: {asked}, used: {used}, limited: {limited}"
    assert why(cluster, pod(container=container)) == text
    assert why(cluster, pod(container=container), dry_run="All") == text


def test_what_a_quota_counts_has_to_be_stated(cluster: Cluster) -> None:
    quota(cluster, hard={"limits.cpu": "4", "requests.memory": "4Gi", "requests.nvidia.com/gpu": "8"})
    assert why(cluster, pod()) == "failed quota: team: must specify limits.cpu for: node; requests.memory for: node"


def test_a_quota_tells_what_is_used_of_it_and_a_dry_run_uses_nothing(cluster: Cluster) -> None:
    quota(cluster, hard={"requests.memory": "3Gi", "pods": "10"})
    create(cluster, pod("tried", container=needs(requests={"memory": "1Gi"})), dry_run="All")
    create(cluster, pod("one", container=needs(requests={"memory": "2Gi"})))
    cluster.wait(lambda: cluster.objects("resourcequotas")[0]["status"]["used"]["pods"] == "1")
    assert cluster.objects("resourcequotas")[0]["status"] == {
        "hard": {"requests.memory": "3Gi", "pods": "10"}, "used": {"requests.memory": "2Gi", "pods": "1"},
    }  # fmt: skip
    assert "used: requests.memory=2Gi" in why(cluster, pod("two", container=needs(requests={"memory": "2Gi"})))
    cluster.wait(lambda: cluster.finish("one") == 1)
    cluster.wait(lambda: cluster.objects("resourcequotas")[0]["status"]["used"]["pods"] == "0")
    create(cluster, pod("two", container=needs(requests={"memory": "2Gi"})))


def test_a_quota_may_be_of_one_priority_only(cluster: Cluster) -> None:
    cluster.apply("priorityclasses", {"metadata": {"name": "urgent"}, "value": 1000})
    urgent = {"scopeName": "PriorityClass", "operator": "In", "values": ["urgent"]}
    quota(cluster, hard={"pods": "0"}, scopeSelector={"matchExpressions": [urgent]})
    create(cluster, pod("ordinary"))
    assert why(cluster, pod(priorityClassName="urgent")).startswith("exceeded quota: team")


def test_jobs_and_jobsets_can_be_counted_themselves(cluster: Cluster) -> None:
    quota(cluster, hard={"count/jobs.batch": "0", "count/jobsets.jobset.x-k8s.io": "1"})
    with pytest.raises(ApiException) as error:
        submit(cluster, indexed_job())
    assert json.loads(error.value.body)["message"] == (
        'jobs.batch "demo" is forbidden: exceeded quota: team, requested: count/jobs.batch=1, '
        "used: count/jobs.batch=0, limited: count/jobs.batch=0"
    )
    submit(cluster, jobset("first"))
    with pytest.raises(ApiException) as error:
        submit(cluster, jobset("second"))
    assert "requested: count/jobsets.jobset.x-k8s.io=1" in error.value.body
    told = cluster.wait(lambda: events(cluster, "JobCreationFailed"))[0]
    assert told.startswith('job "first-nodes-0" creation failed with error: jobs.batch "first-nodes-0" is forbidden: ')


def test_a_dry_run_of_jobs_and_jobsets_meets_what_the_real_one_meets(cluster: Cluster) -> None:
    batch, custom = k8s.BatchV1Api(client(cluster)), k8s.CustomObjectsApi(client(cluster))
    assert batch.create_namespaced_job("default", indexed_job(), dry_run="All").metadata.name == "demo"
    bad = changed(indexed_job(), "spec.template.spec.restartPolicy", "Always")
    with pytest.raises(ApiException) as error:
        batch.create_namespaced_job("default", bad, dry_run="All")
    assert error.value.status == 422
    bad = changed(jobset(), "spec.failurePolicy.rules.0.name", "not-valid")
    with pytest.raises(ApiException) as error:
        custom.create_namespaced_custom_object(GROUP, VERSION, "default", "jobsets", bad, dry_run="All")
    assert error.value.status == 422
    assert not cluster.objects("jobs")
    assert not cluster.objects("jobsets")


@given(st.one_of(st.integers(0, 10**9).map(float), st.integers(1, 9999).map(lambda milli: milli / 1000)))
def test_numbers_are_written_as_quantities_that_stand_for_them(value: float) -> None:
    assert amount(written(value)) == pytest.approx(value)
    if value == int(value):
        assert amount(written(value, in_binary=True)) == value


@pytest.mark.parametrize(
    ("value", "in_binary", "text"),
    [(0, False, "0"), (0.5, False, "500m"), (9000, False, "9k"), (192, False, "192"), (1.5 * 2**30, True, "1536Mi")],
)
def test_numbers_are_written_as_kubernetes_does(value: float, in_binary: bool, text: str) -> None:
    assert written(value, in_binary=in_binary) == text
    assert not in_binary or binary(text)


# --- evictions --------------------------------------------------------------------------------------------------------


def evict(cluster: Cluster, name: str, **options: Any) -> None:
    meta = k8s.V1ObjectMeta(name=name, namespace="default")
    k8s.CoreV1Api(client(cluster)).create_namespaced_pod_eviction(
        name, "default", k8s.V1Eviction(metadata=meta), **options
    )


def budget(cluster: Cluster, name: str = "keep", **spec: Any) -> None:
    selector = {"matchLabels": {"job-name": "demo"}}
    cluster.apply("poddisruptionbudgets", {"metadata": {"name": name}, "spec": {"selector": selector, **spec}})


def up(cluster: Cluster) -> list[str]:
    """The names of the job's two pods, once they are ready."""

    def found() -> list[str] | None:
        ready = [
            one["metadata"]["name"]
            for one in cluster.pods("demo")
            if {"type": "Ready", "status": "True"}.items()
            <= next((row for row in one["status"].get("conditions", []) if row["type"] == "Ready"), {}).items()
        ]
        return ready if len(ready) == 2 else None

    names = cluster.wait(found)
    assert names is not None
    return names


def test_an_evicted_pod_is_disrupted(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first, _ = up(cluster)
    evict(cluster, first, dry_run="All")
    assert len(up(cluster)) == 2
    evict(cluster, first)

    def failed() -> str:
        rows = cluster.objects("jobs")[0]["status"].get("conditions", [])
        return str(next((one["message"] for one in rows if one["type"] == "Failed"), ""))

    assert cluster.wait(failed) == (
        f"Pod default/{first} has condition DisruptionTarget matching FailJob rule at index 0"
    )


def test_a_budget_forbids_an_eviction(cluster: Cluster) -> None:
    budget(cluster, minAvailable=2)
    submit(cluster, indexed_job())
    first, _ = up(cluster)
    with pytest.raises(ApiException) as error:
        evict(cluster, first)
    assert error.value.status == 429
    assert json.loads(error.value.body) == {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 429,
        "reason": "TooManyRequests",
        "message": "Cannot evict pod as it would violate the pod's disruption budget.",
        "details": {"causes": [{
            "reason": "DisruptionBudget",
            "message": "The disruption budget keep needs 2 healthy pods and has 2 currently",
        }]},
    }  # fmt: skip
    assert len(up(cluster)) == 2
    k8s.PolicyV1Api(client(cluster)).delete_namespaced_pod_disruption_budget("keep", "default")
    budget(cluster, minAvailable=1)
    evict(cluster, first)


def test_a_budget_in_per_cent_cannot_be_reckoned_for_jobs_and_forbids_all(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first, _ = up(cluster)
    budget(cluster, maxUnavailable="50%")
    told = cluster.wait(lambda: events(cluster, "CalculateExpectedPodCountFailed"))
    assert told == [
        "Failed to calculate the number of expected pods: jobs.batch does not implement the scale subresource"
    ]
    with pytest.raises(ApiException) as error:
        evict(cluster, first)
    assert error.value.status == 429


def test_two_budgets_for_one_pod_are_not_supported(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    budget(cluster, "one", minAvailable=0)
    budget(cluster, "two", minAvailable=0)
    with pytest.raises(ApiException) as error:
        evict(cluster, up(cluster)[0])
    assert error.value.status == 500
    assert "more than one PodDisruptionBudget" in error.value.body


def test_refusals_that_repeat_are_combined_in_one_event(cluster: Cluster) -> None:
    cluster.secure("restricted")
    submit(cluster, indexed_job())
    told = cluster.wait(lambda: [one for one in events(cluster, "FailedCreate") if one.startswith("(")], seconds=40)
    assert told[0].startswith('(combined from similar events): Error creating: pods "demo-0-')
    assert len(events(cluster, "FailedCreate")) == 11
