"""The JobSet controller, after kubernetes-sigs/jobset's pkg/controllers (jobset_controller.go, failure_policy.go).

Not here: exclusive placement, in-place restarts and RestartJob (alpha, off by default), volumeClaimPolicies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha1
from typing import Any

from .admission import Admission
from .controllers import DELETE, Events, Queue, Timing
from .errors import ApiError
from .pods import owner_reference
from .store import Object, Store, condition, copied, holds, labels_of, moment, set_condition

P = "jobset.sigs.k8s.io"
SOURCE = "jobset-controller"
MESSAGES = {
    "FailJobSet": ("FailJobSetFailurePolicyAction", "applying FailJobSet failure policy action"),
    "RestartJobSet": ("RestartJobSetFailurePolicyAction", "applying RestartJobSet failure policy action"),
    "RestartJobSetAndIgnoreMaxRestarts": (
        "RestartJobSetAndIgnoreMaxRestartsFailurePolicyAction",
        "applying RestartJobSetAndIgnoreMaxRestarts failure policy action",
    ),
}


class JobSetController:
    def __init__(
        self, store: Store, queue: Queue, admission: Admission, events: Events, delete: DELETE, timing: Timing
    ) -> None:
        self.store, self.queue, self.admission, self.events, self.delete = store, queue, admission, events, delete
        self.timing = timing
        queue.controllers["jobsets"] = self.reconcile

    def reconcile(self, jobset: Object) -> None:
        if jobset["metadata"].get("deletionTimestamp"):
            return
        draft = copied(jobset)
        status = draft.setdefault("status", {})
        status.setdefault("restarts", 0)
        jobs = self.store.owned("jobs", jobset)
        old = [job for job in jobs if int(labels_of(job)[f"{P}/restart-attempt"]) < status["restarts"]]
        current = [job for job in jobs if job not in old]
        status["replicatedJobsStatus"] = [_counts(one["name"], current) for one in jobset["spec"]["replicatedJobs"]]
        if status.get("terminalState"):
            for job in current:
                if not (holds(job, "Complete") or holds(job, "Failed")):
                    self._end(job)
            self._expire(jobset)
        else:
            for job in old:
                self._end(job)
            self._advance(draft, current, old)
        self.store.change("jobsets", jobset, lambda thing: thing.__setitem__("status", status))

    def _advance(self, jobset: Object, current: Sequence[Object], old: Sequence[Object]) -> None:
        failed = [job for job in current if holds(job, "Failed")]
        if failed:
            self._fail(jobset, failed)
            return
        if self._succeeded(jobset["spec"], current):
            set_condition(jobset, "Completed", "True", "AllJobsCompleted", "jobset completed successfully")
            jobset["status"]["terminalState"] = "Completed"
            self.events(jobset, "AllJobsCompleted", "jobset completed successfully", source=SOURCE)
            return
        self._service(jobset)
        strategy = jobset["spec"].get("failurePolicy", {}).get("restartStrategy", "Recreate")
        if not (strategy == "BlockingRecreate" and old):
            self._create_missing(jobset, current)
        self._suspend_or_resume(jobset, current)
        total = sum(one["replicas"] for one in jobset["spec"]["replicatedJobs"])
        up = sum(row["ready"] + row["succeeded"] for row in jobset["status"]["replicatedJobsStatus"])
        if holds(jobset, "RestartingJobSet") and up == total:
            set_condition(jobset, "RestartingJobSet", "False", "JobsReady", "all jobs are ready")

    # --- failure ------------------------------------------------------------------------------------------------------

    def _fail(self, jobset: Object, failed: Sequence[Object]) -> None:
        failed = sorted(failed, key=_failed_at)
        policy = jobset["spec"].get("failurePolicy")
        if policy is None:
            self._end_all(jobset, "FailedJobs", "jobset failed due to one or more job failures", failed[0])
            return
        rule, job = next(
            ((rule, job) for rule in policy.get("rules", []) for job in failed if _applies(rule, job)),
            (None, failed[0]),
        )
        action = rule["action"] if rule else "RestartJobSet"
        reason, message = MESSAGES[action]
        counted = action == "RestartJobSet"
        status = jobset["status"]
        if action == "FailJobSet":
            self._end_all(jobset, reason, message, job)
        elif counted and status.get("restartsCountTowardsMax", 0) >= policy.get("maxRestarts", 0):
            text = "jobset failed due to reaching max number of restarts"
            self._end_all(jobset, "ReachedMaxRestarts", text, job)
        else:
            status["restarts"] += 1
            status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + int(counted)
            text = _with_job(message, job)
            why = f"FailurePolicy_{rule['name']}" if rule else "DefaultFailurePolicy"
            # The condition is since 0.12; that its message is the event's is INFERRED.
            set_condition(jobset, "RestartingJobSet", "True", why, text)
            self.events(jobset, reason, text, source=SOURCE, kind="Warning")
            meta = jobset["metadata"]
            self.queue.look("jobsets", meta["namespace"], meta["name"])

    def _end_all(self, jobset: Object, reason: str, message: str, job: Object) -> None:
        text = _with_job(message, job)
        set_condition(jobset, "Failed", "True", reason, text)
        jobset["status"]["terminalState"] = "Failed"
        self.events(jobset, reason, text, source=SOURCE, kind="Warning")

    @staticmethod
    def _succeeded(spec: Mapping[str, Any], jobs: Sequence[Object]) -> bool:
        policy = spec["successPolicy"]
        targets = policy.get("targetReplicatedJobs") or [one["name"] for one in spec["replicatedJobs"]]
        wanted = sum(one["replicas"] for one in spec["replicatedJobs"] if one["name"] in targets)
        done = [job for job in jobs if holds(job, "Complete") and labels_of(job)[f"{P}/replicatedjob-name"] in targets]
        return len(done) >= (1 if policy["operator"] == "Any" else wanted)

    # --- children -----------------------------------------------------------------------------------------------------

    def _service(self, jobset: Object) -> None:
        network, meta = jobset["spec"]["network"], jobset["metadata"]
        name = network.get("subdomain") or meta["name"]
        if not network["enableDNSHostnames"] or self.store.get("services", meta["namespace"], name) is not None:
            return
        service = {
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": meta["namespace"], "ownerReferences": [owner_reference(jobset)]},
            "spec": {
                "clusterIP": "None", "selector": {f"{P}/jobset-name": meta["name"]},
                "publishNotReadyAddresses": network["publishNotReadyAddresses"],
            },
        }  # fmt: skip
        try:
            self.store.add("services", self.admission.create("services", service))
        except ApiError as error:
            self.events(jobset, "HeadlessServiceCreationFailed", str(error), source=SOURCE, kind="Warning")

    def _create_missing(self, jobset: Object, current: Sequence[Object]) -> None:
        meta = jobset["metadata"]
        names = {job["metadata"]["name"] for job in self.store.all("jobs", meta["namespace"])}
        for replicated in jobset["spec"]["replicatedJobs"]:
            if not all(_met(one, jobset, current) for one in replicated.get("dependsOn") or []):
                continue
            refused = []
            for index in range(replicated["replicas"]):
                name = f"{meta['name']}-{replicated['name']}-{index}"
                if name in names:
                    continue
                try:
                    job = self.admission.create("jobs", job_of(jobset, replicated, index))
                except ApiError as error:
                    refused.append(f'job "{name}" creation failed with error: {error}')
                else:
                    self.store.add("jobs", job)
            if refused:  # tried again for ever, at growing intervals; no condition of the JobSet tells
                self.events(jobset, "JobCreationFailed", "\n".join(refused), source=SOURCE, kind="Warning")
                self.queue.look("jobsets", meta["namespace"], meta["name"], after=self.timing.retry_create)
                return

    def _suspend_or_resume(self, jobset: Object, current: Sequence[Object]) -> None:
        suspend = bool(jobset["spec"].get("suspend"))
        for job in current:
            if bool(job["spec"].get("suspend")) != suspend:
                self.store.change("jobs", job, lambda thing: thing["spec"].__setitem__("suspend", suspend))
        if suspend and not holds(jobset, "Suspended"):
            set_condition(jobset, "Suspended", "True", "SuspendedJobs", "jobset is suspended")
            self.events(jobset, "SuspendedJobs", "jobset is suspended", source=SOURCE)
        elif not suspend and holds(jobset, "Suspended"):
            set_condition(jobset, "Suspended", "False", "ResumeJobs", "jobset is resumed")
            self.events(jobset, "ResumeJobs", "jobset is resumed", source=SOURCE)

    def _end(self, job: Object) -> None:
        if not job["metadata"].get("deletionTimestamp"):
            self.delete("jobs", job, {"propagationPolicy": "Foreground"})

    def _expire(self, jobset: Object) -> None:
        """ttlSecondsAfterFinished."""
        ttl, meta = jobset["spec"].get("ttlSecondsAfterFinished"), jobset["metadata"]
        ended = condition(jobset, "Completed") or condition(jobset, "Failed")
        if ttl is None or ended is None:
            return
        left = ttl - (datetime.now(UTC) - datetime.fromisoformat(ended["lastTransitionTime"])).total_seconds()
        if left <= 0:
            self.delete("jobsets", jobset, {"propagationPolicy": "Foreground"})
        else:
            self.queue.look("jobsets", meta["namespace"], meta["name"], after=left)


def job_of(jobset: Object, replicated: Mapping[str, Any], index: int) -> Object:
    """A child Job, with the labels that JobSet puts on it and on its pods."""
    spec, meta = jobset["spec"], jobset["metadata"]
    name = f"{meta['name']}-{replicated['name']}-{index}"
    before = spec["replicatedJobs"][: spec["replicatedJobs"].index(replicated)]
    group = [one for one in spec["replicatedJobs"] if one["groupName"] == replicated["groupName"]]
    marks = {
        "jobset-name": meta["name"],
        "jobset-uid": meta["uid"],
        "replicatedjob-name": replicated["name"],
        "restart-attempt": jobset["status"]["restarts"],
        "job-restart-attempt": 0,
        "replicatedjob-replicas": replicated["replicas"],
        "global-replicas": sum(one["replicas"] for one in spec["replicatedJobs"]),
        "job-index": index,
        "job-global-index": sum(one["replicas"] for one in before) + index,
        "job-key": sha1(f"{meta['namespace']}/{name}".encode()).hexdigest(),
        "group-name": replicated["groupName"],
        "group-replicas": sum(one["replicas"] for one in group),
        "job-group-index": sum(one["replicas"] for one in before if one in group) + index,
    }
    subdomain = spec["network"].get("subdomain") or meta["name"]
    if coordinator := spec.get("coordinator"):
        marks["coordinator"] = (
            f"{meta['name']}-{coordinator['replicatedJob']}-{coordinator.get('jobIndex', 0)}"
            f"-{coordinator.get('podIndex', 0)}.{subdomain}"
        )
    written = {f"{P}/{key}": str(value) for key, value in marks.items()}
    template = copied(replicated["template"])
    job_meta = template.get("metadata") or {}
    job = template["spec"]
    pod_meta = job["template"].setdefault("metadata", {})
    pod_meta["labels"] = {**(pod_meta.get("labels") or {}), **written}
    pod_meta["annotations"] = {**(pod_meta.get("annotations") or {}), **written}
    if spec["network"]["enableDNSHostnames"]:
        job["template"]["spec"]["subdomain"] = subdomain
    job["suspend"] = bool(spec.get("suspend"))
    return {
        "apiVersion": "batch/v1", "kind": "Job", "spec": job,
        "metadata": {
            "name": name, "namespace": meta["namespace"],
            "labels": {**(job_meta.get("labels") or {}), **written},
            "annotations": {**(job_meta.get("annotations") or {}), **written},
            "ownerReferences": [owner_reference(jobset)],
        },
    }  # fmt: skip


def _applies(rule: Mapping[str, Any], job: Object) -> bool:
    """Reason, message (RE2, unanchored) and replicated job: each may be left open."""
    ended = condition(job, "Failed") or {}
    reasons, patterns = rule.get("onJobFailureReasons"), rule.get("onJobFailureMessagePatterns")
    targets = rule.get("targetReplicatedJobs")
    return (
        (not reasons or ended["reason"] in reasons)
        and (not patterns or any(re.search(pattern, ended["message"]) for pattern in patterns))
        and (not targets or labels_of(job)[f"{P}/replicatedjob-name"] in targets)
    )


def _with_job(message: str, job: Object) -> str:
    return f"{message} (first failed job: {job['metadata']['name']})"


def _failed_at(job: Object) -> str:
    return str((condition(job, "Failed") or {"lastTransitionTime": moment()})["lastTransitionTime"])


def _counts(name: str, jobs: Sequence[Object]) -> Object:
    row = {"name": name, "ready": 0, "succeeded": 0, "failed": 0, "active": 0, "suspended": 0}
    for job in jobs:
        if labels_of(job)[f"{P}/replicatedjob-name"] != name:
            continue
        status, spec = job.get("status", {}), job["spec"]
        if holds(job, "Complete"):
            row["succeeded"] += 1
        elif holds(job, "Failed"):
            row["failed"] += 1
        elif spec.get("suspend"):
            row["suspended"] += 1
        else:
            row["active"] += bool(status.get("active"))
            wanted = min(spec["parallelism"], spec.get("completions", spec["parallelism"]))
            row["ready"] += status.get("ready", 0) + status.get("succeeded", 0) >= wanted
    return row


def _met(dependency: Mapping[str, Any], jobset: Object, jobs: Sequence[Object]) -> bool:
    replicas = next(one["replicas"] for one in jobset["spec"]["replicatedJobs"] if one["name"] == dependency["name"])
    row = _counts(dependency["name"], jobs)
    done = row["succeeded"] if dependency["status"] == "Complete" else row["ready"] + row["succeeded"]
    return bool(done >= replicas)
