"""A new network is one new file: in a copy of the launcher that has it, the commands know it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).parents[2]


def printed(folder: Path, verb: str, *settings: str) -> str:
    """What the command line of a checkout that has one file more prints of a config with the toy network."""
    words = [sys.executable, "-m", "cli.main", verb, "config.yaml", *(f"platform.{one}" for one in settings)]
    path = {"PYTHONPATH": f"{folder}:{CHECKOUT}", "PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "400"}
    done = subprocess.run(words, cwd=folder, env=path, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_pods_get_what_a_network_s_file_says_and_a_plan_looks_at_its_options(tmp_path: Path) -> None:
    shutil.copytree(CHECKOUT / "launcher", tmp_path / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "tests/fakes/toy_network.py", tmp_path / "launcher/networks/toy.py")
    platform = {"kind": "gke", "cluster": "c", "location": "us-central1", "machine": "a3-highgpu-8g", "nodes": 2}
    image = {"kind": "prebuilt", "reference": "127.0.0.1:1/train@sha256:" + 64 * "1"}
    config = {"name": "toy", "root": str(tmp_path), "script": "/app/a.py", "image": image, "platform": platform}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    rendered = printed(tmp_path, "render", "network=toy", "toy_lanes=3", "network_daemon=v7")
    (jobset,) = [one for one in yaml.safe_load(rendered)["items"] if one["kind"] == "JobSet"]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    node, (daemon,) = pod["spec"]["containers"][0], pod["spec"]["initContainers"]
    attached = json.loads(pod["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert [one["network"] for one in attached] == ["default", "toy-1", "toy-2", "toy-3", "toy-4"]
    assert daemon["image"] == "toy.example/daemon:v7"
    assert "/usr/local/toy" in [one["mountPath"] for one in node["volumeMounts"]]
    variables = {one["name"]: one.get("value", "") for one in node["env"]}
    assert variables["NCCL_TOY_LANES"] == "3"
    assert json.loads(variables["LITGPT_NETWORK"])["nccl_net"] == "ToyNet"
    assert "platform.toy_lanes=5: a card has 4" in printed(tmp_path, "plan", "network=toy", "toy_lanes=5")
