"""What torch says of itself, asked of a real one. The library that stands in for NCCL is compiled here, and loaded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from litgpt_demo.errors import NodeError, UserError
from litgpt_demo.node.torch_seen import torch_seen

SOURCE = "int ncclGetVersion(int *version) { *version = 22105; return 0; }"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnccl that says it is 2.21.5."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nccl.c").write_text(SOURCE)
    path = folder / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(folder / "nccl.c")], check=True)
    return path


def test_an_nccl_that_is_preloaded_counts_and_no_variable_of_the_image_does(library: Path) -> None:
    import torch

    seen = torch_seen({**os.environ, "LD_PRELOAD": str(library), "NCCL_VERSION": "2.19.3"})
    assert (seen.nccl, seen.nccl_path) == ("2.21.5", str(library))
    assert (seen.torch, seen.cuda) == (torch.__version__, torch.version.cuda)
    assert seen.gpus == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'ImportError: libcudnn.so.9: no such file' >&2; exit 1", r"exit code 1\): ImportError: libcudnn\.so\.9"),
        ("kill -SEGV $$", r"signal 11\): no word"),
        ("echo no JSON", r"exit code 0\): no JSON"),
    ],
)
def test_why_torch_does_not_start_is_told_in_its_own_words(script: str, told: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=told):
        torch_seen(os.environ, python=str(python))


def test_a_process_that_cannot_be_killed_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits in the driver does not die of any signal."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho $$ > "$PID_FILE"\nexec sleep 600\n')
    python.chmod(0o755)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    with pytest.raises(NodeError, match="a GPU of this machine hangs"):
        torch_seen({**os.environ, "PID_FILE": str(tmp_path / "pid")}, python=str(python), patience=0.5)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
