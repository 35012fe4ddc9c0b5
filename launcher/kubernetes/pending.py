"""Why does a job not run yet? What the scheduler, the kubelets, the controllers and Kueue say, as findings.

All pods of a job are alike, so one that waits speaks for the others: the number of calls does not grow with the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from launcher.errors import LauncherError
from launcher.findings import Finding, Severity
from launcher.kubernetes.cluster import EVENTS, WORKLOADS, Cluster, Object
from launcher.kubernetes.states import holding, index_of, main_container, uid_of
from launcher.kubernetes.watching import JobName

_QUEUE = "kueue.x-k8s.io/queue-name"
_TOPOLOGY_GATE = "kueue.x-k8s.io/topology"


def explain(cluster: Cluster, job: JobName, workload: Object, pods: Iterable[Object]) -> list[Finding]:
    """What keeps the job from running, the most telling first; what cannot be asked is left out."""
    waiting = sorted(
        (pod for pod in pods if "running" not in main_container(pod) and "terminated" not in main_container(pod)),
        key=index_of,
    )
    found = [*_of_pods(waiting)]
    found += _asked(lambda: _of_events(cluster, job, workload, waiting[:1]))
    if _QUEUE in workload["metadata"].get("labels", {}):
        found += _asked(lambda: _of_kueue(cluster, job, workload))
    elif workload["spec"].get("suspend"):
        fix = "set its spec.suspend to false, or cancel it"
        found.append(
            Finding("warning", "gke.pending.suspended", f"{job.name} is suspended, and no queue will start it", fix)
        )
    order = ("error", "warning", "info")
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.severity))


def _asked(ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(ask())
    except LauncherError:
        return []  # a reason that cannot be had must not hide those that can


# --- pods -------------------------------------------------------------------------------------------------------------


def _of_pods(waiting: list[Object]) -> Iterator[Finding]:
    """By what their own status says; nodes that wait for the same reason are named together."""
    reasons: dict[Finding, list[int]] = {}
    for pod in waiting:
        for finding in (*_of_scheduling(pod), *_of_containers(pod)):
            reasons.setdefault(finding, []).append(index_of(pod))
    for finding, nodes in reasons.items():
        who = f"node {nodes[0]}" if len(nodes) == 1 else f"{len(nodes)} nodes (node {nodes[0]} first)"
        yield Finding(finding.severity, finding.code, f"{who}: {finding.what}", finding.fix)


@dataclass(frozen=True)
class _Phrase:
    """A phrase of somebody's message, and what it means. `{0}` is what the phrase's group has matched."""

    pattern: str
    code: str
    what: str
    fix: str
    severity: Severity = "warning"

    def read(self, text: str) -> Iterator[Finding]:
        for match in dict.fromkeys(found.groups() for found in re.finditer(self.pattern, text)):
            words = [word.strip() for word in match]
            yield Finding(self.severity, f"gke.pending.{self.code}", self.what.format(*words), self.fix.format(*words))


# Wording of kube-scheduler's plug-ins (kubernetes: pkg/scheduler/framework/plugins, 1.33).
_SCHEDULER = (
    _Phrase(r"(\d+) Insufficient nvidia\.com/gpu", "gpus", "{0} machines have not enough free GPUs",
            "wait for other jobs to end, add machines, or take fewer platform.nodes"),
    _Phrase(r"(\d+) Insufficient ((?!nvidia)[^,.\s]+)", "resources", "{0} machines have not enough free {1}",
            "ask for less in platform.cpus or platform.memory, or take larger machines"),
    _Phrase(r"untolerated taint(?:\(s\))? \{([^:}]+):? ?([^}]*)\}", "taint", "machines are tainted {0}={1}",
            "take the taint off, or take another platform.node_pool", "error"),
    _Phrase(r"didn't match (Pod's node affinity/selector)", "selector",
            "no machine has the labels that are asked for",
            "look at platform.machine, node_pool, node_selector, reservation, spot and exclude_nodes; compare "
            "`kubectl get nodes --show-labels`"),
    _Phrase(r"didn't match (pod anti-affinity) rules", "apart",
            "machines are taken by another job with a receive daemon, of which there can be one",
            "wait for it to end, or add machines"),
    _Phrase(r"(node\(s\) were unschedulable)", "cordoned", "machines are cordoned off", "kubectl uncordon them"),
    _Phrase(r"(Too many pods)", "pods", "machines have as many pods as they may", "take other machines"),
    _Phrase(r"(no nodes available)", "nodes", "the cluster has no machine at all", "add a node pool"),
    _Phrase(r"(persistentvolumeclaim \"[^\"]+\" not found)", "claim", "{0}",
            "create it, or mend platform.claim", "error"),
    _Phrase(r"(cannot allocate all claims)", "claims", "no machine can give what the pod claims (DRA)",
            "look at `kubectl describe resourceclaims`: is the node pool made with its DRA driver?"),
)  # fmt: skip


def _of_scheduling(pod: Object) -> Iterator[Finding]:
    conditions = pod.get("status", {}).get("conditions") or ()
    told = next((one for one in conditions if one["type"] == "PodScheduled" and one["status"] == "False"), None)
    gates = [one["name"] for one in pod["spec"].get("schedulingGates") or ()]
    if gates:
        by = "Kueue, which looks for machines close together" if _TOPOLOGY_GATE in gates else ", ".join(gates)
        yield Finding("info", "gke.pending.gated", f"held back by {by}", "")
    elif told is not None:
        text = told.get("message", "")
        # What is behind it says why nobody else could be thrown out, for the same reasons.
        known = [finding for phrase in _SCHEDULER for finding in phrase.read(text.split("preemption:")[0])]
        yield from known or [Finding("warning", "gke.pending.unscheduled", text, "")]


_WAITING = {
    "ErrImagePull": "image", "ImagePullBackOff": "image", "InvalidImageName": "image", "ErrImageNeverPull": "image",
    "CreateContainerConfigError": "configuration", "CreateContainerError": "container",
    "RunContainerError": "container", "CrashLoopBackOff": "crash",
}  # fmt: skip
_FIXES = {
    "image": "is the reference right, and may the nodes' service account read it (roles/artifactregistry.reader)?",
    "configuration": "a Secret or ConfigMap that the pod needs is not there",
    "container": "look at `kubectl describe pod`; a device or path of the machine may be missing",
    "crash": "look at that container's log: `kubectl logs POD -c CONTAINER --previous`",
}


def _of_containers(pod: Object) -> Iterator[Finding]:
    status = pod.get("status", {})
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = one["state"].get("waiting", {})
        if (code := _WAITING.get(waiting.get("reason", ""))) is not None:
            what = f"container {one['name']}, image {one['image']}: {waiting['reason']}: {waiting.get('message', '')}"
            yield Finding("error", f"gke.pending.{code}", what, _FIXES[code])


# --- events -----------------------------------------------------------------------------------------------------------

# By the event's reason: phrases in its message, and what it means if none is in it.
_EVENTS: dict[str, tuple[_Phrase, ...]] = {
    "FailedCreate": (
        _Phrase(r"exceeded quota: ([^,]+), requested: (.*?), used: .*?, limited: ([^,]+(?:,[^,=]+=[^,]+)*)", "quota",
                "the namespace's quota {0} is used up: {1} asked for, {2} allowed",
                "raise it, wait for other jobs to end, or take fewer platform.nodes"),
        _Phrase(r'serviceaccount "([^"]+)" not found', "service-account", "the service account {0} is not there",
                "kubectl create serviceaccount {0}, or mend platform.service_account", "error"),
        _Phrase(r"no PriorityClass with name (\S+) was found", "priority", "there is no PriorityClass {0}",
                "mend platform.priority", "error"),
        _Phrase(r"(failed calling webhook .*)", "webhook", "{0}", "is that webhook's controller running?"),
        _Phrase(r"(.+)", "refused", "the pods are refused: {0}", "", "error"),
    ),
    "FailedMount": (_Phrase(r"(.+)", "volume", "{0}", "is the volume, bucket or folder there, and may it be read?"),),
    "FailedAttachVolume": (_Phrase(r"(.+)", "volume", "{0}", "is the disk in use on another machine?"),),
    "FailedCreatePodSandBox": (
        _Phrase(r"(.+)", "network", "{0}", "do the machines have the additional networks that the pod is attached to "
                "(platform.network, GKENetworkParamSet)?"),
    ),
    # Of the cluster autoscaler: https://docs.cloud.google.com/kubernetes-engine/docs/how-to/cluster-autoscaler-visibility
    "NotTriggerScaleUp": (_Phrase(r"(.+)", "scale-up", "no machine will be added: {0}",
                                  "raise the node pool's limit, or take another platform.node_pool"),),
    "FailedScaleUp": (
        _Phrase(r"(.*(?:[Qq]uota|QUOTA).*)", "project-quota", "the project's quota is used up: {0}",
                "ask for more at console.cloud.google.com/iam-admin/quotas, or take another location"),
        _Phrase(r"(.+)", "capacity", "Google has no machine to give: {0}",
                "wait, use a platform.reservation or platform.flex_start, or take another location"),
    ),
    "JobCreationFailed": (_Phrase(r"(.+)", "job", "JobSet cannot create its Job: {0}", "", "error"),),
    "HeadlessServiceCreationFailed": (
        _Phrase(r"(.+)", "service", "JobSet cannot create its Service: {0}", "", "error"),
    ),
}  # fmt: skip


def _of_events(cluster: Cluster, job: JobName, workload: Object, waiting: list[Object]) -> Iterator[Finding]:
    about = [job.name, *([f"{job.name}-nodes-0"] if workload["kind"] == "JobSet" else [])]
    alive = {uid_of(workload), *(uid_of(pod) for pod in waiting)}
    for name in (*about, *(pod["metadata"]["name"] for pod in waiting)):
        events, _ = cluster.list(EVENTS, job.namespace, fields=f"involvedObject.name={name}")
        newest = {
            event["reason"]: event
            for event in sorted(events, key=lambda one: one.get("lastTimestamp") or "")
            # A Job between JobSet and pods has an id that we do not know; of the others, no older namesake's.
            if name not in (job.name, *(pod["metadata"]["name"] for pod in waiting))
            or event["involvedObject"].get("uid") in alive
        }
        for reason, event in newest.items():
            for phrase in _EVENTS.get(reason, ()):
                if known := list(phrase.read(event["message"])):
                    yield from known
                    break


# --- Kueue ------------------------------------------------------------------------------------------------------------


def _of_kueue(cluster: Cluster, job: JobName, workload: Object) -> Iterator[Finding]:
    """What Kueue's Workload says; which conditions there are is known from its documentation only (INFERRED)."""
    listed, _ = cluster.list(WORKLOADS, job.namespace)
    mine = [
        one
        for one in listed
        if any(owner["uid"] == uid_of(workload) for owner in one["metadata"].get("ownerReferences", ()))
    ]
    queue = workload["metadata"]["labels"][_QUEUE]
    if not mine:
        what = f"Kueue has not taken notice of the job in its queue {queue}"
        yield Finding("warning", "gke.pending.queue", what, "is Kueue's controller running, with JobSets turned on?")
    for one in mine:
        if (evicted := holding(one, "Evicted")) is not None:
            what = f"Kueue has taken the machines back ({evicted.get('reason', '')}): {evicted.get('message', '')}"
            yield Finding("warning", "gke.pending.evicted", what, "it goes on by itself, from its last checkpoint")
        if holding(one, "Admitted") is not None:
            continue
        conditions = one.get("status", {}).get("conditions") or ()
        told: Object = next(
            (item for item in conditions if item["type"] == "QuotaReserved" and item["status"] == "False"), {}
        )
        never = told.get("reason") == "Inadmissible" or "maximum capacity" in told.get("message", "")
        if told and holding(one, "Evicted") is None:
            what = f"queue {queue}: {told.get('message', '')}"
            if never:
                yield Finding("error", "gke.pending.queue", what, "mend platform.queue, or take fewer platform.nodes")
            else:
                yield Finding("warning", "gke.pending.queue", what, "wait for other jobs to end, or raise the quota")
