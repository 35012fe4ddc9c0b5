"""Rendering of a job as Kubernetes objects. Pure: no cluster, no clock, no disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from launcher.environment import as_rows
from launcher.job import ATTEMPT_LABEL, RUN_LABEL, Job, JobId, Submission
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.cluster import (
    CLAIM_TEMPLATES,
    COMPUTE_DOMAINS,
    JOBS,
    JOBSETS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Resource,
)
from launcher.platforms.kubernetes.indexed_job import headless_service, indexed_job, kueue_labels
from launcher.platforms.kubernetes.jobset import jobset
from launcher.platforms.kubernetes.pods import Pod, claim_name, pod
from launcher.platforms.kubernetes.settings import GkePlatformConfig

WorkloadObjects = Literal["jobset", "job"]

PLATFORM = "gke"

# What a network's claims are made from: a ComputeDomain's controller makes the claim template itself.
_CLAIM_KINDS: Mapping[str, Resource] = {"compute-domain": COMPUTE_DOMAINS, "rdma": CLAIM_TEMPLATES}


def render(job: Job, settings: GkePlatformConfig, workload: WorkloadObjects) -> Submission:
    """The submission: a Kubernetes List, which `kubectl apply -f -` would take as it is printed.

    Its id is `namespace/name`. All objects have the labels of the attempt.

    Raises:
        ConfigProblem: names do not fit, variables clash, or the network is not to be had.
    """
    names.require_fit(workload, job.attempt_name, nodes=job.nodes)
    made = pod(job, settings, workload)
    metadata = {
        "name": job.attempt_name,
        "namespace": settings.namespace,
        "labels": {**job.all_labels, **kueue_labels(settings)},
    }
    plain = {**metadata, "labels": job.all_labels}
    items = [*([network_policy(plain)] if settings.isolated else []), *claims(job, plain, made)]
    if workload == "jobset":
        items.append(jobset(job, settings, template=made.template(), metadata=metadata))
    else:
        items.append(headless_service(job, plain))
        items.append(indexed_job(job, settings, template=made.template(), metadata=metadata))
    return Submission(
        platform=PLATFORM,
        job_id=job_id_of(settings, job.attempt_name),
        body={"apiVersion": "v1", "kind": "List", "items": items},
        environment=tuple(as_rows(made.environment)),
    )


def job_id_of(settings: GkePlatformConfig, attempt_name: str) -> JobId:
    """Return the id of the job that the attempt of this name is."""
    return JobId(f"{settings.namespace}/{attempt_name}")


def made_of(settings: GkePlatformConfig) -> tuple[Resource, ...]:
    """Return the kinds of all objects that a job with these settings may have.

    It is a JobSet or a Job by what the cluster had when it was submitted, so either is looked for.

    Raises:
        ConfigProblem: the network's release is not known.
    """
    claimed = (_CLAIM_KINDS[claim] for claim in settings.fabric.claims)
    isolated = (NETWORK_POLICIES,) if settings.isolated else ()
    return (JOBSETS, JOBS, SERVICES, PODS, *isolated, *claimed)


def network_policy(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Let pods of the attempt alone connect to its pods: rank 0's store and gloo ask nobody for a password.

    All ports, because NCCL and gloo listen on any that is free. What pods connect to (DNS, buckets) is left open. It
    holds on eth0, where the cluster has network policy enforcement (GKE: Dataplane V2 or Calico); the further
    interfaces of TCPX, TCPXO and RDMA are networks of the GPUs' own, which it does not cover:
    https://docs.cloud.google.com/kubernetes-engine/docs/how-to/setup-multinetwork-support-for-pods
    """
    attempt = {"matchLabels": {name: metadata["labels"][name] for name in (RUN_LABEL, ATTEMPT_LABEL)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": dict(metadata),
        "spec": {
            "podSelector": attempt,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": attempt}]}],
        },
    }


def claims(job: Job, metadata: Mapping[str, Any], made: Pod) -> list[dict[str, Any]]:
    """Return the templates of the pods' resource claims (dynamic resource allocation)."""
    objects = {"compute-domain": compute_domain, "rdma": rdma_claim}
    return [objects[claim](job, metadata, made) for claim in made.network.claims]


def compute_domain(job: Job, metadata: Mapping[str, Any], _made: Pod) -> dict[str, Any]:
    """Memory shared over NVLink between the nodes of a GB200 rack; its controller makes the claim template.

    https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob/992db812/gpudirect-rdma/nccl-test-imex-a4x.yaml
    """
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": dict(metadata),
        "spec": {
            "numNodes": job.nodes,
            "channel": {"resourceClaimTemplate": {"name": claim_name(job, "compute-domain")}},
        },
    }


def rdma_claim(job: Job, metadata: Mapping[str, Any], made: Pod) -> dict[str, Any]:
    """The node's RDMA cards, by GKE's managed DRA driver.

    https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob/992db812/gpudirect-rdma/nccl-test-managed-rdma.yaml
    """
    cards = made.network.rdma_cards
    amount = {"allocationMode": "All"} if cards is None else {"allocationMode": "ExactCount", "count": cards}
    request = {"name": "rdma", "exactly": {"deviceClassName": "mrdma.google.com", **amount}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {**metadata, "name": claim_name(job, "rdma")},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
