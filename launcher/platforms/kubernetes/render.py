"""Rendering of a job as Kubernetes objects: a JobSet, or an Indexed Job with its headless Service, and what they need.

A JobSet is one Indexed Job of all nodes that is restarted as a whole, by the cluster, for as long as that helps. A
plain Job, for clusters without JobSet, cannot restart as a whole; the launcher's next attempt does that.
Pure: no cluster, no clock, no disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from launcher.environment import as_rows
from launcher.errors import ConfigProblem
from launcher.job import ATTEMPT_LABEL, RUN_LABEL, Job, JobId, Submission
from launcher.networks.profile import Network
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.pods import NODE, NODES, claim_name, pod, pod_host
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from launcher.platforms.settings import LONGEST_LABEL, RFC_1035
from litgpt_demo.errors import EXIT_CODES, Fault

WorkloadObjects = Literal["jobset", "job"]

PLATFORM = "gke"
LEAST_JOBSET = (0, 10)
"""The first JobSet version with onJobFailureMessagePatterns, which tell exit codes apart."""

# What comes back however often it is tried: the user's mistake, bad data, too little memory or disk, and what nobody
# knows. 137 is SIGKILL, mostly for memory: a cluster's rules do not see the reason (OOMKilled); the launcher does, and
# decides.
_FAULTS = (Fault.UNKNOWN, Fault.USER, Fault.DATA, Fault.OUT_OF_MEMORY, Fault.DISK_FULL)
HOPELESS = (*sorted(EXIT_CODES[fault] for fault in _FAULTS), 137)

# What a network's claims are made from: a ComputeDomain's controller makes the claim template itself.
_CLAIM_KINDS: Mapping[str, api.Resource] = {"compute-domain": api.COMPUTE_DOMAINS, "rdma": api.CLAIM_TEMPLATES}

_POD_SUFFIX = 6
"""Controllers append a dash and five characters to a pod's name."""


def render(job: Job, settings: GkePlatformConfig, workload: WorkloadObjects) -> Submission:
    """The submission: a Kubernetes List, which `kubectl apply -f -` would take as it is printed.

    Its id is `namespace/name`. All objects have the labels of the attempt.

    Raises:
        ConfigProblem: names do not fit, variables clash, or the network is not to be had.
    """
    name = job.attempt_name
    # JobSet's webhook would refuse names of pods that do not fit; a Job's pods would never appear.
    longest = len(pod_host(workload, name, job.nodes - 1)) + _POD_SUFFIX
    if longest > LONGEST_LABEL:
        raise ConfigProblem(
            f"the pods of {name} on {job.nodes} nodes would have names of {longest} characters, and Kubernetes takes "
            f"{LONGEST_LABEL}; make the run's `name` {longest - LONGEST_LABEL} characters shorter"
        )
    if not RFC_1035.fullmatch(name):
        raise ConfigProblem(f"{name!r} cannot be a host name; use lower-case letters, digits and dashes")
    network = settings.fabric
    template, environment = pod(job, settings, network, workload)
    labels, kueue = job.all_labels, {}
    if settings.queue is not None:
        # https://github.com/kubernetes-sigs/kueue/blob/ff69552e79/site/content/en/docs/tasks/run
        kueue["kueue.x-k8s.io/queue-name"] = settings.queue
        if settings.priority is not None:
            kueue["kueue.x-k8s.io/priority-class"] = settings.priority
    metadata = {"name": name, "namespace": settings.namespace, "labels": {**labels, **kueue}}
    plain = {**metadata, "labels": labels}
    items = [*([_network_policy(plain)] if settings.isolated else [])]
    items += [_claim(claim, job, plain, network) for claim in network.claims]
    # Kueue starts what waits in its queues; nothing else may.
    spec = {**({"suspend": True} if settings.queue is not None else {}), "ttlSecondsAfterFinished": settings.ttl}
    if workload == "jobset":
        spec |= _jobset(settings, {"metadata": {"labels": labels}, "spec": _gang(job, template)})
        version = "jobset.x-k8s.io/v1alpha2"
        items.append({"apiVersion": version, "kind": "JobSet", "metadata": metadata, "spec": spec})
    else:
        # Pods get names before they are ready, which is when they look for node 0.
        selector = {"batch.kubernetes.io/job-name": name}
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        items.append({"apiVersion": "v1", "kind": "Service", "metadata": plain, "spec": service})
        spec |= _gang(job, {**template, "spec": {"subdomain": name, **template["spec"]}})
        items.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
    return Submission(
        platform=PLATFORM,
        job_id=job_id_of(settings, name),
        body={"apiVersion": "v1", "kind": "List", "items": items},
        environment=tuple(as_rows(environment)),
    )


def job_id_of(settings: GkePlatformConfig, attempt_name: str) -> JobId:
    """Return the id of the job that the attempt of this name is."""
    return JobId(f"{settings.namespace}/{attempt_name}")


def made_of(settings: GkePlatformConfig) -> tuple[api.Resource, ...]:
    """Return the kinds of all objects that a job with these settings may have.

    It is a JobSet or a Job by what the cluster had when it was submitted, so either is looked for.
    """
    claimed = (_CLAIM_KINDS[claim] for claim in settings.fabric.claims)
    isolated = (api.NETWORK_POLICIES,) if settings.isolated else ()
    return (api.JOBSETS, api.JOBS, api.SERVICES, api.PODS, *isolated, *claimed)


def _gang(job: Job, template: Mapping[str, Any]) -> dict[str, Any]:
    """The Job's specification: all pods or none. One that fails fails the Job, at once and with its reason.

    Two pods of one index must never live at the same time (kubernetes#115844): a replacement waits until the old one is
    gone, and there is none, because nothing is tried again (jobset#574).
    """
    codes = {"containerName": NODE, "operator": "In", "values": list(HOPELESS)}
    return {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # A disrupted pod's exit code means nothing, so this comes first.
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": codes},
            ]
        },
        "template": dict(template),
    }


def _jobset(settings: GkePlatformConfig, template: Mapping[str, Any]) -> dict[str, Any]:
    """A JobSet. It makes the headless Service itself; pods are `<name>-nodes-0-<index>.<name>`.

    By its failure policy what comes back ends it; anything else restarts it and is counted. A preemption is counted
    too. The cluster knows of no checkpoint, does not pause between two restarts, and takes a pod's eviction from a full
    machine for a preemption; the launcher, which starts the next attempt, knows better.

    A disrupted pod and an exit code are both `PodFailurePolicy` to JobSet, told apart by the Job controller's message
    (https://github.com/kubernetes-sigs/jobset/tree/08dfbdfd/keps/262-ConfigurableFailurePolicy): `Container … for pod …
    failed with exit code 42 matching …`.
    BlockingRecreate: no pod of the next life starts before the last of this one is gone (jobset#665, #684).
    """
    hopeless = {
        "name": "hopeless",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f".*failed with exit code ({'|'.join(map(str, HOPELESS))}) matching.*"],
        "targetReplicatedJobs": [NODES],
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": settings.restarts, "restartStrategy": "BlockingRecreate", "rules": [hopeless]},
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": template}],
    }


def _network_policy(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Let pods of the attempt alone connect to its pods: rank 0's store and gloo ask nobody for a password.

    All ports, because NCCL and gloo listen on any that is free. What pods connect to (DNS, buckets) is left open. It
    holds on eth0, where the cluster has network policy enforcement (GKE: Dataplane V2 or Calico); the further
    interfaces of TCPX, TCPXO and RDMA are networks of the GPUs' own, which it does not cover:
    https://docs.cloud.google.com/kubernetes-engine/docs/how-to/setup-multinetwork-support-for-pods
    """
    attempt = {"matchLabels": {name: metadata["labels"][name] for name in (RUN_LABEL, ATTEMPT_LABEL)}}
    ingress = [{"from": [{"podSelector": attempt}]}]
    spec = {"podSelector": attempt, "policyTypes": ["Ingress"], "ingress": ingress}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def _claim(claim: str, job: Job, metadata: Mapping[str, Any], network: Network) -> dict[str, Any]:
    """The object behind a claim of the pods (dynamic resource allocation).

    `compute-domain`: memory shared over NVLink between the nodes of a GB200 rack; its controller makes the claim
    template. `rdma`: the node's RDMA cards, by GKE's managed DRA driver.
    https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob/992db812/gpudirect-rdma:
    nccl-test-imex-a4x.yaml, nccl-test-managed-rdma.yaml
    """
    name = claim_name(job, claim)
    if claim == "compute-domain":
        domain = {"numNodes": job.nodes, "channel": {"resourceClaimTemplate": {"name": name}}}
        version = "resource.nvidia.com/v1beta1"
        return {"apiVersion": version, "kind": "ComputeDomain", "metadata": metadata, "spec": domain}
    cards = network.rdma_cards
    amount = {"allocationMode": "All"} if cards is None else {"allocationMode": "ExactCount", "count": cards}
    request = {"name": "rdma", "exactly": {"deviceClassName": "mrdma.google.com", **amount}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {**metadata, "name": name},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
