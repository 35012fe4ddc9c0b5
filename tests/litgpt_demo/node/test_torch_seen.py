"""What torch says of itself, asked of a real one. The library that stands in for NCCL is compiled here, and loaded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import NodeError, UserError
from litgpt_demo.node.torch_seen import torch_seen, version_text

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


@given(st.integers(2, 9), st.integers(0, 99), st.integers(0, 99))
def test_versions_read_as_nccl_encodes_them(major: int, minor: int, patch: int) -> None:
    assert version_text(major * 10000 + minor * 100 + patch) == f"{major}.{minor}.{patch}"


def test_an_nccl_that_is_preloaded_counts_and_no_variable_of_the_image_does(library: Path) -> None:
    seen = torch_seen({**os.environ, "LD_PRELOAD": str(library), "NCCL_VERSION": "2.19.3"})
    assert (seen.nccl, seen.nccl_path) == ("2.21.5", str(library))


def test_this_torch_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torch_seen(os.environ)
    assert (seen.torch, seen.cuda) == (torch.__version__, torch.version.cuda)
    assert (seen.nccl is None) == (torch.version.cuda is None)
    assert seen.gpus == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert (seen.gpu_error == "") == (torch.version.cuda is None or seen.gpus > 0)


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


def test_an_image_without_a_python_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-python cannot be run"):
        torch_seen({}, python=str(tmp_path / "no-python"))


def test_a_torch_that_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(NodeError, match="did not say within 0 s"):
        torch_seen(os.environ, patience=0.01)


def test_a_process_that_cannot_be_killed_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits in the driver does not die of any signal."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho $$ > "$PID_FILE"\nexec sleep 30\n')
    python.chmod(0o755)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    begun = time.monotonic()
    with pytest.raises(NodeError, match="a GPU of this machine hangs"):
        torch_seen({**os.environ, "PID_FILE": str(tmp_path / "pid")}, python=str(python), patience=0.5)
    assert time.monotonic() - begun < 15
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
