"""What a `platform: {kind: gke}` section may say."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.checks.preflight import check_program
from launcher.config import RunConfig, ScriptConfig, validated
from launcher.errors import ConfigProblem
from launcher.networks import NETWORKS
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
        ({"machine": "a3-highgpu-8g"}, 8),
        ({"machine": "a4x-highgpu-4g"}, 4),
        ({"machine": "a3-highgpu-8g", "processes": 2}, 2),
        ({"machine": "a3-highgpu-8g", "processes": None}, 8),
        ({"processes": 3}, 3),
    ],
)
def test_there_is_one_rank_per_gpu_unless_it_is_said(options: dict[str, Any], processes: int) -> None:
    assert platform(**options).processes == processes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "a3-highgpu-8"}, "'a3-highgpu-8' is not in the table.*did you mean a3-highgpu-8g"),
        ({"machine": "h100-box"}, "Any other machine: leave it out and give platform.gpus"),
        (
            {"machine": "a3-highgpu-8g", "network": "tcpxo"},
            "network=tcpxo, which a a3-highgpu-8g has not got; take tcpx",
        ),
        ({"machine": "g2-standard-48", "network": "gib"}, "has not got; take plain"),
        ({"network": "tcpx"}, "belongs to particular machines; name one"),
        ({"machine": "a3-highgpu-8g", "processes": 16}, "has 8 GPUs, and ranks cannot share one"),
        ({"machine": "a3-highgpu-8g", "gpus": 4}, "has 8; leave platform.gpus out"),
        ({"extra_nic": True, "machine": "a3-megagpu-8g", "network": "tcpxo"}, "extra_nic=True means nothing to"),
        ({"network_daemon": "v1", "machine": "a4-highgpu-8g", "network": "gib"}, "network_daemon=v1 means nothing to"),
        ({"disable_pmtu": True, "machine": "a3-megagpu-8g", "network": "tcpxo"}, "disable_pmtu=True means nothing to"),
        ({"network_registry": "mirror.example"}, "network_registry=mirror.example means nothing to .*network=plain"),
        ({"network_registry": "https://mirror.example"}, "network_registry: 'https://mirror.example' given"),
        ({"network_registry": "google"}, "network_registry: 'google' given"),  # somebody's folder on Docker Hub
        ({"network_registry": "google/plugins"}, "network_registry: 'google/plugins' given"),
        ({"network_plugin": "mirror/plugin:v1"}, "network_plugin: 'mirror/plugin:v1' given"),
        ({"network_plugin": "mirror.example/plugin"}, "network_plugin: 'mirror.example/plugin' given"),
        ({"network_plugin": "mirror.example/plugin@sha256:" + 64 * "0"}, "network_plugin: 'mirror.example/plugin@"),
        ({"network_daemon": "Mirror/plugin:v1"}, "network_daemon: 'Mirror/plugin:v1' given"),
        ({"network_install": "pod"}, "platform.network=plain, which has no options"),
        ({"roce_resource": "rdma/a"}, "platform.roce_resource=rdma/a means nothing to .*set network: roce, or leave"),
        ({"network": "roce", "machine": "a3-ultragpu-8g"}, "which a a3-ultragpu-8g has not got; take gib or plain"),
        ({"network": "roce", "roce_resource": "rdma/a=0"}, "roce_resource: 'rdma/a=0' given"),
        ({"cluster": "mine"}, "found by both"),
        ({"cluster": "mine", "location": "x", "kubeconfig": "k"}, "different ways to a cluster; keep one"),
        ({"topology": "block"}, "there is no platform.queue"),
        ({"slice_nodes": 2, "nodes": 2}, "slice_nodes=2 is Kueue's to arrange"),
        ({"slice_nodes": 2, "nodes": 3, "queue": "q"}, "nodes=3 is no multiple of platform.slice_nodes=2"),
        ({"spot": True, "flex_start": 60}, "two ways to buy a machine"),
        ({"workload": "job", "restarts": 2}, "a plain Job cannot restart as a whole"),
        ({"stage": "fuse"}, "name it in platform.service_account"),
        ({"shm": "lots"}, "shm: 'lots' given"),
        ({"nodes": 0}, "nodes: 0 given"),
        ({"namespace": "My_Space"}, "namespace: 'My_Space' given"),
        ({"network_plugin": "a b"}, "network_plugin: 'a b' given"),
        ({"quue": "x"}, "no such setting; did you mean queue"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        platform(**options)


def test_the_swapped_batch_sizes_of_the_demo_are_called_by_name() -> None:
    document = {"platform": {"kind": "gke"}, "train": {"global_batch": 5, "micro_batch": 125}}
    with pytest.raises(
        ConfigProblem, match=r"global_batch=5 is smaller than train.micro_batch=125; are the two swapped"
    ):
        validated(RunConfig, document, where="here")


def test_a_script_is_a_path_in_the_image() -> None:
    config = validated(ScriptConfig, {"script": "train.py", "platform": {"kind": "gke"}}, where="here")
    assert [one.code for one in check_program(config)] == ["script.relative"]
    there = validated(ScriptConfig, {"script": "/app/train.py", "platform": {"kind": "gke"}}, where="here")
    assert there.program == ("/app/train.py",)
    assert list(check_program(there)) == []


def test_a_form_is_not_given_a_number_of_ranks_that_belongs_to_no_machine() -> None:
    assert "default" not in GkePlatformConfig.model_json_schema()["properties"]["processes"]


def test_a_form_shows_a_networks_options_beside_it_and_says_what_networks_there_are() -> None:
    shown = GkePlatformConfig.model_json_schema()["properties"]
    order = sorted(shown, key=lambda name: shown[name]["position"])
    assert order.index("exclude_nodes") < order.index("network") < order.index("roce_resource")
    assert order.index("roce_resource") < order.index("host_network")
    assert set(shown["network"]["enum"]) == set(NETWORKS)
    assert all(f"{name} ({one.summary})" in shown["network"]["description"] for name, one in NETWORKS.items())
