"""What each platform is sent for a script whose code is mounted: golden files, one per platform."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.config import CodeSettings, ScriptConfig, validated
from launcher.job import Submission
from launcher.runs.code import CodeArchive
from launcher.runs.run import Script, plan_script, script_job

GOLDEN = Path(__file__).parents[2] / "golden" / "code"
BUCKET = "gs://my-bucket/scripts"
PLATFORMS: Mapping[str, Mapping[str, Any]] = {
    "gke": {"cluster": "research", "location": "us-central1", "machine": "g2-standard-48", "nodes": 2},
    "batch": {"project": "my-project", "location": "us-central1", "machine": "g2-standard-48", "nodes": 2},
    "runai": {"api": "cli", "cli_version": "v2", "project": "team-a", "nodes": 2, "gpus": 8},
}


def rendered(kind: str, root: str = BUCKET) -> Submission:
    document = {
        "name": "mine", "root": root, "script": "train.py", "args": ("--steps", "9"), "code": {"mount": "mine"},
        "platform": {"kind": kind, **PLATFORMS[kind]},
    }  # fmt: skip
    config = validated(ScriptConfig, document, where="test")
    script = Script(config=config, code=CodeArchive(sha256=64 * "a", content=b""))
    job = script_job(script, attempt=1, image="registry.example/litgpt@sha256:" + 64 * "0")
    return config.platform.open().render(job)


@pytest.mark.parametrize("kind", PLATFORMS)
def test_what_is_sent_for_mounted_code_is_the_golden_one(kind: str) -> None:
    """`make golden` writes them anew; the difference is read in review."""
    text, file = str(rendered(kind)), GOLDEN / f"{kind}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_every_golden_file_of_mounted_code_has_its_platform() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == PLATFORMS.keys()


def test_each_node_of_this_machine_unpacks_it_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code = CodeSettings(mount=str(tmp_path))
    script = plan_script(ScriptConfig(root=str(tmp_path / "out"), script="train.py", code=code))
    assert script.code is not None
    job = script_job(script, attempt=1, image=None)
    (node,) = script.config.platform.open().render(job).body["nodes"]
    assert node["argv"][-4:] == ["--code", f"{tmp_path}/out/code/{script.code.sha256}.tar", "--", "train.py"]
