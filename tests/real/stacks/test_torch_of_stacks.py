"""What a node runs works with the torch of every stack, not only with that of the tests' own environment."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from other_torch import python_with

from launcher.images.stacks import STACKS

TESTS = Path(__file__).parents[2]
OURS = version("torch").partition("+")[0]

# What goes through torch: training, checkpoints, collection, torchrun.
CHOSEN = ("litgpt_demo/training", "litgpt_demo/export", "litgpt_demo/node")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("stack", [stack.name for stack in STACKS.values() if stack.torch != OURS])
def test_training_checkpoints_and_nodes_work_with_the_torch_of_each_stack(stack: str, tmp_path: Path) -> None:
    python = python_with(STACKS[stack].torch, upon_ours=True)
    environ = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    asked = [python, "-c", "import torch; print(torch.__version__)"]
    said = subprocess.run(asked, env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.partition("+")[0].strip() == STACKS[stack].torch
    command = [python, "-m", "pytest", "-n", "0", "--basetemp", tmp_path / "tests", "-o", f"cache_dir={tmp_path}/cache"]
    environ.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, *(TESTS / folder for folder in CHOSEN)],
        cwd=TESTS.parent, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:]
