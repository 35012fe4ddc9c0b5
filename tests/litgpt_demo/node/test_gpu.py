"""GPUs as a library that stands in for NVML tells of them. It is compiled here, and really loaded by a real process."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from litgpt_demo.errors import Fault, NodeError
from litgpt_demo.node.gpu import VISIBLE, check_gpus, check_used, gpus
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.torch_seen import TorchSeen

# Types, numbers and order of the calls are those of NVIDIA's nvml.h; what it is told it reads from the environment.
NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int started;
static char *said(const char *name, char *otherwise) { char *value = getenv(name); return value ? value : otherwise; }

int nvmlInitWithFlags(unsigned flags) {
    if (getenv("HANGS")) pause();
    started = 1;
    return flags ? 2 /* INVALID_ARGUMENT */ : atoi(said("INIT", "0"));
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    return snprintf(version, length, "%s", said("DRIVER", "535.161.08")) < (int)length ? !started : 7;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = atoi(said("GPUS", "8")); return !started; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
    *gpu = (void *)(size_t)(index + 1);
    return index == (unsigned)atoi(said("LOST", "-1")) ? 15 /* GPU_IS_LOST */ : !started;
}
int nvmlDeviceGetName(void *gpu, char *name, unsigned length) {
    return snprintf(name, length, "NVIDIA H100 80GB HBM3") < (int)length ? !gpu : 7 /* INSUFFICIENT_SIZE */;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int type, int counter, unsigned long long *errors) {
    if (type != 1 || counter != 0) return 2; /* those that could not be corrected, since the driver was loaded */
    *errors = (size_t)gpu == 6 ? atoi(said("ERRORS", "0")) : 0;
    return strcmp(said("ERRORS", "0"), "uncounted") ? 0 : 3 /* NOT_SUPPORTED */;
}
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine whose driver's libraries are where GKE mounts them."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    root = tmp_path_factory.mktemp("machine")
    folder = root / "usr/local/nvidia/lib64"
    folder.mkdir(parents=True)
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(folder / "libnvidia-ml.so.1"), "-"]
    subprocess.run(command, input=NVML, text=True, check=True)
    return root


def codes(root: Path, network: NodeNetwork, **told: str) -> dict[str, str]:
    found = list(check_gpus(network, told, root=root))
    assert all(trouble.fault is Fault.NODE and trouble.fix for trouble in found)
    return {trouble.code: trouble.what for trouble in found if trouble.severity == "error"}


EIGHT = NodeNetwork(name="tcpx", gpus=8, drivers=(">=535,<536",))


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, {}),
        ({"GPUS": "7"}, {"gpu.count": "7 GPUs are here, and the job was given machines with 8"}),
        ({"ERRORS": "3"}, {"gpu.ecc": "GPU 5 (NVIDIA H100 80GB HBM3) has 3 memory errors that ECC could not correct"}),
        ({"ERRORS": "uncounted"}, {}),
        (
            {"DRIVER": "580.65.06"},
            {"gpu.driver-version": "the GPU driver is 580.65.06, and tcpx works with >=535,<536"},
        ),
        ({"LOST": "3"}, {"gpu.driver": "the driver answered with an error: GPU 3: GPU is lost"}),
    ],
)
def test_what_the_driver_says_against_its_gpus_is_told(nvml: Path, told: dict[str, str], found: dict[str, str]) -> None:
    assert codes(nvml, EIGHT, **told) == found
    assert codes(nvml, NodeNetwork(), **told) == {}  # a node without GPUs is not asked


def test_a_driver_that_does_not_answer_is_not_waited_for(nvml: Path) -> None:
    with pytest.raises(NodeError, match="did not answer for 1 s"):
        gpus({"LD_LIBRARY_PATH": str(nvml / "usr/local/nvidia/lib64"), "HANGS": "1"}, patience=1)


# --- the GPUs as torch has them ---------------------------------------------------------------------------------------

# The words of torch 2.2, 2.11 and 2.13 (torch/cuda/__init__.py, c10/cuda/CUDAFunctions.cpp).
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
        (seen(error="CUDA error: no kernel image is available for execution on the device"), {}, Fault.USER, "image"),
    ],
)
def test_gpus_that_torch_cannot_use_end_the_job_instead_of_training_on_cpus(
    torch: TorchSeen, environ: dict[str, str], fault: Fault, fix: str
) -> None:
    (found,) = check_used(EIGHT, torch, environ, processes=8)
    assert (found.severity, found.code, found.fault) == ("error", "gpu.unused", fault)
    assert found.what.endswith("the ranks would run on CPUs")
    assert fix in found.fix


def test_every_rank_has_a_gpu_that_torch_can_use() -> None:
    assert list(check_used(EIGHT, seen(gpus=8), {}, processes=8)) == []
    assert list(check_used(EIGHT, seen(gpus=2), {VISIBLE: "0,1"}, processes=2)) == []
    (found,) = check_used(EIGHT, seen(gpus=1), {VISIBLE: "0"}, processes=2)
    assert (found.code, found.fault) == ("gpu.visible", Fault.USER)
    assert found.what == f"torch can use 1 of the 8 GPUs that the job was given for 2 ranks ({VISIBLE}=0)"
    (found,) = check_used(EIGHT, seen(gpus=7), {}, processes=8)
    assert (found.code, found.fault) == ("gpu.visible", Fault.NODE)
