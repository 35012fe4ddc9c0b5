"""A JobSet: one Indexed Job of all nodes that is restarted as a whole, by the cluster, for as long as that helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.job import Job
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.indexed_job import HOPELESS, gang, suspension
from launcher.platforms.kubernetes.settings import GkePlatformConfig

API_VERSION = "jobset.x-k8s.io/v1alpha2"
LEAST_VERSION = (0, 10)
"""The first JobSet version with onJobFailureMessagePatterns, which tell exit codes apart."""


def jobset(
    job: Job, settings: GkePlatformConfig, *, template: Mapping[str, Any], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The JobSet. It makes the headless Service itself; pods are `<name>-nodes-0-<index>.<name>`."""
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": dict(metadata),
        "spec": {
            **suspension(settings),
            "ttlSecondsAfterFinished": settings.ttl,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": failure_policy(settings),
            "replicatedJobs": [
                {
                    "name": names.NODES,
                    "replicas": 1,
                    "template": {"metadata": {"labels": job.all_labels}, "spec": gang(job, template)},
                }
            ],
        },
    }


def failure_policy(settings: GkePlatformConfig) -> dict[str, Any]:
    """Return the rules for a JobSet whose Job fails: what comes back ends it, anything else restarts it and is counted.

    A preemption is counted too. The cluster knows of no checkpoint, does not pause between two restarts, and takes a
    pod's eviction from a full machine for a preemption; the launcher, which starts the next attempt, knows better.

    A disrupted pod and an exit code are both `PodFailurePolicy` to JobSet, told apart by the Job controller's message
    (https://github.com/kubernetes-sigs/jobset/tree/08dfbdfd/keps/262-ConfigurableFailurePolicy): `Container … for pod …
    failed with exit code 42 matching …`.
    BlockingRecreate: no pod of the next life starts before the last of this one is gone (jobset#665, #684).
    """
    hopeless = "|".join(str(code) for code in HOPELESS)
    return {
        "maxRestarts": settings.restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": "hopeless",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f".*failed with exit code ({hopeless}) matching.*"],
                "targetReplicatedJobs": [names.NODES],
            }
        ],
    }
