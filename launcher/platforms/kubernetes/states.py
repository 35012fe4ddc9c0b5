"""States of a job by its JobSet or Job and its pods, in our words. Pure: objects in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from launcher.job import JobState, JobStatus, Object
from launcher.platforms.kubernetes import names
from litgpt_demo.errors import EXIT_CODES, Fault

RESTART = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"


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


def exit_code(pod: Object) -> int | None:
    """Return how the node ended, from which its fault follows (litgpt_demo.errors); None while it has not.

    A disrupted pod (https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions) was
    preempted, however its processes ended. 128 and more are signals.
    """
    stopped = main_container(pod).get("terminated")
    code = None if stopped is None else int(stopped["exitCode"])
    if code == 0:
        return 0
    if holding(pod, "DisruptionTarget") is not None and (code is not None or ended(pod)):
        return EXIT_CODES[Fault.PREEMPTED]
    if stopped is None:
        # Evicted for memory or disk, or refused by its kubelet: no container tells.
        return EXIT_CODES[Fault.NODE] if pod.get("status", {}).get("phase") == "Failed" else None
    if stopped.get("reason") == "OOMKilled":
        return EXIT_CODES[Fault.OUT_OF_MEMORY]
    assert code is not None
    return 128 - code if code > 128 else code


def status_of(
    workload: Object | None, pods: Iterable[Object], codes: Mapping[tuple[int, int], int], *, nodes: int
) -> JobStatus:
    """Return the state of the job.

    Args:
        pods: those that are there now.
        codes: exit codes by life and node, of pods that may be gone by now.
    """
    if workload is None:
        return JobStatus(state=JobState.ABSENT, native="not there")
    restart = restarts_of(workload)
    mine = [pod for pod in pods if restart_of(pod) == restart]
    known = {node: code for (when, node), code in codes.items() if when == restart}
    known |= {index_of(pod): code for pod in mine if (code := exit_code(pod)) is not None}
    state, native = _state(workload, mine, nodes)
    meta, status = workload["metadata"], workload.get("status", {})
    end = _end(workload)
    return JobStatus(
        state=state,
        native=native,
        exit_codes=dict(sorted(known.items())),
        started=seconds(status.get("startTime") or meta.get("creationTimestamp")),
        ended=seconds(end["lastTransitionTime"]) if end else None,
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
