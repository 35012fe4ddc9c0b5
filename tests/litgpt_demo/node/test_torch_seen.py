"""What torch says of itself, asked of a real one. The library that stands in for NCCL is compiled here, and loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import NodeError
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
    assert seen is not None
    assert (seen.nccl, seen.nccl_path) == ("2.21.5", str(library))


def test_this_torch_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torch_seen(os.environ)
    assert seen is not None
    assert (seen.torch, seen.cuda) == (torch.__version__, torch.version.cuda)
    assert (seen.nccl is None) == (torch.version.cuda is None)
    assert seen.gpus == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert (seen.gpu_error == "") == (torch.version.cuda is None or seen.gpus > 0)


def test_an_image_whose_torch_does_not_start_says_nothing(tmp_path: Path) -> None:
    assert torch_seen({}, python=str(tmp_path / "no-python")) is None


def test_a_torch_that_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(NodeError, match="did not say within 0 s"):
        torch_seen(os.environ, patience=0.01)
