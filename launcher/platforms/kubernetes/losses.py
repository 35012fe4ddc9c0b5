"""Machines that a job has lost: which, since when, and what becomes of the job. Pure: objects in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.job import Object
from launcher.platforms.kubernetes.states import condition, ended, index_of
from litgpt_demo.errors import fault_of_exit_code
from litgpt_demo.findings import Finding

_NAMED = 3
"""Nodes that are named; a job can lose hundreds at once."""
_UNREACHABLE = "node.kubernetes.io/unreachable"


def losses(pods: Sequence[Object], codes: Mapping[int, int]) -> Iterator[Finding]:
    """Yield what keeps a job from ending or from starting again.

    Args:
        pods: all pods of the job that are there, of its earlier lives too: they hold up the next one.
        codes: exit codes of nodes that have ended.
    """
    silent = sorted((pod for pod in pods if silent_since(pod)), key=index_of)
    if silent:
        named = [f"node {index_of(pod)} on {pod['spec']['nodeName']}" for pod in silent[:_NAMED]]
        more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
        since = min(str(silent_since(pod)) for pod in silent)
        what = f"the machine of {', '.join(named)}{more} has not answered since {since}"
        yield Finding("warning", "gke.machine-lost", what, _next(silent[0]))
        return
    failed = next(((node, code) for node, code in sorted(codes.items()) if code != 0), None)
    if failed is not None and any(not ended(pod) for pod in pods):
        node, code = failed
        what = f"node {node} has ended ({fault_of_exit_code(code)}, exit code {code}), and others have not yet"
        fix = "wait: they are asked to leave; a machine that does not answer is found out within a minute"
        yield Finding("warning", "gke.ending", what, fix)


def silent_since(pod: Object) -> str:
    """Return since when nothing is heard of the pod's machine; empty if it answers, or has told the pod's end.

    The control plane declares the pods of a silent machine not ready (a minute after it fell silent at the latest),
    while their containers stay as their kubelet last told: ready. No permission to look at machines is needed for that.
    https://kubernetes.io/docs/concepts/architecture/nodes/#node-status
    """
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    unready = condition(pod, "Ready")
    if ended(pod) or not statuses or unready is None or unready["status"] != "False":
        return ""
    as_last_told = all(one.get("ready") for one in statuses if "running" in one["state"])
    running = any("running" in one["state"] for one in statuses)
    return str(unready.get("lastTransitionTime", "a while")) if running and as_last_told else ""


def _next(pod: Object) -> str:
    """Return what happens now, by how far the cluster has got with giving the pod up."""
    machine = pod["spec"]["nodeName"]
    restart = (
        "the job starts again from its last checkpoint as soon as the machine is back or its Node is gone, which GKE "
        f"sees to; elsewhere, once it is switched off: kubectl delete node {machine}"
    )
    if pod["metadata"].get("deletionTimestamp"):
        return f"its pod was given up; {restart}"
    tolerated: Object = next((one for one in pod["spec"].get("tolerations", ()) if one.get("key") == _UNREACHABLE), {})
    after = tolerated.get("tolerationSeconds")
    return f"its pod is given up {f'after {after} s' if after is not None else 'in a while'}; then {restart}"
