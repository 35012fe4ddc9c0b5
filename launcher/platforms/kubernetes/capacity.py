"""The subject of the checks, and the checks whether the cluster has, or can get, machines and room for all pods.

Kubernetes writes quantities as text (`500m`, `200Gi`). Here they are numbers.
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
from launcher.platforms.kubernetes.connection import gke_cluster
from launcher.platforms.kubernetes.render import WorkloadObjects, job_name, pod_host
from launcher.platforms.kubernetes.settings import GkePlatformConfig, KubernetesSettings
from launcher.platforms.kubernetes.states import condition, container_of, job_of, pod_of, workload_of
from litgpt_demo.errors import Finding

if TYPE_CHECKING:
    from google.cloud.container_v1.types import Cluster as GoogleCluster

Amounts = Mapping[str, Decimal]
"""CPUs, bytes, or pieces, by resource."""

_COMPARED = {"nvidia.com/gpu": "GPUs", "cpu": "CPUs", "memory": "memory"}
"""The resources that a machine must have enough of, apart from extended ones such as RDMA cards, and their names."""

_RESERVED = ("limits", "requests")
"""The resources of a pod that reserve room on its machine. Without a request its limit counts."""

GKE_POOL = "cloud.google.com/gke-nodepool"


info, warning, error = partial(Finding, "info"), partial(Finding, "warning"), partial(Finding, "error")


class Survey:
    """The subject of the checks: a submission and its cluster."""

    def __init__(self, cluster: Cluster, settings: KubernetesSettings, items: Sequence[ApiObject]) -> None:
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
        """Return an object as the cluster would store it (dryRun=All)."""
        resource = api.PODS if item["kind"] == "Pod" else api.SENT[item["kind"]]
        return self.cluster.create(resource, self.namespace, item, dry_run=True)

    @property
    def parts(self) -> list[ApiObject]:
        """Return the objects that controllers create: the Job of a JobSet, and the pod of node 0."""
        name = self.workload["metadata"]["name"]
        metadata = {**self.meta, "name": f"{pod_host(self.kind, name, 0)}-check", "namespace": self.namespace}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.pod}
        if self.kind == "job":
            return [pod]
        metadata = {"name": job_name(name), "namespace": self.namespace, "labels": self.meta["labels"]}
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_of(self.workload)}, pod]

    @cached_property
    def admitted_pod(self) -> Object:
        """The pod with the defaults of the namespace, or as rendered if the cluster refuses it."""
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
    """Return the sum of these parts of the containers' resources, of which later ones win. Each container that runs
    before the others needs its room only in its turn.
    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers"""
    total: defaultdict[str, Decimal] = defaultdict(Decimal)
    first = pod.get("initContainers", ())
    sequential = [container for container in first if container.get("restartPolicy") != "Always"]
    parallel = [*pod["containers"], *(container for container in first if container not in sequential)]
    for container in (*parallel, *sequential):
        resources = ChainMap(*(container.get("resources", {}).get(part, {}) for part in reversed(parts)))
        for resource, quantity in resources.items():
            if container in parallel:
                total[resource] += _amount(quantity)
            else:
                total[resource] = max(total[resource], _amount(quantity))
    return total


def machines(survey: Survey) -> Iterator[Finding]:
    """Check that enough machines fit, or that the pools can grow to it."""
    settings = survey.settings
    nodes, _ = survey.cluster.list(api.NODES, None)
    wanted = _total(survey.pod, *_RESERVED)
    reasons = Counter(_unfit(node, survey.pod, wanted) for node in nodes)
    fit = reasons.pop("", 0)
    if fit >= settings.nodes:
        yield info("kubernetes.machines", f"{fit} machines fit, and the job needs {settings.nodes}")
        return
    listed = ", ".join(f"{count} {why}" for why, count in reasons.most_common(4)) or "there are no others"
    what = f"{fit} machines fit, but the job needs {settings.nodes} ({listed})"
    pool = [node for node in nodes if node["metadata"].get("labels", {}).get(GKE_POOL, "") == settings.node_pool]
    # Without GPUs: a machine reports them only after their driver is installed.
    room = {name: wanted[name] for name in ("cpu", "memory") if name in wanted}
    if pool and all(_too_small(node, room) for node in pool):
        fix = "lower platform.cpus and platform.memory, or take another platform.node_pool"
        yield error(
            "kubernetes.machines", f"the machines of platform.node_pool={settings.node_pool} are too small: {what}", fix
        )
    elif isinstance(settings, GkePlatformConfig):
        yield from pools(gke_cluster(settings)[1], settings, what)
    elif _may_grow(nodes, settings):
        fix = "check that the node pool can grow that far. platform.kind=gke checks it automatically"
        yield warning("kubernetes.machines", what, fix)
    else:
        yield error("kubernetes.machines", what, "lower platform.nodes, take other machines, or add some")


def spare_machines(cluster: Cluster, settings: KubernetesSettings, pod: Object) -> int | None:
    """Return how many of the machines that fit a job does not need, None if the cluster can get others."""
    nodes, _ = cluster.list(api.NODES, None)
    if isinstance(settings, GkePlatformConfig) or _may_grow(nodes, settings):
        return None
    wanted = _total(pod, *_RESERVED)
    return max(0, sum(not _unfit(node, pod, wanted) for node in nodes) - settings.nodes)


def _may_grow(nodes: Iterable[ApiObject], settings: KubernetesSettings) -> bool:
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
        return "excluded by platform.exclude_nodes or the run's own diagnoses"
    if spec.get("unschedulable"):
        return "cordoned off"
    if condition(node, "Ready") is None:
        return "not ready"
    for taint in spec.get("taints", ()):
        key, value, effect = taint["key"], taint.get("value", ""), taint["effect"]
        is_tolerated = any(
            rule.get("key") == key
            and rule.get("effect") in (None, "", effect)
            and (rule.get("operator") == "Exists" or rule.get("value", "") == value)
            for rule in pod["tolerations"]
        )
        if effect != "PreferNoSchedule" and not is_tolerated:
            return f"with the taint {key}={value}"
    return _too_small(node, wanted)


def _too_small(node: ApiObject, wanted: Amounts) -> str:
    allocatable = node.get("status", {}).get("allocatable", {})
    for resource in _COMPARED | dict.fromkeys(name for name in wanted if "/" in name):
        has, needs = _amount(allocatable.get(resource, "0")), wanted.get(resource, Decimal(0))
        if has < needs:
            name = _COMPARED.get(resource, resource)
            return f"with {_shown(resource, has)} {name} of {_shown(resource, needs)}"
    return ""


def pools(described: GoogleCluster, settings: KubernetesSettings, what: str) -> Iterator[Finding]:
    """Check the description of the GKE API: can the node pools grow to enough machines?"""
    if described.autopilot.enabled or described.autoscaling.enable_node_autoprovisioning:
        yield info("kubernetes.machines", f"{what}; GKE creates the others on request")
        return
    most = {}
    for pool in described.node_pools:
        if settings.machine in (None, pool.config.machine_type) and settings.node_pool in (None, pool.name):
            scaling, zones = pool.autoscaling, max(1, len(pool.locations))
            if scaling.enabled and scaling.total_max_node_count:
                most[pool.name] = int(scaling.total_max_node_count)
            else:  # per zone
                most[pool.name] = zones * int(scaling.max_node_count if scaling.enabled else pool.initial_node_count)
    listed = ", ".join(f"{name}: {count} at most" for name, count in most.items())
    if not most:
        existing = ", ".join(f"{pool.name} of {pool.config.machine_type}" for pool in described.node_pools) or "none"
        what = f"no node pool has {settings.machine or f'the name {settings.node_pool}'} (there are {existing})"
        yield error("kubernetes.pools", what, "add one, or fix platform.machine and platform.node_pool")
    elif sum(most.values()) < settings.nodes:
        fix = "take fewer platform.nodes, or raise the limits of the node pools"
        yield error("kubernetes.pools", f"{what}, and the node pools cannot give them ({listed})", fix)
    else:
        yield info("kubernetes.machines", f"{what}; the node pools can grow to it ({listed})")


# The dry run of one pod is exact for limits, Pod Security and policies. It does not check the other pods, or the effect
# of a default limit on the training.
def quotas(survey: Survey) -> Iterator[Finding]:
    """Yield the resources of the whole job that exceed a ResourceQuota, now or ever. Quotas with scopes are left to the
    dry run of the pod: the API server knows which of them count."""
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
    fix = "have it raised, or request less (platform.nodes, cpus, memory)"
    for quota in listed:
        name, spec, used = quota["metadata"]["name"], quota["spec"], quota.get("status", {}).get("used", {})
        hard = {} if spec.get("scopes") or spec.get("scopeSelector") else spec.get("hard", {})
        for resource, allowed in hard.items():
            if resource not in wanted:
                continue
            needs, most = wanted[resource], _amount(allowed)
            free = max(most - _amount(used.get(resource, "0")), Decimal(0))
            allows, asks = _shown(resource, most), _shown(resource, needs)
            what = f"quota {name} allows {allows} of {resource}, but the job needs {asks}"
            if needs > most:
                yield error("kubernetes.quota", what, fix)
            elif needs > free:
                what = f"{what}, of which {_shown(resource, free)} is free now"
                yield warning("kubernetes.quota", what, f"wait for other jobs to end, {fix}")


def limits(survey: Survey) -> Iterator[Finding]:
    """Yield the limits that the namespace adds to the container that trains."""
    rendered, admitted = (
        container_of(pod).get("resources", {}).get("limits", {}) for pod in (survey.pod, survey.admitted_pod)
    )
    added = sorted(f"{resource}={quantity}" for resource, quantity in admitted.items() if resource not in rendered)
    if added:
        listed = ", ".join(added)
        what = f"a LimitRange of the namespace limits every node to {listed}, which can kill or slow the training"
        yield warning("kubernetes.limits", what, "have its default raised, or take another platform.namespace")
