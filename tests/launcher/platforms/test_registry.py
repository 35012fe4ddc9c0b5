"""A platform is one folder and one line of the registry: everything that shared code needs is asked of its class."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config import RunConfig, validated
from launcher.errors import ConfigProblem
from launcher.platforms import PLATFORMS, settings_classes

CHECKOUT = Path(__file__).parents[3]

# The registry's line is the second one; the rest is what the console script does.
WITH_ANOTHER = """
from launcher import platforms
platforms.PLATFORMS = {**platforms.PLATFORMS, "strict": "strict_platform:StrictSettings"}
from cli.__main__ import main
main()
"""
CONFIG = r"""
name: mine
data:
  corpus: {kind: files, paths: [text.txt], separator: "\n"}
  tokenizer: {kind: train, vocab_size: 270}
  validation_fraction: 0.1
model: {name: pythia-14m, sequence_length: 64}
train: {global_batch: 4, micro_batch: 2, max_steps: 4, warmup_steps: 1, precision: 16-mixed}
platform: {kind: strict, nodes: 2}
"""


def train_litgpt(folder: Path, *arguments: str) -> str:
    """What the command line with one platform more prints."""
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT}/tests/fakes", "COLUMNS": "200"}
    command = [sys.executable, "-c", WITH_ANOTHER, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_every_platform_is_registered_under_the_kind_that_its_settings_have() -> None:
    for kind, settings in zip(PLATFORMS, settings_classes(), strict=True):
        assert settings.model_json_schema()["properties"]["kind"]["const"] == kind


def test_a_platform_that_is_not_registered_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigProblem, match=r"platform\.kind: 'toy' given; there are 'local', 'gke', 'runai', 'batch'"):
        validated(RunConfig, {"platform": {"kind": "toy"}}, where="here")


def test_one_line_of_the_registry_makes_a_platform_that_configs_name_and_plans_ask(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 2000)
    (tmp_path / "strict.yaml").write_text(CONFIG)
    planned = train_litgpt(tmp_path, "plan", "strict.yaml")
    assert "train 4 steps" in planned
    assert "the strict platform is asked for 2 nodes" in planned
    assert "L4 has 24" in planned  # the memory of what its settings say that its nodes have
    (tmp_path / "strict.yaml").write_text("platform: {kind: strict, node: 2}\n")
    refused = train_litgpt(tmp_path, "plan", "strict.yaml")
    assert "platform.node: there is no such setting; did you mean nodes?" in refused
