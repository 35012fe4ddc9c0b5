"""Checks of a machine and its network, on file systems that are made up; sockets are real."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from litgpt_demo.errors import FailureClass, UserError
from litgpt_demo.node import gpu
from litgpt_demo.node.checks import (
    check_daemon,
    check_interfaces,
    check_machine,
    check_nccl,
    check_packages,
    check_plugin,
    cores_of,
)
from litgpt_demo.node.gpu import VISIBLE, TorchSeen, check_gpus, check_used
from litgpt_demo.node.network import NetworkUse, NodeNetwork
from litgpt_demo.node.rendezvous import Node


def test_missing_interfaces_and_those_that_are_down_are_named(tmp_path: Path) -> None:
    for name, state in {"lo": "unknown", "eth0": "up", "eth1": "down"}.items():
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text(f"{state}\n")
    missing, down = check_interfaces(NodeNetwork(interfaces=("lo", "eth0", "eth1", "eth2")), tmp_path)
    assert (missing.fault, missing.code, "eth2 are missing" in missing.what) == (
        FailureClass.NODE,
        "network.interfaces",
        True,
    )
    assert (down.code, "eth1 is down" in down.what) == ("network.interface-down", True)


def test_a_daemon_that_does_not_answer_is_named_with_its_place(tmp_path: Path) -> None:
    network = NodeNetwork(name="tcpx", socket=str(tmp_path / "rx_rule_manager"))
    assert "No such file" in next(check_daemon(network, patience=0)).what
    (tmp_path / "rx_rule_manager").touch()
    assert "it is not a socket" in next(check_daemon(network, patience=0)).what
    with socket.socket() as daemon:
        daemon.bind(("127.0.0.1", 0))
        network = NodeNetwork(name="tcpxo", socket=f"127.0.0.1:{daemon.getsockname()[1]}")
        assert "Connection refused" in next(check_daemon(network, patience=0)).what
        daemon.listen()
        assert list(check_daemon(network, patience=0)) == []


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    network = NodeNetwork(
        name="tcpx", nccl_net="GPUDirectTCPX_v7", interfaces=("eth9",), gpus=8, glibc="9.9", shm_bytes=2**60,
        library_paths=(str(tmp_path / "plugin"),),
    )  # fmt: skip
    meet = {"nodes": 2, "node_rank": 0, "host": "h", "port": 1, "run_id": "r"}
    node = Node(**meet, processes=8, directory=tmp_path, program=("x",), network=network)  # type: ignore[arg-type]
    found = [trouble.code for trouble in check_machine(node, {"PATH": "/none"}, root=tmp_path)]
    assert found == [
        "gpu.count", "gpu.libcuda", "network.interfaces", "node.shared-memory", "image.glibc", "nccl.plugin",
    ]  # fmt: skip


@pytest.mark.parametrize(("program", "codes"), [(("-m", "litgpt_demo", "train"), ["python.packages"]), (("x",), [])])
def test_node_refuses_packages_from_another_place(program: tuple[str, ...], codes: list[str], tmp_path: Path) -> None:
    (tmp_path / "litgpt").mkdir()
    (tmp_path / "litgpt/__init__.py").touch()
    meet = {"nodes": 1, "node_rank": 0, "host": "h", "port": 1, "run_id": "r"}
    node = Node(**meet, processes=1, directory=tmp_path, program=program)  # type: ignore[arg-type]
    found = list(check_machine(node, {"PYTHONPATH": str(tmp_path)}, root=tmp_path))
    assert [finding.code for finding in found] == codes
    assert all(f"from {tmp_path}/litgpt/__init__.py, but litgpt 0.5" in finding.what for finding in found)


def test_node_takes_an_editable_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, metadata = tmp_path / "src dir/litgpt", tmp_path / "site/litgpt-0.5.13.dist-info"
    code.mkdir(parents=True)
    metadata.mkdir(parents=True)
    (code / "__init__.py").touch()
    (metadata / "METADATA").write_text("Name: litgpt\nVersion: 0.5.13\n")
    monkeypatch.setattr(sys, "path", [str(metadata.parent), str(code.parent), *sys.path])
    origin = {"url": code.parent.as_uri(), "dir_info": {"editable": True}}
    (metadata / "direct_url.json").write_text(json.dumps(origin))
    assert list(check_packages({})) == []
    (metadata / "direct_url.json").write_text(json.dumps(origin | {"url": "file:///somewhere/else"}))
    assert [finding.code for finding in check_packages({})] == ["python.packages"]


def test_ranks_are_pinned_to_cores_that_the_network_leaves() -> None:
    assert cores_of("0-2,8,10-11") == {0, 1, 2, 8, 10, 11}
    program = """
import os
from litgpt_demo.node.checks import pin_cpus
mine = min(os.sched_getaffinity(0))
print(*pin_cpus(f"{mine},4000-4095"), os.sched_getaffinity(0) == {mine}, next(pin_cpus("4000-4095")).severity)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "warning"]


def test_why_torch_does_not_start_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libcudnn.so.9: no such file' >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(gpu, "PYTHON", (str(python),))
    with pytest.raises(UserError, match=r"exit code 1\): ImportError: libcudnn\.so\.9"):
        gpu.torch_seen(os.environ)


def tcpx(plugin: Path, *, allow_unqualified: bool = False) -> NodeNetwork:
    return NodeNetwork(
        name="tcpx", nccl_net="GPUDirectTCPX_v7", library_paths=(str(plugin),), nccl_versions=(">=2.19,<2.20",),
        nccl_loads=(">=2.18,<2.30",), nccl_fails=("==2.21.5",), allow_unqualified=allow_unqualified,
    )  # fmt: skip


def seen(*, nccl: str | None = "2.29.7", gpus: int = 0, cuda: str | None = "13.0", error: str = "") -> TorchSeen:
    return TorchSeen(torch="2.13.0", cuda=cuda, nccl=nccl, nccl_path="/l", gpus=gpus, gpu_error=error)


@pytest.mark.parametrize(
    ("version", "allowed", "severity", "code"),
    [
        # A plugin made for 2.19 under NCCL 2.21: single nodes work, several end with ncclInternalError.
        ("2.21.5", True, "error", "nccl.version"),
        ("2.29.7", False, "error", "nccl.version"),
        ("2.29.7", True, "warning", "nccl.version"),
        (None, True, "error", "nccl.missing"),
    ],
)
def test_an_nccl_that_fails_or_is_unknown_is_refused(
    tmp_path: Path, version: str | None, allowed: bool, severity: str, code: str
) -> None:
    assert list(check_nccl(tcpx(tmp_path), seen(nccl="2.19.3"))) == []
    (found,) = check_nccl(tcpx(tmp_path, allow_unqualified=allowed), seen(nccl=version))
    assert (found.severity, found.fault, found.code) == (severity, FailureClass.USER, code)


def test_missing_or_shadowed_plugin_is_named(tmp_path: Path) -> None:
    plugin, another = tmp_path / "plugin", tmp_path / "hpcx"
    for folder in (plugin, another):
        folder.mkdir()
        (folder / "libnccl-net.so").touch()
    assert list(check_plugin(tcpx(plugin), {"LD_LIBRARY_PATH": f"{plugin}:{another}"})) == []
    (found,) = check_plugin(tcpx(plugin), {"LD_LIBRARY_PATH": f"{another}:{plugin}"})
    assert f"NCCL would load {another}/libnccl-net.so, which is not the tcpx plugin of {plugin}" in found.what
    (found,) = check_plugin(tcpx(plugin), {"LD_LIBRARY_PATH": str(plugin), "NCCL_NET_PLUGIN": "ofi"})
    assert (found.fault, found.code) == (FailureClass.NODE, "nccl.plugin")


GIB = NodeNetwork(name="gib", nccl_net="gIB")


def rank_printed(folder: Path, rank: int, *lines: str) -> None:
    """Output of a rank where torchrun leaves it."""
    path = folder / "r_x" / "attempt_0" / str(rank) / "stdout.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"pod-0:71:71 [0] NCCL INFO {line}\n" for line in lines))


def test_plain_sockets_stop_the_run_unless_they_are_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use = NetworkUse(GIB, tmp_path, nodes=2)
    rank_printed(tmp_path, 0, "Using network gIB")
    assert use.look(steps=5) is None
    rank_printed(tmp_path, 1, "NET/Plugin: Could not find: libnccl-net.so.", "Using network Socket")
    found = use.look()
    assert (found.fault, "NCCL uses Socket, not gIB (platform.network=gib)" in found.message) == (
        FailureClass.NODE,
        True,
    )
    assert any("Could not find: libnccl-net.so" in line for line in found.traceback)
    assert NetworkUse(NodeNetwork(), tmp_path, nodes=2).look(steps=1) is None
    assert NetworkUse(GIB, tmp_path, nodes=1).look(steps=1) is None
    assert capsys.readouterr().out == ""
    allowed = NetworkUse(GIB.model_copy(update={"allow_tcp_fallback": True}), tmp_path, nodes=2)
    assert [allowed.look(), allowed.look()] == [None, None]
    assert capsys.readouterr().out.count("warning [network.unused] NCCL uses Socket, not gIB") == 1


def test_each_known_name_of_a_plugin_is_accepted(tmp_path: Path) -> None:
    network = NodeNetwork(name="tcpx", nccl_net="GPUDirectTCPX_v7", nccl_net_aliases=("GPUDirectTCPX_v8",))
    use = NetworkUse(network, tmp_path, nodes=2)
    rank_printed(tmp_path, 0, "Using network GPUDirectTCPX_v7", "Using network GPUDirectTCPX_v8")
    assert use.look(steps=5) is None


CHECKOUT = Path(__file__).parents[3]

# What it is told it reads from the environment.
PYNVML = """
import os
from types import SimpleNamespace
told, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = os.environ.get, 1, 0
NVMLError = type("NVMLError", (Exception,), {})
NVMLError_LibraryNotFound, NVMLError_NotSupported = (type(name, (NVMLError,), {}) for name in ("Missing", "Uncounted"))

def nvmlDeviceGetHandleByIndex(index):
    if str(index) == told("LOST"):
        raise NVMLError("GPU is lost")
    return index

def nvmlDeviceGetTotalEccErrors(gpu, kind, counter):
    if told("ERRORS") == "uncounted":
        raise NVMLError_NotSupported
    return int(told("ERRORS", "0")) if (gpu, kind, counter) == (5, 1, 0) else 0

nvmlInit, nvmlSystemGetDriverVersion = lambda: None, lambda: told("DRIVER", "535.161.08")
nvmlDeviceGetCount, nvmlDeviceGetName = lambda: 8, lambda gpu: "NVIDIA H100 80GB HBM3"
"""

EIGHT = NodeNetwork(name="tcpx", gpus=8, drivers=(">=535,<536",))


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"ERRORS": "uncounted"}, {}),
        ({"ERRORS": "3"}, {"gpu.ecc": "GPU 5 (NVIDIA H100 80GB HBM3) has 3 memory errors that ECC could not correct"}),
        ({"DRIVER": "580.1"}, {"gpu.driver-version": "the GPU driver is 580.1, but tcpx works with >=535,<536"}),
        ({"LOST": "3"}, {"gpu.driver": "the driver answered with an error: GPU 3: GPU is lost"}),
    ],
)
def test_findings_of_the_driver_are_reported(tmp_path: Path, variables: dict[str, str], found: dict[str, str]) -> None:
    (tmp_path / "pynvml.py").write_text(PYNVML)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}", **variables}
    troubles = list(check_gpus(EIGHT, environ, root=tmp_path))
    assert {trouble.code: trouble.what for trouble in troubles} == found
    assert all(trouble.fault is FailureClass.NODE for trouble in troubles)
    assert list(check_gpus(NodeNetwork(), environ, root=tmp_path)) == []  # a node without GPUs is not asked


# Words of torch 2.2, 2.11 and 2.13.
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
NONE_THERE = "No CUDA GPUs are available"


@pytest.mark.parametrize(
    ("torch", "environ", "fault", "fix"),
    [
        (seen(error=TOO_OLD), {}, FailureClass.NODE, "CUDA 13 needs driver 580.65.06 or newer"),
        (seen(cuda=None), {}, FailureClass.USER, "install a CUDA build of torch"),
        (seen(error=NONE_THERE), {VISIBLE: "9"}, FailureClass.USER, f"unset {VISIBLE}"),
        (seen(error=NONE_THERE), {}, FailureClass.NODE, "exclude this node"),
    ],
)
def test_gpus_that_torch_cannot_use_end_the_job(
    torch: TorchSeen, environ: dict[str, str], fault: FailureClass, fix: str
) -> None:
    (found,) = check_used(EIGHT, torch, environ, processes=8)
    assert (found.severity, found.code, found.fault) == ("error", "gpu.unused", fault)
    assert fix in found.fix


def test_every_rank_has_a_gpu_that_torch_can_use() -> None:
    assert list(check_used(EIGHT, seen(gpus=8), {}, processes=8)) == []
    assert list(check_used(EIGHT, seen(gpus=2), {VISIBLE: "0,1"}, processes=2)) == []
    (found,) = check_used(EIGHT, seen(gpus=1), {VISIBLE: "0"}, processes=2)
    assert (found.code, found.fault) == ("gpu.visible", FailureClass.USER)
    (found,) = check_used(EIGHT, seen(gpus=7), {}, processes=8)
    assert (found.code, found.fault) == ("gpu.visible", FailureClass.NODE)
