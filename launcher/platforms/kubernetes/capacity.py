"""What checks look at, a submission and its cluster; and whether that has, or can get, machines and room for all pods.

Kubernetes writes quantities as texts (`500m`, `200Gi`); here they are plain numbers.
"""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property, partial
from typing import TYPE_CHECKING

from launcher.formatting import bytes_text
from launcher.job import Object
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Resource
from launcher.platforms.kubernetes.connection import google_way
from launcher.platforms.kubernetes.render import WorkloadObjects, job_name, pod_host
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from launcher.platforms.kubernetes.states import condition, container_of, job_of, pod_of, workload_of
from litgpt_demo.errors import Finding, Severity

if TYPE_CHECKING:
    from google.cloud.container_v1.types import Cluster as GoogleCluster

Amounts = Mapping[str, Decimal]
"""CPUs, bytes, or pieces, by resource."""

_COMPARED = {"nvidia.com/gpu": "GPUs", "cpu": "CPUs", "memory": "memory"}
"""The resources that a machine must have enough of, beside extended ones such as RDMA cards, and their names."""

_RESERVED = ("limits", "requests")
"""What a pod has reserved on its machine; where only a limit is given, the limit."""

GKE_POOL = "cloud.google.com/gke-nodepool"


def _found(severity: Severity, code: str, what: str, fix: str = "") -> Finding:
    return Finding(severity, f"gke.{code}", what, fix)


good, risk, bad = partial(_found, "info"), partial(_found, "warning"), partial(_found, "error")


class Survey:
    """A question to the cluster: what is asked, and about what."""

    def __init__(self, cluster: Cluster, settings: GkePlatformConfig, items: Sequence[ApiObject]) -> None:
        self.cluster, self.settings, self.items = cluster, settings, items
        self.namespace, self.fabric = settings.namespace, settings.fabric
        self.workload = workload_of(items)
        self.kind: WorkloadObjects = "jobset" if self.workload["kind"] == "JobSet" else "job"
        self.meta: Object = job_of(self.workload)["template"]["metadata"]
        self.annotations: dict[str, str] = self.meta.get("annotations", {})
        self.pod = pod_of(self.workload)
        self.version = (0, 0)

    def get(self, resource: Resource, name: str) -> ApiObject | None:
        return self.cluster.get(resource, self.namespace, name)

    def try_out(self, item: ApiObject) -> ApiObject:
        """Ask the cluster to judge an object without storing it (dryRun=All); returns what would be stored."""
        resource = api.PODS if item["kind"] == "Pod" else api.SENT[item["kind"]]
        return self.cluster.create(resource, self.namespace, item, dry_run=True)

    @property
    def parts(self) -> list[ApiObject]:
        """Return what controllers make of the JobSet or Job: the Job of a JobSet, and the pod of node 0."""
        name = self.workload["metadata"]["name"]
        metadata = {**self.meta, "name": f"{pod_host(self.kind, name, 0)}-check", "namespace": self.namespace}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.pod}
        if self.kind == "job":
            return [pod]
        metadata = {"name": job_name(name), "namespace": self.namespace, "labels": self.meta["labels"]}
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_of(self.workload)}, pod]

    @cached_property
    def admitted_pod(self) -> Object:
        """The pod with what the namespace adds to it; as it was rendered where the cluster does not say."""
        try:
            spec: Object = self.try_out(self.parts[-1])["spec"]
        except api.ApiRefused:
            return self.pod
        return spec


def _amount(quantity: str | float) -> Decimal:
    from kubernetes.utils import parse_quantity

    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]


def _shown(resource: str, number: Decimal) -> str:
    in_bytes = resource.rpartition(".")[2] in {"memory", "ephemeral-storage", "storage"}
    return bytes_text(int(number)) if in_bytes else f"{number.normalize():f}"


def _total(pod: Object, *parts: str) -> Amounts:
    """Return what the pod's containers together have in these parts of their resources, the last part winning.

    Containers that run side by side are added up; containers before them need their room only in their turn.
    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
    """
    total: defaultdict[str, Decimal] = defaultdict(Decimal)
    first = pod.get("initContainers", ())
    in_turn = [one for one in first if one.get("restartPolicy") != "Always"]
    for one in (*pod["containers"], *(one for one in first if one not in in_turn), *in_turn):
        resources = ChainMap(*(one.get("resources", {}).get(part, {}) for part in reversed(parts)))
        for resource, quantity in resources.items():
            number = _amount(quantity)
            total[resource] = max(total[resource], number) if one in in_turn else total[resource] + number
    return total


def machines(survey: Survey) -> Iterator[Finding]:
    """Check that enough nodes fit, or that the pools may grow so far."""
    settings = survey.settings
    nodes, _ = survey.cluster.list(api.NODES, None)
    wanted = _total(survey.pod, *_RESERVED)
    reasons = Counter(_unfit(node, survey.pod, wanted) for node in nodes)
    if (fit := reasons.pop("", 0)) >= settings.nodes:
        yield good("machines", f"{fit} machines fit, {settings.nodes} are asked for")
        return
    listed = ", ".join(f"{count} {why}" for why, count in reasons.most_common(4)) or "there are no others"
    what = f"only {fit} of {settings.nodes} machines are there ({listed})"
    pool = [node for node in nodes if node["metadata"].get("labels", {}).get(GKE_POOL, "") == settings.node_pool]
    # Not GPUs: a machine shows them only when their driver is there.
    room = {name: wanted[name] for name in ("cpu", "memory") if name in wanted}
    if pool and all(_too_small(node, room) for node in pool):
        fix = "ask for less in platform.cpus and memory, or take another platform.node_pool, for all of one are alike"
        yield bad("machines", f"the pool {settings.node_pool} has too small machines: {what}", fix)
    elif settings.cluster is not None:
        yield from pools(google_way(settings)[1], settings, what)
    elif _may_grow(nodes, settings):
        fix = "see that the node pool can grow that far; with platform.cluster instead of a kubeconfig that is checked"
        yield risk("machines", what, fix)
    else:
        yield bad("machines", what, "take fewer platform.nodes, other machines, or add some")


def spare_machines(cluster: Cluster, settings: GkePlatformConfig, pod: Object) -> int | None:
    """Return how many of the machines that fit a job does not need; None where others can be had."""
    nodes, _ = cluster.list(api.NODES, None)
    if settings.cluster or _may_grow(nodes, settings):
        return None
    wanted = _total(pod, *_RESERVED)
    return max(0, sum(not _unfit(node, pod, wanted) for node in nodes) - settings.nodes)


def _may_grow(nodes: Iterable[ApiObject], settings: GkePlatformConfig) -> bool:
    """Return whether others may come: by a queue, or from GKE's pools, whose limits one sees by the cluster's name."""
    pooled = any(GKE_POOL in node["metadata"].get("labels", {}) for node in nodes)
    return pooled or bool(settings.queue or settings.flex_start)


def _unfit(node: ApiObject, pod: Object, wanted: Amounts) -> str:
    labels, spec = node["metadata"].get("labels", {}), node.get("spec", {})
    for key, value in pod.get("nodeSelector", {}).items():
        if labels.get(key) != value:
            return f"without the label {key}={value}"
    affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", ())
    excluded = [value for term in terms for rule in term["matchExpressions"] for value in rule["values"]]
    if labels.get("kubernetes.io/hostname") in excluded:
        return "excluded by platform.exclude_nodes or the run's own verdicts"
    if spec.get("unschedulable"):
        return "cordoned off"
    if condition(node, "Ready") is None:
        return "not ready"
    for taint in spec.get("taints", ()):
        key, value, effect = taint["key"], taint.get("value", ""), taint["effect"]
        same = [one for one in pod["tolerations"] if one.get("key") == key and one.get("effect") in (None, "", effect)]
        tolerated = any(one.get("operator") == "Exists" or one.get("value", "") == value for one in same)
        if effect != "PreferNoSchedule" and not tolerated:
            return f"with the taint {key}={value}"
    return _too_small(node, wanted)


def _too_small(node: ApiObject, wanted: Amounts) -> str:
    allocatable = node.get("status", {}).get("allocatable", {})
    for resource in _COMPARED | dict.fromkeys(name for name in wanted if "/" in name):
        has, asked = _amount(allocatable.get(resource, "0")), wanted.get(resource, Decimal(0))
        if has < asked:
            name = _COMPARED.get(resource, resource)
            return f"with {_shown(resource, has)} {name} of {_shown(resource, asked)}"
    return ""


def pools(described: GoogleCluster, settings: GkePlatformConfig, what: str) -> Iterator[Finding]:
    """Check in the GKE API that the node pools can grow to what is asked for."""
    if described.autopilot.enabled or described.autoscaling.enable_node_autoprovisioning:
        yield good("machines", f"{what}; GKE makes the others when they are asked for")
        return
    most = {}
    for pool in described.node_pools:
        if settings.machine in (None, pool.config.machine_type) and settings.node_pool in (None, pool.name):
            grown, zones = pool.autoscaling, max(1, len(pool.locations))
            count = grown.max_node_count if grown.enabled else pool.initial_node_count
            # Limits are per zone, unless they are total ones.
            most[pool.name] = int((grown.enabled and grown.total_max_node_count) or count * zones)
    listed = ", ".join(f"{name}: {count} at most" for name, count in most.items())
    if not most:
        there = ", ".join(f"{pool.name} of {pool.config.machine_type}" for pool in described.node_pools) or "none"
        what = f"no node pool has {settings.machine or f'the name {settings.node_pool}'} (there are {there})"
        yield bad("pools", what, "add one, or fix platform.machine and platform.node_pool")
    elif sum(most.values()) < settings.nodes:
        fix = "take fewer platform.nodes, or raise the limits of the node pools"
        yield bad("pools", f"{what}, and the node pools cannot give them ({listed})", fix)
    else:
        yield good("machines", f"{what}; the node pools can grow to it ({listed})")


# The cluster's own answer to a dry run of one pod is exact for limits, Pod Security and policies. It says nothing of
# the other pods, or of what a limit that is set by default will do to a training.
def quotas(survey: Survey) -> Iterator[Finding]:
    """Yield what the job as a whole asks for and a ResourceQuota has not got, now or ever.

    Quotas with scopes are left to the dry run of the pod: the API server knows which of them count.
    """
    listed, _ = survey.cluster.list(api.QUOTAS, survey.namespace)
    pod, nodes = survey.admitted_pod, survey.settings.nodes
    wanted: dict[str, Decimal] = dict.fromkeys(("pods", "count/pods"), Decimal(nodes))
    wanted |= dict.fromkeys(("services", "count/services", "count/jobs.batch"), Decimal(1))
    if survey.kind == "jobset":
        wanted["count/jobsets.jobset.x-k8s.io"] = Decimal(1)
    for resource, quantity in _total(pod, *_RESERVED).items():
        wanted[f"requests.{resource}"] = quantity * nodes
        if "/" not in resource:
            wanted[resource] = quantity * nodes
    wanted |= {f"limits.{resource}": quantity * nodes for resource, quantity in _total(pod, "limits").items()}
    fix = "have it raised, or ask for less (platform.nodes, cpus, memory)"
    for quota in listed:
        name, spec, used = quota["metadata"]["name"], quota["spec"], quota.get("status", {}).get("used", {})
        hard = {} if spec.get("scopes") or spec.get("scopeSelector") else spec.get("hard", {})
        for resource in (one for one in hard if one in wanted):
            asked, most = wanted[resource], _amount(hard[resource])
            free = max(most - _amount(used.get(resource, "0")), Decimal(0))
            allows, asks = _shown(resource, most), _shown(resource, asked)
            what = f"quota {name} allows {allows} of {resource}, and the job asks for {asks}"
            if asked > most:
                yield bad("quota", what, fix)
            elif asked > free:
                what = f"{what}, of which {_shown(resource, free)} is free now"
                yield risk("quota", what, f"wait for other jobs to end, {fix}")


def limits(survey: Survey) -> Iterator[Finding]:
    """Yield the limits that the namespace would give the container that trains, and nobody has asked for."""
    containers = map(container_of, (survey.pod, survey.admitted_pod))
    ours, given = (one.get("resources", {}).get("limits", {}) for one in containers)
    if added := sorted(f"{resource}={quantity}" for resource, quantity in given.items() if resource not in ours):
        listed = ", ".join(added)
        what = f"a LimitRange of the namespace limits every node to {listed}: more memory ends it, more cpu waits"
        yield risk("limits", what, "have its default raised, or take another platform.namespace")
