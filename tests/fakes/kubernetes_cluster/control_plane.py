"""What the API server does with an object before it is stored, and the controllers: of JobSets, of Jobs, the scheduler
and the garbage collector, for what this project sends.

Stricter than the real thing in one way: unknown fields are always refused, where the API drops them with a warning
unless asked for `fieldValidation=Strict`. A field of ours that is dropped in silence is a fault of ours.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .schemas import shape_troubles
from .store import KINDS, ApiError, Object, Store, condition, copied, finished, moment, set_condition

JOBSET = "jobset.sigs.k8s.io"
INDEX = "batch.kubernetes.io/job-completion-index"
TRACKING = "batch.kubernetes.io/job-tracking"
"""The Job controller's finalizer: a pod stays until it has been counted."""
FOREGROUND = "foregroundDeletion"
COLLECTED = ("jobsets", "jobs", "pods", "services", "networkpolicies", "resourceclaimtemplates", "computedomains")
"""Kinds that go with their owners."""


class ControlPlane:
    """Looks at the store, never at a change: each step brings all objects one nearer to what they should be."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.steps: list[Callable[[], None]] = [self._jobsets, self._jobs, self._schedule, self._collect]

    def settle(self) -> None:
        """Let all controllers act until nothing changes any more, and tell the watches."""
        seen = 0
        while seen != self.store.version:
            seen = self.store.version
            for step in self.steps:
                step()
        self.store.wake()

    def event(self, about: Object, reason: str, message: str, **more: Any) -> None:
        """An Event object. What is said once more is not heard; a real recorder would count it."""
        meta = about["metadata"]
        name, space = f"{meta['name']}.{hash((meta['uid'], reason, message)):x}", meta["namespace"]
        if self.store.get("events", space, name) is None:
            regarding = {"kind": about["kind"], "name": meta["name"], "uid": meta["uid"]}
            event = {"reason": reason, "message": message, "lastTimestamp": moment(), "involvedObject": regarding}
            self.store.add("events", {"metadata": {"name": name, "namespace": space}, **event, **more})

    # --- what is created and deleted ----------------------------------------------------------------------------------

    def create(self, plural: str, sent: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Store an object as it is admitted: valid, allowed, and of a new name; an ApiError says why not."""
        kind = KINDS[plural]
        thing: Object = {"apiVersion": kind.api_version, "kind": kind.name, **copied(sent)}
        name, space = thing["metadata"]["name"], thing["metadata"].get("namespace")
        if kind.namespaced and self.store.get("namespaces", None, space) is None:
            raise ApiError(404, f'namespaces "{space}" not found')
        troubles = shape_troubles(thing)
        if plural == "jobs" and thing["spec"]["template"]["spec"].get("restartPolicy") != "Never":
            troubles.append('spec.template.spec.restartPolicy: only "Never" is supported with podFailurePolicy')
        if troubles:
            raise ApiError(422, f'{kind.name} "{name}" is invalid: [{", ".join(troubles)}]', reason="Invalid")
        if plural == "pods":
            self._admit_pod(thing)
        if self.store.get(plural, space, name) is not None:
            raise ApiError(409, f'{kind.qualified} "{name}" already exists', reason="AlreadyExists")
        if plural == "namespaces" and not dry_run:
            self.store.add("serviceaccounts", {"metadata": {"name": "default", "namespace": name}})
        return thing if dry_run else self.store.add(plural, thing)

    def _admit_pod(self, pod: Object) -> None:
        """The plugins add to a pod, also to one that a controller makes, or refuse it."""
        meta, spec = pod["metadata"], pod["spec"]
        named, space = meta.get("generateName") or meta["name"], meta["namespace"]
        account, priority = spec.setdefault("serviceAccountName", "default"), spec.get("priorityClassName")
        why = ""
        if self.store.get("serviceaccounts", space, account) is None:
            why = f'error looking up service account {space}/{account}: serviceaccount "{account}" not found'
        elif priority and self.store.get("priorityclasses", None, priority) is None:
            why = f"no PriorityClass with name {priority} was found"
        else:  # a ResourceQuota on the number of pods; of other quotas, the tests tell the words
            used = sum(not finished(pod) for pod in self.store.all("pods", space))
            for quota in self.store.all("resourcequotas", space):
                if used >= int(most := quota["spec"]["hard"]["pods"]):
                    usage = f"requested: pods=1, used: pods={used}, limited: pods={most}"
                    why = f"exceeded quota: {quota['metadata']['name']}, {usage}"
        if why:
            raise ApiError(403, f'pods "{named}" is forbidden: {why}')
        spec.setdefault("tolerations", []).extend(
            {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            for key in ("not-ready", "unreachable")
        )

    def delete(self, plural: str, thing: Object, options: Mapping[str, Any]) -> Object:
        """What a DELETE does at once; owned objects and graceful ends are the garbage collector's and the kubelet's."""
        uid = thing["metadata"]["uid"]
        if (wanted := options.get("preconditions", {}).get("uid", uid)) != uid:
            raise ApiError(409, f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}")

        def mark(gone: Object) -> None:
            meta = gone["metadata"]
            finalizers = meta.setdefault("finalizers", [])
            if options.get("propagationPolicy") == "Foreground" and FOREGROUND not in finalizers:
                finalizers.append(FOREGROUND)
            meta.setdefault("deletionTimestamp", moment())
            if plural == "pods":
                default = gone["spec"].get("terminationGracePeriodSeconds", 30)
                graceful = gone["spec"].get("nodeName") and not finished(gone)
                grace = options.get("gracePeriodSeconds", default) if graceful else 0
                meta["deletionGracePeriodSeconds"] = min(grace, meta.get("deletionGracePeriodSeconds", grace))

        return self.store.change(plural, thing, mark) or {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _collect(self) -> None:
        """Delete what is owned by what is gone; what is deleted in the foreground goes when it owns nothing."""
        owners = {thing["metadata"]["uid"]: thing for thing in (*self.store.all("jobsets"), *self.store.all("jobs"))}
        in_front = {uid for uid, thing in owners.items() if FOREGROUND in thing["metadata"].get("finalizers", ())}
        things = [(plural, thing) for plural in COLLECTED for thing in self.store.all(plural)]
        owning: set[str] = set()
        for plural, thing in things:
            uids = {owner["uid"] for owner in thing["metadata"].get("ownerReferences", ())}
            owning |= uids
            if uids - owners.keys() or uids & in_front:
                if plural == "pods":
                    self.store.change("pods", thing, _untrack)  # its Job counts no more
                if not leaving(thing):
                    foreground = uids & in_front and plural != "pods"
                    self.delete(plural, thing, {"propagationPolicy": "Foreground" if foreground else "Background"})
        for plural, thing in things:
            if FOREGROUND in thing["metadata"].get("finalizers", ()) and thing["metadata"]["uid"] not in owning:
                self.store.change(plural, thing, lambda kept: kept["metadata"]["finalizers"].remove(FOREGROUND))

    # --- JobSets: after kubernetes-sigs/jobset's pkg/controllers; one replicated Job, BlockingRecreate ----------------

    def _jobsets(self) -> None:
        for jobset in self.store.all("jobsets"):
            if not (leaving(jobset) or condition(jobset, "Completed") or condition(jobset, "Failed")):
                draft = {"status": copied(jobset.get("status", {"restarts": 0}))}
                self._jobset(jobset, draft)
                self.store.change("jobsets", jobset, partial(_update, draft=draft))

    def _jobset(self, jobset: Object, draft: Object) -> None:
        meta, spec, status = jobset["metadata"], jobset["spec"], draft["status"]
        owned, restart = self.store.owned("jobs", jobset), str(status["restarts"])
        job = next((job for job in owned if job["metadata"]["labels"][f"{JOBSET}/restart-attempt"] == restart), None)
        for old in owned:
            if old is not job and not leaving(old):
                self.delete("jobs", old, {"propagationPolicy": "Foreground"})
        if job is not None and (failed := condition(job, "Failed")) is not None:
            (rule,) = spec["failurePolicy"]["rules"]  # FailJobSet, by the Job's reason and words (RE2, unanchored)
            matches = any(re.search(pattern, failed["message"]) for pattern in rule["onJobFailureMessagePatterns"])
            hopeless = matches and failed["reason"] in rule["onJobFailureReasons"]
            if not hopeless and status["restarts"] < spec["failurePolicy"]["maxRestarts"]:
                status["restarts"] += 1
                return
            reason, text = "ReachedMaxRestarts", "jobset failed due to reaching max number of restarts"
            if hopeless:
                reason, text = "FailJobSetFailurePolicyAction", "applying FailJobSet failure policy action"
            set_condition(draft, "Failed", reason=reason, message=text)
        elif job is not None and condition(job, "Complete"):
            set_condition(draft, "Completed", reason="AllJobsCompleted", message="jobset completed successfully")
        else:
            if self.store.get("services", meta["namespace"], meta["name"]) is None:
                selector = {f"{JOBSET}/jobset-name": meta["name"]}
                service = _owned_by(jobset, meta["name"], spec={"clusterIP": "None", "selector": selector})
                self.store.add("services", service)
            if not owned:  # BlockingRecreate
                self._create_job(jobset, restart)

    def _create_job(self, jobset: Object, restart: str) -> None:
        """The child Job, with the labels that JobSet puts on it and on its pods."""
        (replicated,) = jobset["spec"]["replicatedJobs"]
        name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
        marks = {f"{JOBSET}/jobset-name": jobset["metadata"]["name"], f"{JOBSET}/restart-attempt": restart}
        spec = copied(replicated["template"]["spec"])
        template = spec["template"]
        spec["suspend"] = jobset["spec"].get("suspend", False)
        template["spec"]["subdomain"] = jobset["metadata"]["name"]
        template["metadata"] = _marked(template.get("metadata", {}), labels=marks, annotations=marks)
        job = _owned_by(jobset, name, spec=spec)
        job["metadata"] |= _marked(replicated["template"].get("metadata", {}), labels=marks)
        self.create("jobs", job)

    # --- Jobs: after kubernetes' pkg/controller/job; Indexed, all pods at once, none replaced, podFailurePolicy -------

    def _jobs(self) -> None:
        for job in self.store.all("jobs"):
            if not (leaving(job) or condition(job, "Complete") or condition(job, "Failed")):
                draft = {"status": copied(job.get("status", {}))}
                self._job(job, draft)
                self.store.change("jobs", job, partial(_update, draft=draft))

    def _job(self, job: Object, draft: Object) -> None:
        status, spec, pods = draft["status"], job["spec"], self.store.owned("pods", job)
        target = condition(job, "FailureTarget") or {}
        reason, message = target.get("reason", ""), target.get("message", "")
        for pod in pods:
            never_ran = leaving(pod) and not pod["spec"].get("nodeName")
            if TRACKING in pod["metadata"]["finalizers"] and (finished(pod) or never_ran):
                if pod["status"]["phase"] != "Succeeded":
                    status["failed"] = status.get("failed", 0) + 1
                    if not reason and (rule := _matching_rule(job, pod)):
                        reason, message = "PodFailurePolicy", rule
                self.store.change("pods", pod, _untrack)
        if not reason and status.get("failed", 0) > spec["backoffLimit"]:
            reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        if reason:
            set_condition(draft, "FailureTarget", reason=reason, message=message)
            for pod in pods:
                if not finished(pod) and not leaving(pod):
                    self.delete("pods", pod, {})
            if all(map(finished, self.store.owned("pods", job))):  # said when the last pod is gone (kubernetes 1.31)
                set_condition(draft, "Failed", reason=reason, message=message)
        elif sum(map(finished, pods)) == spec["completions"]:
            text = "Reached expected number of succeeded pods"
            set_condition(draft, "Complete", reason="CompletionsReached", message=text)
        elif not spec.get("suspend"):
            status.setdefault("startTime", moment())
            self._create_pods(job, {pod["metadata"]["annotations"][INDEX] for pod in pods})

    def _create_pods(self, job: Object, existing: set[str]) -> None:
        for index in map(str, range(job["spec"]["completions"])):
            if index not in existing:
                pod = _pod_of(job, index)
                try:
                    self._admit_pod(pod)
                except ApiError as error:
                    self.event(job, "FailedCreate", f"Error creating: {error}")
                    return
                self.store.add("pods", pod)

    # --- the scheduler: labels, taints and what is free, in kube-scheduler's words ------------------------------------

    def _schedule(self) -> None:
        pods = [pod for pod in self.store.all("pods") if not finished(pod)]
        waiting = [pod for pod in pods if "nodeName" not in pod["spec"] and not leaving(pod)]
        if not waiting:
            return
        nodes = {node["metadata"]["name"]: node for node in self.store.all("nodes")}
        used = {name: Counter[str]() for name in nodes}
        for pod in pods:
            if (name := pod["spec"].get("nodeName")) in used:
                used[name].update(_asked(pod))
        for pod in waiting:
            against = {name: _against(pod, node, used[name]) for name, node in nodes.items()}
            if fit := [name for name, reasons in against.items() if not reasons]:
                least = min(fit, key=lambda name: used[name]["pods"])
                used[least].update(_asked(pod))
                self.store.change("pods", pod, partial(_bind, node=least))
                continue
            counted = Counter(reason for reasons in against.values() for reason in reasons)
            listed = ", ".join(sorted(f"{count} {reason}" for reason, count in counted.items()))
            text = f"0/{len(nodes)} nodes are available: {listed}." if nodes else "no nodes available to schedule pods"
            tell = partial(set_condition, kind="PodScheduled", status="False", reason="Unschedulable", message=text)
            self.store.change("pods", pod, tell)
            self.event(pod, "FailedScheduling", text)


def owner_of(thing: Object) -> Object:
    """The reference to an owner, for what it makes."""
    meta = thing["metadata"]
    return {"apiVersion": thing["apiVersion"], "kind": thing["kind"], "name": meta["name"], "uid": meta["uid"]}


def leaving(thing: Object) -> bool:
    return "deletionTimestamp" in thing["metadata"]


def _owned_by(owner: Object, name: str, **content: Any) -> Object:
    space = owner["metadata"]["namespace"]
    return {"metadata": {"name": name, "namespace": space, "ownerReferences": [owner_of(owner)]}, **content}


def _marked(meta: Object, **marks: dict[str, str]) -> Object:
    """Metadata with more labels or annotations."""
    return {**meta, **{what: {**meta.get(what, {}), **more} for what, more in marks.items()}}


def _update(thing: Object, *, draft: Object) -> None:
    thing |= draft


def _untrack(pod: Object) -> None:
    pod["metadata"]["finalizers"] = [name for name in pod["metadata"].get("finalizers", ()) if name != TRACKING]


def _matching_rule(job: Object, pod: Object) -> str:
    """The message of the first rule that matches the failed pod: FailJob, by a condition or by codes of its node."""
    name, (node,) = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}", pod["status"]["containerStatuses"]
    code = node["state"].get("terminated", {}).get("exitCode")
    for index, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", ())):
        matching = f"matching {rule['action']} rule at index {index}"
        for pattern in rule.get("onPodConditions", ()):
            if condition(pod, pattern["type"]):
                return f"Pod {name} has condition {pattern['type']} {matching}"
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return f"Container node for pod {name} failed with exit code {code} {matching}"
    return ""


def _pod_of(job: Object, index: str) -> Object:
    """The pod that the Job's template makes, for one index."""
    template, name = copied(job["spec"]["template"]), job["metadata"]["name"]
    template["spec"]["hostname"] = f"{name}-{index}"
    variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}}
    for container in template["spec"]["containers"]:
        container.setdefault("env", []).append(variable)
    stem = f"{name}-{index}-"[:58]
    suffix = "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))  # without vowels and look-alikes
    pod = _owned_by(job, stem + suffix, spec=template["spec"], status={"phase": "Pending"})
    marks = {"batch.kubernetes.io/job-name": name, INDEX: index}
    pod["metadata"] |= _marked(template.get("metadata", {}), labels=marks, annotations={INDEX: index})
    pod["metadata"] |= {"generateName": stem, "finalizers": [TRACKING]}
    return pod


def _asked(pod: Object) -> Counter[str]:
    """What a node has to have free for it; the tests run out of whole pieces alone, such as GPUs."""
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return Counter({"pods": 1, **{name: int(count) for name, count in limits.items() if "/" in name}})


def _against(pod: Object, node: Object, used: Counter[str]) -> Sequence[str]:
    """The first filter that says no, as kube-scheduler runs them; several shortages count each."""
    for taint in node["spec"]["taints"]:
        if not any(_tolerates(toleration, taint) for toleration in pod["spec"]["tolerations"]):
            return ["node(s) had untolerated taint(s)"]
    if not pod["spec"].get("nodeSelector", {}).items() <= node["metadata"]["labels"].items():
        return ["node(s) didn't match Pod's node affinity/selector"]
    free, requested = node["status"]["allocatable"], _asked(pod)
    return [
        f"Insufficient {name}" for name in sorted(requested) if used[name] + requested[name] > int(free.get(name, 0))
    ]


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, taint["effect"]) or toleration.get("key") not in (None, taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _bind(pod: Object, *, node: str) -> None:
    pod["spec"]["nodeName"] = node
    set_condition(pod, "PodScheduled")
