"""What a `platform: {kind: gke}` section may say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.checks.preflight import check_program
from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem
from launcher.job import Job
from launcher.platforms.kubernetes.checks import Submitted, check_settings
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.findings import Finding

JOB = Job(
    name="owt-01", attempt=1, nodes=2, processes=8, program=("-m", "x"), directory="gs://b/runs/owt-01/attempts/1",
    image="registry/train@sha256:" + 64 * "0",
)  # fmt: skip


def platform(**options: Any) -> GkePlatformConfig:
    config = validated(ScriptConfig, {"script": "-m x", "platform": {"kind": "gke", **options}}, where="here")
    assert isinstance(config.platform, GkePlatformConfig)
    return config.platform


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({}, 1),
        ({"gpus": 4}, 4),
        ({"machine": "a4x-highgpu-4g"}, 4),
        ({"machine": "a3-highgpu-8g", "processes": 2}, 2),
    ],
)
def test_there_is_one_rank_per_gpu_unless_it_is_said(options: dict[str, Any], processes: int) -> None:
    assert platform(**options).processes == processes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "a3-highgpu-8"}, "'a3-highgpu-8' is not in the table.*did you mean a3-highgpu-8g"),
        ({"machine": "a3-highgpu-8g", "network": "tcpxo"}, "has not got; take tcpx"),
        ({"machine": "a3-highgpu-8g", "processes": 16}, "has 8 GPUs, and ranks cannot share one"),
        ({"network_registry": "google"}, "network_registry: 'google' given"),  # somebody's folder on Docker Hub
        ({"roce_resource": "rdma/a"}, "platform.roce_resource=rdma/a means nothing to .*set network: roce, or leave"),
        ({"cluster": "mine", "location": "x", "kubeconfig": "k"}, "different ways to a cluster; keep one"),
        ({"slice_nodes": 2, "nodes": 3, "queue": "q"}, "nodes=3 is no multiple of platform.slice_nodes=2"),
        ({"spot": True, "flex_start": 60}, "two ways to buy a machine"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        platform(**options)


def test_a_script_is_a_path_in_the_image() -> None:
    config = validated(ScriptConfig, {"script": "train.py", "platform": {"kind": "gke"}}, where="here")
    assert [one.code for one in check_program(config)] == ["script.relative"]
    there = validated(ScriptConfig, {"script": "/app/train.py", "platform": {"kind": "gke"}}, where="here")
    assert there.program == ("/app/train.py",)
    assert list(check_program(there)) == []


def found(job: Job, **options: Any) -> dict[str, Finding]:
    settings = platform(nodes=2, **options)
    items = GkePlatform(settings).render(job).body["items"]
    return {one.code: one for one in check_settings(Submitted(items, settings))}


def test_a_folder_that_other_nodes_do_not_see_is_refused_and_one_in_the_claim_is_not() -> None:
    job = replace(JOB, directory="/data/runs/owt-01/attempts/1")
    assert found(job).keys() == {"gke.root-not-shared"}
    assert found(job, claim="nfs", claim_path="/data") == {}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"uid": 0}, "gke.root"),
        ({"spot": True, "grace": 60}, "gke.spot-grace"),
        ({"host_network": True, "service_account": "trainer"}, "gke.host-network-identity"),
        ({"overrides": {"PET_NNODES": "3"}}, "gke.torchrun-variable"),
    ],
)
def test_what_may_be_wished_for_and_does_not_end_well_is_a_warning(options: dict[str, Any], code: str) -> None:
    assert {code: one.severity for code, one in found(JOB, **options).items()} == {code: "warning"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, {"roce_resource": "kubectl describe node", "roce_network": "or take platform.host_network"}),
        (
            {"roce_resource": "rdma/shared", "roce_network": "rails/a", "host_network": True},
            {"roce_network": "leave out platform.roce_network"},
        ),
        ({"roce_resource": "rdma/shared", "roce_network": "rails/a"}, {}),
    ],
)
def test_names_that_only_the_site_knows_have_to_be_given(options: dict[str, Any], said: dict[str, str]) -> None:
    told = found(JOB, gpus=8, network="roce", **options)
    assert {code: one.severity for code, one in told.items()} == {
        f"network.{name.replace('_', '-')}": "error" for name in said
    }
    for finding, (name, fix) in zip(told.values(), said.items(), strict=True):
        assert f"platform.{name}" in finding.what
        assert fix in finding.fix
