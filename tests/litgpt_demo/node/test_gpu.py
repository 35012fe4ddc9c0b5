"""GPUs as a module that stands in for pynvml tells a process of them, and as torch has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from litgpt_demo.errors import Fault
from litgpt_demo.node.gpu import VISIBLE, check_gpus, check_used
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.torch_seen import TorchSeen

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
    ("told", "found"),
    [
        ({"ERRORS": "uncounted"}, {}),
        ({"ERRORS": "3"}, {"gpu.ecc": "GPU 5 (NVIDIA H100 80GB HBM3) has 3 memory errors that ECC could not correct"}),
        ({"DRIVER": "580.1"}, {"gpu.driver-version": "the GPU driver is 580.1, and tcpx works with >=535,<536"}),
        ({"LOST": "3"}, {"gpu.driver": "the driver answered with an error: GPU 3: GPU is lost"}),
    ],
)
def test_what_the_driver_says_against_gpus_is_told(tmp_path: Path, told: dict[str, str], found: dict[str, str]) -> None:
    (tmp_path / "pynvml.py").write_text(PYNVML)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}", **told}
    troubles = list(check_gpus(EIGHT, environ, root=tmp_path))
    assert {trouble.code: trouble.what for trouble in troubles} == found
    assert all(trouble.fault is Fault.NODE for trouble in troubles)
    assert list(check_gpus(NodeNetwork(), environ, root=tmp_path)) == []  # a node without GPUs is not asked


# Words of torch 2.2, 2.11 and 2.13.
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
NONE_THERE = "No CUDA GPUs are available"


def seen(*, gpus: int = 0, cuda: str | None = "13.0", error: str = "") -> TorchSeen:
    return TorchSeen(torch="2.13.0", cuda=cuda, nccl="2.29.7", nccl_path="/l", gpus=gpus, gpu_error=error)


@pytest.mark.parametrize(
    ("torch", "environ", "fault", "fix"),
    [
        (seen(error=TOO_OLD), {}, Fault.NODE, "CUDA 13 needs driver 580.65.06 or newer"),
        (seen(cuda=None), {}, Fault.USER, "install a CUDA build of torch"),
        (seen(error=NONE_THERE), {VISIBLE: "9"}, Fault.USER, f"leave {VISIBLE} out"),
        (seen(error=NONE_THERE), {}, Fault.NODE, "exclude this node"),
    ],
)
def test_gpus_that_torch_cannot_use_end_the_job(
    torch: TorchSeen, environ: dict[str, str], fault: Fault, fix: str
) -> None:
    (found,) = check_used(EIGHT, torch, environ, processes=8)
    assert (found.severity, found.code, found.fault) == ("error", "gpu.unused", fault)
    assert fix in found.fix


def test_every_rank_has_a_gpu_that_torch_can_use() -> None:
    assert list(check_used(EIGHT, seen(gpus=8), {}, processes=8)) == []
    assert list(check_used(EIGHT, seen(gpus=2), {VISIBLE: "0,1"}, processes=2)) == []
    (found,) = check_used(EIGHT, seen(gpus=1), {VISIBLE: "0"}, processes=2)
    assert (found.code, found.fault) == ("gpu.visible", Fault.USER)
    (found,) = check_used(EIGHT, seen(gpus=7), {}, processes=8)
    assert (found.code, found.fault) == ("gpu.visible", Fault.NODE)
