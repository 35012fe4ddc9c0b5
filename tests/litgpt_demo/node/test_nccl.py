"""Which NCCL a rank would load. The library that stands in for NCCL is compiled here, and really loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import Fault
from litgpt_demo.node.nccl import check_nccl, check_plugin, loaded, main, version_text
from litgpt_demo.node.network import NodeNetwork

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


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "libnccl-net.so").touch()
    return tmp_path


def tcpx(plugin: Path, *versions: str) -> NodeNetwork:
    return NodeNetwork(
        name="tcpx",
        nccl_net="GPUDirectTCPX_v7",
        library_paths=(str(plugin),),
        nccl_versions=versions or (">=2.19,<2.20",),
    )


@given(st.integers(2, 9), st.integers(0, 99), st.integers(0, 99))
def test_versions_read_as_nccl_encodes_them(major: int, minor: int, patch: int) -> None:
    assert version_text(major * 10000 + minor * 100 + patch) == f"{major}.{minor}.{patch}"


def test_an_nccl_that_the_plugin_is_not_made_for_is_refused_before_it_crashes(library: Path, plugin: Path) -> None:
    """A plug-in made for 2.19 under NCCL 2.21: single nodes work, several end with ncclInternalError."""
    environ = {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(plugin), "NCCL_VERSION": "2.19.3"}
    (found,) = check_nccl(tcpx(plugin), environ)
    assert (found.fault, found.code) == (Fault.USER, "nccl.version")
    assert found.what == f"torch loads NCCL 2.21.5 from {library}, and the tcpx plug-in is for >=2.19,<2.20"


def test_a_torch_without_nccl_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main() == 0
    told = json.loads(capsys.readouterr().out)
    assert told["torch"] == torch.__version__
    assert (told["version"] is None) == (torch.version.cuda is None)


def test_an_image_whose_torch_does_not_start_is_told_so(plugin: Path, tmp_path: Path) -> None:
    assert loaded({}, python=str(tmp_path / "no-python")) is None


def test_a_plugin_that_is_not_there_would_mean_sockets(tmp_path: Path) -> None:
    (found,) = check_plugin(tcpx(tmp_path), {"LD_LIBRARY_PATH": f"{tmp_path}:/nowhere"})
    assert (found.fault, found.code) == (Fault.NODE, "nccl.plugin")
    assert f"is in none of {tmp_path}, /nowhere" in found.what


def test_another_plugin_that_comes_first_is_named(plugin: Path, tmp_path: Path) -> None:
    other = tmp_path / "hpcx"
    other.mkdir()
    (other / "libnccl-net.so").touch()
    network = tcpx(plugin)
    assert list(check_plugin(network, {"LD_LIBRARY_PATH": f"{plugin}:{other}"})) == []
    (found,) = check_plugin(network, {"LD_LIBRARY_PATH": f"{other}:{plugin}"})
    assert f"NCCL would load {other}/libnccl-net.so, which is not the tcpx plug-in of {plugin}" in found.what
    (found,) = check_plugin(network, {"LD_LIBRARY_PATH": str(plugin), "NCCL_NET_PLUGIN": "ofi"})
    assert "libnccl-net-ofi.so is in none of" in found.what


def test_networks_that_need_no_plugin_are_not_asked(tmp_path: Path) -> None:
    for name in (None, "IB", "Socket"):
        assert list(check_nccl(NodeNetwork(nccl_net=name), {})) == []
