"""What becomes of a job whose machines go silent, come back, run out of memory, or lose their control plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import kubernetes.client as k8s
import pytest
import urllib3
from cluster_objects import changed, client, indexed_job, jobset, submit
from kubernetes.client.exceptions import ApiException
from kubernetes_cluster import Cluster, Timing, running_cluster

UNREACHABLE = "node.kubernetes.io/unreachable"
FOREVER = {"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=3) as made:
        yield made


def running(cluster: Cluster, count: int = 2) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]] | None:
        up = [one for one in cluster.pods("demo") if one["status"]["phase"] == "Running"]
        return up if len(up) == count else None

    pods = cluster.wait(found)
    assert pods is not None
    return pods


def pod(cluster: Cluster, name: str) -> dict[str, Any]:
    return next(one for one in cluster.objects("pods") if one["metadata"]["name"] == name)


def node(cluster: Cluster, name: str) -> dict[str, Any]:
    return next(one for one in cluster.objects("nodes") if one["metadata"]["name"] == name)


def condition(thing: dict[str, Any], kind: str) -> dict[str, Any]:
    rows = thing.get("status", {}).get("conditions", [])
    return next((one for one in rows if one["type"] == kind), {})


def ready(cluster: Cluster, name: str) -> str:
    return str(condition(node(cluster, name), "Ready")["status"])


def taints(cluster: Cluster, name: str) -> set[tuple[str, str]]:
    return {(one["key"], one["effect"]) for one in node(cluster, name)["spec"]["taints"]}


def events(cluster: Cluster, reason: str) -> list[str]:
    return [one["message"] for one in cluster.objects("events") if one["reason"] == reason]


def hung(cluster: Cluster) -> tuple[str, str]:
    """(pod, node) of a machine that has stopped answering, a job running on it."""
    submit(cluster, indexed_job())
    first = running(cluster)[0]
    name, machine = first["metadata"]["name"], first["spec"]["nodeName"]
    cluster.hang(machine)
    return name, machine


def terminating(cluster: Cluster, name: str) -> Callable[[], bool]:
    return lambda: bool(pod(cluster, name)["metadata"].get("deletionTimestamp"))


def test_a_silent_machine_becomes_unknown_and_tainted(cluster: Cluster) -> None:
    name, machine = hung(cluster)
    assert ready(cluster, machine) == "True"
    cluster.wait(lambda: ready(cluster, machine) == "Unknown")
    assert condition(node(cluster, machine), "Ready")["reason"] == "NodeStatusUnknown"
    assert condition(node(cluster, machine), "Ready")["message"] == "Kubelet stopped posting node status."
    cluster.wait(lambda: taints(cluster, machine) == {(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")})
    assert condition(pod(cluster, name), "Ready")["status"] == "False"
    assert events(cluster, "NodeNotReady").count("Node is not ready") == 1


def test_pods_of_a_silent_machine_are_deleted_and_stay(cluster: Cluster) -> None:
    """Nothing waits for them, and nothing replaces them: with podFailurePolicy only what has failed is replaced."""
    name, _ = hung(cluster)
    cluster.wait(terminating(cluster, name))
    held = condition(pod(cluster, name), "DisruptionTarget")
    assert (held["reason"], held["message"]) == (
        "DeletionByTaintManager",
        "Taint manager: deleting due to NoExecute taint",
    )
    assert events(cluster, "TaintManagerEviction") == [f"Marking for deletion Pod default/{name}"]
    time.sleep(0.5)
    assert pod(cluster, name)["status"]["phase"] == "Running"
    assert len(cluster.pods("demo")) == 2
    assert not condition(cluster.objects("jobs")[0], "FailureTarget")
    with pytest.raises(ApiException) as error:
        k8s.CoreV1Api(client(cluster)).read_namespaced_pod_log(name, "default")
    assert "no route to host" in error.value.body


ENDS: dict[str, Callable[[Cluster, str], object]] = {
    "the node is deleted": lambda cluster, machine: cluster.remove_node(machine),
    "the machine is restarted": lambda cluster, machine: cluster.recover(machine),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_stuck_pod_fails_its_job_when(cluster: Cluster, end: str) -> None:
    name, machine = hung(cluster)
    cluster.wait(terminating(cluster, name))
    ENDS[end](cluster, machine)
    cluster.wait(lambda: condition(cluster.objects("jobs")[0], "Failed"))
    assert condition(cluster.objects("jobs")[0], "Failed")["reason"] == "PodFailurePolicy"


def test_a_stuck_pod_goes_by_force_once_its_job_is_deleted(cluster: Cluster) -> None:
    """Before that the Job's finalizer holds it: it is Running, and neither failed nor counted."""
    name, _ = hung(cluster)
    cluster.wait(terminating(cluster, name))
    cluster.delete_pod(name, grace=0)
    time.sleep(0.3)
    assert pod(cluster, name)["metadata"]["finalizers"] == ["batch.kubernetes.io/job-tracking"]
    k8s.BatchV1Api(client(cluster)).delete_namespaced_job("demo", "default", propagation_policy="Foreground")
    cluster.wait(lambda: not cluster.objects("jobs"))
    assert not cluster.pods(live=False)


def test_a_deleted_job_waits_for_a_stuck_pod(cluster: Cluster) -> None:
    name, _ = hung(cluster)
    k8s.BatchV1Api(client(cluster)).delete_namespaced_job("demo", "default", propagation_policy="Foreground")
    cluster.wait(lambda: len(cluster.objects("pods")) == 1)
    time.sleep(0.3)
    assert cluster.objects("jobs")
    cluster.delete_pod(name, grace=0)
    cluster.wait(lambda: not cluster.objects("jobs"))
    assert not cluster.pods(live=False)


def test_a_restart_waits_for_the_pod_of_a_silent_machine(cluster: Cluster) -> None:
    """The other node fails of it, and its Job is to fail; but that is said when the last pod has ended, and JobSet
    waits to be told."""
    submit(cluster, jobset())
    first, second = running(cluster)
    cluster.hang(first["spec"]["nodeName"])
    cluster.finish(second["metadata"]["name"], code=44)
    cluster.wait(terminating(cluster, first["metadata"]["name"]))
    cluster.wait(lambda: condition(cluster.objects("jobs")[0], "FailureTarget"))
    time.sleep(0.5)
    assert not condition(cluster.objects("jobs")[0], "Failed")
    assert cluster.objects("jobsets")[0]["status"]["restarts"] == 0
    assert [one["metadata"]["name"] for one in cluster.pods("demo")] == [first["metadata"]["name"]]
    cluster.remove_node(first["spec"]["nodeName"])
    cluster.wait(lambda: cluster.objects("jobsets")[0]["status"]["restarts"] == 1)
    cluster.wait(lambda: first["metadata"]["name"] not in [one["metadata"]["name"] for one in cluster.pods("demo")])
    running(cluster)


def test_a_restarted_machine_is_ready_and_what_ran_there_has_failed(cluster: Cluster) -> None:
    name, machine = hung(cluster)
    cluster.wait(lambda: ready(cluster, machine) == "Unknown")
    cluster.recover(machine)
    cluster.wait(lambda: ready(cluster, machine) == "True")
    assert taints(cluster, machine) == set()
    ended = pod(cluster, name)["status"]
    assert ended["phase"] == "Failed"
    assert ended["containerStatuses"][0]["state"]["terminated"]["reason"] == "ContainerStatusUnknown"
    assert ended["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137


def test_a_machine_that_the_cloud_has_taken_is_removed_and_its_pods_with_it(cluster: Cluster) -> None:
    submit(cluster, jobset())
    first = running(cluster)[0]
    cluster.lose(first["spec"]["nodeName"])
    cluster.wait(lambda: cluster.objects("jobsets")[0]["status"]["restarts"] == 1)
    assert "does not exist in the cloud provider" in events(cluster, "DeletingNode")[0]
    assert cluster.objects("jobsets")[0]["status"].get("restartsCountTowardsMax") == 0
    running(cluster)


def test_a_pod_stays_for_as_long_as_it_tolerates(cluster: Cluster) -> None:
    submit(cluster, changed(indexed_job(), "spec.template.spec.tolerations", [FOREVER]))
    first = running(cluster)[0]
    cluster.hang(first["spec"]["nodeName"])
    cluster.wait(lambda: ready(cluster, first["spec"]["nodeName"]) == "Unknown")
    time.sleep(0.8)
    assert not terminating(cluster, first["metadata"]["name"])()


def test_when_no_machine_is_heard_nobody_is_evicted(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    running(cluster)
    machines = [one["metadata"]["name"] for one in cluster.objects("nodes")]
    for machine in machines:
        cluster.hang(machine)
    cluster.wait(lambda: all(ready(cluster, machine) == "Unknown" for machine in machines))
    time.sleep(0.8)
    assert not [one for one in cluster.pods("demo") if one["metadata"].get("deletionTimestamp")]
    assert taints(cluster, machines[0]) == {(UNREACHABLE, "NoSchedule")}


def test_an_outage_of_the_api_leaves_pods_running_and_nodes_unknown_for_a_while() -> None:
    with running_cluster(simulate=True, nodes=2, timing=Timing(heartbeat=1.0)) as cluster:
        submit(cluster, indexed_job())
        before = [one["metadata"]["name"] for one in running(cluster)]
        end = cluster.outage()
        with pytest.raises(urllib3.exceptions.HTTPError):
            k8s.CoreV1Api(client(cluster)).list_namespaced_pod("default")
        time.sleep(0.5)
        end()
        assert {ready(cluster, one["metadata"]["name"]) for one in cluster.objects("nodes")} == {"Unknown"}
        assert {condition(one, "Ready")["status"] for one in cluster.pods("demo")} == {"False"}
        submit(cluster, changed(indexed_job("late"), "spec.completions", 2))
        cluster.wait(lambda: [one for one in cluster.pods("late") if condition(one, "PodScheduled")])
        assert "2 node(s) had untolerated taint(s)" in condition(cluster.pods("late")[0], "PodScheduled")["message"]
        cluster.wait(lambda: {ready(cluster, f"node-{one}") for one in range(2)} == {"True"})
        cluster.wait(lambda: {condition(one, "Ready")["status"] for one in cluster.pods("demo")} == {"True"})
        assert [one["metadata"]["name"] for one in running(cluster)] == before
        cluster.wait(lambda: {one["status"]["phase"] for one in cluster.pods("late")} == {"Running"})


def test_a_short_outage_of_the_api_changes_no_node(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    running(cluster)
    cluster.outage()()
    assert {ready(cluster, one["metadata"]["name"]) for one in cluster.objects("nodes")} == {"True"}
    cluster.finish()
    cluster.wait(lambda: condition(cluster.objects("jobs")[0], "Complete"))


def test_controllers_do_nothing_while_the_api_is_away(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first = running(cluster)[0]["metadata"]["name"]
    end = cluster.outage()
    cluster.finish(first, code=42)
    time.sleep(0.3)
    assert not condition(cluster.objects("jobs")[0], "FailureTarget")
    end()
    cluster.wait(lambda: condition(cluster.objects("jobs")[0], "Failed"))


def test_a_pod_that_its_node_has_no_memory_for_is_evicted_by_the_kubelet(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    name = running(cluster)[0]["metadata"]["name"]
    cluster.run_out(name)
    cluster.wait(lambda: pod(cluster, name)["status"]["phase"] == "Failed")
    status = pod(cluster, name)["status"]
    assert status["reason"] == "Evicted"
    assert status["message"].startswith("The node was low on resource: memory. Threshold quantity: ")
    assert condition(pod(cluster, name), "DisruptionTarget")["reason"] == "TerminationByKubelet"
    assert events(cluster, "Evicted") == [status["message"]]


def test_a_secret_that_is_not_there_holds_the_pod_back(cluster: Cluster) -> None:
    volumes = [{"name": "keys", "secret": {"secretName": "hf-token"}}]
    submit(cluster, changed(indexed_job(), "spec.template.spec.volumes", volumes))
    told = cluster.wait(lambda: events(cluster, "FailedMount"))
    assert told[0] == 'MountVolume.SetUp failed for volume "keys" : secret "hf-token" not found'
    states = [one["status"]["containerStatuses"][0]["state"] for one in cluster.pods("demo")]
    assert states == [{"waiting": {"reason": "ContainerCreating"}}] * 2
    cluster.apply("secrets", {"metadata": {"name": "hf-token"}, "stringData": {"token": "x"}})
    running(cluster)


def test_a_container_beyond_its_memory_is_told_from_one_that_was_killed(cluster: Cluster) -> None:
    submit(cluster, indexed_job())
    first, second = (one["metadata"]["name"] for one in running(cluster))
    cluster.kill(first, out_of_memory=True)
    cluster.kill(second)
    for name, reason in ((first, "OOMKilled"), (second, "Error")):
        cluster.wait(lambda name=name: pod(cluster, name)["status"]["phase"] == "Failed")
        ended = pod(cluster, name)["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["exitCode"], ended["reason"]) == (137, reason)
