"""What the API server does with an object before it is stored, and the controllers: of JobSets, of Jobs, the scheduler
and the garbage collector, for what this project sends.

Stricter than the real thing in one way: unknown fields are always refused, where the API drops them with a warning
unless asked for `fieldValidation=Strict`. A field of ours that is dropped in silence is a fault of ours.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from .schemas import shape_troubles
from .store import (
    KINDS,
    ApiError,
    Object,
    Store,
    condition,
    copied,
    finalizers_of,
    finished,
    labels_of,
    moment,
    set_condition,
)

JOBSET = "jobset.sigs.k8s.io"
INDEX = "batch.kubernetes.io/job-completion-index"
TRACKING = "batch.kubernetes.io/job-tracking"
"""The Job controller's finalizer: a pod stays until it has been counted."""
FOREGROUND = "foregroundDeletion"
COLLECTED = (
    "jobsets", "jobs", "pods", "services", "networkpolicies", "resourceclaimtemplates", "computedomains",
)  # fmt: skip
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

    def event(self, about: Object, reason: str, message: str, *, source: str) -> None:
        """An Event object. Who says the same once more is not heard; a real recorder would count it."""
        meta = about["metadata"]
        space, words = meta["namespace"], (meta["uid"], reason, message)
        name = f"{meta['name']}.{hash(words) & (2**64 - 1):016x}"
        if self.store.get("events", space, name) is None:
            regarding = {"kind": about["kind"], "name": meta["name"], "namespace": space, "uid": meta["uid"]}
            self.store.add("events", {
                "metadata": {"name": name, "namespace": space}, "involvedObject": regarding, "reason": reason,
                "message": message, "count": 1, "firstTimestamp": moment(), "lastTimestamp": moment(),
                "source": {"component": source},
            })  # fmt: skip

    # --- what is created and deleted ----------------------------------------------------------------------------------

    def create(self, plural: str, sent: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Store an object as it is admitted: with its defaults, valid, allowed, and of a new name.

        Raises:
            ApiError: It is refused.
        """
        kind = KINDS[plural]
        thing: Object = {"apiVersion": kind.api_version, "kind": kind.name, **copied(sent)}
        meta = thing["metadata"]
        name, space = meta["name"], meta.get("namespace")
        if kind.namespaced and self.store.get("namespaces", None, space) is None:
            raise ApiError(404, f'namespaces "{space}" not found', "namespaces", space)
        troubles = shape_troubles(thing)
        if plural == "jobsets" and not troubles:
            for one in thing["spec"]["replicatedJobs"]:
                # The trap of JobSet: containers would restart in place, and no failure would be seen.
                one["template"]["spec"]["template"]["spec"].setdefault("restartPolicy", "OnFailure")
        if troubles := troubles or list(_troubles(plural, thing)):
            listed = troubles[0] if len(troubles) == 1 else f"[{', '.join(troubles)}]"
            qualified = f"{kind.name}.{kind.group}".rstrip(".")
            raise ApiError(422, f'{qualified} "{name}" is invalid: {listed}', qualified, name)
        if plural == "pods":
            self._admit_pod(thing)
        if self.store.get(plural, space, name) is not None:
            text = f'{kind.qualified} "{name}" already exists'
            raise ApiError(409, text, kind.qualified, name, reason="AlreadyExists")
        if dry_run:
            return thing
        if plural == "namespaces":
            self.store.add("serviceaccounts", {"metadata": {"name": "default", "namespace": name}})
        return self.store.add(plural, thing)

    def _admit_pod(self, pod: Object) -> None:
        """What the plug-ins add to a pod, also to one that a controller makes.

        Raises:
            ApiError: One of them refuses it. The name is what it will be generated from.
        """
        meta, spec = pod["metadata"], pod["spec"]
        named, space = meta.get("generateName") or meta["name"], meta["namespace"]
        account, priority = spec.setdefault("serviceAccountName", "default"), spec.get("priorityClassName")
        why = ""
        if self.store.get("serviceaccounts", space, account) is None:
            why = f'error looking up service account {space}/{account}: serviceaccount "{account}" not found'
        elif priority and self.store.get("priorityclasses", None, priority) is None:
            why = f"no PriorityClass with name {priority} was found"
        else:  # a ResourceQuota on the number of pods; of other quotas, the tests tell the words
            used = sum(not finished(one) for one in self.store.all("pods", space))
            for quota in self.store.all("resourcequotas", space):
                most = quota["spec"].get("hard", {}).get("pods")
                if most is not None and used >= int(most):
                    words = f"requested: pods=1, used: pods={used}, limited: pods={most}"
                    why = f"exceeded quota: {quota['metadata']['name']}, {words}"
        if why:
            raise ApiError(403, f'pods "{named}" is forbidden: {why}', "pods", named)
        spec.setdefault("tolerations", []).extend(
            {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            for key in ("not-ready", "unreachable")
        )

    def delete(self, plural: str, thing: Object, options: Mapping[str, Any]) -> Object:
        """What a DELETE does at once; owned objects and graceful ends are the garbage collector's and the kubelet's."""
        wanted, uid = (options.get("preconditions") or {}).get("uid"), thing["metadata"]["uid"]
        if wanted not in (None, uid):
            text = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}"
            raise ApiError(409, text)

        def mark(gone: Object) -> None:
            meta, finalizers = gone["metadata"], finalizers_of(gone)
            if options.get("propagationPolicy") == "Foreground" and FOREGROUND not in finalizers:
                finalizers.append(FOREGROUND)
            meta.setdefault("deletionTimestamp", moment())
            if plural == "pods":
                default = gone["spec"].get("terminationGracePeriodSeconds", 30)
                graceful = gone["spec"].get("nodeName") and not finished(gone)
                grace = options.get("gracePeriodSeconds", default) if graceful else 0
                meta["deletionGracePeriodSeconds"] = min(grace, meta.get("deletionGracePeriodSeconds", grace))

        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return self.store.change(plural, thing, mark) or done

    def _collect(self) -> None:
        """Delete what is owned by what is gone; what is deleted in the foreground goes when it owns nothing."""
        owners = {one["metadata"]["uid"]: one for plural in ("jobsets", "jobs") for one in self.store.all(plural)}
        in_front = {uid for uid, one in owners.items() if FOREGROUND in one["metadata"].get("finalizers", ())}
        there = [(plural, one) for plural in COLLECTED for one in self.store.all(plural)]
        owning: set[str] = set()
        for plural, thing in there:
            uids = {one["uid"] for one in thing["metadata"].get("ownerReferences", ())}
            owning |= uids
            if uids - owners.keys() or uids & in_front:
                if plural == "pods":
                    self.store.change("pods", thing, _untrack)  # its Job counts no more
                if not leaving(thing):
                    foreground = uids & in_front and plural != "pods"
                    self.delete(plural, thing, {"propagationPolicy": "Foreground" if foreground else "Background"})
        for plural, thing in there:
            if FOREGROUND in thing["metadata"].get("finalizers", ()) and thing["metadata"]["uid"] not in owning:
                self.store.change(plural, thing, lambda one: finalizers_of(one).remove(FOREGROUND))

    # --- JobSets: after kubernetes-sigs/jobset's pkg/controllers; one replicated Job, BlockingRecreate ----------------

    def _jobsets(self) -> None:
        for jobset in self.store.all("jobsets"):
            status = copied(jobset.get("status", {"restarts": 0}))
            if not leaving(jobset) and not status.get("terminalState"):
                self._jobset(jobset, {"status": status})
                self.store.change("jobsets", jobset, lambda one, status=status: one.update(status=status))

    def _jobset(self, jobset: Object, draft: Object) -> None:
        meta, spec, status = jobset["metadata"], jobset["spec"], draft["status"]
        owned, restart = self.store.owned("jobs", jobset), str(status["restarts"])
        job = next((one for one in owned if labels_of(one)[f"{JOBSET}/restart-attempt"] == restart), None)
        for old in owned:
            if old is not job and not leaving(old):
                self.delete("jobs", old, {"propagationPolicy": "Foreground"})
        if job is not None and (failed := condition(job, "Failed")) is not None:
            policy = spec.get("failurePolicy") or {}
            action = next((one["action"] for one in policy.get("rules", ()) if _applies(one, failed)), "RestartJobSet")
            if action != "FailJobSet" and status["restarts"] < policy.get("maxRestarts", 0):
                status["restarts"] += 1
                return
            reason, text = "ReachedMaxRestarts", "jobset failed due to reaching max number of restarts"
            if action == "FailJobSet":
                reason, text = "FailJobSetFailurePolicyAction", "applying FailJobSet failure policy action"
            named = f"{text} (first failed job: {job['metadata']['name']})"
            set_condition(draft, "Failed", reason=reason, message=named)
            status["terminalState"] = "Failed"
        elif job is not None and condition(job, "Complete"):
            set_condition(draft, "Completed", reason="AllJobsCompleted", message="jobset completed successfully")
            status["terminalState"] = "Completed"
        else:
            if self.store.get("services", meta["namespace"], meta["name"]) is None:
                named = {"name": meta["name"], "namespace": meta["namespace"], "ownerReferences": [owner_of(jobset)]}
                selector = {f"{JOBSET}/jobset-name": meta["name"]}
                self.store.add("services", {"metadata": named, "spec": {"clusterIP": "None", "selector": selector}})
            if not owned:  # BlockingRecreate
                self._create_job(jobset, restart)
            if spec.get("suspend"):
                set_condition(draft, "Suspended")

    def _create_job(self, jobset: Object, restart: str) -> None:
        """The child Job, with the labels that JobSet puts on it and on its pods."""
        meta, (replicated,) = jobset["metadata"], jobset["spec"]["replicatedJobs"]
        name, template = f"{meta['name']}-{replicated['name']}-0", copied(replicated["template"])
        marks = {
            f"{JOBSET}/jobset-name": meta["name"], f"{JOBSET}/replicatedjob-name": replicated["name"],
            f"{JOBSET}/job-index": "0", f"{JOBSET}/restart-attempt": restart,
        }  # fmt: skip
        spec, pod_meta = template["spec"], template["spec"]["template"].setdefault("metadata", {})
        spec["suspend"] = bool(jobset["spec"].get("suspend"))
        spec["template"]["spec"]["subdomain"] = meta["name"]
        for what in ("labels", "annotations"):
            pod_meta[what] = {**(pod_meta.get(what) or {}), **marks}
        labels = {**(template.get("metadata", {}).get("labels") or {}), **marks}
        named = {"name": name, "namespace": meta["namespace"], "labels": labels, "ownerReferences": [owner_of(jobset)]}
        try:
            self.create("jobs", {"metadata": named, "spec": spec})
        except ApiError as error:  # tried again for ever; no condition of the JobSet tells
            text = f'job "{name}" creation failed with error: {error}'
            self.event(jobset, "JobCreationFailed", text, source="jobset-controller")

    # --- Jobs: after kubernetes' pkg/controller/job; Indexed, all pods at once, none replaced, podFailurePolicy -------

    def _jobs(self) -> None:
        for job in self.store.all("jobs"):
            if not (leaving(job) or condition(job, "Complete") or condition(job, "Failed")):
                draft: Object = {"status": copied(job.get("status", {}))}
                self._job(job, draft)
                self.store.change("jobs", job, lambda one, draft=draft: one.update(draft))

    def _job(self, job: Object, draft: Object) -> None:
        status, spec, pods = draft["status"], job["spec"], self.store.owned("pods", job)
        target = condition(job, "FailureTarget") or {}
        reason, message = target.get("reason", ""), target.get("message", "")
        for pod in pods:
            never_ran = leaving(pod) and not pod["spec"].get("nodeName")
            if TRACKING in pod["metadata"]["finalizers"] and (finished(pod) or never_ran):
                if never_ran or pod["status"]["phase"] == "Failed":
                    status["failed"] = status.get("failed", 0) + 1
                    if not reason and (rule := _matching_rule(job, pod)):
                        reason, message = "PodFailurePolicy", rule
                self.store.change("pods", pod, _untrack)
        if not reason and status.get("failed", 0) > spec.get("backoffLimit", 6):
            reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        if reason:
            set_condition(draft, "FailureTarget", reason=reason, message=message)
            for pod in pods:
                if not finished(pod) and not leaving(pod):
                    self.delete("pods", pod, {})
            if all(map(finished, self.store.owned("pods", job))):  # said when the last pod is gone (kubernetes 1.31)
                set_condition(draft, "Failed", reason=reason, message=message)
        elif sum(finished(pod) for pod in pods) >= spec.get("completions", 1):
            text = "Reached expected number of succeeded pods"
            set_condition(draft, "Complete", reason="CompletionsReached", message=text)
        elif spec.get("suspend"):
            set_condition(draft, "Suspended")
        else:
            status.setdefault("startTime", moment())
            there = {pod["metadata"]["annotations"][INDEX] for pod in pods}
            self._create_pods(job, [str(one) for one in range(spec.get("completions", 1)) if str(one) not in there])

    def _create_pods(self, job: Object, indices: Sequence[str]) -> None:
        for index in indices:
            pod = _pod_of(job, index)
            try:
                self._admit_pod(pod)
            except ApiError as error:
                return self.event(job, "FailedCreate", f"Error creating: {error}", source="job-controller")
            self.store.add("pods", pod)
        return None

    # --- the scheduler: labels, taints and what is free, in kube-scheduler's words ------------------------------------

    def _schedule(self) -> None:
        pods = [pod for pod in self.store.all("pods") if not finished(pod)]
        waiting = [pod for pod in pods if not pod["spec"].get("nodeName") and not leaving(pod)]
        if not waiting:
            return
        nodes = {node["metadata"]["name"]: node for node in self.store.all("nodes")}
        used: dict[str, Counter[str]] = {name: Counter() for name in nodes}
        for pod in pods:
            if (name := pod["spec"].get("nodeName")) in used:
                used[name].update(_asked(pod))
        for pod in waiting:
            asked = _asked(pod)
            against = {name: _against(pod, node, asked, used[name]) for name, node in nodes.items()}
            if fit := [name for name, reasons in against.items() if not reasons]:
                least = min(fit, key=lambda name: used[name]["pods"])
                used[least].update(asked)
                self.store.change("pods", pod, partial(_bind, node=least))
                continue
            counted = Counter(reason for reasons in against.values() for reason in reasons)
            listed = ", ".join(sorted(f"{count} {reason}" for reason, count in counted.items()))
            text = f"0/{len(nodes)} nodes are available: {listed}." if nodes else "no nodes available to schedule pods"
            tell = partial(set_condition, kind="PodScheduled", status="False", reason="Unschedulable", message=text)
            self.store.change("pods", pod, tell)
            self.event(pod, "FailedScheduling", text, source="default-scheduler")


def owner_of(thing: Object) -> Object:
    """The reference to an owner, for what it makes."""
    meta = thing["metadata"]
    return {
        "apiVersion": thing["apiVersion"], "kind": thing["kind"], "name": meta["name"], "uid": meta["uid"],
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


def leaving(thing: Object) -> bool:
    return "deletionTimestamp" in thing["metadata"]


def _untrack(pod: Object) -> None:
    if TRACKING in finalizers_of(pod):
        finalizers_of(pod).remove(TRACKING)


def _troubles(plural: str, thing: Mapping[str, Any]) -> Iterator[str]:
    """A few of the rules of Jobs and pods. A JobSet's are found when its controller creates the Job."""
    if plural not in ("pods", "jobs"):
        return
    spec, where = thing["spec"], "spec"
    if plural == "jobs":
        policy, (spec, where) = spec.get("podFailurePolicy"), (spec["template"]["spec"], "spec.template.spec")
        if policy and (given := spec.get("restartPolicy")) != "Never":
            only = 'only "Never" is supported when podFailurePolicy is specified'
            yield f'{where}.restartPolicy: Invalid value: "{given}": {only}'
    volumes = [one["name"] for one in spec.get("volumes") or []]
    yield from (f'{where}.volumes: Duplicate value: "{one}"' for one in sorted(set(volumes)) if volumes.count(one) > 1)
    for container in (*(spec.get("initContainers") or []), *spec["containers"]):
        for mount in container.get("volumeMounts") or []:
            if mount["name"] not in volumes:
                yield f'{where}.containers.volumeMounts[{mount["name"]}].name: Not found: "{mount["name"]}"'


def _applies(rule: Mapping[str, Any], ended: Mapping[str, Any]) -> bool:
    """Reason and message (RE2, unanchored): each may be left open."""
    reasons, patterns = rule.get("onJobFailureReasons"), rule.get("onJobFailureMessagePatterns")
    return (not reasons or ended["reason"] in reasons) and (
        not patterns or any(re.search(pattern, ended["message"]) for pattern in patterns)
    )


def _matching_rule(job: Object, pod: Object) -> str:
    """The message of the first rule that matches the failed pod, all of which are FailJob's here."""
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for index, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules", [])):
        matching = f"matching {rule['action']} rule at index {index}"
        for one in rule.get("onPodConditions", ()):
            if condition(pod, one["type"]):
                return f"Pod {name} has condition {one['type']} {matching}"
        for one in pod["status"].get("containerStatuses", ()) if (wanted := rule.get("onExitCodes")) else ():
            code = one["state"].get("terminated", {}).get("exitCode", 0)
            ours = wanted.get("containerName", one["name"]) == one["name"]
            if ours and code != 0 and (code in wanted["values"]) == (wanted["operator"] == "In"):
                return f"Container {one['name']} for pod {name} failed with exit code {code} {matching}"
    return ""


def _pod_of(job: Object, index: str) -> Object:
    """The pod that the Job's template makes, for one index."""
    meta, template = job["metadata"], copied(job["spec"]["template"])
    made_of, spec = template.get("metadata") or {}, template["spec"]
    marks = {
        "batch.kubernetes.io/controller-uid": meta["uid"], "batch.kubernetes.io/job-name": meta["name"], INDEX: index,
    }  # fmt: skip
    spec["hostname"] = f"{meta['name']}-{index}"
    variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}}
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        container.setdefault("env", []).append(variable)
    stem = f"{meta['name']}-{index}-"[:58]
    return {
        "spec": spec, "status": {"phase": "Pending"},
        "metadata": {
            # Without vowels and look-alikes, as all generated names end.
            "name": stem + "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5)), "generateName": stem,
            "namespace": meta["namespace"], "labels": {**made_of.get("labels", {}), **marks},
            "annotations": {**made_of.get("annotations", {}), INDEX: index},
            "finalizers": [TRACKING], "ownerReferences": [owner_of(job)],
        },
    }  # fmt: skip


def _asked(pod: Object) -> dict[str, Decimal]:
    """What a node has to have free for it; what init containers take is free again before the others start."""
    from kubernetes.utils import parse_quantity

    total = Counter[str]({"pods": Decimal(1)})
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, value in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] += parse_quantity(value)
    return total


def _against(pod: Object, node: Object, asked: Mapping[str, Decimal], used: Mapping[str, Decimal]) -> Sequence[str]:
    """The first filter that says no, as kube-scheduler runs them; several shortages count each."""
    from kubernetes.utils import parse_quantity

    spec, labels = pod["spec"], labels_of(node)
    for taint in node["spec"].get("taints") or []:
        if not any(_tolerates(one, taint) for one in spec.get("tolerations") or []):
            return ["node(s) had untolerated taint(s)"]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [{}])
    rules = [[_selects(one, labels) for one in term.get("matchExpressions") or []] for term in terms]
    if not (spec.get("nodeSelector") or {}).items() <= labels.items() or not any(map(all, rules)):
        return ["node(s) didn't match Pod's node affinity/selector"]
    free = node["status"]["allocatable"]
    return [
        f"Insufficient {name}"
        for name, value in sorted(asked.items())
        if name != "pods" and used.get(name, 0) + value > parse_quantity(free.get(name, 0))
    ]


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, taint["effect"]) or toleration.get("key") not in (None, taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _selects(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """One matchExpression of a node selector."""
    value, values = labels.get(one["key"]), one.get("values") or []
    return {"In": value in values, "NotIn": value not in values, "Exists": value is not None}[one["operator"]]


def _bind(pod: Object, *, node: str) -> None:
    pod["spec"]["nodeName"] = node
    set_condition(pod, "PodScheduled")
