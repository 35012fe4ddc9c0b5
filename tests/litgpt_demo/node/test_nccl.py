"""Which NCCL and which plug-in a rank would use, against those that the network is made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from litgpt_demo.errors import Fault
from litgpt_demo.findings import Finding
from litgpt_demo.node.nccl import check_nccl, check_plugin, wants_version
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.torch_seen import TorchSeen


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "libnccl-net.so").touch()
    return tmp_path


def tcpx(plugin: Path, *, allow_unqualified: bool = False) -> NodeNetwork:
    return NodeNetwork(
        name="tcpx",
        nccl_net="GPUDirectTCPX_v7",
        library_paths=(str(plugin),),
        nccl_versions=(">=2.19,<2.20",),
        nccl_loads=(">=2.18,<2.30",),
        nccl_fails=("==2.21.5",),
        allow_unqualified=allow_unqualified,
    )


def with_nccl(version: str | None) -> TorchSeen:
    return TorchSeen(torch="2.2.2", cuda="12.1", nccl=version, nccl_path="/l/libnccl.so.2", gpus=8, gpu_error="")


def test_the_nccl_that_the_plugin_is_qualified_for_is_no_trouble(plugin: Path) -> None:
    assert list(check_nccl(tcpx(plugin), with_nccl("2.19.3"))) == []


def test_an_nccl_that_fails_with_the_plugin_is_refused_whatever_is_allowed(plugin: Path) -> None:
    """A plug-in made for 2.19 under NCCL 2.21: single nodes work, several end with ncclInternalError."""
    for allowed in (False, True):
        (found,) = check_nccl(tcpx(plugin, allow_unqualified=allowed), with_nccl("2.21.5"))
        assert (found.severity, found.fault, found.code) == ("error", Fault.USER, "nccl.version")
        assert "torch 2.2.2 here, which loads /l/libnccl.so.2, has NCCL 2.21.5, which is known to fail" in found.what


@pytest.mark.parametrize(("allowed", "severity"), [(False, "error"), (True, "warning")])
def test_an_nccl_that_nobody_has_qualified_is_refused_unless_it_is_allowed(
    plugin: Path, allowed: bool, severity: str
) -> None:
    (found,) = check_nccl(tcpx(plugin, allow_unqualified=allowed), with_nccl("2.29.7"))
    assert (found.severity, found.fault, found.code) == (severity, Fault.USER, "nccl.version")
    assert "qualified for >=2.19,<2.20" in found.what


def test_a_torch_without_nccl_is_told_apart(plugin: Path) -> None:
    (found,) = check_nccl(tcpx(plugin), with_nccl(None))
    assert (found.code, found.what) == ("nccl.missing", "torch 2.2.2 comes without NCCL")


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


def test_networks_that_need_no_plugin_are_not_asked() -> None:
    for name in (None, "IB", "Socket"):
        network, nothing = NodeNetwork(nccl_net=name), list[Finding]()
        assert not wants_version(network)
        assert list(check_nccl(network, with_nccl(None))) == nothing
        assert list(check_plugin(network, {})) == nothing
