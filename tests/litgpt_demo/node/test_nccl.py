"""Which NCCL and which plug-in a rank would use, against those that the network is made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from litgpt_demo.errors import Fault
from litgpt_demo.node.nccl import check_nccl, check_plugin
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.torch_seen import TorchSeen


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "libnccl-net.so").touch()
    return tmp_path


def tcpx(plugin: Path, *, allow_unqualified: bool = False) -> NodeNetwork:
    return NodeNetwork(
        name="tcpx", nccl_net="GPUDirectTCPX_v7", library_paths=(str(plugin),), nccl_versions=(">=2.19,<2.20",),
        nccl_loads=(">=2.18,<2.30",), nccl_fails=("==2.21.5",), allow_unqualified=allow_unqualified,
    )  # fmt: skip


def with_nccl(version: str | None) -> TorchSeen:
    return TorchSeen(torch="2.2.2", cuda="12.1", nccl=version, nccl_path="/l/libnccl.so.2", gpus=8, gpu_error="")


@pytest.mark.parametrize(
    ("version", "allowed", "severity", "code"),
    [
        # A plug-in made for 2.19 under NCCL 2.21: single nodes work, several end with ncclInternalError.
        ("2.21.5", True, "error", "nccl.version"),
        ("2.29.7", False, "error", "nccl.version"),
        ("2.29.7", True, "warning", "nccl.version"),
        (None, True, "error", "nccl.missing"),
    ],
)
def test_an_nccl_that_fails_or_that_nobody_has_qualified_is_refused(
    plugin: Path, version: str | None, allowed: bool, severity: str, code: str
) -> None:
    assert list(check_nccl(tcpx(plugin), with_nccl("2.19.3"))) == []
    (found,) = check_nccl(tcpx(plugin, allow_unqualified=allowed), with_nccl(version))
    assert (found.severity, found.fault, found.code) == (severity, Fault.USER, code)


def test_a_plugin_that_is_not_there_would_mean_sockets_and_another_one_that_comes_first_is_named(
    plugin: Path, tmp_path: Path
) -> None:
    other = tmp_path / "hpcx"
    other.mkdir()
    (other / "libnccl-net.so").touch()
    assert list(check_plugin(tcpx(plugin), {"LD_LIBRARY_PATH": f"{plugin}:{other}"})) == []
    (found,) = check_plugin(tcpx(plugin), {"LD_LIBRARY_PATH": f"{other}:{plugin}"})
    assert f"NCCL would load {other}/libnccl-net.so, which is not the tcpx plug-in of {plugin}" in found.what
    (found,) = check_plugin(tcpx(plugin), {"LD_LIBRARY_PATH": str(plugin), "NCCL_NET_PLUGIN": "ofi"})
    assert (found.fault, found.code) == (Fault.NODE, "nccl.plugin")
