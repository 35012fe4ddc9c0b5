"""The reasons why a cluster refuses a job or does not run it yet: the cluster's messages as findings with a fix.

A bare 403 means little: quotas, limits, policies and missing roles all answer with it. The pods of a job are alike, so
one waiting pod stands for the others, and the number of calls does not grow with the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from launcher.errors import LauncherError
from launcher.platforms.kubernetes import states
from launcher.platforms.kubernetes.cluster import EVENTS, WORKLOADS, ApiObject, Cluster, NotFound
from launcher.platforms.kubernetes.render import job_name
from litgpt_demo.errors import Finding, Severity

CLUSTER_ROLES = "have the Role of deployments/rbac.yaml bound to your account in that namespace"


class Phrase(NamedTuple):
    """A phrase of a cluster's message and its meaning. `{0}` stands for the match of the pattern's first group."""

    pattern: str
    code: str
    what: str
    fix: str
    severity: Severity = "warning"

    def read(self, text: str, area: str) -> list[Finding]:
        """Return a finding for each different match in the text."""
        code, findings = f"{area}.{self.code}", list[Finding]()
        for groups in dict.fromkeys(match.groups() for match in re.finditer(self.pattern, text)):
            values = [group.strip() for group in groups]
            findings.append(Finding(self.severity, code, self.what.format(*values), self.fix.format(*values)))
        return findings


def _first(phrases: Iterable[Phrase], text: str) -> list[Finding]:
    return next(filter(None, (phrase.read(text, _AREA) for phrase in phrases)), [])


# Wording of the API server's admission plugins (kubernetes: plugin/pkg/admission, staging/src/k8s.io/apiserver,
# staging/src/k8s.io/pod-security-admission; the same from 1.30 to 1.36).
_ADMISSION = (
    Phrase(r"exceeded quota: ([^,]+), requested: (.*?), used: (.*?), limited: ([^,]+(?:,[^,=]+=[^,]+)*)", "quota",
           "the namespace's quota {0} has no room: {1} requested, {2} in use, {3} allowed",
           "have the quota raised, wait for other jobs to end, or request less (platform.nodes, cpus, memory)"),
    Phrase(r"failed quota: ([^:]+): must specify ([^;,]+(?:[;,] ?[^;,]+)*)", "quota",
           "the namespace's quota {0} lets in only pods that specify {1}",
           "set platform.cpus and platform.memory for requests; limits come from a LimitRange with defaults", "error"),
    Phrase(r"((?:maximum|minimum) \S+ usage per \w+ is [^,\]]+?(?:, but (?:request|limit) is [^,\s\]]+"
           r"|\.\s+No (?:request|limit) is specified)|\S+ max limit to request ratio per \w+ is [^,\]]+"
           r"|must be less than or equal to \S+ limit(?: of [^\s,;\]]+)?)", "limits",
           "a LimitRange of the namespace does not allow it: {0}",
           "change platform.cpus or memory, or have the LimitRange changed (`kubectl get limitranges`)", "error"),
    Phrase(r'violates PodSecurity "([^"]+)": (.+)', "pod-security",
           "the namespace enforces the Pod Security level {0}, which forbids the pods: {1}",
           "take another platform.namespace, or have its label pod-security.kubernetes.io/enforce lowered: baseline "
           "forbids platform.host_network and GPUDirect, restricted also platform.uid=0", "error"),
    Phrase(r'service account ([^\s/]+)/\S+: serviceaccount "([^"]+)" not found', "service-account",
           "there is no service account {1} in {0}",
           "kubectl create serviceaccount {1} --namespace {0}, or fix platform.service_account", "error"),
    Phrase(r"no PriorityClass with name (\S+) was found", "priority", "there is no PriorityClass {0}",
           "fix platform.priority", "error"),
    Phrase(r"(failed calling webhook .*)", "webhook", "{0}", "check that the webhook's controller runs"),
    Phrase(r"""(?:admission webhook "|ValidatingAdmissionPolicy ')([^"']+)["'].*? denied (?:the )?request: (.*)""",
           "policy", "the cluster's policy {0} forbids it: {1}",
           "follow the policy, or request an exception from the cluster's administrator", "error"),
    Phrase(r"(namespace \S+) because it is being terminated", "namespace", "the {0} is being removed",
           "take another platform.namespace, or wait and create it again", "error"),
    Phrase(r'([Uu]ser "[^"]+" cannot \w+ resource .*)', "permission", "{0}", CLUSTER_ROLES, "error"),
)  # fmt: skip


def refusals(message: str, area: str) -> list[Finding]:
    """Return all reasons in the message, at least one, each with its fix. Their codes begin with `area`."""
    known = [finding for phrase in _ADMISSION for finding in phrase.read(message, area)]
    return known or [Finding("error", f"{area}.refused", message, "change what it names, or contact the administrator")]


def advice(message: str) -> str:
    """Return the fixes of a refusal in one line."""
    return "; ".join(dict.fromkeys(finding.fix for finding in refusals(message, "kubernetes")))


_AREA = "kubernetes.pending"
_QUEUE = "kueue.x-k8s.io/queue-name"


def explain(cluster: Cluster, job: states.JobName, workload: ApiObject, pods: Iterable[ApiObject]) -> list[Finding]:
    """Return the reasons why the job does not run, the most severe first, as far as they can be requested and read."""
    present = [pod for pod in pods if states.restart_of(pod) == states.restarts_of(workload)]
    waiting = sorted((pod for pod in present if not states.began(pod)), key=states.index_of)
    complete = len(present) >= states.nodes_of(workload)
    sources = [_of_pods(waiting), _of_events(cluster, job, workload, waiting[:1], complete=complete)]
    if _QUEUE in workload["metadata"].get("labels", {}):
        sources.append(_of_kueue(cluster, job, workload))
    findings: list[Finding] = []
    for source in sources:
        # Anybody may write Events and conditions into a cluster. A malformed one must not end the follower of a job.
        with suppress(LauncherError, LookupError, TypeError, AttributeError, ValueError):
            findings.extend(source)
    return sorted(dict.fromkeys(findings), key=lambda finding: ("error", "warning", "info").index(finding.severity))


# Wording of kube-scheduler's plugins (kubernetes: pkg/scheduler/framework/plugins, 1.30 to 1.36). The newest no longer
# says which taints; volumes have a new wording since 1.33.
_SCHEDULER = (
    Phrase(r"^(\d+) Insufficient nvidia\.com/gpu", "gpus", "{0} machines have not enough free GPUs",
           "wait for other jobs to end, add machines, or take fewer platform.nodes"),
    Phrase(r"^(\d+) Insufficient (\S+)", "resources", "{0} machines have not enough free {1}",
           "lower platform.cpus or platform.memory, or take larger machines"),
    Phrase(r"untolerated taint(?:\(s\))? \{([^:}]+):? ?([^}]*)\}", "taint", "machines are tainted {0}={1}",
           "take the taint off, or take another platform.node_pool", "error"),
    Phrase(r"^(\d+) node\(s\) had untolerated taint(?:\(s\))?$", "taint",
           "{0} machines have a taint that the pods do not tolerate",
           "`kubectl describe nodes` shows which; take it off, or take another platform.node_pool", "error"),
    Phrase(r"didn't match (Pod's node affinity/selector)", "selector",
           "no machine has the requested labels",
           "compare platform.machine, node_pool, node_selector, reservation, spot, exclude_nodes and machines that the "
           "run avoids (restart_policy.exclude_machine_after) with `kubectl get nodes --show-labels`"),
    Phrase(r"((?:didn't match pod|didn't satisfy existing pods) anti-affinity)", "apart",
           "machines are taken by another job with a receive daemon, of which there can be one",
           "wait for it to end, or add machines"),
    Phrase(r"(didn't have free ports)", "ports", "machines have no free port for pods on the hosts' network",
           "wait for the other job on these machines to end, or leave platform.host_network out"),
    Phrase(r"(node\(s\) were unschedulable)", "cordoned", "machines are cordoned off", "kubectl uncordon them"),
    Phrase(r"(Too many pods)", "pods", "machines already run the most pods that they may", "take other machines"),
    Phrase(r"(no nodes available)", "nodes", "the cluster has no machine at all", "add a node pool"),
    Phrase(r"(persistentvolumeclaim \"[^\"]+\" not found)", "pvc", "{0}",
           "create it, or fix platform.pvc", "error"),
    Phrase(r"((?:persistentvolumeclaim|PersistentVolume|persistent volume|volume zone|pv\(s\)|free storage|volume)"
           r".*)", "volume", "the machines cannot reach the volume: {0}",
           "`kubectl describe pvc` of platform.pvc says why; take a PVC whose volume every machine can reach"),
    Phrase(r"(cannot allocate all claims|resourceclaim.*|resource claim.*)", "claims",
           "no machine can give what the pod claims (DRA): {0}",
           "see `kubectl describe resourceclaims`, and check that the node pool has the DRA driver"),
)  # fmt: skip


def unschedulable(message: str) -> Iterator[Finding]:
    """Yield every reason of a scheduler's message, each with its fix. The text behind the first sentence says why the
    pod can replace no other one."""
    head = re.split(r"\.(?:\s|$)", re.sub(r"^\d+/\d+ nodes are available: ", "", message), maxsplit=1)[0]
    fix = "`kubectl describe pod` and `kubectl describe nodes` show more; or contact the cluster's administrator"
    for reason in re.split(r", (?=\d+ )", head):
        unknown = Finding("warning", f"{_AREA}.unscheduled", reason or "no machine was found yet", fix)
        yield from _first(_SCHEDULER, reason) or [unknown]


# Why a container waits, and the kubelet's message.
_WAITING = (
    Phrase(r"(?s)^((?:ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull): .*)", "image", "{0}",
           "fix the reference, or let the nodes' service account read it (roles/artifactregistry.reader)",
           "error"),
    Phrase(r"(?s)^(CreateContainerConfigError: .*)", "configuration", "{0}",
           "create the Secret or ConfigMap that it names", "error"),
    Phrase(r"(?s)^((?:Create|Run)ContainerError: .*)", "container", "{0}",
           "see `kubectl describe pod`: a device or path of the machine may be missing", "error"),
    Phrase(r"(?s)^(CrashLoopBackOff: .*)", "crash", "{0}",
           "read that container's log: `kubectl logs POD -c CONTAINER --previous`", "error"),
)  # fmt: skip


def _of_pods(waiting: list[ApiObject]) -> Iterator[Finding]:
    nodes_by_reason: dict[Finding, list[int]] = {}
    for pod in waiting:
        findings: list[Finding] = []
        gates = [gate["name"] for gate in pod["spec"].get("schedulingGates") or ()]
        unscheduled = states.condition(pod, "PodScheduled", "False")
        if gates:
            by = ", ".join(gates)
            if "kueue.x-k8s.io/topology" in gates:
                by = "Kueue, which looks for machines close together"
            findings.append(Finding("info", f"{_AREA}.gated", f"held back by {by}", "wait: it continues automatically"))
        elif unscheduled is not None:
            findings += unschedulable(unscheduled.get("message", ""))
        status = pod.get("status", {})
        for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
            waits = container["state"].get("waiting", {})
            place = f"container {container['name']}, image {container['image']}"
            for finding in _first(_WAITING, f"{waits.get('reason', '')}: {waits.get('message', '')}"):
                findings.append(replace(finding, what=f"{place}: {finding.what}"))
        for finding in findings:
            nodes_by_reason.setdefault(finding, []).append(states.index_of(pod))
    for finding, nodes in nodes_by_reason.items():
        place = f"node {nodes[0]}" if len(nodes) == 1 else f"{len(nodes)} nodes (node {nodes[0]} first)"
        yield replace(finding, what=f"{place}: {finding.what}")


# The event's reason and its message. `FailedCreate` is read by `refusals`.
_EVENTS = (
    Phrase(r"(?s)^FailedMount: (.+)", "volume", "{0}", "check that the volume, bucket or folder can be read"),
    Phrase(r"(?s)^FailedAttachVolume: (.+)", "volume", "{0}", "check whether another machine uses the disk"),
    Phrase(r"(?s)^FailedCreatePodSandBox: (.+)", "network", "{0}",
           "check that the machines have the pod's networks (platform.network, GKENetworkParamSet)"),
    # Of the cluster autoscaler: https://docs.cloud.google.com/kubernetes-engine/docs/how-to/cluster-autoscaler-visibility
    Phrase(r"(?s)^NotTriggerScaleUp: (.+)", "scale-up", "no machine will be added: {0}",
           "raise the node pool's limit, or take another platform.node_pool"),
    Phrase(r"(?s)^FailedScaleUp: (.*(?:[Qq]uota|QUOTA).*)", "project-quota", "the project's quota is used up: {0}",
           "request more at console.cloud.google.com/iam-admin/quotas, or take another location"),
    Phrase(r"(?s)^FailedScaleUp: (.+)", "capacity", "Google has no machine to give: {0}",
           "wait, use a platform.reservation or platform.flex_start, or take another location"),
)  # fmt: skip
# Of JobSet, with the API server's message behind it.
_REFUSED_PARTS = {"JobCreationFailed": "job", "HeadlessServiceCreationFailed": "service"}

REFUSALS = frozenset(
    f"{_AREA}.{code}"
    for code in (
        *(phrase.code for phrase in (*_ADMISSION, *_WAITING)),
        *_REFUSED_PARTS.values(),
        "refused",
        "deactivated",
    )
)
"""The codes of reasons that waiting does not change: the API server refuses the pods, or their Job or Service, a
kubelet cannot start them, or Kueue has deactivated the job. Controllers try again every minute, kubelets every five."""


def _of_events(
    cluster: Cluster, job: states.JobName, workload: ApiObject, waiting: list[ApiObject], *, complete: bool
) -> Iterator[Finding]:
    names = [job.name, *(pod["metadata"]["name"] for pod in waiting)]
    if workload["kind"] == "JobSet":
        names.insert(1, job_name(job.name))
    for name in names:
        events, _ = cluster.list(EVENTS, job.namespace, fields=f"involvedObject.name={name}")
        events.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
        # The newest of each reason. Reason and message are optional (core/v1 Event).
        newest = {str(event.get("reason") or ""): str(event.get("message") or "") for event in events}
        if complete:  # the problem that kept a pod from being created is over
            newest.pop("FailedCreate", None)
        for reason, message in newest.items():
            if reason == "FailedCreate":
                yield from refusals(message.removeprefix("Error creating: "), _AREA)
            elif reason in _REFUSED_PARTS:
                part = _REFUSED_PARTS[reason]
                what = f"JobSet cannot create its {part.title()}: {message}"
                yield Finding("error", f"{_AREA}.{part}", what, advice(message))
            else:
                yield from _first(_EVENTS, f"{reason}: {message}")


def _of_kueue(cluster: Cluster, job: states.JobName, workload: ApiObject) -> Iterator[Finding]:
    """Yield the reasons in Kueue's Workload. Its conditions are those of the documentation (INFERRED)."""
    queue = workload["metadata"]["labels"][_QUEUE]
    try:
        listed, _ = cluster.list(WORKLOADS, job.namespace)
    except NotFound:
        what = f"the job waits in queue {queue}, but Kueue, which would start it, is not installed"
        yield Finding("error", f"{_AREA}.queue", what, "install Kueue, or cancel it and leave platform.queue out")
        return
    own = [admission for admission in listed if states.uid_of(workload) in states.owners_of(admission)]
    if not own:
        what = f"Kueue has not yet created a Workload for the job in queue {queue}"
        yield Finding("warning", f"{_AREA}.queue", what, "check that Kueue runs, and its JobSet integration")
    for admission in own:
        evicted = states.condition(admission, "Evicted")
        if admission["spec"].get("active") is False:  # https://kueue.sigs.k8s.io/docs/concepts/workload/#active
            name, why = admission["metadata"]["name"], evicted or {}
            what = f"Kueue has deactivated the job's Workload ({why.get('reason', '')}): {why.get('message', '')}"
            patch = f'kubectl patch workload {name} -n {job.namespace} --type=merge -p \'{{"spec":{{"active":true}}}}\''
            yield Finding("error", f"{_AREA}.deactivated", what, f"activate it: {patch}")
            continue
        if evicted is not None:
            what = f"Kueue has taken the machines back ({evicted.get('reason', '')}): {evicted.get('message', '')}"
            yield Finding("warning", f"{_AREA}.evicted", what, "it continues automatically from its last checkpoint")
        unreserved = states.condition(admission, "QuotaReserved", "False")
        if evicted is None and unreserved is not None and states.condition(admission, "Admitted") is None:
            what = f"queue {queue}: {unreserved.get('message', '')}"
            if unreserved.get("reason") == "Inadmissible" or "maximum capacity" in what:
                yield Finding("error", f"{_AREA}.queue", what, "fix platform.queue, or take fewer platform.nodes")
            else:
                yield Finding("warning", f"{_AREA}.queue", what, "wait for other jobs to end, or raise the quota")
