"""The JobSet controller, after kubernetes-sigs/jobset's pkg/controllers, for what this project sends.

That is one replicated Job, a failure policy with BlockingRecreate, a Service, and suspend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .admission import Admission
from .controllers import DELETE, RETRY, Events, Queue
from .errors import ApiError
from .pods import owner_reference
from .store import Object, Store, condition, copied, holds, labels_of, set_condition

P = "jobset.sigs.k8s.io"
SOURCE = "jobset-controller"


class JobSetController:
    def __init__(self, store: Store, queue: Queue, admission: Admission, events: Events, delete: DELETE) -> None:
        self.store, self.queue, self.admission, self.events, self.delete = store, queue, admission, events, delete
        queue.controllers["jobsets"] = self.reconcile

    def reconcile(self, jobset: Object) -> None:
        if jobset["metadata"].get("deletionTimestamp") or jobset.get("status", {}).get("terminalState"):
            return
        draft = copied(jobset)
        draft.setdefault("status", {}).setdefault("restarts", 0)
        jobs = self.store.owned("jobs", jobset)
        old = [job for job in jobs if int(labels_of(job)[f"{P}/restart-attempt"]) < draft["status"]["restarts"]]
        for job in old:
            self._end(job)
        self._advance(draft, [job for job in jobs if job not in old], old)
        self.store.change("jobsets", jobset, lambda thing: thing.__setitem__("status", draft["status"]))

    def _advance(self, jobset: Object, current: Sequence[Object], old: Sequence[Object]) -> None:
        spec = jobset["spec"]
        if failed := [job for job in current if holds(job, "Failed")]:
            self._fail(jobset, failed[0])
        elif len([job for job in current if holds(job, "Complete")]) == len(spec["replicatedJobs"]):
            set_condition(jobset, "Completed", "True", "AllJobsCompleted", "jobset completed successfully")
            jobset["status"]["terminalState"] = "Completed"
        else:
            self._service(jobset)
            if not old:  # BlockingRecreate
                self._create_missing(jobset, current)
            self._suspend_or_resume(jobset, current)

    def _fail(self, jobset: Object, job: Object) -> None:
        policy, status, meta = jobset["spec"].get("failurePolicy") or {}, jobset["status"], jobset["metadata"]
        ended = condition(job, "Failed") or {}
        rule = next((one for one in policy.get("rules", []) if _applies(one, ended)), None)
        action = rule["action"] if rule else "RestartJobSet"
        if action == "FailJobSet":
            reason, text = "FailJobSetFailurePolicyAction", "applying FailJobSet failure policy action"
        elif status["restarts"] >= policy.get("maxRestarts", 0):
            reason, text = "ReachedMaxRestarts", "jobset failed due to reaching max number of restarts"
        else:
            status["restarts"] += 1
            self.queue.look("jobsets", meta["namespace"], meta["name"])
            return
        set_condition(jobset, "Failed", "True", reason, f"{text} (first failed job: {job['metadata']['name']})")
        status["terminalState"] = "Failed"

    def _service(self, jobset: Object) -> None:
        meta = jobset["metadata"]
        if self.store.get("services", meta["namespace"], meta["name"]) is None:
            self.store.add("services", {
                "metadata": {
                    "name": meta["name"], "namespace": meta["namespace"], "ownerReferences": [owner_reference(jobset)],
                },
                "spec": {"clusterIP": "None", "selector": {f"{P}/jobset-name": meta["name"]}},
            })  # fmt: skip

    def _create_missing(self, jobset: Object, current: Sequence[Object]) -> None:
        meta = jobset["metadata"]
        there = {job["metadata"]["name"] for job in current}
        for replicated in jobset["spec"]["replicatedJobs"]:
            name = f"{meta['name']}-{replicated['name']}-0"
            if name in there:
                continue
            try:
                job = self.admission.create("jobs", _job_of(jobset, replicated, name))
            except ApiError as error:  # tried again for ever; no condition of the JobSet tells
                text = f'job "{name}" creation failed with error: {error}'
                self.events(jobset, "JobCreationFailed", text, source=SOURCE)
                self.queue.look("jobsets", meta["namespace"], meta["name"], after=RETRY)
            else:
                self.store.add("jobs", job)

    def _suspend_or_resume(self, jobset: Object, current: Sequence[Object]) -> None:
        suspend = bool(jobset["spec"].get("suspend"))
        for job in current:
            self.store.change("jobs", job, lambda thing: thing["spec"].__setitem__("suspend", suspend))
        if suspend != holds(jobset, "Suspended"):
            set_condition(jobset, "Suspended", str(suspend))

    def _end(self, job: Object) -> None:
        if not job["metadata"].get("deletionTimestamp"):
            self.delete("jobs", job, {"propagationPolicy": "Foreground"})


def _job_of(jobset: Object, replicated: Mapping[str, Any], name: str) -> Object:
    """A child Job, with the labels that JobSet puts on it and on its pods."""
    meta, template = jobset["metadata"], copied(replicated["template"])
    marks = {
        f"{P}/jobset-name": meta["name"], f"{P}/replicatedjob-name": replicated["name"], f"{P}/job-index": "0",
        f"{P}/restart-attempt": str(jobset["status"]["restarts"]),
    }  # fmt: skip
    job, pod_meta = template["spec"], template["spec"]["template"].setdefault("metadata", {})
    job["suspend"] = bool(jobset["spec"].get("suspend"))
    job["template"]["spec"]["subdomain"] = meta["name"]
    for kind in ("labels", "annotations"):
        pod_meta[kind] = {**(pod_meta.get(kind) or {}), **marks}
    return {
        "apiVersion": "batch/v1", "kind": "Job", "spec": job,
        "metadata": {
            "name": name, "namespace": meta["namespace"], "ownerReferences": [owner_reference(jobset)],
            "labels": {**((template.get("metadata") or {}).get("labels") or {}), **marks},
        },
    }  # fmt: skip


def _applies(rule: Mapping[str, Any], ended: Mapping[str, Any]) -> bool:
    """Reason and message (RE2, unanchored): each may be left open."""
    reasons, patterns = rule.get("onJobFailureReasons"), rule.get("onJobFailureMessagePatterns")
    return (not reasons or ended["reason"] in reasons) and (
        not patterns or any(re.search(pattern, ended["message"]) for pattern in patterns)
    )
