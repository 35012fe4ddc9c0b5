"""What each platform is sent for a script whose code is mounted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_files import differences

from launcher.config import CodeSettings, ScriptConfig, validated
from launcher.runs.code import CodeArchive
from launcher.runs.run import Script, plan_script, script_job

PLATFORMS: Mapping[str, Mapping[str, Any]] = {
    "gke": {"cluster": "research", "location": "us-central1", "machine": "g2-standard-48", "nodes": 2},
    "batch": {"project": "my-project", "location": "us-central1", "machine": "g2-standard-48", "nodes": 2},
    "runai": {"api": "cli", "cli_version": "v2", "project": "team-a", "nodes": 2, "gpus": 8},
}


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("gke", "items.1.spec.replicatedJobs.nodes.template.spec.template.spec.containers.node.command"),
        ("batch", "job.taskGroups.0.taskSpec.runnables.train.container.commands"),
        ("runai", "node.command"),
    ],
)
def test_nodes_are_told_where_mounted_code_is_and_nothing_else_is_sent_otherwise(kind: str, where: str) -> None:
    document = {
        "name": "mine", "root": "gs://my-bucket/scripts", "script": "train.py", "code": {"mount": "mine"},
        "platform": {"kind": kind, **PLATFORMS[kind]},
    }  # fmt: skip
    config = validated(ScriptConfig, document, where="test")
    script = Script(config=config, code=CodeArchive(sha256=64 * "a", content=b""))
    job = script_job(script, attempt=1, image="registry.example/litgpt@sha256:" + 64 * "0")
    platform = config.platform.open()
    found = differences(platform.render(replace(job, code=None)), platform.render(job))
    assert found == {where: [None, f"--code gs://my-bucket/scripts/code/{64 * 'a'}.tar"]}


def test_each_node_of_this_machine_unpacks_it_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code = CodeSettings(mount=str(tmp_path))
    script = plan_script(ScriptConfig(root=str(tmp_path / "out"), script="train.py", code=code))
    assert script.code is not None
    job = script_job(script, attempt=1, image=None)
    (node,) = script.config.platform.open().render(job).body["nodes"]
    assert node["argv"][-4:] == ["--code", f"{tmp_path}/out/code/{script.code.sha256}.tar", "--", "train.py"]
