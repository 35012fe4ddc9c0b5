import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.__main__ import main
from litgpt_demo.errors import (
    JOB_FAILURE_CLASSES,
    FailureClass,
    RankFailure,
    fault_of_exception,
    fault_of_exit_code,
    root_cause,
)


def test_exit_code_gives_its_class_back() -> None:
    """Another code is the machine's, the user's or of no class."""
    assert [fault_of_exit_code(fault.exit_code) for fault in JOB_FAILURE_CLASSES] == list(JOB_FAILURE_CLASSES)
    assert [fault_of_exit_code(code) for code in (-signal.SIGSEGV, 2, 77)] == [
        FailureClass.NODE,
        FailureClass.USER,
        FailureClass.UNKNOWN,
    ]


# What torch 2.13, gloo and NCCL really print; our own keep their class whatever their words look like.
SAID = [
    ("litgpt_demo.errors.UserError: this would run out of memory, connection refused", FailureClass.USER),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", FailureClass.OUT_OF_MEMORY),
    (
        "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:51410",
        FailureClass.NETWORK,
    ),
    (
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 joined",
        FailureClass.NETWORK,
    ),
    ("terminate called\nwhat(): [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(…)", FailureClass.HANG),
    ("ModuleNotFoundError: No module named 'triton'", FailureClass.USER),
    (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        FailureClass.DATA,
    ),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", FailureClass.NODE),
    ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", FailureClass.DISK_FULL),
    ("RuntimeError: something unheard of", FailureClass.UNKNOWN),
]


def test_an_exceptions_text_says_its_class() -> None:
    assert [(text, fault_of_exception(text)) for text, _ in SAID] == SAID


GPU_STOPPED = [
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "torch.AcceleratorError: CUDA error: unspecified launch failure",
    "torch.AcceleratorError: CUDA error: misaligned address",
    "torch.AcceleratorError: CUDA error: unknown error",
    "RuntimeError: CUDA driver error: unknown error",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle, …)`",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "what():  [PG ID 0 Rank 3] Process group watchdog thread terminated with exception: CUDA error: an illegal memory "
    "access was encountered",
]


def test_a_gpu_that_stops_in_a_programs_work_is_a_node_fault() -> None:
    assert {text: fault_of_exception(text) for text in GPU_STOPPED} == dict.fromkeys(GPU_STOPPED, FailureClass.NODE)


def test_a_gpus_memory_or_assertion_is_no_node_fault() -> None:
    full = ("CUDA driver error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    assert {fault_of_exception(f"RuntimeError: {text}") for text in full} == {FailureClass.OUT_OF_MEMORY}
    assertion = "torch.AcceleratorError: CUDA error: device-side assert triggered"
    assert fault_of_exception(assertion) is FailureClass.USER, "an index out of range comes back on every machine"


def failure(code: int | None, message: str = "", *, time: float = 100.0) -> RankFailure:
    return RankFailure(local_rank=0, exit_code=code, message=message, time=time)


LOST_PEER = "RuntimeError: Connection closed by peer [10.0.0.7]:4711"


def test_a_rank_failed_by_what_tells_most() -> None:
    reports = {
        FailureClass.DATA: failure(41, "KeyError: 'x'"),
        FailureClass.NETWORK: failure(-signal.SIGABRT, LOST_PEER),
        FailureClass.NODE: failure(-signal.SIGKILL),
        FailureClass.PREEMPTED: failure(None, "Preempted: saved step 12"),
        FailureClass.UNKNOWN: failure(1),
    }
    assert {fault: report.fault for fault, report in reports.items()} == {fault: fault for fault in reports}


def test_the_cause_is_the_earliest_that_did_not_only_lose_a_peer() -> None:
    cause, killed = failure(1, "DataError: bad", time=101.0), failure(-signal.SIGKILL, time=104.0)
    assert root_cause([failure(1, LOST_PEER), failure(-signal.SIGTERM, time=100.5), killed, cause]) is cause
    waited = failure(1, "RuntimeError: Timed out waiting 6000ms for recv operation to complete")
    assert root_cause([replace(waited, waits=True), killed]) is killed, "who gave up waiting explains nobody"
    terminated, by_torchrun = failure(-signal.SIGTERM), failure(-signal.SIGTERM, LOST_PEER)
    assert root_cause([by_torchrun, terminated]) is terminated


RANK = st.builds(
    failure, st.sampled_from([1, 41, 43, -9, -15]), time=st.floats(0, 10),
    message=st.sampled_from(["", LOST_PEER, "DataError: bad"]),
)  # fmt: skip


@given(st.lists(RANK, min_size=1))
def test_bystander_never_decides_when_another_rank_failed(ranks: list[RankFailure]) -> None:
    cause = root_cause(ranks)
    assert cause.secondary == all(rank.secondary for rank in ranks)


def test_unknown_exception_has_the_class_of_its_cause() -> None:
    chain = (
        "Traceback (most recent call last):",
        "OSError: [Errno 28] No space left on device",
        "During handling of the above exception, another exception occurred:",
        "RuntimeError: the checkpoint could not be written",
    )
    assert replace(failure(1, chain[-1]), traceback=chain).fault is FailureClass.DISK_FULL
    assert replace(failure(1, chain[-1]), traceback=chain[2:]).fault is FailureClass.UNKNOWN
    assert replace(failure(1, "KeyError: 'x'"), traceback=chain).fault is FailureClass.USER


@pytest.mark.parametrize("command", ["train", "collect"])
def test_commands_refuse_packages_from_another_place(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before they import them."""
    (tmp_path / "litgpt.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main([command, "--run", str(tmp_path)]) == 40
    assert f"Python would load litgpt from {tmp_path}/litgpt.py, but litgpt 0.5" in capsys.readouterr().err


def test_returned_command_exits_before_python_shuts_down() -> None:
    """Native threads that need Python would abort the process: `-v` tells what it removes at its end."""
    command = [sys.executable, "-v", "-m", "litgpt_demo", "-h"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("`python -m litgpt_demo")
    assert "# cleanup" not in done.stderr
