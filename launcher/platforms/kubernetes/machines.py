"""Checks that a cluster has the machines that a job asks for, or can get them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from launcher.platforms.kubernetes.checks import Submitted
from launcher.platforms.kubernetes.cluster import NODES, ApiObject, Cluster
from launcher.platforms.kubernetes.connection import google_way
from launcher.platforms.kubernetes.resources import GPU, Amounts, amount, requests_of, shown
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from launcher.platforms.kubernetes.states import holding
from litgpt_demo.findings import Finding

if TYPE_CHECKING:
    from google.cloud.container_v1.types import Cluster as GoogleCluster

_COMPARED = {GPU: "GPUs", "cpu": "CPUs", "memory": "memory"}
"""The resources that a machine must have enough of, beside extended ones such as RDMA cards, and their names."""

GKE_POOL = "cloud.google.com/gke-nodepool"


def machines(cluster: Cluster, submitted: Submitted) -> Iterator[Finding]:
    """Check that enough nodes fit, or that the pools may grow so far."""
    settings = submitted.settings
    nodes, _ = cluster.list(NODES, None)
    wanted = requests_of(submitted.pod)
    reasons = Counter(unfit(node, submitted.pod, wanted) for node in nodes)
    if (fit := reasons.pop("", 0)) >= settings.nodes:
        yield Finding("info", "gke.machines", f"{fit} machines fit, {settings.nodes} are asked for")
        return
    none = "there are no others" if nodes else "the cluster has no machine"
    listed = ", ".join(f"{count} {why}" for why, count in reasons.most_common(4)) or none
    what = f"only {fit} of {settings.nodes} machines are there ({listed})"
    pool = [node for node in nodes if node["metadata"].get("labels", {}).get(GKE_POOL, "") == settings.node_pool]
    # Not GPUs: a machine shows them only when their driver is there.
    room: Amounts = {name: wanted[name] for name in ("cpu", "memory") if name in wanted}
    if pool and all(too_small(node, room) for node in pool):
        fix = "ask for less in platform.cpus and memory, or take another platform.node_pool, for all of one are alike"
        yield Finding("error", "gke.machines", f"the pool {settings.node_pool} has too small machines: {what}", fix)
    elif settings.cluster is not None:
        way = google_way(settings)
        yield from pools(way.described, settings, what)
    elif _may_grow(nodes) or settings.queue or settings.flex_start:
        fix = "see that the node pool can grow that far; with platform.cluster instead of a kubeconfig that is checked"
        yield Finding("warning", "gke.machines", what, fix)
    else:
        yield Finding("error", "gke.machines", what, "take fewer platform.nodes, other machines, or add some")


def spare_machines(cluster: Cluster, submitted: Submitted) -> int | None:
    """Return how many of the machines that fit a job does not need; None where others can be had."""
    settings = submitted.settings
    nodes, _ = cluster.list(NODES, None)
    if settings.cluster or settings.queue or settings.flex_start or _may_grow(nodes):
        return None
    wanted = requests_of(submitted.pod)
    return max(0, sum(not unfit(node, submitted.pod, wanted) for node in nodes) - settings.nodes)


def _may_grow(nodes: Iterable[ApiObject]) -> bool:
    """Return whether GKE has these nodes in pools, which grow as far as only who asks for the cluster by name sees."""
    return any(GKE_POOL in node["metadata"].get("labels", {}) for node in nodes)


def unfit(node: ApiObject, pod: Mapping[str, Any], wanted: Amounts) -> str:
    """Return the reason why the pod can never run on this node; empty if it can once the node is free."""
    labels, spec = node["metadata"].get("labels", {}), node.get("spec", {})
    for key, value in pod.get("nodeSelector", {}).items():
        if labels.get(key) != value:
            return f"without the label {key}={value}"
    if labels.get("kubernetes.io/hostname") in _excluded(pod):
        return "excluded by platform.exclude_nodes or the run's own verdicts"
    if spec.get("unschedulable"):
        return "cordoned off"
    if holding(node, "Ready") is None:
        return "not ready"
    for taint in spec.get("taints", ()):
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(one, taint) for one in pod["tolerations"]):
            return f"with the taint {taint['key']}={taint.get('value', '')}"
    return too_small(node, wanted)


def too_small(node: ApiObject, wanted: Amounts) -> str:
    """Return what a machine has less of than is asked for; empty if it is large enough."""
    allocatable = node.get("status", {}).get("allocatable", {})
    for resource in _COMPARED | dict.fromkeys(name for name in wanted if "/" in name):
        has, asked = amount(allocatable.get(resource, "0")), wanted.get(resource, 0)
        if has < asked:
            name = _COMPARED.get(resource, resource)
            return f"with {shown(resource, has)} {name} of {shown(resource, amount(str(asked)))}"
    return ""


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]) or toleration.get("key") != taint["key"]:
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _excluded(pod: Mapping[str, Any]) -> list[str]:
    affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", ())
    return [
        value
        for term in terms
        for rule in term.get("matchExpressions", ())
        if rule["key"] == "kubernetes.io/hostname" and rule["operator"] == "NotIn"
        for value in rule["values"]
    ]


def pools(described: GoogleCluster, settings: GkePlatformConfig, what: str) -> Iterator[Finding]:
    """Check in the GKE API that the node pools can grow to what is asked for."""
    if described.autopilot.enabled or described.autoscaling.enable_node_autoprovisioning:
        yield Finding("info", "gke.machines", f"{what}; GKE makes the others when they are asked for")
        return
    fitting = {
        pool.name: largest(pool)
        for pool in described.node_pools
        if settings.machine in (None, pool.config.machine_type) and settings.node_pool in (None, pool.name)
    }
    listed = ", ".join(f"{name}: {count} at most" for name, count in fitting.items())
    if not fitting:
        there = ", ".join(f"{pool.name} of {pool.config.machine_type}" for pool in described.node_pools)
        wanted = settings.machine or f"the name {settings.node_pool}"
        fix = "add one, or fix platform.machine and platform.node_pool"
        yield Finding("error", "gke.pools", f"no node pool has {wanted} (there are {there or 'none'})", fix)
    elif sum(fitting.values()) < settings.nodes:
        fix = "take fewer platform.nodes, or raise the limits of the node pools"
        yield Finding("error", "gke.pools", f"{what}, and the node pools cannot give them ({listed})", fix)
    else:
        yield Finding("info", "gke.machines", f"{what}; the node pools can grow to it ({listed})")


def largest(pool: Any) -> int:
    """Machines that a node pool can have: limits are per zone, unless they are total ones."""
    zones = max(1, len(pool.locations))
    if not pool.autoscaling.enabled:
        return int(pool.initial_node_count) * zones
    return int(pool.autoscaling.total_max_node_count or pool.autoscaling.max_node_count * zones)
