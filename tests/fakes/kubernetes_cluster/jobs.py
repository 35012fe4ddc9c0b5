"""The Job controller: pods for a Job, and what becomes of it.

After kubernetes' pkg/controller/job (job_controller.go, pod_failure_policy.go, indexed_job_utils.go), for the parts
that this project meets: Indexed and plain Jobs, podFailurePolicy, backoffLimit, podReplacementPolicy, suspend,
activeDeadlineSeconds, ttl. Not here: backoffLimitPerIndex, successPolicy, managedBy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .admission import Admission
from .controllers import DELETE, Events, Queue, Timing
from .errors import ApiError
from .pods import INDEX, TRACKING, finished, index_of, owner_reference, phase, ready, untrack
from .server import suffix
from .store import Object, Store, condition, copied, holds, moment, set_condition

SOURCE = "job-controller"


class JobController:
    def __init__(
        self, store: Store, queue: Queue, admission: Admission, events: Events, delete: DELETE, timing: Timing
    ) -> None:
        self.store, self.queue, self.admission, self.events = store, queue, admission, events
        self.delete, self.timing = delete, timing
        self._failed_at: dict[str, float] = {}
        queue.controllers["jobs"] = self.reconcile

    def reconcile(self, job: Object) -> None:
        pods = self.store.owned("pods", job)
        if job["metadata"].get("deletionTimestamp"):
            for pod in pods:
                self._untrack(pod)
            return
        if holds(job, "Complete") or holds(job, "Failed"):
            self._expire(job)
            return
        status = copied(job.get("status", {}))
        done = _indexes(status.get("completedIndexes", ""))
        failure = self._count(job, pods, status, done)
        pods = self.store.owned("pods", job)
        ending = self._ending(job, status, pods, done, failure)
        suspended = bool(job["spec"].get("suspend"))
        if ending is not None or suspended:
            for pod in pods:
                if not finished(pod) and not pod["metadata"].get("deletionTimestamp"):
                    if ending is None:
                        self._untrack(pod)  # what suspension ends has not failed
                    self.delete("pods", pod, {})
        else:
            self._create_missing(job, status, pods, done)
        self._write(job, status, done, ending, suspended=suspended)

    # --- counting -----------------------------------------------------------------------------------------------------

    def _count(self, job: Object, pods: Sequence[Object], status: Object, done: set[int]) -> str | None:
        """Add what has ended since the last look; the message of the first FailJob rule that matched."""
        message = None
        for pod in pods:
            if TRACKING not in pod["metadata"].get("finalizers", []):
                continue
            if phase(pod) == "Succeeded":
                status["succeeded"] = status.get("succeeded", 0) + 1
                if (index := index_of(pod)) is not None:
                    done.add(index)
            elif is_failed(pod, job):
                matched, counts = matching_rule(job, pod)
                message = message or matched
                if counts:
                    status["failed"] = status.get("failed", 0) + 1
                    self._failed_at[job["metadata"]["uid"]] = time.monotonic()
            else:
                continue
            self._untrack(pod)
        return message

    def _untrack(self, pod: Object) -> None:
        self.store.change("pods", pod, untrack)

    def _ending(
        self, job: Object, status: Object, pods: Sequence[Object], done: set[int], failure: str | None
    ) -> tuple[str, str, str] | None:
        """(condition, reason, message) where the Job is to end."""
        spec = job["spec"]
        if (target := condition(job, "FailureTarget")) is not None:
            return "Failed", target["reason"], target["message"]
        if failure is not None:
            return "Failed", "PodFailurePolicy", failure
        limit = spec["backoffLimit"]
        restarts = sum(
            one.get("restartCount", 0) for pod in pods for one in pod.get("status", {}).get("containerStatuses", [])
        )
        in_place = spec["template"]["spec"]["restartPolicy"] == "OnFailure" and restarts > max(limit - 1, 0)
        if status.get("failed", 0) > limit or in_place:
            return "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        deadline = spec.get("activeDeadlineSeconds")
        if deadline is not None and status.get("startTime"):
            left = deadline - (datetime.now(UTC) - datetime.fromisoformat(status["startTime"])).total_seconds()
            if left <= 0:
                return "Failed", "DeadlineExceeded", "Job was active longer than specified deadline"
            self.queue.look("jobs", job["metadata"]["namespace"], job["metadata"]["name"], after=left)
        completed = len(done) if _indexed(spec) else status.get("succeeded", 0)
        if completed >= spec.get("completions", 1):
            return "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
        return None

    # --- pods ---------------------------------------------------------------------------------------------------------

    def _create_missing(self, job: Object, status: Object, pods: Sequence[Object], done: set[int]) -> None:
        spec, meta = job["spec"], job["metadata"]
        status.setdefault("startTime", moment())
        waits = spec["podReplacementPolicy"] == "Failed"
        taken = [
            pod for pod in pods
            if not finished(pod) and (waits or not pod["metadata"].get("deletionTimestamp"))
        ]  # fmt: skip
        room = min(spec["parallelism"], spec.get("completions", spec["parallelism"])) - len(taken)
        if room <= 0:
            return
        left = self.timing.retry_pod - (time.monotonic() - self._failed_at.get(meta["uid"], -1e9))
        if left > 0:
            self.queue.look("jobs", meta["namespace"], meta["name"], after=left)
            return
        if _indexed(spec):
            live = {index_of(pod) for pod in taken}
            wanted: Sequence[int | None] = [i for i in range(spec["completions"]) if i not in live and i not in done]
        else:
            wanted = [None] * (spec.get("completions", room) - status.get("succeeded", 0) - len(taken))
        for index in wanted[:room]:
            try:
                pod = pod_of(job, index)
                self.admission.pod(pod)
            except ApiError as error:
                self.events(job, "FailedCreate", f"Error creating: {error}", source=SOURCE, kind="Warning")
                self.queue.look("jobs", meta["namespace"], meta["name"], after=self.timing.retry_create)
                return
            self.store.add("pods", pod)
            self.events(job, "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}", source=SOURCE)

    # --- status -------------------------------------------------------------------------------------------------------

    def _write(
        self, job: Object, status: Object, done: set[int], ending: tuple[str, str, str] | None, *, suspended: bool
    ) -> None:
        pods = self.store.owned("pods", job)
        live = [pod for pod in pods if not finished(pod)]
        active = [pod for pod in live if not pod["metadata"].get("deletionTimestamp")]
        status |= {"active": len(active), "ready": sum(map(ready, active)), "terminating": len(live) - len(active)}
        status.setdefault("uncountedTerminatedPods", {})
        if _indexed(job["spec"]):
            status["completedIndexes"] = _ranges(done)
        draft: Object = {"status": status}
        if ending is not None:
            kind, reason, message = ending
            first = "FailureTarget" if kind == "Failed" else "SuccessCriteriaMet"
            set_condition(draft, first, "True", reason, message)
            if not live:  # the last word is said when the last pod is gone (kubernetes 1.31 and later)
                set_condition(draft, kind, "True", reason, message)
                if kind == "Complete":
                    status["completionTime"] = moment()
                self._say(job, kind, reason, message)
        elif suspended != holds(job, "Suspended") and (suspended or condition(job, "Suspended")):
            if suspended:
                status.pop("startTime", None)
                set_condition(draft, "Suspended", "True", "JobSuspended", "Job suspended")
                self.events(job, "Suspended", "Job suspended", source=SOURCE)
            else:
                set_condition(draft, "Suspended", "False", "JobResumed", "Job resumed")
                self.events(job, "Resumed", "Job resumed", source=SOURCE)
        self.store.change("jobs", job, lambda thing: thing.__setitem__("status", draft["status"]))

    def _say(self, job: Object, kind: str, reason: str, message: str) -> None:
        if kind == "Complete":
            self.events(job, "Completed", "Job completed", source=SOURCE)
        else:
            self.events(job, reason, message, source=SOURCE, kind="Warning")

    def _expire(self, job: Object) -> None:
        """ttlSecondsAfterFinished."""
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        ended = condition(job, "Complete") or condition(job, "Failed")
        if ttl is None or ended is None:
            return
        left = ttl - (datetime.now(UTC) - datetime.fromisoformat(ended["lastTransitionTime"])).total_seconds()
        if left <= 0:
            self.delete("jobs", job, {"propagationPolicy": "Foreground"})
        else:
            self.queue.look("jobs", job["metadata"]["namespace"], job["metadata"]["name"], after=left)


def is_failed(pod: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Whether the pod counts as failed: a deleted one does at once, unless only failed pods are replaced."""
    if phase(pod) == "Failed":
        return True
    deleted = bool(pod["metadata"].get("deletionTimestamp"))
    if job["spec"]["podReplacementPolicy"] == "Failed":
        return deleted and phase(pod) == "Pending"
    return deleted and phase(pod) != "Succeeded"


def matching_rule(job: Mapping[str, Any], pod: Mapping[str, Any]) -> tuple[str | None, bool]:
    """(message where a FailJob rule matches, whether the failure counts towards backoffLimit)."""
    rules = (job["spec"].get("podFailurePolicy") or {}).get("rules", [])
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for index, rule in enumerate(rules):
        if "onExitCodes" in rule:
            found = _exited(pod, rule["onExitCodes"])
            text = found and (
                f"Container {found[0]} for pod {name} failed with exit code {found[1]} "
                f"matching {rule['action']} rule at index {index}"
            )
        else:
            held = next((one["type"] for one in rule["onPodConditions"] if _has(pod, one)), None)
            text = held and f"Pod {name} has condition {held} matching {rule['action']} rule at index {index}"
        if text:
            return (text if rule["action"] == "FailJob" else None), rule["action"] != "Ignore"
    return None, True


def _exited(pod: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, int] | None:
    status = pod.get("status", {})
    for one in (*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])):
        ended = one["state"].get("terminated")
        if ended is None or ended["exitCode"] == 0 or wanted.get("containerName", one["name"]) != one["name"]:
            continue
        if (ended["exitCode"] in wanted["values"]) == (wanted["operator"] == "In"):
            return one["name"], ended["exitCode"]
    return None


def _has(pod: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    found = condition(pod, wanted["type"])
    return found is not None and found["status"] == wanted.get("status", "True")


def pod_of(job: Object, index: int | None) -> Object:
    """The pod that the Job's template makes, for one index."""
    meta, template = job["metadata"], copied(job["spec"]["template"])
    made_of = template.get("metadata") or {}
    stem = meta["name"] if index is None else f"{meta['name']}-{index}"
    # Names longer than 63 lose their end, as generated names do.
    name = f"{stem[:57]}-{suffix()}"
    labels = {
        **made_of.get("labels", {}),
        "batch.kubernetes.io/controller-uid": meta["uid"], "controller-uid": meta["uid"],
        "batch.kubernetes.io/job-name": meta["name"], "job-name": meta["name"],
    }  # fmt: skip
    annotations = dict(made_of.get("annotations", {}))
    spec = template["spec"]
    if index is not None:
        labels[INDEX] = annotations[INDEX] = str(index)
        spec["hostname"] = f"{meta['name']}-{index}"
        variable = {
            "name": "JOB_COMPLETION_INDEX",
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX}']"}},
        }
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            if all(one["name"] != variable["name"] for one in container.get("env", [])):
                container.setdefault("env", []).append(variable)
    return {
        "apiVersion": "v1", "kind": "Pod", "spec": spec, "status": {"phase": "Pending"},
        "metadata": {
            "name": name, "generateName": f"{stem[:57]}-", "namespace": meta["namespace"],
            "labels": labels, "annotations": annotations,
            "finalizers": [TRACKING], "ownerReferences": [owner_reference(job)],
        },
    }  # fmt: skip


def _indexed(spec: Mapping[str, Any]) -> bool:
    return bool(spec.get("completionMode") == "Indexed")


def _indexes(text: str) -> set[int]:
    """`0-2,5` as numbers."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _ranges(indexes: set[int]) -> str:
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a},{b}" for a, b in parts)
