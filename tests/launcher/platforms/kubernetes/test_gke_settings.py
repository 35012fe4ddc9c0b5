"""What a `platform: {kind: gke}` section may say."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.checks.preflight import check_program
from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem
from launcher.platforms.kubernetes.settings import GkePlatformConfig


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
