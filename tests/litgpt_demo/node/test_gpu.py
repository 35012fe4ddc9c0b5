"""GPUs as a strict stand-in for nvidia-smi tells of them: it refuses what the real one refuses."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from litgpt_demo.errors import Fault, NodeError
from litgpt_demo.node.gpu import check_gpus, gpus
from litgpt_demo.node.network import NodeNetwork

# Answers only the query that it knows the fields of, in the format that was asked for, as the real one does.
NVIDIA_SMI = """#!{python}
import sys, time
ROWS = {rows!r}
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
if set(flags) != {{"query-gpu", "format"}}:
    sys.exit("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
if set(flags["format"].split(",")) != {{"csv", "noheader", "nounits"}}:
    sys.exit("a header and units were asked for")
known = {{"index", "name", "driver_version", "ecc.errors.uncorrected.volatile.total"}}
if wrong := set(flags["query-gpu"].split(",")) - known:
    sys.exit(f'Field "{{wrong.pop()}}" is not a valid field to query.')
{first}
for row in ROWS:
    print(", ".join(str(row[field]) for field in flags["query-gpu"].split(",")))
"""


def gpu(index: int, *, errors: object = 0, driver: str = "535.161.08") -> dict[str, object]:
    return {
        "index": index, "name": "NVIDIA H100 80GB HBM3", "driver_version": driver,
        "ecc.errors.uncorrected.volatile.total": errors,
    }  # fmt: skip


def machine(tmp_path: Path, *rows: dict[str, object], first: str = "") -> Path:
    """A made-up file system with the driver's program where GKE mounts it."""
    program = tmp_path / "usr/local/nvidia/bin/nvidia-smi"
    program.parent.mkdir(parents=True)
    program.write_text(NVIDIA_SMI.format(python=sys.executable, rows=list(rows), first=first))
    program.chmod(0o755)
    return tmp_path


def codes(root: Path, network: NodeNetwork) -> dict[str, str]:
    found = list(check_gpus(network, {"PATH": "/usr/bin:/bin"}, root=root))
    assert all(trouble.fault is Fault.NODE and trouble.fix for trouble in found)
    return {trouble.code: trouble.what for trouble in found if trouble.severity == "error"}


EIGHT = NodeNetwork(name="tcpx", gpus=8, drivers=(">=535,<536",))


def test_eight_sound_gpus_are_no_trouble(tmp_path: Path) -> None:
    assert codes(machine(tmp_path, *map(gpu, range(8))), EIGHT) == {}


def test_a_gpu_that_fell_off_the_bus_is_missed(tmp_path: Path) -> None:
    found = codes(machine(tmp_path, *map(gpu, range(7))), EIGHT)
    assert found == {"gpu.count": "7 GPUs are here, and the job was given machines with 8"}


def test_memory_that_cannot_be_corrected_is_told_with_its_gpu(tmp_path: Path) -> None:
    rows = [gpu(number, errors=3 if number == 5 else 0) for number in range(8)]
    found = codes(machine(tmp_path, *rows), EIGHT)
    assert found == {"gpu.ecc": "GPU 5 (NVIDIA H100 80GB HBM3) has 3 memory errors that ECC could not correct"}


def test_gpus_that_count_no_errors_are_not_blamed(tmp_path: Path) -> None:
    assert codes(machine(tmp_path, gpu(0, errors="[N/A]")), NodeNetwork(gpus=1)) == {}


def test_a_driver_that_the_network_does_not_know_is_refused(tmp_path: Path) -> None:
    found = codes(machine(tmp_path, *(gpu(number, driver="580.65.06") for number in range(8))), EIGHT)
    assert found == {"gpu.driver-version": "the GPU driver is 580.65.06, and tcpx works with >=535,<536"}


def test_a_driver_that_answers_with_an_error_is_the_nodes_fault(tmp_path: Path) -> None:
    first = "sys.exit('Unable to determine the device handle for GPU 0000:04:00.0: Unknown Error')"
    found = codes(machine(tmp_path, first=first), EIGHT)
    assert "Unable to determine the device handle" in found["gpu.driver"]


def test_a_driver_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    program = machine(tmp_path, first="time.sleep(60)") / "usr/local/nvidia/bin/nvidia-smi"
    begun = time.monotonic()
    with pytest.raises(NodeError, match="did not answer for 1 s"):
        gpus(str(program), {}, patience=1)
    assert time.monotonic() - begun < 20


def test_without_nvidia_smi_the_devices_are_counted(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert codes(tmp_path, NodeNetwork(gpus=2)) == {}
    assert [one.code for one in check_gpus(NodeNetwork(gpus=2), {"PATH": "/none"}, root=tmp_path)] == ["gpu.unseen"]
    assert set(codes(tmp_path, NodeNetwork(gpus=8))) == {"gpu.count"}


def test_a_node_without_gpus_is_not_asked(tmp_path: Path) -> None:
    assert codes(machine(tmp_path, first="sys.exit('asked')"), NodeNetwork()) == {}
