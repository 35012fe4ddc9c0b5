"""Why the scheduler finds no machine: messages of Kubernetes 1.30 to 1.36, every reason in them with its fix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.platforms.kubernetes.pending import unschedulable

NOT_HELPFUL = "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
NO_VICTIMS = (
    "preemption: 0/3 nodes are available: 1 Preemption is not helpful for scheduling, 2 No preemption victims found "
    "for incoming pod."
)
CLAIMS = "no new claims to deallocate, "

MESSAGES = {
    # 1.30 to 1.33
    "0/3 nodes are available: 3 node(s) had untolerated taint {team: other}. " + NOT_HELPFUL: ["taint"],
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
    "2 Insufficient nvidia.com/gpu. " + NO_VICTIMS: ["taint", "gpus"],
    "0/3 nodes are available: 3 Insufficient cpu, 3 Insufficient memory. " + NO_VICTIMS: ["resources", "resources"],
    '0/3 nodes are available: persistentvolumeclaim "shared" not found. ' + NOT_HELPFUL: ["claim"],
    "0/3 nodes are available: 3 node(s) had volume node affinity conflict. " + NOT_HELPFUL: ["volume"],
    "no nodes available to schedule pods": ["nodes"],
    # 1.34, whose claims (DRA) are on for everybody
    "0/2 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
    "1 node(s) had untolerated taint {team: other}. " + CLAIMS + NOT_HELPFUL: ["taint", "taint"],
    "0/3 nodes are available: 3 node(s) didn't match PersistentVolume's node affinity. "
    + CLAIMS + NOT_HELPFUL: ["volume"],
    "0/3 nodes are available: 3 cannot allocate all claims. " + CLAIMS + NOT_HELPFUL: ["claims"],
    # 1.36
    "0/3 nodes are available: 3 node(s) had untolerated taint(s). " + CLAIMS + NOT_HELPFUL: ["taint"],
    "0/6 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu, 3 node(s) didn't match Pod's "
    "node affinity/selector. " + CLAIMS + NO_VICTIMS: ["taint", "resources", "selector"],
    "0/3 nodes are available: 1 node(s) were unschedulable, 1 Too many pods, 1 node(s) didn't match pod "
    "anti-affinity rules. " + CLAIMS + NO_VICTIMS: ["cordoned", "pods", "apart"],
    "0/3 nodes are available: 3 node(s) didn't have free ports for the requested pod ports. "
    + CLAIMS + NO_VICTIMS: ["ports"],
    "0/3 nodes are available: 1 a reason of tomorrow, 2 Insufficient cpu. " + CLAIMS + NOT_HELPFUL: [
        "unscheduled", "resources",
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_every_reason_of_the_scheduler_is_told_with_its_fix(message: str) -> None:
    told = list(unschedulable(message))
    assert [one.code.removeprefix("gke.pending.") for one in told] == MESSAGES[message]
    assert all(one.fix for one in told)
    assert not any("preemption" in one.what or "deallocate" in one.what for one in told)


def test_a_taint_is_named_where_the_scheduler_names_it() -> None:
    (old,) = unschedulable("0/3 nodes are available: 3 node(s) had untolerated taint {team: other}.")
    (new,) = unschedulable("0/3 nodes are available: 3 node(s) had untolerated taint(s).")
    assert "team=other" in old.what
    assert "kubectl get nodes" in new.fix
    assert old.severity == new.severity == "error"


@given(st.text())
def test_whatever_the_scheduler_says_there_is_something_to_do(message: str) -> None:
    told = list(unschedulable(message))
    assert told
    assert all(one.fix for one in told)
