from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.job import JobState, JobStatus, LogLine
from launcher.runs.diagnosis import (
    ACTIONS,
    ADVICE,
    VERDICT,
    Action,
    Verdict,
    diagnose,
    read_verdict,
    write_verdict,
)
from launcher.runs.evidence import damaged_reports, node_reports
from litgpt_demo.errors import EXIT_CODES, JOB_FAULTS, DataError, Fault
from litgpt_demo.storage import open_storage

LOST_PEER = "RuntimeError: Connection closed by peer"
NOON = 1_000_000.0


def failed(**exit_codes: int) -> JobStatus:
    codes = {int(node.removeprefix("node")): code for node, code in exit_codes.items()}
    return JobStatus(state=JobState.FAILED, native="node 0 ended with 1", exit_codes=codes)


def rank(number: int, fault: Fault, message: str = "", *, exit_code: int | None = 1, **more: Any) -> dict[str, Any]:
    return {"rank": number, "exit_code": exit_code, "fault": fault.value, "message": message, **more}


def report(
    node: int, fault: Fault | None, *ranks: dict[str, Any], after: float = 0, message: str = ""
) -> dict[str, Any]:
    """What a node writes of its end, `after` seconds after noon."""
    code = 0 if fault is None else EXIT_CODES[fault]
    name = None if fault is None else fault.value
    return {
        "node": node, "exit_code": code, "fault": name, "message": message, "ended": NOON + after, "ranks": list(ranks),
    }  # fmt: skip


def verdict(*reports: dict[str, Any], status: JobStatus | None = None, tail: tuple[LogLine, ...] = ()) -> Verdict:
    return diagnose(status or failed(), reports, tail, logs="/runs/gpt/attempts/1")


# --- who did it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [fault for fault in JOB_FAULTS if fault is not Fault.NETWORK])
def test_a_victim_that_lost_its_peer_never_explains_the_peers_death(fault: Fault) -> None:
    nodes = [
        report(0, Fault.NETWORK, rank(0, Fault.NETWORK, LOST_PEER), after=0.5),
        report(1, fault, rank(1, fault, "what really happened"), after=0.6),
        report(2, Fault.NETWORK, rank(2, Fault.NETWORK, LOST_PEER), after=0.4),
    ]
    for order in permutations(nodes):
        found = verdict(*order)
        assert (found.fault, found.node, found.rank) == (fault, 1, 1)
        assert found.evidence == "what really happened"


def test_of_nodes_that_hang_the_one_that_fell_silent_first_is_named() -> None:
    nodes = [
        report(number, Fault.HANG, rank(number, Fault.HANG, f"Hung: rank {number}", time=NOON - silent))
        for number, silent in enumerate([900, 904, 901])
    ]
    for order in permutations(nodes):
        found = verdict(*order)
        assert (found.fault, found.node, found.rank, found.action) == (Fault.HANG, 1, 1, Action.RESTART)


def test_of_nodes_that_left_together_the_one_that_was_asked_is_named() -> None:
    left = rank(0, Fault.PREEMPTED, "Preempted: asked to leave", traceback=["Traceback (most recent call last):"])
    nodes = [
        report(number, Fault.PREEMPTED, left | {"rank": number}, after=number) | {"asked": asked}
        for number, asked in enumerate([None, NOON - 3, None])
    ]
    for order in permutations(nodes):
        found = verdict(*order)
        assert (found.node, found.rank, found.evidence) == (1, 1, "Preempted: asked to leave")


@pytest.mark.parametrize("fault", [fault for fault in JOB_FAULTS if fault is not Fault.PREEMPTED])
def test_who_was_told_to_leave_after_a_death_was_not_preempted(fault: Fault) -> None:
    culprit = report(1, fault, rank(1, fault, "it was me"), after=0)
    told = report(0, Fault.PREEMPTED, rank(0, Fault.PREEMPTED, exit_code=-15), after=5.3)
    for order in permutations([culprit, told]):
        assert (verdict(*order).fault, verdict(*order).node) == (fault, 1)


@pytest.mark.parametrize("fault", [Fault.NETWORK, Fault.UNKNOWN, Fault.NODE])
def test_a_preempted_node_explains_what_its_leaving_did_to_the_others(fault: Fault) -> None:
    left = report(1, Fault.PREEMPTED, rank(1, Fault.PREEMPTED, "Preempted: saved at step 7"), after=0.5)
    bereft = report(0, fault, rank(0, fault, "Gloo: something unheard of"), after=0.2)
    for order in permutations([left, bereft]):
        found = verdict(*order)
        assert (found.fault, found.node, found.action) == (Fault.PREEMPTED, 1, Action.RESTART)


def test_a_node_that_was_killed_without_a_word_is_the_culprit_among_those_who_lost_it() -> None:
    found = verdict(
        report(0, Fault.NETWORK, rank(0, Fault.NETWORK, LOST_PEER)),
        report(2, Fault.PREEMPTED, after=6),
        status=failed(node0=EXIT_CODES[Fault.NETWORK], node1=-9, node2=EXIT_CODES[Fault.PREEMPTED]),
    )
    assert (found.fault, found.node, found.rank) == (Fault.NODE, 1, None)
    assert found.evidence == "the node's process ended with signal 9"


@pytest.mark.parametrize("said", [Fault.PREEMPTED, Fault.NETWORK])
def test_a_node_that_was_evicted_is_the_culprit_whatever_it_still_said_itself(said: Fault) -> None:
    status = replace(failed(node0=45, node1=42), evictions={1: "evicted by its kubelet: low on memory"})
    for order in permutations([report(0, Fault.PREEMPTED, after=6), report(1, said, after=0.5)]):
        found = verdict(*order, status=status)
        assert (found.fault, found.node, found.action) == (Fault.OUT_OF_MEMORY, 1, Action.STOP)
        assert found.evidence == "evicted by its kubelet: low on memory"


def test_the_only_node_that_could_report_and_was_told_to_leave_does_not_hide_the_one_that_was_killed() -> None:
    """A preemption is not counted: the machine that kills its job would get one attempt after the other."""
    status = failed(node0=EXIT_CODES[Fault.PREEMPTED], node1=-9)
    found = verdict(report(0, Fault.PREEMPTED, after=5.5), status=status)
    assert (found.fault, found.node, found.action) == (Fault.NODE, 1, Action.RESTART)


def test_a_mistake_explains_the_peers_that_waited_for_that_node_until_they_hung() -> None:
    mistaken = report(1, Fault.USER, rank(1, Fault.USER, "NameError: name 'lr' is not defined"))
    hung = report(0, Fault.HANG, rank(0, Fault.HANG, "Hung: rank 0", time=NOON - 900))
    for order in permutations([mistaken, hung]):
        assert (verdict(*order).fault, verdict(*order).node) == (Fault.USER, 1)


@pytest.mark.parametrize(
    ("severe", "mild"),
    [
        (Fault.USER, Fault.OUT_OF_MEMORY),
        (Fault.DATA, Fault.NODE),
        (Fault.OUT_OF_MEMORY, Fault.UNKNOWN),
        (Fault.HANG, Fault.NODE),
        (Fault.NODE, Fault.UNKNOWN),
    ],
)
def test_of_two_causes_the_one_that_says_more_counts(severe: Fault, mild: Fault) -> None:
    assert verdict(report(0, mild), report(1, severe)).fault is severe
    assert verdict(report(0, severe), report(1, mild)).fault is severe


def test_of_two_alike_the_first_node_is_named() -> None:
    assert verdict(report(3, Fault.DATA), report(1, Fault.DATA)).node == 1


def test_network_errors_alone_are_a_network_fault() -> None:
    assert verdict(report(0, Fault.NETWORK), report(1, Fault.NETWORK)).fault is Fault.NETWORK


def test_nodes_that_ended_well_are_not_suspected() -> None:
    status = failed(node0=0, node1=EXIT_CODES[Fault.DATA])
    assert verdict(report(0, None), status=status).node == 1


# --- who complains of nothing -----------------------------------------------------------------------------------------

GAVE_UP = "RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation to complete"


def waited(number: int) -> dict[str, Any]:
    return rank(number, Fault.HANG, GAVE_UP, waits=True)


def enqueued(number: int, work: int) -> dict[str, Any]:
    text = f"[Rank {number}] failure detected by watchdog, last enqueued work: {work}, last completed work: {work - 1}"
    return {"source": "recorder", "rank": number, "text": text}


def test_the_rank_that_the_others_gave_up_waiting_for_is_named() -> None:
    nodes = [
        report(0, Fault.HANG, waited(0), waited(1)),
        report(1, Fault.HANG, waited(3), rank(2, Fault.NODE, exit_code=-15)),
    ]
    for order in permutations(nodes):
        found = verdict(*order)
        assert (found.fault, found.node, found.rank, found.action) == (Fault.HANG, 1, 2, Action.RESTART)
        assert GAVE_UP in found.evidence


def test_a_hung_node_that_was_only_asked_to_leave_is_named_with_its_rank() -> None:
    asked = report(1, Fault.PREEMPTED, after=6) | {"asked": NOON + 5.5, "stopped": [1]}
    found = verdict(report(0, Fault.HANG, waited(0)), asked)
    assert (found.fault, found.node, found.rank) == (Fault.HANG, 1, 1)


def test_where_several_complained_of_nothing_their_node_is_named_and_no_rank() -> None:
    nodes = [report(0, Fault.HANG, waited(0), waited(1)), report(1, Fault.HANG, waited(2)) | {"stopped": [3, 4]}]
    assert (verdict(*nodes).node, verdict(*nodes).rank) == (1, None)


def test_the_rank_that_began_the_fewest_collectives_is_the_one_that_hangs() -> None:
    nodes = [
        report(0, Fault.HANG, waited(0)) | {"traces": [enqueued(0, 41)]},
        report(1, Fault.HANG, waited(1)) | {"traces": [enqueued(1, 40)]},
        report(2, Fault.HANG, waited(2)) | {"traces": [enqueued(2, 41)]},
    ]
    for order in permutations(nodes):
        found = verdict(*order)
        assert (found.fault, found.node, found.rank) == (Fault.HANG, 1, 1)
        assert found.evidence.startswith("it had begun 40 collectives, and each other rank at least 41")


def test_a_rank_whose_stacks_do_not_wait_comes_before_those_that_do() -> None:
    silent = rank(3, Fault.HANG, "Hung: rank 3", time=NOON - 1)
    nodes = [
        report(0, Fault.HANG, rank(0, Fault.HANG, "Hung: rank 0", time=NOON - 9, waits=True)),
        report(1, Fault.HANG, silent),
    ]
    for order in permutations(nodes):
        assert verdict(*order).rank == 3


def test_a_process_that_was_stopped_explains_those_that_went_on_when_it_did() -> None:
    nodes = [
        report(0, Fault.HANG, rank(0, Fault.HANG, "Hung: rank 0", time=NOON - 9)),
        report(1, Fault.HANG, rank(3, Fault.HANG, "Hung: rank 3", time=NOON - 1, held=True)),
    ]
    for order in permutations(nodes):
        assert verdict(*order).rank == 3


def test_a_node_that_left_nothing_at_all_is_the_one_that_the_others_lost() -> None:
    lost = [report(number, Fault.NETWORK, rank(number, Fault.NETWORK, LOST_PEER)) for number in (0, 2)]
    found = diagnose(failed(), lost, (), logs="/", nodes=3)
    assert (found.fault, found.node, found.rank) == (Fault.NODE, 1, None)
    mistaken = report(2, Fault.USER, rank(2, Fault.USER, "KeyError: 'x'"))
    assert diagnose(failed(), [lost[0], mistaken], (), logs="/", nodes=3).node == 2


def test_a_node_whose_program_ended_too_early_explains_who_lost_it() -> None:
    found = verdict(report(0, Fault.NETWORK, rank(0, Fault.NETWORK, LOST_PEER)), report(1, None))
    assert (found.fault, found.node) == (Fault.USER, 1)


# --- what the kernel said ---------------------------------------------------------------------------------------------

OFF_THE_BUS = "NVRM: Xid (PCI:0000:4e:00): 79, pid=2431, name=python, GPU has fallen off the bus."


def kernel(text: str) -> dict[str, Any]:
    return {"traces": [{"source": "kernel", "rank": None, "text": text}]}


@pytest.mark.parametrize("fault", [Fault.UNKNOWN, Fault.NETWORK, Fault.HANG, Fault.NODE])
def test_a_gpu_that_fell_off_the_bus_explains_whatever_else_its_node_and_the_others_saw(fault: Fault) -> None:
    broken = report(1, fault, rank(2, fault, "RuntimeError: CUDA error")) | kernel(OFF_THE_BUS)
    other = report(0, Fault.HANG, rank(0, Fault.HANG, "Hung: rank 0", time=NOON - 900))
    for order in permutations([broken, other]):
        found = verdict(*order)
        assert (found.fault, found.node, found.action) == (Fault.NODE, 1, Action.RESTART)
        assert OFF_THE_BUS in found.evidence


def test_an_error_of_the_programs_own_in_the_kernels_log_blames_no_machine() -> None:
    mistaken = report(0, Fault.USER, rank(0, Fault.USER, "CUDA error: an illegal memory access")) | kernel(
        "NVRM: Xid (PCI:0000:4e:00): 31, pid=2431, name=python, MMU Fault"
    )
    assert verdict(mistaken).fault is Fault.USER


def test_a_rank_that_the_kernel_killed_for_memory_was_out_of_memory() -> None:
    killed = report(0, Fault.NODE, rank(0, Fault.NODE, exit_code=-9)) | kernel("Out of memory: Killed process 4711")
    assert verdict(killed).fault is Fault.OUT_OF_MEMORY
    segfault = report(0, Fault.NODE, rank(0, Fault.NODE, exit_code=-11)) | kernel("Out of memory: Killed process 1")
    assert verdict(segfault).fault is Fault.NODE


# --- where it is kept -------------------------------------------------------------------------------------------------


def test_a_verdict_is_stored_once_and_read_again(tmp_path: Path) -> None:
    attempt = open_storage(str(tmp_path))
    assert read_verdict(attempt) is None
    found = verdict(report(1, Fault.HANG, rank(3, Fault.HANG, "Hung: rank 3")) | {"host": "gke-pool-1"})
    assert write_verdict(attempt, found)
    assert not write_verdict(attempt, verdict(report(0, Fault.USER)))
    stored = read_verdict(attempt)
    assert stored is not None
    assert (stored.code, stored.fault, stored.node, stored.rank) == ("attempt.hang", Fault.HANG, 1, 3)
    assert (stored.host, stored.evidence, stored.action) == ("gke-pool-1", ("Hung: rank 3",), Action.RESTART)
    assert stored.advice == ADVICE[Fault.HANG]


def test_however_much_a_node_says_the_evidence_that_is_stored_is_bounded(tmp_path: Path) -> None:
    attempt = open_storage(str(tmp_path))
    long = rank(0, Fault.USER, "x" * 100_000, traceback=["y" * 100_000] * 1000)
    write_verdict(attempt, verdict(report(0, Fault.USER, long) | {"host": "z" * 100_000}))
    stored = read_verdict(attempt)
    assert stored is not None
    assert len(stored.evidence) == 60
    assert max(map(len, stored.evidence)) == 1000


@pytest.mark.parametrize("damaged", [b"", b"[]", b'{"format": 1}', b'{"format": 1, "node": -1}'])
def test_a_verdict_that_somebody_else_wrote_is_refused(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / VERDICT).write_bytes(damaged)
    with pytest.raises(DataError, match=r"verdict\.json"):
        read_verdict(open_storage(str(tmp_path)))


# --- on what evidence -------------------------------------------------------------------------------------------------


def test_the_rank_that_explains_the_others_comes_first_in_a_report_and_is_the_one_named() -> None:
    """A rank killed by a signal leaves no words; the words of the peer that lost it are no evidence."""
    killed = rank(2, Fault.NODE, exit_code=-9)
    found = verdict(
        report(1, Fault.NODE, killed, rank(3, Fault.NETWORK, LOST_PEER), message="local rank 0 was killed by signal 9")
    )
    assert (found.rank, found.evidence) == (2, "local rank 0 was killed by signal 9")


def test_the_traceback_is_shown() -> None:
    lines = ["Traceback (most recent call last):", '  File "mine.py", line 3', "ValueError: no"]
    found = verdict(report(0, Fault.UNKNOWN, rank(0, Fault.UNKNOWN, "ValueError: no", traceback=lines)))
    assert found.evidence.splitlines() == ["ValueError: no", *(f"    {line}" for line in lines)]


@pytest.mark.parametrize(
    ("one", "evidence"),
    [
        (report(0, Fault.NODE, message="node.port: port 4000 is in use"), "node.port: port 4000 is in use"),
        (report(0, Fault.NODE, rank(0, Fault.NODE, exit_code=None)), "ended with exit code 43"),
        (report(0, Fault.HANG), "ended with exit code 46"),
    ],
)
def test_without_a_ranks_own_words_the_nodes_count(one: dict[str, Any], evidence: str) -> None:
    assert verdict(one).evidence == evidence


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        *((EXIT_CODES[fault], fault) for fault in JOB_FAULTS),
        (2, Fault.USER),
        (-9, Fault.NODE),
        (137, Fault.UNKNOWN),
        (EXIT_CODES[Fault.CANCELLED], Fault.UNKNOWN),  # a user's own script may end with it
    ],
)
def test_where_there_is_no_report_the_exit_code_says_what_it_can(code: int, fault: Fault) -> None:
    found = verdict(status=failed(node4=code))
    assert (found.fault, found.node) == (fault, 4)
    assert str(abs(code)) in found.evidence


def test_where_nothing_is_known_the_platforms_word_and_the_last_lines_are_shown() -> None:
    status = JobStatus(state=JobState.FAILED, native="supervisor lost")
    tail = tuple(LogLine(0, f"line {number}") for number in range(40))
    found = verdict(status=status, tail=tail)
    assert (found.fault, found.node, found.action) == (Fault.NODE, None, Action.RESTART)
    assert found.evidence.splitlines()[0] == "supervisor lost; last lines:"
    assert found.evidence.splitlines()[1:] == [f"[node 0] line {number}" for number in range(25, 40)]


def test_where_there_is_no_log_either_the_verdict_says_so_and_announces_no_lines() -> None:
    found = verdict(status=JobStatus(state=JobState.FAILED, native="supervisor lost"))
    assert found.evidence == "supervisor lost; its nodes left neither a report nor a line of log"


def test_words_of_a_platform_that_name_a_full_disk_are_of_that_class() -> None:
    native = "a node could not be started: [Errno 28] No space left on device: 'node-0.log'"
    found = verdict(status=JobStatus(state=JobState.FAILED, native=native))
    assert (found.fault, found.action) == (Fault.DISK_FULL, Action.STOP)


def test_reports_are_read_from_the_attempts_folder_and_torchruns_own_files_are_none(tmp_path: Path) -> None:
    attempt = open_storage(str(tmp_path))
    reports = [report(0, Fault.USER, rank(1, Fault.USER, "UserError: no", time=NOON)), report(12, None)]
    for one in reports:
        attempt.write(f"node-{one['node']}.json", json.dumps(one).encode())
    for other in ("node-0.log", "result.json", "node-0/ranks/failures.json", "node-0/ranks/r_1/attempt_0/0/error.json"):
        attempt.write(other, b'{"ranks": []}')
    found = node_reports(attempt)
    assert [(one["node"], one["exit_code"]) for one in found] == [(0, 40), (12, 0)]
    assert verdict(*found) == verdict(*reports)
    assert node_reports(attempt.within("empty")) == []


@pytest.mark.parametrize("damaged", [b"", b"[]", b"null", b"\xff", b'{"node": "x"}', b'{"node": 1, "exit_code": 40}'])
def test_a_damaged_report_counts_as_none_and_the_exit_code_is_left(tmp_path: Path, damaged: bytes) -> None:
    attempt = open_storage(str(tmp_path))
    attempt.write("node-1.json", damaged)
    assert node_reports(attempt) == []
    assert verdict(*node_reports(attempt), status=failed(node1=42)).fault is Fault.OUT_OF_MEMORY


# --- whose machine is to blame ----------------------------------------------------------------------------------------

VICTIMS = ("lost its peer", "waited", "was asked to leave", "terminated", "ended well")
ENDS = (*VICTIMS, "gone", "killed", "process killed", "hung", "out of memory", "wrong", "preempted")


def end_of(node: int, how: str) -> dict[str, Any] | None:
    """The report that a node leaves of such an end; None where it leaves none."""
    match how:
        case "lost its peer":
            return report(node, Fault.NETWORK, rank(node, Fault.NETWORK, LOST_PEER), after=1)
        case "waited":
            return report(node, Fault.HANG, rank(node, Fault.HANG, "Timed out", waits=True, time=NOON))
        case "was asked to leave":
            return report(node, Fault.PREEMPTED, after=60) | {"asked": NOON + 30}
        case "ended well":
            return report(node, None)
        case "process killed":
            return report(node, Fault.NODE, rank(node, Fault.NODE, exit_code=-9), after=1)
        case "hung":
            return report(node, Fault.HANG, rank(node, Fault.HANG, "Hung: silent", time=NOON))
        case "out of memory":
            return report(node, Fault.OUT_OF_MEMORY, rank(node, Fault.OUT_OF_MEMORY, "OutOfMemoryError: 3 GB"))
        case "wrong":
            return report(node, Fault.USER, rank(node, Fault.USER, "ValueError: 3"))
        case "preempted":
            return report(node, Fault.PREEMPTED) | {"asked": NOON}
        case _:
            return None


def judged(ends: Sequence[str], order: Sequence[int]) -> Verdict:
    """The verdict where machine `m<i>` ended as `ends[i]` says, and was the node `order[i]`."""
    machines = {node: f"m{machine}" for machine, node in enumerate(order)}
    reports = [end_of(node, how) for node, how in zip(order, ends, strict=True)]
    told = [one | {"host": machines[one["node"]]} for one in reports if one is not None]
    codes = {one["node"]: one["exit_code"] for one in told}
    killed = {"killed": -9, "terminated": -15}
    codes |= {node: killed[how] for node, how in zip(order, ends, strict=True) if how in killed}
    status = JobStatus(state=JobState.FAILED, native="failed", exit_codes=codes, hosts=machines)
    return diagnose(status, told, (), logs="/attempts/1", nodes=len(ends))


@given(st.lists(st.sampled_from(ENDS), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_neither_a_victim_nor_one_of_several_that_may_have_been_it_is_blamed(ends: list[str], chance: Random) -> None:
    order = list(range(len(ends)))
    found = judged(ends, order)
    if found.machine:
        how = ends[int(found.machine[1:])]
        assert how in {"gone", "killed", "process killed", "hung"}
        assert ends.count(how) == 1
        assert found.fault in {Fault.NODE, Fault.HANG}
    # Which number a machine had as a node says nothing.
    chance.shuffle(order)
    assert judged(ends, order).machine == found.machine


@pytest.mark.parametrize("how", ["gone", "killed", "process killed", "hung"])
def test_the_one_machine_that_the_others_lost_is_to_blame_and_named_in_the_verdict(how: str, tmp_path: Path) -> None:
    found = judged(["lost its peer", how, "lost its peer"], [0, 1, 2])
    assert (found.machine, found.clear) == ("m1", True)
    assert "machine: m1" in str(found)
    folder = open_storage(str(tmp_path))
    write_verdict(folder, found)
    stored = read_verdict(folder)
    assert stored is not None
    assert (stored.host, stored.clear) == ("m1", True)


def test_pods_that_were_ended_with_the_first_that_failed_are_its_victims() -> None:
    found = judged(["terminated", "killed", "terminated"], [0, 1, 2])
    assert (found.node, found.machine) == (1, "m1")


@pytest.mark.parametrize("host", ["Workstation", "a b", "a" * 64, "-x", "{evil}", ""])
def test_what_can_be_no_label_is_no_machine_to_avoid(host: str) -> None:
    found = diagnose(failed(node0=43), [report(0, Fault.NODE, rank(0, Fault.NODE)) | {"host": host}], (), logs="/1")
    assert found.machine == ""


# --- what follows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", JOB_FAULTS)
def test_every_fault_has_one_action_and_advice(fault: Fault) -> None:
    assert isinstance(ACTIONS[fault], Action)
    assert ADVICE[fault]


@pytest.mark.parametrize(
    ("action", "faults"),
    [
        (Action.STOP, {Fault.USER, Fault.DATA, Fault.OUT_OF_MEMORY, Fault.DISK_FULL, Fault.UNKNOWN}),
        (Action.RESTART, {Fault.NODE, Fault.NETWORK, Fault.HANG, Fault.PREEMPTED}),
    ],
)
def test_only_what_another_machine_or_another_time_may_mend_is_tried_again(action: Action, faults: set[Fault]) -> None:
    assert {fault for fault in JOB_FAULTS if ACTIONS[fault] is action} == faults


def test_a_verdict_reads_as_who_what_why_and_what_to_do() -> None:
    found = verdict(report(1, Fault.OUT_OF_MEMORY, rank(9, Fault.OUT_OF_MEMORY, "OutOfMemoryError: 3 GB")))
    who, advice, logs = str(found).splitlines()
    assert who == "out of memory on node 1, rank 9: OutOfMemoryError: 3 GB"
    assert "halve train.micro_batch" in advice
    assert logs.strip() == "logs: /runs/gpt/attempts/1"


@pytest.mark.parametrize("fault", sorted(set(Fault) - set(JOB_FAULTS)))
def test_a_report_with_a_class_that_no_node_ends_with_counts_as_none(fault: Fault, tmp_path: Path) -> None:
    (tmp_path / "node-0.json").write_text(json.dumps(report(0, Fault.NODE) | {"fault": fault.value}))
    (tmp_path / "node-1.json").write_text(json.dumps(report(1, Fault.NODE)))
    assert [one["node"] for one in node_reports(open_storage(str(tmp_path)))] == [1]


# --- whatever a node writes -------------------------------------------------------------------------------------------

FORGED = {
    "infinite time": {"ended": float("inf")},
    "an exit code of 400 digits": {"exit_code": 10**400},
    "an exit code of 5,000 digits": '{"node":0,"fault":null,"message":"","ended":1,"exit_code":1' + "0" * 5000 + "}",
    "nested": '{"node":' + "[" * 100_000,
    "half a surrogate pair": '{"node":0,"exit_code":1,"fault":null,"ended":1,"message":"\\ud800"}',
    "another node's number": {"node": 1},
    "a million ranks": {"ranks": [{"rank": None}] * 1_000_000},
    "9 MB": {"message": "x" * 9_000_000},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_report_beyond_the_limits_counts_as_none_and_is_told_of(forged: dict[str, Any] | str, tmp_path: Path) -> None:
    text = forged if isinstance(forged, str) else json.dumps(report(0, Fault.NODE) | forged)
    (tmp_path / "node-0.json").write_text(text)
    assert node_reports(open_storage(str(tmp_path)), bad := damaged_reports()) == []
    assert str(bad).startswith("1 nodes' reports could not be read; the first: ")
    assert len(str(bad)) < 1000


def test_a_long_message_and_traceback_are_cut(tmp_path: Path) -> None:
    first = rank(0, Fault.USER, "E" * 1_000_000) | {"traceback": ["line"] * 100_000}
    (tmp_path / "node-0.json").write_text(json.dumps(report(0, Fault.USER, first)))
    assert len(verdict(*node_reports(open_storage(str(tmp_path)))).evidence) < 20_000


SMALL = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(SMALL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner))


@given(
    st.binary(max_size=300)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from(["node", "exit_code", "fault", "message", "ended", "asked", "ranks"]), JSON, max_size=7
    ).map(lambda changes: json.dumps(report(0, Fault.HANG, rank(1, Fault.HANG, "Hung: 1")) | changes).encode())
)
def test_whatever_a_report_holds_there_is_a_verdict(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "node-0.json").write_bytes(content)
        reports = node_reports(open_storage(folder))
    str(verdict(*reports, status=failed(node0=43)))
