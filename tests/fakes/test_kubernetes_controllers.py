"""What JobSet, the Job controller, Kueue and the scheduler make of a job: conditions, messages, restarts.

Pods are simulated: `finish` says how their containers end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import kubernetes.client as k8s
import pytest
from cluster_objects import GROUP, VERSION, changed, client, indexed_job, jobset, submit
from kubernetes_cluster import Cluster, running_cluster

NODE = "spec.template.spec.containers.0"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=4, kueue=True) as made:
        yield made


def running(cluster: Cluster, text: str = "demo", count: int = 2) -> list[str]:
    """Wait for that many pods to run; their names."""

    def names() -> list[str] | None:
        found = cluster.pods(text)
        up = [one["metadata"]["name"] for one in found if one["status"]["phase"] == "Running"]
        return up if len(up) == len(found) == count else None

    found = cluster.wait(names)
    assert found is not None
    return found


def condition(cluster: Cluster, plural: str, kind: str) -> dict[str, Any]:
    """Wait until the only object of the kind has the condition, and return it."""

    def found() -> dict[str, Any] | None:
        things = cluster.objects(plural)
        rows = things[0].get("status", {}).get("conditions", []) if things else []
        return next((one for one in rows if one["type"] == kind and one["status"] == "True"), None)

    held = cluster.wait(found)
    assert held is not None
    return held


def events(cluster: Cluster, reason: str) -> list[str]:
    return [one["message"] for one in cluster.objects("events") if one["reason"] == reason]


def restarts(cluster: Cluster) -> tuple[int, int]:
    status = cluster.objects("jobsets")[0].get("status", {})
    return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_an_indexed_job_gives_each_pod_its_index_and_name(cluster: Cluster) -> None:
    job = submit(cluster, indexed_job())
    running(cluster)
    for index, pod in enumerate(cluster.pods("demo")):
        meta, spec = pod["metadata"], pod["spec"]
        assert meta["name"].startswith(f"demo-{index}-")
        assert len(meta["name"]) == len(f"demo-{index}-") + 5
        assert spec["hostname"] == f"demo-{index}"
        assert meta["labels"]["batch.kubernetes.io/job-name"] == meta["labels"]["job-name"] == "demo"
        assert meta["labels"]["batch.kubernetes.io/job-completion-index"] == str(index)
        assert meta["annotations"]["batch.kubernetes.io/job-completion-index"] == str(index)
        assert meta["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
        assert spec["containers"][0]["env"][0]["name"] == "JOB_COMPLETION_INDEX"


def test_a_job_completes_when_every_index_has(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first, second = running(cluster)
    cluster.finish(first)
    cluster.wait(lambda: cluster.objects("jobs")[0]["status"].get("completedIndexes") == "0")
    cluster.finish(second)
    assert condition(cluster, "jobs", "Complete")["message"] == "Reached expected number of succeeded pods"
    status = cluster.objects("jobs")[0]["status"]
    assert (status["succeeded"], status["completedIndexes"], status["active"]) == (2, "0,1", 0)
    assert "completionTime" in status


def test_a_listed_exit_code_fails_the_job_with_its_message_and_ends_the_other_pods(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first, second = running(cluster)
    cluster.finish(second, code=42)
    for kind in ("FailureTarget", "Failed"):
        held = condition(cluster, "jobs", kind)
        assert held["reason"] == "PodFailurePolicy"
        assert held["message"] == (
            f"Container node for pod default/{second} failed with exit code 42 matching FailJob rule at index 1"
        )
    assert not cluster.pods("demo")
    assert [one["metadata"]["name"] for one in cluster.pods("demo", live=False)] == [second], first


def test_another_exit_code_uses_up_the_backoff_limit(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first, _ = running(cluster)
    cluster.finish(first, code=43)
    held = condition(cluster, "jobs", "Failed")
    assert (held["reason"], held["message"]) == (
        "BackoffLimitExceeded",
        "Job has reached the specified backoff limit",
    )


def test_below_the_backoff_limit_a_pod_is_replaced(cluster: Cluster) -> None:
    submit(cluster, indexed_job(backoffLimit=1))
    first, _ = running(cluster)
    cluster.finish(first, code=43)
    cluster.wait(lambda: first not in [one["metadata"]["name"] for one in cluster.pods("demo")])
    again = running(cluster)
    assert {one.rsplit("-", 1)[0] for one in again} == {"demo-0", "demo-1"}


def test_a_preempted_pod_fails_the_job_by_its_condition(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first, _ = running(cluster)
    cluster.preempt(first)
    assert condition(cluster, "jobs", "Failed")["message"] == (
        f"Pod default/{first} has condition DisruptionTarget matching FailJob rule at index 0"
    )


def test_a_deleted_pod_is_no_disruption(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first, _ = running(cluster)
    cluster.delete_pod(first)
    assert condition(cluster, "jobs", "Failed")["reason"] == "BackoffLimitExceeded"


def test_with_a_backoff_limit_a_deleted_pod_is_only_replaced(cluster: Cluster) -> None:
    """jobset#574: nobody restarts the others."""
    submit(cluster, indexed_job(backoffLimit=6))
    first, second = running(cluster)
    cluster.delete_pod(first)
    cluster.wait(lambda: first not in [one["metadata"]["name"] for one in cluster.pods("demo")])
    assert second in running(cluster)


def test_a_job_that_takes_too_long_fails(cluster: Cluster) -> None:
    submit(cluster, indexed_job(activeDeadlineSeconds=1))
    running(cluster)
    held = condition(cluster, "jobs", "Failed")
    assert (held["reason"], held["message"]) == ("DeadlineExceeded", "Job was active longer than specified deadline")


def test_a_job_with_a_deadline_ends_with_its_pods_and_not_at_the_deadline(cluster: Cluster) -> None:
    submit(cluster, indexed_job(activeDeadlineSeconds=7200))
    running(cluster)
    time.sleep(0.5)  # longer than a Job's changes are gathered
    assert cluster.finish() == 2
    condition(cluster, "jobs", "Complete")


def test_a_suspended_job_has_no_pods_until_it_is_resumed(cluster: Cluster) -> None:
    submit(cluster, indexed_job(suspend=True))
    assert condition(cluster, "jobs", "Suspended")["message"] == "Job suspended"
    assert not cluster.pods(live=False)
    k8s.BatchV1Api(client(cluster)).patch_namespaced_job("demo", "default", {"spec": {"suspend": False}})
    running(cluster)


def test_an_ended_job_is_removed_after_its_ttl(cluster: Cluster) -> None:
    submit(cluster, indexed_job(ttlSecondsAfterFinished=1))
    running(cluster)
    cluster.finish()
    condition(cluster, "jobs", "Complete")
    cluster.wait(lambda: not cluster.objects("jobs"))
    assert not cluster.pods(live=False)


def test_pods_that_admission_refuses_are_an_event_and_are_tried_again(cluster: Cluster) -> None:
    submit(cluster, changed(indexed_job(), "spec.template.spec.serviceAccountName", "trainer"))
    message = cluster.wait(lambda: events(cluster, "FailedCreate"))[0]
    assert message.startswith('Error creating: pods "demo-0-')
    assert 'serviceaccount "trainer" not found' in message
    cluster.apply("serviceaccounts", {"metadata": {"name": "trainer"}})
    running(cluster)


# --- jobsets ----------------------------------------------------------------------------------------------------------


def test_a_jobset_makes_jobs_pods_and_a_service_with_its_labels(cluster: Cluster) -> None:
    made = submit(cluster, jobset())
    assert [one.rsplit("-", 1)[0] for one in running(cluster)] == ["demo-nodes-0-0", "demo-nodes-0-1"]
    job = cluster.objects("jobs")[0]
    assert job["metadata"]["name"] == "demo-nodes-0"
    service = cluster.objects("services")[0]
    assert service["metadata"]["name"] == "demo"
    assert service["spec"] == {
        "clusterIP": "None",
        "selector": {"jobset.sigs.k8s.io/jobset-name": "demo"},
        "publishNotReadyAddresses": True,
    }
    pod = cluster.pods("demo")[1]
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("demo-nodes-0-1", "demo")
    expected = {
        "jobset-name": "demo", "jobset-uid": made["metadata"]["uid"], "replicatedjob-name": "nodes",
        "replicatedjob-replicas": "1", "global-replicas": "1", "job-index": "0", "job-global-index": "0",
        "restart-attempt": "0", "group-name": "default",
    }  # fmt: skip
    for marks in (job["metadata"]["labels"], pod["metadata"]["labels"], pod["metadata"]["annotations"]):
        assert {f"jobset.sigs.k8s.io/{key}": value for key, value in expected.items()}.items() <= marks.items()
    row = cluster.wait(lambda: cluster.objects("jobsets")[0]["status"]["replicatedJobsStatus"][0])
    assert row["name"] == "nodes"
    cluster.wait(lambda: cluster.objects("jobsets")[0]["status"]["replicatedJobsStatus"][0]["ready"] == 1)


def test_a_jobset_completes(cluster: Cluster) -> None:
    submit(cluster, jobset())
    running(cluster)
    cluster.finish()
    held = condition(cluster, "jobsets", "Completed")
    assert (held["reason"], held["message"]) == ("AllJobsCompleted", "jobset completed successfully")
    assert cluster.objects("jobsets")[0]["status"]["terminalState"] == "Completed"


def test_a_fault_restarts_the_whole_set_until_the_limit(cluster: Cluster) -> None:
    submit(cluster, jobset(restarts=1))
    before = running(cluster)
    cluster.finish(before[0], code=43)
    cluster.wait(lambda: restarts(cluster) == (1, 1))
    after = cluster.wait(lambda: (set(found := running(cluster)) - set(before)) and found)
    assert not set(before) & set(after)
    labels = {one["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] for one in cluster.pods("demo")}
    assert labels == {"1"}
    cluster.finish(after[1], code=43)
    held = condition(cluster, "jobsets", "Failed")
    assert held["reason"] == "ReachedMaxRestarts"
    assert held["message"] == ("jobset failed due to reaching max number of restarts (first failed job: demo-nodes-0)")
    assert not cluster.pods("demo")


def test_a_blocking_restart_waits_until_the_last_old_pod_is_gone() -> None:
    with running_cluster(simulate=True, nodes=4) as cluster:
        alive: list[tuple[set[str], float]] = []
        submit(cluster, jobset())
        before = running(cluster)
        cluster.finish(before[0], code=43)

        def attempts() -> bool:
            found = cluster.objects("pods")
            alive.append(
                ({one["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] for one in found}, time.time())
            )
            return alive[-1][0] == {"1"}

        cluster.wait(attempts)
        assert all(len(seen) < 2 for seen, _ in alive)


def test_a_disruption_does_not_count_and_a_hopeless_code_ends_it(cluster: Cluster) -> None:
    submit(cluster, jobset(restarts=0))
    before = running(cluster)
    cluster.preempt(before[0])
    cluster.wait(lambda: restarts(cluster) == (1, 0))
    message = "applying RestartJobSetAndIgnoreMaxRestarts failure policy action (first failed job: demo-nodes-0)"
    assert events(cluster, "RestartJobSetAndIgnoreMaxRestartsFailurePolicyAction") == [message]
    after = cluster.wait(lambda: (set(found := running(cluster)) - set(before)) and found)
    cluster.finish(after[0], code=42)
    held = condition(cluster, "jobsets", "Failed")
    assert (held["reason"], held["message"]) == (
        "FailJobSetFailurePolicyAction",
        "applying FailJobSet failure policy action (first failed job: demo-nodes-0)",
    )


def test_without_a_failure_policy_the_first_failed_job_fails_the_set(cluster: Cluster) -> None:
    submit(cluster, changed(jobset(), "spec.failurePolicy", None))
    cluster.finish(running(cluster)[0], code=43)
    assert condition(cluster, "jobsets", "Failed")["message"] == (
        "jobset failed due to one or more job failures (first failed job: demo-nodes-0)"
    )


def test_a_suspended_jobset_waits_and_goes_on(cluster: Cluster) -> None:
    thing = jobset()
    thing["spec"]["suspend"] = True
    submit(cluster, thing)
    assert condition(cluster, "jobsets", "Suspended")["reason"] == "SuspendedJobs"
    assert not cluster.pods(live=False)
    k8s.CustomObjectsApi(client(cluster)).patch_namespaced_custom_object(
        GROUP, VERSION, "default", "jobsets", "demo", {"spec": {"suspend": False}}
    )
    running(cluster)


def test_an_ended_jobset_is_removed_after_its_ttl(cluster: Cluster) -> None:
    thing = jobset()
    thing["spec"]["ttlSecondsAfterFinished"] = 1
    submit(cluster, thing)
    running(cluster)
    cluster.finish()
    cluster.wait(lambda: not cluster.objects("jobsets"))
    assert not cluster.objects("jobs")
    assert not cluster.objects("services")
    assert not cluster.pods(live=False)


# --- kueue ------------------------------------------------------------------------------------------------------------


def queued(name: str, queue: str = "research", gpus: int = 8) -> dict[str, Any]:
    thing = changed(jobset(name), "metadata.labels", {"kueue.x-k8s.io/queue-name": queue})
    path = "spec.replicatedJobs.0.template.spec.template.spec.containers.0.resources"
    return changed(thing, path, {"limits": {"nvidia.com/gpu": gpus}})


def workload(cluster: Cluster, text: str, kind: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        things = [one for one in cluster.objects("workloads") if text in one["metadata"]["name"]]
        rows = [one for thing in things for one in thing.get("status", {}).get("conditions", [])]
        return next((one for one in rows if one["type"] == kind), None)

    held = cluster.wait(found)
    assert held is not None
    return held


def test_kueue_holds_what_exceeds_the_quota_and_lets_it_in_later(cluster: Cluster) -> None:
    cluster.add_nodes(4, gpus=8)
    cluster.add_queue("research", quota={"nvidia.com/gpu": 16})
    assert submit(cluster, queued("first"))["spec"]["suspend"] is True
    running(cluster, "first")
    submit(cluster, queued("second"))
    held = workload(cluster, "second", "QuotaReserved")
    assert (held["status"], held["reason"]) == ("False", "Pending")
    assert "insufficient unused quota for nvidia.com/gpu in flavor default-flavor, 16 more needed" in held["message"]
    assert not cluster.pods("second")
    cluster.finish("first")
    running(cluster, "second")
    assert workload(cluster, "second", "Admitted")["status"] == "True"


def test_a_queue_that_is_not_there_admits_nothing(cluster: Cluster) -> None:
    submit(cluster, queued("lost", queue="reserch"))
    held = workload(cluster, "lost", "QuotaReserved")
    assert (held["reason"], held["message"]) == ("Inadmissible", "LocalQueue reserch doesn't exist")


def test_kueues_preemption_suspends_without_any_disruption(cluster: Cluster) -> None:
    """jobset#1117."""
    cluster.add_nodes(2, gpus=8)
    cluster.add_queue("research", quota={"nvidia.com/gpu": 16})
    submit(cluster, queued("demo"))
    before = running(cluster)
    cluster.suspend("demo")
    assert workload(cluster, "demo", "Evicted")["reason"] == "Preempted"
    cluster.wait(lambda: not cluster.pods("demo", live=False))
    assert condition(cluster, "jobsets", "Suspended")
    assert restarts(cluster) == (0, 0)
    cluster.let_in("demo")
    assert not set(running(cluster)) & set(before)


# --- the scheduler ----------------------------------------------------------------------------------------------------


def waiting(cluster: Cluster) -> str:
    def message() -> str | None:
        rows = [one for pod in cluster.pods("demo") for one in pod["status"].get("conditions", [])]
        return next((one["message"] for one in rows if one["reason"] == "Unschedulable"), None)

    found = cluster.wait(message)
    assert found is not None
    return found


def test_a_pod_that_fits_nowhere_says_why_and_starts_when_it_does(cluster: Cluster) -> None:
    pool = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    cluster.add_nodes(1, gpus=4, labels=pool)
    cluster.add_nodes(1, gpus=8, labels=pool, taints=[{"key": "busy", "value": "yes", "effect": "NoSchedule"}])
    job = changed(indexed_job(), f"{NODE}.resources", {"limits": {"nvidia.com/gpu": "8"}})
    submit(cluster, changed(job, "spec.template.spec.nodeSelector", pool))
    message = waiting(cluster)
    assert message == (
        "0/6 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint(s), "
        "4 node(s) didn't match Pod's node affinity/selector. no new claims to deallocate, preemption: "
        "0/6 nodes are available: 6 Preemption is not helpful for scheduling."
    )
    assert message in events(cluster, "FailedScheduling")
    cluster.add_nodes(2, gpus=8, labels=pool)
    running(cluster)


TAINTED = {
    "v1.33.5-gke.1080000": (
        "0/1 nodes are available: 1 node(s) had untolerated taint {busy: yes}. "
        "preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
    ),
    "v1.36.2-gke.1034000": (
        "0/1 nodes are available: 1 node(s) had untolerated taint(s). no new claims to deallocate, "
        "preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
    ),
}


@pytest.mark.parametrize("version", TAINTED)
def test_a_tainted_node_is_told_in_the_words_of_the_release(version: str) -> None:
    with running_cluster(simulate=True, nodes=0, version=version) as cluster:
        cluster.add_nodes(1, taints=[{"key": "busy", "value": "yes", "effect": "NoSchedule"}])
        submit(cluster, indexed_job())
        assert waiting(cluster) == TAINTED[version]


def test_nodes_that_are_only_full_could_be_made_free(cluster: Cluster) -> None:
    submit(cluster, changed(indexed_job("first", nodes=4), f"{NODE}.resources", {"requests": {"cpu": "150"}}))
    running(cluster, "first", 4)
    submit(cluster, changed(indexed_job(), f"{NODE}.resources", {"requests": {"cpu": "150"}}))
    assert waiting(cluster) == (
        "0/4 nodes are available: 4 Insufficient cpu. no new claims to deallocate, preemption: "
        "0/4 nodes are available: 4 No preemption victims found for incoming pod."
    )


def test_affinity_keeps_pods_away_from_nodes_and_from_each_other(cluster: Cluster) -> None:
    away = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-0", "node-1"]}
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [away]}],
        }},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"job-name": "demo"}}},
        ]},
    }  # fmt: skip
    submit(cluster, changed(indexed_job(), "spec.template.spec.affinity", affinity))
    running(cluster)
    assert sorted(one["spec"]["nodeName"] for one in cluster.pods("demo")) == ["node-2", "node-3"]


# --- scale ------------------------------------------------------------------------------------------------------------


def test_a_thousand_nodes_start_and_end() -> None:
    with running_cluster(simulate=True, nodes=1000) as cluster:
        began = time.monotonic()
        submit(cluster, jobset("large", nodes=1000))
        cluster.wait(
            lambda: cluster.objects("jobsets")[0].get("status", {}).get("replicatedJobsStatus", [{}])[0].get("ready"),
            seconds=60,
        )
        assert len({one["spec"]["nodeName"] for one in cluster.pods("large")}) == 1000
        cluster.finish()
        cluster.wait(lambda: cluster.objects("jobsets")[0]["status"].get("terminalState") == "Completed", seconds=60)
        assert time.monotonic() - began < 60
        assert sum(cluster.traffic.calls.values()) == 1


def test_claims_have_to_be_there_before_a_pod_is_placed(cluster: Cluster) -> None:
    path = "spec.template.spec.volumes"
    data = [{"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}}]
    submit(cluster, changed(indexed_job(), path, data))
    assert waiting(cluster).startswith('0/4 nodes are available: persistentvolumeclaim "datasets" not found. ')
    cluster.apply(
        "persistentvolumeclaims", {"metadata": {"name": "datasets"}, "spec": {"accessModes": ["ReadWriteMany"]}}
    )
    running(cluster)


def test_a_compute_domain_makes_the_claim_template_that_its_pods_wait_for(cluster: Cluster) -> None:
    claims = [{"name": "domain", "resourceClaimTemplateName": "demo-domain"}]
    submit(cluster, changed(indexed_job(), "spec.template.spec.resourceClaims", claims))
    assert "waiting for dynamic resource controller" in waiting(cluster)
    assert 'resourceclaimtemplate.resource.k8s.io "demo-domain" not found' in events(
        cluster, "FailedResourceClaimCreation"
    )[0]  # fmt: skip
    spec = {"numNodes": 2, "channel": {"resourceClaimTemplate": {"name": "demo-domain"}}}
    cluster.apply("computedomains", {"metadata": {"name": "demo"}, "spec": spec})
    running(cluster)


def test_a_sidecar_that_does_not_stay_up_holds_its_pod_back(cluster: Cluster) -> None:
    cluster.options.outcomes["daemon"] = 1
    sidecar = {"name": "daemon", "image": "cloud:v1", "restartPolicy": "Always"}
    submit(cluster, changed(indexed_job(), "spec.template.spec.initContainers", [sidecar]))

    def crashing() -> bool:
        rows = [one for pod in cluster.pods("demo") for one in pod["status"].get("initContainerStatuses", [])]
        reasons = [one["state"].get("waiting", {}).get("reason") for one in rows if one["restartCount"] > 1]
        return reasons.count("CrashLoopBackOff") == 2

    cluster.wait(crashing)
    assert {one["status"]["phase"] for one in cluster.pods("demo")} == {"Pending"}
    cluster.options.outcomes.clear()
    running(cluster)


def test_others_can_write_events_about_a_pod(cluster: Cluster) -> None:
    submit(cluster, changed(indexed_job(), "spec.template.spec.nodeSelector", {"pool": "none"}))
    waiting(cluster)
    pod = cluster.pods("demo")[0]["metadata"]["name"]
    cluster.tell(pod, "NotTriggerScaleUp", "pod didn't trigger scale-up", source="cluster-autoscaler", kind="Normal")
    assert events(cluster, "NotTriggerScaleUp") == ["pod didn't trigger scale-up"]
