"""Why a cluster refuses an object: by what admission says, in the API servers' own words from 1.30 to 1.36."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.platforms.kubernetes.refusals import advice, refusals

POD = 'pods "demo-1-nodes-0-0-x7k2p" is forbidden: '

SAID = {
    "a quota on pods": (
        POD + "exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1",
        "quota", "quota small has no room: pods=1 asked for, pods=1 in use, pods=1 allowed", "have the quota raised",
    ),
    "a quota that wants requests": (
        POD + "failed quota: cpus: must specify requests.cpu for: node; requests.memory for: node",
        "quota", "lets in only pods that specify requests.cpu for: node", "set platform.cpus and platform.memory",
    ),
    "a LimitRange": (
        POD + "maximum cpu usage per Container is 4, but request is 32", "limits",
        "maximum cpu usage per Container is 4, but request is 32", "kubectl get limitranges",
    ),
    "Pod Security, baseline": (
        POD + 'violates PodSecurity "baseline:latest": host namespaces (hostNetwork=true)',
        "pod-security", "host namespaces (hostNetwork=true)", "platform.host_network",
    ),
    "a service account": (
        POD + 'error looking up service account default/trainer: serviceaccount "trainer" not found',
        "service-account", "the service account trainer is not there", "kubectl create serviceaccount trainer",
    ),
    "a webhook that says no": (
        'admission webhook "validation.gatekeeper.sh" denied the request: [team] you must provide labels: {"team"}',
        "policy", 'validation.gatekeeper.sh says no: [team] you must provide labels: {"team"}', "exception",
    ),
    "a role": (
        'jobsets.jobset.x-k8s.io is forbidden: User "me" cannot create resource "jobsets" in API group '
        '"jobset.x-k8s.io" in the namespace "default"',
        "permission", 'cannot create resource "jobsets"', "deployments/rbac.yaml",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_every_refusal_is_told_by_who_refused_and_with_its_own_fix(case: str) -> None:
    message, code, what, fix = SAID[case]
    (told,) = refusals(message, "gke")
    assert told.code == f"gke.{code}"
    assert what in told.what
    assert fix in told.fix
    if code != "permission":
        assert "rbac.yaml" not in advice(message)


@given(st.text())
def test_whatever_a_cluster_says_is_passed_on_with_something_to_do(message: str) -> None:
    told = refusals(message, "gke")
    assert told
    assert all(one.fix for one in told)
