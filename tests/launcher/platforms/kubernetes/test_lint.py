"""The linter sees what a schema cannot: each rule against a submission that breaks it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.job import Job
from launcher.platforms.kubernetes.lint import lint, parse_bindings
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig

JOB = Job(
    name="owt-01", attempt=1, nodes=2, processes=8, program=("-m", "x"), directory="gs://b/runs/owt-01/attempts/1",
    image="registry/train@sha256:" + 64 * "0",
)  # fmt: skip
HIGH = {"machine": "a3-highgpu-8g", "network": "tcpx"}
Items = list[dict[str, Any]]


def configured(options: dict[str, Any]) -> GkePlatformConfig:
    return GkePlatformConfig.model_validate({"kind": "gke", "nodes": 2, **options})


def items_of(options: dict[str, Any], env: dict[str, str] | None = None) -> Items:
    items: Items = GkePlatform(configured(options)).render(replace(JOB, env=env or {})).body["items"]
    return copy.deepcopy(items)


def test_receive_bindings_of_the_demo_overlap_those_that_send() -> None:
    """124-139 where 126-139 is right: the seeds' typo, called by its name."""
    rx = "eth1:22-35,124-139;eth2:22-35,124-139;eth3:74-87,178-191;eth4:74-87,178-191"
    options = {**HIGH, "overrides": {"NCCL_GPUDIRECTTCPX_RX_BINDINGS": rx}}
    found = lint(items_of(options), configured(options))
    assert {finding.code for finding in found} == {"gke.bindings-overlap"}
    assert "gives eth1 the cores 124-125" in found[0].what
    assert "126-139" in found[0].fix


def test_a_folder_that_other_nodes_do_not_see_is_refused_and_one_in_the_claim_is_not() -> None:
    job = replace(JOB, directory="/data/runs/owt-01/attempts/1")
    lonely, shared = configured({}), configured({"claim": "nfs", "claim_path": "/data"})
    assert [one.code for one in lint(GkePlatform(lonely).render(job).body["items"], lonely)] == ["gke.root-not-shared"]
    assert lint(GkePlatform(shared).render(job).body["items"], shared) == []


ROCE = {"gpus": 8, "network": "roce"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, {"roce_resource": "kubectl describe node", "roce_network": "or take platform.host_network"}),
        ({"roce_resource": "rdma/shared"}, {"roce_network": "kubectl get network-attachment-definitions"}),
        ({"roce_resource": "shared", "host_network": True}, {"roce_resource": "as kubectl describe node does"}),
        (
            {"roce_resource": "rdma/shared", "roce_network": "rails/a", "host_network": True},
            {"roce_network": "leave out platform.roce_network"},
        ),
        ({"roce_resource": "rdma/shared", "roce_network": "rails/a"}, {}),
    ],
)
def test_names_that_only_the_site_knows_have_to_be_given(options: dict[str, Any], said: dict[str, str]) -> None:
    found = lint(items_of({**ROCE, **options}), configured({**ROCE, **options}))
    assert {one.code: one.severity for one in found} == {f"network.{name.replace('_', '-')}": "error" for name in said}
    for finding, (name, fix) in zip(found, said.items(), strict=True):
        assert f"platform.{name}" in finding.what
        assert fix in finding.fix


@given(
    st.dictionaries(
        st.sampled_from(["eth1", "eth2", "eth3"]),
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=3),
        min_size=1,
    )
)
def test_bindings_are_read_as_they_are_written(cores: dict[str, list[tuple[int, int]]]) -> None:
    text = ";".join(
        f"{name}:" + ",".join(f"{first}-{first + more}" for first, more in ranges) for name, ranges in cores.items()
    )
    expected = {
        name: [core for first, more in ranges for core in range(first, first + more + 1)]
        for name, ranges in cores.items()
    }
    assert parse_bindings(text) == expected
