from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import (
    EXIT_CODES,
    JOB_FAULTS,
    DataError,
    Fault,
    NetworkError,
    NodeError,
    Preempted,
    RankFailure,
    UserError,
    decisive,
    fault_of_exception,
    fault_of_exit_code,
)


@pytest.mark.parametrize("fault", JOB_FAULTS)
def test_every_class_comes_back_from_its_exit_code(fault: Fault) -> None:
    assert fault_of_exit_code(EXIT_CODES[fault]) is fault


def test_another_exit_code_is_the_machines_or_the_users_or_of_no_class() -> None:
    assert [fault_of_exit_code(code) for code in (-signal.SIGSEGV, 2, 77)] == [Fault.NODE, Fault.USER, Fault.UNKNOWN]


@pytest.mark.parametrize("kind", [UserError, DataError, NodeError, NetworkError, Preempted])
def test_our_own_exceptions_keep_their_class_in_whatever_words(kind: type[Exception]) -> None:
    error = kind("this would run out of memory, connection refused")
    assert fault_of_exception(error) is fault_of_exception(f"litgpt_demo.errors.{kind.__name__}: {error}")
    assert fault_of_exception(error) is error.fault  # type: ignore[attr-defined]


# What torch 2.13, gloo and NCCL really print.
SAID = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Fault.OUT_OF_MEMORY),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] can't allocate memory",
        Fault.OUT_OF_MEMORY,
    ),
    ("RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:51410", Fault.NETWORK),
    ("torch.distributed.DistBackendError: NCCL error in: …, ncclRemoteError: A call failed", Fault.NETWORK),
    ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 joined", Fault.NETWORK),
    ("terminate called\nwhat(): [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(…)", Fault.HANG),
    ("ModuleNotFoundError: No module named 'triton'", Fault.USER),
    ("json.decoder.JSONDecodeError: Unterminated string starting at: line 1", Fault.DATA),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", Fault.DATA),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", Fault.NODE),
    ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", Fault.DISK_FULL),
    ("OSError: [Errno 122] Disk quota exceeded", Fault.DISK_FULL),
    ("RuntimeError: something unheard of", Fault.UNKNOWN),
]


@pytest.mark.parametrize(("text", "fault"), SAID)
def test_an_exceptions_text_says_its_class(text: str, fault: Fault) -> None:
    assert fault_of_exception(text) is fault


def failure(rank: int, exit_code: int | None, message: str = "", *, time: float = 100.0) -> RankFailure:
    return RankFailure(local_rank=rank, exit_code=exit_code, message=message, time=time)


LOST_PEER = "RuntimeError: Connection closed by peer [10.0.0.7]:4711"


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (failure(0, 41, "KeyError: 'x'"), Fault.DATA),
        (failure(0, 1, "DataError: train.bin is cut off"), Fault.DATA),
        (failure(0, -signal.SIGABRT, LOST_PEER), Fault.NETWORK),
        (failure(0, -signal.SIGKILL), Fault.NODE),
        (failure(0, -signal.SIGTERM, "Preempted: saved step 12"), Fault.PREEMPTED),
        (failure(0, None, "Preempted: saved step 12"), Fault.PREEMPTED),
        (failure(0, 1), Fault.UNKNOWN),
    ],
)
def test_a_rank_failed_by_what_tells_most(one: RankFailure, fault: Fault) -> None:
    assert one.fault is fault


def test_the_cause_is_the_earliest_that_did_not_only_lose_a_peer() -> None:
    cause = failure(2, 1, "DataError: bad", time=101.0)
    others = [
        failure(0, 1, LOST_PEER, time=100.0),
        failure(1, -signal.SIGTERM, time=100.5),
        failure(3, -signal.SIGKILL, time=104.0),
    ]
    assert decisive([*others, cause]) is cause
    waited = failure(0, 1, "RuntimeError: Timed out waiting 6000ms for recv operation to complete")
    assert decisive([replace(waited, waits=True), others[2]]) is others[2], "who gave up waiting explains nobody"
    terminated = failure(2, -signal.SIGTERM, time=118.0)
    by_torchrun = failure(3, -signal.SIGTERM, LOST_PEER, time=118.0)
    assert decisive([by_torchrun, terminated]) is terminated


RANKS = st.lists(
    st.builds(
        failure,
        st.integers(0, 7),
        st.sampled_from([1, 41, 43, -9, -15]),
        st.sampled_from(["", LOST_PEER, "DataError: bad"]),
        time=st.floats(0, 10),
    ),
    min_size=1,
)


@given(RANKS)
def test_a_bystander_never_decides_while_another_failed_by_itself(ranks: list[RankFailure]) -> None:
    cause = decisive(ranks)
    assert cause is not None
    assert cause.bystander == all(rank.bystander for rank in ranks)


def test_an_exception_that_says_nothing_is_of_the_class_of_what_it_came_of() -> None:
    chain = (
        "Traceback (most recent call last):",
        "OSError: [Errno 28] No space left on device",
        "During handling of the above exception, another exception occurred:",
        "RuntimeError: the checkpoint could not be written",
    )
    assert replace(failure(0, 1, chain[-1]), traceback=chain).fault is Fault.DISK_FULL
    assert replace(failure(0, 1, chain[-1]), traceback=chain[2:]).fault is Fault.UNKNOWN
    assert replace(failure(0, 1, "KeyError: 'x'"), traceback=chain).fault is Fault.USER
