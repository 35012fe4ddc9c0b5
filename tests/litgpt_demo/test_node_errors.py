from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import (
    EXIT_CODES,
    JOB_FAULTS,
    Fault,
    RankFailure,
    decisive,
    fault_of_exception,
    fault_of_exit_code,
)


def test_every_class_comes_back_from_its_exit_code_and_another_code_is_the_machines_the_users_or_of_no_class() -> None:
    assert [fault_of_exit_code(EXIT_CODES[fault]) for fault in JOB_FAULTS] == list(JOB_FAULTS)
    assert [fault_of_exit_code(code) for code in (-signal.SIGSEGV, 2, 77)] == [Fault.NODE, Fault.USER, Fault.UNKNOWN]


# What torch 2.13, gloo and NCCL really print; our own keep their class whatever their words look like.
SAID = [
    ("litgpt_demo.errors.UserError: this would run out of memory, connection refused", Fault.USER),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Fault.OUT_OF_MEMORY),
    ("RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:51410", Fault.NETWORK),
    ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 joined", Fault.NETWORK),
    ("terminate called\nwhat(): [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(…)", Fault.HANG),
    ("ModuleNotFoundError: No module named 'triton'", Fault.USER),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", Fault.DATA),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", Fault.NODE),
    ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", Fault.DISK_FULL),
    ("RuntimeError: something unheard of", Fault.UNKNOWN),
]


def test_an_exceptions_text_says_its_class() -> None:
    assert [(text, fault_of_exception(text)) for text, _ in SAID] == SAID


def failure(rank: int, exit_code: int | None, message: str = "", *, time: float = 100.0) -> RankFailure:
    return RankFailure(local_rank=rank, exit_code=exit_code, message=message, time=time)


LOST_PEER = "RuntimeError: Connection closed by peer [10.0.0.7]:4711"


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (failure(0, 41, "KeyError: 'x'"), Fault.DATA),
        (failure(0, -signal.SIGABRT, LOST_PEER), Fault.NETWORK),
        (failure(0, -signal.SIGKILL), Fault.NODE),
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


RANK = st.builds(
    failure, st.integers(0, 7), st.sampled_from([1, 41, 43, -9, -15]), time=st.floats(0, 10),
    message=st.sampled_from(["", LOST_PEER, "DataError: bad"]),
)  # fmt: skip


@given(st.lists(RANK, min_size=1))
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
