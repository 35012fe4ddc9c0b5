"""The Job controller: pods for an Indexed Job, and what becomes of it.

After kubernetes' pkg/controller/job, for what this project sends: all pods at once, none replaced (backoffLimit 0),
podFailurePolicy and suspend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .admission import Admission
from .controllers import DELETE, RETRY, Events, Queue
from .errors import ApiError
from .pods import INDEX, TRACKING, finished, index_of, owner_reference, phase, ready, untrack
from .server import suffix
from .store import Object, Store, condition, copied, holds, moment, set_condition

SOURCE = "job-controller"


class JobController:
    def __init__(self, store: Store, queue: Queue, admission: Admission, events: Events, delete: DELETE) -> None:
        self.store, self.queue, self.admission, self.events, self.delete = store, queue, admission, events, delete
        queue.controllers["jobs"] = self.reconcile

    def reconcile(self, job: Object) -> None:
        if job["metadata"].get("deletionTimestamp"):
            for pod in self.store.owned("pods", job):
                self.store.change("pods", pod, untrack)
            return
        if holds(job, "Complete") or holds(job, "Failed"):
            return
        status = copied(job.get("status", {}))
        failure = self._count(job, status)
        pods = self.store.owned("pods", job)
        done = {index_of(pod) for pod in pods if phase(pod) == "Succeeded"}
        ending = _ending(job, status, done, failure)
        suspended = bool(job["spec"].get("suspend"))
        if ending is None and not suspended:
            self._create_missing(job, status, pods)
        else:
            for pod in pods:
                if not finished(pod) and not pod["metadata"].get("deletionTimestamp"):
                    if ending is None:
                        self.store.change("pods", pod, untrack)  # what suspension ends has not failed
                    self.delete("pods", pod, {})
        self._write(job, status, ending, suspended=suspended)

    def _count(self, job: Object, status: Object) -> str | None:
        """Add what has ended since the last look; the message of the first FailJob rule that matched."""
        message = None
        for pod in self.store.owned("pods", job):
            if TRACKING not in pod["metadata"].get("finalizers", []) or not _over(pod):
                continue
            if phase(pod) != "Succeeded":
                message = message or _matching_rule(job, pod)
                status["failed"] = status.get("failed", 0) + 1
            self.store.change("pods", pod, untrack)
        return message

    def _create_missing(self, job: Object, status: Object, pods: Sequence[Object]) -> None:
        spec, meta = job["spec"], job["metadata"]
        status.setdefault("startTime", moment())
        there = {index_of(pod) for pod in pods}
        for index in range(spec.get("completions", 1)):
            if index in there:
                continue
            try:
                pod = _pod_of(job, index)
                self.admission.pod(pod)
            except ApiError as error:
                self.events(job, "FailedCreate", f"Error creating: {error}", source=SOURCE)
                self.queue.look("jobs", meta["namespace"], meta["name"], after=RETRY)
                return
            self.store.add("pods", pod)

    def _write(self, job: Object, status: Object, ending: tuple[str, str, str] | None, *, suspended: bool) -> None:
        live = [pod for pod in self.store.owned("pods", job) if not finished(pod)]
        active = [pod for pod in live if not pod["metadata"].get("deletionTimestamp")]
        status |= {"active": len(active), "ready": sum(map(ready, active))}
        draft: Object = {"status": status}
        if ending is not None:
            kind, reason, message = ending
            set_condition(draft, "FailureTarget" if kind == "Failed" else "SuccessCriteriaMet", "True", reason, message)
            if not live:  # the last word is said when the last pod is gone (kubernetes 1.31 and later)
                set_condition(draft, kind, "True", reason, message)
        elif suspended != holds(job, "Suspended"):
            set_condition(draft, "Suspended", str(suspended))
        self.store.change("jobs", job, lambda thing: thing.__setitem__("status", status))


def _over(pod: Object) -> bool:
    """Whether it is finished, or was deleted before it started."""
    return finished(pod) or (bool(pod["metadata"].get("deletionTimestamp")) and not pod["spec"].get("nodeName"))


def _ending(job: Object, status: Object, done: set[int], failure: str | None) -> tuple[str, str, str] | None:
    """(condition, reason, message) where the Job is to end."""
    if (target := condition(job, "FailureTarget")) is not None:
        return "Failed", target["reason"], target["message"]
    if failure is not None:
        return "Failed", "PodFailurePolicy", failure
    if status.get("failed", 0) > job["spec"].get("backoffLimit", 6):
        return "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    if len(done) >= job["spec"].get("completions", 1):
        return "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
    return None


def _matching_rule(job: Mapping[str, Any], pod: Mapping[str, Any]) -> str | None:
    """The message of the first rule that matches the failed pod, all of which are FailJob's here."""
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for index, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules", [])):
        matching = f"matching {rule['action']} rule at index {index}"
        if "onExitCodes" not in rule:
            held = next((one["type"] for one in rule["onPodConditions"] if holds(pod, one["type"])), None)
            if held is not None:
                return f"Pod {name} has condition {held} {matching}"
            continue
        wanted = rule["onExitCodes"]
        for one in pod.get("status", {}).get("containerStatuses", []):
            code = one["state"].get("terminated", {}).get("exitCode", 0)
            ours = wanted.get("containerName", one["name"]) == one["name"]
            if ours and code != 0 and (code in wanted["values"]) == (wanted["operator"] == "In"):
                return f"Container {one['name']} for pod {name} failed with exit code {code} {matching}"
    return None


def _pod_of(job: Object, index: int) -> Object:
    """The pod that the Job's template makes, for one index."""
    meta, template = job["metadata"], copied(job["spec"]["template"])
    made_of, spec = template.get("metadata") or {}, template["spec"]
    marks = {
        "batch.kubernetes.io/controller-uid": meta["uid"], "batch.kubernetes.io/job-name": meta["name"],
        INDEX: str(index),
    }  # fmt: skip
    spec["hostname"] = f"{meta['name']}-{index}"
    variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}}
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        container.setdefault("env", []).append(variable)
    stem = f"{meta['name']}-{index}-"[:58]
    return {
        "apiVersion": "v1", "kind": "Pod", "spec": spec, "status": {"phase": "Pending"},
        "metadata": {
            "name": stem + suffix(), "generateName": stem, "namespace": meta["namespace"],
            "labels": {**made_of.get("labels", {}), **marks},
            "annotations": {**made_of.get("annotations", {}), INDEX: str(index)},
            "finalizers": [TRACKING], "ownerReferences": [owner_reference(job)],
        },
    }  # fmt: skip
