"""States of a job by its JobSet or Job and its pods, and the machines it has lost. Pure: objects in, values out."""

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
# The advice for a pod that was evicted, by its fault. Of what a full machine lacks, only memory is told apart.
_FITS = {
    FailureClass.OUT_OF_MEMORY: "set platform.memory to what a node needs, so that only machines with it are taken",
    FailureClass.NODE: "take machines with more scratch space (platform.local_ssd, a larger boot disk), or write less",
}
_NAMED = 3
"""Nodes that are named; a job can lose hundreds at once."""


@dataclass(frozen=True)
class JobName:
    """The name of a job, and the labels that find everything of it."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, job_id: str) -> JobName:
        """Return the name of an id `namespace/name`."""
        return cls(*job_id.partition("/")[::2])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def labels(self) -> str:
        """A selector."""
        return f"{JOB_LABEL}={self.name}"


def workload_of(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JobSet or Job of a submission."""
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
    return next((one for one in pod["containers"] if one["name"] == NODE), {})


def nodes_of(workload: Object) -> int:
    return int(job_of(workload).get("completions", 1))


def restarts_of(workload: Object) -> int:
    """Return how often JobSet has restarted the job."""
    return int(workload.get("status", {}).get("restarts", 0))


def restart_of(pod: Object) -> int:
    """Return the restart of its JobSet that the pod belongs to; 0 is the first start, and a plain Job's only one."""
    return int(pod["metadata"].get("labels", {}).get(RESTART, 0))


def index_of(pod: Object) -> int:
    """The node that the pod is. The label exists since Kubernetes 1.28, the annotation always."""
    meta = pod["metadata"]
    return int(meta.get("labels", {}).get(INDEX) or meta.get("annotations", {}).get(INDEX) or 0)


def uid_of(thing: Object) -> str:
    return str(thing["metadata"]["uid"])


def owners_of(thing: Object) -> set[str]:
    return {one["uid"] for one in thing["metadata"].get("ownerReferences", ())}


def condition(thing: Object, kind: str, status: str = "True") -> Object | None:
    """Return the condition of that type, if it holds, or if that is its status."""
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind and one["status"] == status), None)


def main_container(pod: Object) -> Object:
    """The state of the container that trains: waiting, running or terminated."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((one["state"] for one in statuses if one["name"] == NODE), {})


def began(pod: Object) -> bool:
    """Return True if the container that trains has ever started."""
    return bool(main_container(pod).keys() & {"running", "terminated"})


def ended(pod: Object) -> bool:
    """Return whether the container that trains has terminated, and says nothing more."""
    return "terminated" in main_container(pod) or pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def final(workload: Object) -> Object | None:
    """Return the condition by which the cluster has decided how the job ends."""
    return next(filter(None, (condition(workload, kind) for kind in ("Completed", "Complete", "Failed"))), None)


class NodeSeen(NamedTuple):
    """A node in one life of the job. Times are in seconds since the epoch, None while they have not come."""

    host: str
    """The machine, once it is found."""
    scheduled: float | None
    """When a machine was found for it."""
    began: float | None
    """When the container that trains began, its image there."""
    code: int | None
    """Its exit code, from which its fault follows (litgpt_demo.errors); negative is the signal that killed it. None
    while it has not ended."""
    eviction: str
    """The reason and what to do, where its kubelet ended it because the machine was full."""


Seen = Mapping[tuple[int, int], NodeSeen]
"""By life and node: pods may be gone by now."""


def node_seen(pod: Object) -> NodeSeen:
    """Return what the pod tells of its node.

    A disrupted pod (https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions) was
    preempted, however its processes ended, unless its own kubelet evicted it, which a machine that is taken away does
    not do. It says `Evicted`, and why; the condition, which it shares with a node that shuts down, comes first:
    https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/
    """
    status, bound, container = pod.get("status", {}), condition(pod, "PodScheduled") or {}, main_container(pod)
    stopped, disrupted = container.get("terminated") or {}, condition(pod, "DisruptionTarget")
    code, eviction = int(stopped["exitCode"]) if stopped else None, ""
    evicted = status.get("reason") == "Evicted"
    words = str(status.get("message", "") if evicted else (disrupted or {}).get("message", ""))
    if code == 0 or not ended(pod):
        pass
    elif evicted or words.startswith(_LOW_ON):
        fault = FailureClass.OUT_OF_MEMORY if words.startswith(f"{_LOW_ON} memory") else FailureClass.NODE
        code, eviction = EXIT_CODES[fault], f"evicted by its kubelet: {one_line(words)}; {_FITS[fault]}"
    elif disrupted is not None:
        code = EXIT_CODES[FailureClass.PREEMPTED]
    elif code is None:  # refused by its kubelet: no container tells
        code = EXIT_CODES[FailureClass.NODE] if status.get("phase") == "Failed" else None
    elif stopped.get("reason") == "OOMKilled":
        code = EXIT_CODES[FailureClass.OUT_OF_MEMORY]
    elif code > 128:  # signals
        code = 128 - code
    since = (container.get("running") or stopped).get("startedAt")
    host = str(pod.get("spec", {}).get("nodeName") or "")
    return NodeSeen(host, _seconds(bound.get("lastTransitionTime")), _seconds(since), code, eviction)


def status_of(workload: Object | None, pods: Iterable[Object], seen: Seen) -> JobStatus:
    """Return the state of the job, by the pods that are there now and what was seen of all of its nodes."""
    if workload is None:
        return JobStatus(state=JobState.ABSENT, native="not there")
    kind, meta, restart, nodes = workload["kind"], workload["metadata"], restarts_of(workload), nodes_of(workload)
    mine = [pod for pod in pods if restart_of(pod) == restart]
    up = sum(began(pod) for pod in mine)
    restarted = f", restarted {restart} times" if restart else ""
    if (over := final(workload)) is not None:
        failed = over["type"] == "Failed"
        state = JobState.FAILED if failed else JobState.SUCCEEDED
        native = f"{kind} {over['type']}" + (f", {over.get('reason', '')}: {over.get('message', '')}" if failed else "")
    elif meta.get("deletionTimestamp"):
        state, native = JobState.RUNNING if mine else JobState.PENDING, f"{kind} is being deleted"
    elif condition(workload, "Suspended") is not None or workload["spec"].get("suspend"):
        state, native = JobState.PENDING, f"{kind} Suspended"
    elif up < nodes:
        state, native = JobState.PENDING, f"{kind} waits: {up} of {nodes} nodes have started{restarted}"
    else:
        state, native = JobState.RUNNING, f"{kind} runs on {nodes} nodes{restarted}"
    known = {node: one for (life, node), one in sorted(seen.items()) if life == restart}
    first = [one for (life, _), one in seen.items() if life == 0]
    found = [one.scheduled for one in first if one.scheduled is not None]
    pulled = [one.began for one in first if one.began is not None]
    return JobStatus(
        state=state,
        native=native,
        exit_codes={node: one.code for node, one in known.items() if one.code is not None},
        evictions={node: one.eviction for node, one in known.items() if one.eviction},
        hosts={node: one.host for node, one in known.items() if one.host},
        scheduled=max(found) if len(found) == nodes else None,
        pulled=max(pulled) if len(pulled) == nodes else None,
        started=_seconds(workload.get("status", {}).get("startTime") or meta.get("creationTimestamp")),
        ended=_seconds(over["lastTransitionTime"]) if over else None,
        restarts=restart,
    )


def _seconds(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment).timestamp() if moment else None


def losses(pods: Sequence[Object], codes: Mapping[int, int]) -> Iterator[Finding]:
    """Yield what keeps a job from ending or from starting again: which machine, since when, and what happens next.

    All pods count that are there, of earlier lives too: they hold up the next one. Codes are those of nodes that ended.
    """
    if silent := sorted((pod for pod in pods if silent_since(pod)), key=index_of):
        pod, since = silent[0], min(map(silent_since, silent))
        named = ", ".join(f"node {index_of(pod)} on {pod['spec']['nodeName']}" for pod in silent[:_NAMED])
        more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
        what = f"the machine of {named}{more} has not answered since {since}"
        tolerated = {one.get("key"): one.get("tolerationSeconds") for one in pod["spec"].get("tolerations", ())}
        after = f"is given up after {tolerated.get('node.kubernetes.io/unreachable') or 300} s; then"
        fix = (
            f"its pod {'was given up;' if pod['metadata'].get('deletionTimestamp') else after} the job starts again "
            "from its last checkpoint as soon as the machine is back or its Node is gone, which GKE sees to; "
            f"elsewhere, once it is switched off: kubectl delete node {pod['spec']['nodeName']}"
        )
        yield Finding("warning", "gke.machine-lost", what, fix)
        return
    failed = {node: code for node, code in codes.items() if code != 0}
    if failed and any(not ended(pod) for pod in pods):
        node, code = min(failed.items())
        what = f"node {node} has ended ({fault_of_exit_code(code)}, exit code {code}), and others have not yet"
        fix = "wait: they are asked to leave; a machine that does not answer is found out within a minute"
        yield Finding("warning", "gke.ending", what, fix)


def silent_since(pod: Object) -> str:
    """Return since when nothing is heard of the pod's machine; empty if it answers, or has told the pod's end.

    The control plane declares the pods of a silent machine not ready (a minute after it fell silent at the latest),
    while their containers stay as their kubelet last told: ready. No permission to look at machines is needed for that.
    https://kubernetes.io/docs/concepts/architecture/nodes/#node-status
    """
    running = [one for one in pod.get("status", {}).get("containerStatuses") or () if "running" in one["state"]]
    unready = condition(pod, "Ready", "False")
    if ended(pod) or unready is None or not running or not all(one.get("ready") for one in running):
        return ""
    return str(unready.get("lastTransitionTime", "a while"))
