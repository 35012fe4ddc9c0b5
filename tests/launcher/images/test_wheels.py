"""Facts about torch's wheels, by the metadata that a package index has: each NCCL belongs to one torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.images.stacks import STACKS

UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")

# The last torch with the NCCL that TCPX is qualified for, and the first without (docs/images.md).
OLDER = {"2.2.2": "2.19.3", "2.3.0": "2.20.5"}


@pytest.mark.long
@pytest.mark.parametrize(("torch", "nccl"), [*((stack.torch, stack.nccl) for stack in STACKS.values()), *OLDER.items()])
def test_a_torch_wheel_requires_the_nccl_that_we_say(torch: str, nccl: str) -> None:
    if UV is None:
        pytest.skip("no uv here: `make lock` installs it")
    command = [UV, "pip", "compile", "--quiet", "--python-version=3.11", "--python-platform=linux", "--no-build", "-"]
    done = subprocess.run(command, input=f"torch=={torch}\n", capture_output=True, text=True, timeout=120, check=False)
    if done.returncode and "Failed to fetch" in done.stderr:
        pytest.skip(f"no package index here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^nvidia-nccl-cu\d+==(\S+)", done.stdout, re.MULTILINE) == [nccl]
