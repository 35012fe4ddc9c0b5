"""States of a job by its JobSet or Job and its pods, in our words. Pure: objects in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from launcher.job import JobState, JobStatus, Object
from launcher.platforms.kubernetes import names
from litgpt_demo.errors import EXIT_CODES, Fault, words_of

RESTART = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"

_LOW_ON = "The node was low on resource:"
_FITS = {
    Fault.OUT_OF_MEMORY: "set platform.memory to what a node needs, so that only machines which have it are taken",
    Fault.NODE: "take machines with more scratch space (platform.local_ssd, a larger boot disk), or write less",
}
"""The advice for a pod that was evicted, by its fault. Of what a full machine lacks, only memory is told apart."""


def restart_of(pod: Object) -> int:
    """Return the restart of its JobSet that the pod belongs to; 0 is the first start, and a plain Job's only one."""
    return int(pod["metadata"].get("labels", {}).get(RESTART, 0))


def index_of(pod: Object) -> int:
    """The node that the pod is. The label exists since Kubernetes 1.28, the annotation always."""
    meta = pod["metadata"]
    return int(meta.get("labels", {}).get(INDEX) or meta.get("annotations", {}).get(INDEX) or 0)


def uid_of(thing: Object) -> str:
    return str(thing["metadata"]["uid"])


def restarts_of(workload: Object) -> int:
    """Return how often JobSet has restarted the job."""
    return int(workload.get("status", {}).get("restarts", 0))


def condition(thing: Object, kind: str) -> Object | None:
    """Return the condition of that type, whether it holds or not."""
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), None)


def holding(thing: Object, kind: str) -> Object | None:
    """The condition of that type, if it holds."""
    found = condition(thing, kind)
    return found if found is not None and found["status"] == "True" else None


def main_container(pod: Object) -> Object:
    """The state of the container that trains: waiting, running or terminated."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    found: Object = next((one["state"] for one in statuses if one["name"] == names.NODE), {})
    return found


def began(pod: Object) -> bool:
    """Return True if the container that trains has ever started."""
    return bool(main_container(pod).keys() & {"running", "terminated"})


def ended(pod: Object) -> bool:
    """Will the container that trains say nothing more?"""
    return "terminated" in main_container(pod) or pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


class Beginning(NamedTuple):
    """The times of a node's pod before its work, in seconds since the epoch; None while they have not come."""

    scheduled: float | None
    """When a machine was found for it."""
    began: float | None
    """When the container that trains began, its image there."""
    host: str = ""
    """The machine, once it is found."""


def beginning_of(pod: Object) -> Beginning:
    """Return when the pod was bound to a machine, and when its container began."""
    bound, container = holding(pod, "PodScheduled") or {}, main_container(pod)
    began = (container.get("running") or container.get("terminated") or {}).get("startedAt")
    host = str(pod.get("spec", {}).get("nodeName") or "")
    return Beginning(seconds(bound.get("lastTransitionTime")), seconds(began), host)


def last_beginning(beginnings: Mapping[tuple[int, int], Beginning], *, nodes: int) -> Beginning:
    """Return when the job's first life had its last machine and its last container; what a node lacks is None.

    Args:
        beginnings: by life and node.
    """
    first = [one for (life, _), one in beginnings.items() if life == 0]

    def last(moments: Iterable[float | None]) -> float | None:
        known = [moment for moment in moments if moment is not None]
        return max(known) if len(known) == nodes else None

    return Beginning(last(one.scheduled for one in first), last(one.began for one in first))


class End(NamedTuple):
    """The end of a node."""

    code: int
    """Its exit code, from which its fault follows (litgpt_demo.errors); negative is the signal that killed it."""
    eviction: str = ""
    """The reason and what to do, where its kubelet ended it because the machine was full."""


def end_of(pod: Object) -> End | None:
    """Return how the node ended; None while it has not.

    A disrupted pod (https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions) was
    preempted, however its processes ended, unless its own kubelet evicted it. 128 and more are signals.
    """
    stopped = main_container(pod).get("terminated")
    code = None if stopped is None else int(stopped["exitCode"])
    if code == 0:
        return End(0)
    if code is None and not ended(pod):
        return None
    if (evicted := _eviction(pod)) is not None:
        return evicted
    if holding(pod, "DisruptionTarget") is not None:
        return End(EXIT_CODES[Fault.PREEMPTED])
    if stopped is None:
        # Refused by its kubelet: no container tells.
        return End(EXIT_CODES[Fault.NODE]) if pod.get("status", {}).get("phase") == "Failed" else None
    if stopped.get("reason") == "OOMKilled":
        return End(EXIT_CODES[Fault.OUT_OF_MEMORY])
    assert code is not None
    return End(128 - code if code > 128 else code)


def _eviction(pod: Object) -> End | None:
    """Return the end of a pod that its kubelet evicted, which a machine that is taken away does not do.

    It says `Evicted`, and why; the condition, which it shares with a node that shuts down, comes first.
    https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/
    """
    status, held = pod.get("status", {}), holding(pod, "DisruptionTarget") or {}
    words = str(status.get("message", "") if status.get("reason") == "Evicted" else held.get("message", ""))
    if status.get("reason") != "Evicted" and not words.startswith(_LOW_ON):
        return None
    short = words.startswith(f"{_LOW_ON} memory")
    fault = Fault.OUT_OF_MEMORY if short else Fault.NODE
    return End(EXIT_CODES[fault], f"evicted by its kubelet: {words_of(words)}; {_FITS[fault]}")


def status_of(
    workload: Object | None, pods: Iterable[Object], ends: Mapping[tuple[int, int], End], *, nodes: int,
    beginnings: Mapping[tuple[int, int], Beginning] | None = None,
) -> JobStatus:  # fmt: skip
    """Return the state of the job.

    Args:
        pods: those that are there now.
        ends: by life and node, of pods that may be gone by now.
        beginnings: the same of how they began; by default as the pods tell.
    """
    if workload is None:
        return JobStatus(state=JobState.ABSENT, native="not there")
    restart = restarts_of(workload)
    mine = [pod for pod in pods if restart_of(pod) == restart]
    known = {node: end for (when, node), end in ends.items() if when == restart}
    known |= {index_of(pod): end for pod in mine if (end := end_of(pod)) is not None}
    state, native = _state(workload, mine, nodes)
    meta, status = workload["metadata"], workload.get("status", {})
    over = _end(workload)
    beginnings = beginnings or {(restart, index_of(pod)): beginning_of(pod) for pod in mine}
    began = last_beginning(beginnings, nodes=nodes)
    return JobStatus(
        state=state,
        native=native,
        exit_codes={node: end.code for node, end in sorted(known.items())},
        evictions={node: end.eviction for node, end in sorted(known.items()) if end.eviction},
        hosts={node: one.host for (when, node), one in sorted(beginnings.items()) if when == restart and one.host},
        scheduled=began.scheduled,
        pulled=began.began,
        started=seconds(status.get("startTime") or meta.get("creationTimestamp")),
        ended=seconds(over["lastTransitionTime"]) if over else None,
        restarts=restart,
    )


def final(workload: Object) -> bool:
    """Return True if the cluster has decided how the job ends."""
    return _end(workload) is not None


def _end(workload: Object) -> Object | None:
    for kind in ("Completed", "Complete", "Failed"):
        if (found := holding(workload, kind)) is not None:
            return found
    return None


def _state(workload: Object, pods: list[Object], nodes: int) -> tuple[JobState, str]:
    kind = workload["kind"]
    if (end := _end(workload)) is not None:
        if end["type"] != "Failed":
            return JobState.SUCCEEDED, f"{kind} {end['type']}"
        return JobState.FAILED, f"{kind} Failed, {end.get('reason', '')}: {end.get('message', '')}"
    if workload["metadata"].get("deletionTimestamp"):
        return JobState.RUNNING if pods else JobState.PENDING, f"{kind} is being deleted"
    if holding(workload, "Suspended") is not None or workload["spec"].get("suspend"):
        return JobState.PENDING, f"{kind} Suspended"
    up = sum(began(pod) for pod in pods)
    restarted = f", restarted {times} times" if (times := restarts_of(workload)) else ""
    if up < nodes:
        return JobState.PENDING, f"{kind} waits: {up} of {nodes} nodes have started{restarted}"
    return JobState.RUNNING, f"{kind} runs on {nodes} nodes{restarted}"


def nodes_of(workload: Object) -> int:
    """Pods that the job has."""
    spec = workload["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if workload["kind"] == "JobSet" else spec
    return int(job.get("completions", 1))


def seconds(moment: str | None) -> float | None:
    """Since the epoch, of a time as the API writes it."""
    return datetime.fromisoformat(moment).timestamp() if moment else None
