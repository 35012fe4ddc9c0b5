"""Names of what a job becomes in a cluster, and whether they fit."""

from __future__ import annotations

from launcher.errors import ConfigProblem
from launcher.platforms.dns import LONGEST, RFC_1035

NODES = "nodes"
"""The one replicated job of our JobSets."""
NODE = "node"
"""The container of a pod that runs `python -m litgpt_demo node`."""

_SUFFIX = 6
"""Controllers append a dash and five characters to a pod's name."""


def pod_host(workload: str, name: str, index: int) -> str:
    """The host name of pod `index`: JobSet numbers its jobs too, of which we have one."""
    return f"{job_name(name)}-{index}" if workload == "jobset" else f"{name}-{index}"


def job_name(name: str) -> str:
    """Return the name of the one Job that JobSet makes for a JobSet of ours."""
    return f"{name}-{NODES}-0"


def master(workload: str, name: str, port: int) -> str:
    """Return the address of node 0: its host name within the headless Service, which has the name of the job."""
    return f"{pod_host(workload, name, 0)}.{name}:{port}"


def require_fit(workload: str, name: str, *, nodes: int) -> None:
    """Check that the names of all pods fit. JobSet's webhook refuses the job otherwise; a Job's pods never appear.

    Raises:
        ConfigProblem: by how much they are too long.
    """
    longest = len(pod_host(workload, name, nodes - 1)) + _SUFFIX
    if longest > LONGEST:
        raise ConfigProblem(
            f"the pods of {name} on {nodes} nodes would have names of {longest} characters, and Kubernetes takes "
            f"{LONGEST}; make the run's `name` {longest - LONGEST} characters shorter"
        )
    if not RFC_1035.fullmatch(name):
        raise ConfigProblem(f"{name!r} cannot be a host name; use lower-case letters, digits and dashes")
