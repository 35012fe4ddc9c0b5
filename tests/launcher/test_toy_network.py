"""A new network is one new file: in a copy of the launcher that has it, the commands know it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_cluster import Cluster, running_cluster

CHECKOUT = Path(__file__).parents[2]
Command = Callable[..., str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=0) as made:
        yield made


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Command:
    """The command line of a checkout that has one file more: what it prints of a config with the toy network."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(CHECKOUT / "launcher", folder / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "tests/fakes/toy_network.py", folder / "launcher/networks/toy.py")
    platform = {"kind": "gke", "kubeconfig": str(cluster.kubeconfig), "machine": "a3-highgpu-8g", "nodes": 2}
    image = {"kind": "prebuilt", "reference": "127.0.0.1:1/train@sha256:" + 64 * "1"}
    document = {"name": "toy", "root": str(folder), "script": "/app/train.py", "image": image, "platform": platform}
    (folder / "config.yaml").write_text(yaml.safe_dump(document))

    def run(verb: str, *settings: str) -> str:
        words = [sys.executable, "-m", "cli.main", verb, "config.yaml", *(f"platform.{one}" for one in settings)]
        path = {"PYTHONPATH": f"{folder}:{CHECKOUT}", "PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "400"}
        done = subprocess.run(words, cwd=folder, env=path, capture_output=True, text=True, check=False, timeout=120)
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def template(command: Command) -> dict[str, Any]:
    """The pods that a job on the toy network has."""
    printed = command("render", "network=toy", "toy_lanes=3", "network_daemon=v7")
    work = yaml.safe_load(printed)["items"][-1]
    found: dict[str, Any] = work["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return found


def test_pods_get_what_the_file_says(template: dict[str, Any]) -> None:
    node, (daemon,) = template["spec"]["containers"][0], template["spec"]["initContainers"]
    attached = json.loads(template["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert [one["network"] for one in attached] == ["default", "toy-1", "toy-2", "toy-3", "toy-4"]
    assert (daemon["image"], daemon["restartPolicy"]) == ("toy.example/daemon:v7", "Always")
    assert {"toy-socket", "toy-library"} <= {one["name"] for one in template["spec"]["volumes"]}
    assert {"/run/toy", "/usr/local/toy"} <= {one["mountPath"] for one in node["volumeMounts"]}
    assert node["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_nodes_are_told_what_nccl_has_to_report(template: dict[str, Any]) -> None:
    variables = {one["name"]: one.get("value", "") for one in template["spec"]["containers"][0]["env"]}
    told = json.loads(variables["LITGPT_NETWORK"])
    assert variables["NCCL_TOY_LANES"] == "3"
    assert (told["name"], told["nccl_net"], told["floor_gbytes"]) == ("toy", "ToyNet", {"2": 3.0})
    assert told["nccl_versions"] == [">=2.20"]


def test_a_plan_looks_at_options_objects_and_nodes(command: Command) -> None:
    printed = command("plan", "network=toy", "toy_lanes=5", "network_daemon=v1", "overrides.NCCL_TOY_IFNAME=eth9")
    for line in (
        "platform.toy_lanes=5: a card has 4",
        "plug-in v2 expects the daemon v7, and platform.network_daemon=v1",
        "NCCL_TOY_IFNAME names eth9, which the pod has not got",
        "the Network objects toy-1, toy-2, toy-3, toy-4 are missing",
        "no DaemonSet installs the plug-in of toy on the nodes",
        "kubectl apply -f https://toy.example/manual/installer.yaml",
    ):
        assert line in printed


def test_its_options_are_refused_on_another_network(command: Command) -> None:
    printed = command("render", "network=tcpx", "toy_lanes=3")
    assert "platform.toy_lanes=3 means nothing to platform.network=tcpx" in printed
    assert "set network: toy, or leave it out" in printed
