"""The state of a job from its JobSet or Job and its pods, and its lost machines. Pure: objects in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from launcher.job import JOB_LABEL, JobState, JobStatus, Object
from launcher.platforms.kubernetes.render import NODE
from litgpt_demo.errors import EXIT_CODES, FailureClass, Finding, fault_of_exit_code, one_line

RESTART = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"

_LOW_ON = "The node was low on resource:"
# The advice for an evicted pod, by its failure class: a full machine lacks memory, or something else.
_FITS = {
    FailureClass.OUT_OF_MEMORY: "set platform.memory to what a node needs, so that only machines with it are taken",
    FailureClass.NODE: "take machines with more scratch space (platform.local_ssd, a larger boot disk), or write less",
}
_NAMED = 3
"""Nodes that a message names; a job can lose hundreds at once."""


@dataclass(frozen=True)
class JobName:
    """The name of a job, and the selector of everything of it."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, job_id: str) -> JobName:
        return cls(*job_id.partition("/")[::2])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def labels(self) -> str:
        return f"{JOB_LABEL}={self.name}"


def workload_of(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(item for item in items if item["kind"] in {"JobSet", "Job"})


def job_of(workload: Object) -> Object:
    """Return the specification of the Indexed Job in a JobSet or Job."""
    spec: Object = workload["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if workload["kind"] == "JobSet" else spec


def pod_of(workload: Object) -> Object:
    """Return the specification of the pods that a JobSet or Job makes."""
    spec: Object = job_of(workload)["template"]["spec"]
    return spec


def container_of(pod: Object) -> Object:
    """Return the container that trains, in the specification of a pod."""
    return next((container for container in pod["containers"] if container["name"] == NODE), {})


def nodes_of(workload: Object) -> int:
    return int(job_of(workload).get("completions", 1))


def restarts_of(workload: Object) -> int:
    return int(workload.get("status", {}).get("restarts", 0))


def restart_of(pod: Object) -> int:
    """Return the restart of its JobSet that the pod belongs to; 0 is the first start, and a plain Job's only one."""
    return int(pod["metadata"].get("labels", {}).get(RESTART, 0))


def index_of(pod: Object) -> int:
    return int(pod["metadata"].get("labels", {}).get(INDEX, 0))


def uid_of(thing: Object) -> str:
    return str(thing["metadata"]["uid"])


def owners_of(thing: Object) -> set[str]:
    return {owner["uid"] for owner in thing["metadata"].get("ownerReferences", ())}


def condition(thing: Object, kind: str, status: str = "True") -> Object | None:
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((found for found in conditions if found["type"] == kind and found["status"] == status), None)


def main_container(pod: Object) -> Object:
    """Return the state of the container that trains: waiting, running or terminated."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((status["state"] for status in statuses if status["name"] == NODE), {})


def began(pod: Object) -> bool:
    return bool(main_container(pod).keys() & {"running", "terminated"})


def ended(pod: Object) -> bool:
    return "terminated" in main_container(pod) or pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def final(workload: Object) -> Object | None:
    """Return the condition that says how the job ended, None while it has not."""
    return condition(workload, "Completed") or condition(workload, "Complete") or condition(workload, "Failed")


class NodeSeen(NamedTuple):
    """A node in one life of the job. Times are in seconds since the epoch, None while they lie in the future."""

    host: str
    """The machine, empty while none was found."""
    scheduled: float | None
    """When a machine was found for it."""
    began: float | None
    """When the container that trains began, after its image was pulled."""
    code: int | None
    """Its exit code, which has a failure class (litgpt_demo.errors), or the negative number of the signal that killed
    it. None while it runs."""
    eviction: str
    """The reason and the advice if the kubelet evicted it from a full machine."""


Seen = Mapping[tuple[int, int], NodeSeen]
"""The nodes by life and number. Their pods may be deleted."""


def node_seen(pod: Object) -> NodeSeen:
    """Return the pod's information about its node.

    A disrupted pod (https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions) was
    preempted, however its processes ended, unless its own kubelet evicted it from a full machine. An evicted pod has
    the reason `Evicted`. Its condition, which a node's shutdown also sets, comes earlier than the reason:
    https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/
    """
    status, bound, container = pod.get("status", {}), condition(pod, "PodScheduled") or {}, main_container(pod)
    stopped, disrupted = container.get("terminated") or {}, condition(pod, "DisruptionTarget")
    code, eviction = int(stopped["exitCode"]) if stopped else None, ""
    is_evicted = status.get("reason") == "Evicted"
    message = str((status if is_evicted else disrupted or {}).get("message", ""))
    if code == 0 or not ended(pod):
        pass
    elif is_evicted or message.startswith(_LOW_ON):
        failure = FailureClass.OUT_OF_MEMORY if message.startswith(f"{_LOW_ON} memory") else FailureClass.NODE
        code, eviction = EXIT_CODES[failure], f"evicted by its kubelet: {one_line(message)}; {_FITS[failure]}"
    elif disrupted is not None:
        code = EXIT_CODES[FailureClass.PREEMPTED]
    elif code is None:
        if status.get("phase") == "Failed":  # rejected by its kubelet before a container existed
            code = EXIT_CODES[FailureClass.NODE]
    elif stopped.get("reason") == "OOMKilled":
        code = EXIT_CODES[FailureClass.OUT_OF_MEMORY]
    elif code > 128:  # signals
        code = 128 - code
    since = (container.get("running") or stopped).get("startedAt")
    host = str(pod.get("spec", {}).get("nodeName") or "")
    return NodeSeen(host, _seconds(bound.get("lastTransitionTime")), _seconds(since), code, eviction)


def status_of(workload: Object | None, pods: Iterable[Object], seen: Seen) -> JobStatus:
    """Return the state of the job from its present pods and what was seen of all of its nodes."""
    if workload is None:
        return JobStatus(state=JobState.ABSENT, native="not there")
    kind, meta, restart, nodes = workload["kind"], workload["metadata"], restarts_of(workload), nodes_of(workload)
    present = [pod for pod in pods if restart_of(pod) == restart]
    up = sum(map(began, present))
    restarted = ""
    if restart:
        restarted = f", restarted {restart} times"
    end = final(workload)
    if end is not None and end["type"] == "Failed":
        state = JobState.FAILED
        native = f"{kind} Failed, {end.get('reason', '')}: {end.get('message', '')}"
    elif end is not None:
        state, native = JobState.SUCCEEDED, f"{kind} {end['type']}"
    elif meta.get("deletionTimestamp"):
        state, native = JobState.RUNNING if present else JobState.PENDING, f"{kind} is being deleted"
    elif condition(workload, "Suspended") is not None or workload["spec"].get("suspend"):
        state, native = JobState.PENDING, f"{kind} Suspended"
    elif up < nodes:
        state, native = JobState.PENDING, f"{kind} waits: {up} of {nodes} nodes have started{restarted}"
    else:
        state, native = JobState.RUNNING, f"{kind} runs on {nodes} nodes{restarted}"
    current = {number: node for (life, number), node in sorted(seen.items()) if life == restart}
    first = [node for (life, _), node in seen.items() if life == 0]
    scheduled = [node.scheduled for node in first if node.scheduled is not None]
    pulled = [node.began for node in first if node.began is not None]
    return JobStatus(
        state=state,
        native=native,
        exit_codes={number: node.code for number, node in current.items() if node.code is not None},
        evictions={number: node.eviction for number, node in current.items() if node.eviction},
        hosts={number: node.host for number, node in current.items() if node.host},
        scheduled=max(scheduled) if len(scheduled) == nodes else None,
        pulled=max(pulled) if len(pulled) == nodes else None,
        started=_seconds(workload.get("status", {}).get("startTime") or meta.get("creationTimestamp")),
        ended=_seconds((end or {}).get("lastTransitionTime")),
        restarts=restart,
    )


def _seconds(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment).timestamp() if moment else None


def lost_nodes(pods: Sequence[Object], codes: Mapping[int, int]) -> Iterator[Finding]:
    """Yield what keeps a job from ending or restarting. Pods of earlier lives count too, because they block the next
    life. `codes` has the nodes that have ended."""
    unreachable = sorted((pod for pod in pods if unreachable_since(pod)), key=index_of)
    if unreachable:
        pod, since = unreachable[0], min(map(unreachable_since, unreachable))
        named = ", ".join(f"node {index_of(pod)} on {pod['spec']['nodeName']}" for pod in unreachable[:_NAMED])
        if len(unreachable) > _NAMED:
            named += f" and {len(unreachable) - _NAMED} more"
        tolerated = {rule.get("key"): rule.get("tolerationSeconds") for rule in pod["spec"].get("tolerations", ())}
        given_up = f"is given up after {tolerated.get('node.kubernetes.io/unreachable') or 300} s; then"
        if pod["metadata"].get("deletionTimestamp"):
            given_up = "was given up;"
        fix = (
            f"its pod {given_up} the job starts again from its last checkpoint as soon as the machine is back or its "
            "Node is gone, which GKE sees to; elsewhere, once it is switched off: "
            f"kubectl delete node {pod['spec']['nodeName']}"
        )
        yield Finding(
            "warning", "kubernetes.machine-lost", f"the machine of {named} has not answered since {since}", fix
        )
        return
    failed = {node: code for node, code in codes.items() if code != 0}
    if failed and not all(map(ended, pods)):
        node, code = min(failed.items())
        what = f"node {node} has ended ({fault_of_exit_code(code)}, exit code {code}), and others have not yet"
        fix = "wait: the others get the signal to end, and a silent machine is detected within a minute"
        yield Finding("warning", "kubernetes.ending", what, fix)


def unreachable_since(pod: Object) -> str:
    """Return since when the pod's machine has not answered; empty if it answers, or has reported the pod's end. After a
    minute at most, the control plane declares the pods of a silent machine not ready, though their containers stay so.
    https://kubernetes.io/docs/concepts/architecture/nodes/#node-status"""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    running = [status for status in statuses if "running" in status["state"]]
    unready = condition(pod, "Ready", "False")
    if ended(pod) or unready is None or not running or not all(status.get("ready") for status in running):
        return ""
    return str(unready.get("lastTransitionTime", "a while"))
