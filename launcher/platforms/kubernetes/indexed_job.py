"""A plain Indexed Job with its headless Service: for clusters that have no JobSet. It cannot restart as a whole; the
launcher's next attempt does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.job import Job
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import EXIT_CODES, Fault

KILLED = 137
"""SIGKILL, mostly for memory. A cluster's rules do not see the reason (OOMKilled); the launcher does, and decides."""

# What comes back however often it is tried: the user's mistake, bad data, too little memory or disk, and what nobody
# knows.
_HOPELESS = (Fault.UNKNOWN, Fault.USER, Fault.DATA, Fault.OUT_OF_MEMORY, Fault.DISK_FULL)
HOPELESS = (
    *sorted(EXIT_CODES[fault] for fault in _HOPELESS),
    KILLED,
)


def gang(job: Job, template: Mapping[str, Any]) -> dict[str, Any]:
    """The Job's specification: all pods or none. One that fails fails the Job, at once and with its reason.

    Two pods of one index must never live at the same time (kubernetes#115844): a replacement waits until the old one is
    gone, and there is none, because nothing is tried again (jobset#574).
    """
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
                {"action": "FailJob", "onExitCodes": _exit_codes(HOPELESS)},
            ]
        },
        "template": dict(template),
    }


def _exit_codes(codes: Sequence[int]) -> dict[str, Any]:
    return {"containerName": names.NODE, "operator": "In", "values": list(codes)}


def kueue_labels(settings: GkePlatformConfig) -> dict[str, str]:
    """https://github.com/kubernetes-sigs/kueue/blob/ff69552e79/site/content/en/docs/tasks/run"""
    labels = {}
    if settings.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
        if settings.priority is not None:
            labels["kueue.x-k8s.io/priority-class"] = settings.priority
    return labels


def suspension(settings: GkePlatformConfig) -> dict[str, bool]:
    """Kueue starts what waits in its queues; nothing else may."""
    return {"suspend": True} if settings.queue is not None else {}


def indexed_job(
    job: Job, settings: GkePlatformConfig, *, template: Mapping[str, Any], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The Job. Its pods are `<name>-<index>.<name>`, which takes the Service of that name."""
    spec = gang(job, template)
    spec["template"] = {**template, "spec": {"subdomain": job.attempt_name, **template["spec"]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": dict(metadata),
        "spec": {**suspension(settings), "ttlSecondsAfterFinished": settings.ttl, **spec},
    }


def headless_service(job: Job, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Gives pods names before they are ready, which is when they look for node 0."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": dict(metadata),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.attempt_name},
        },
    }
