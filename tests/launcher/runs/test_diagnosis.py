"""The diagnosis of a failure: its class, the node and rank that caused it, on what evidence, and what follows.

tests/faults scores it on recorded failures; here are the rules, one at a time.
"""

import json
import time
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
from launcher.runs.diagnosis import Action, Diagnosis, diagnose
from litgpt_demo.documents import Unreadable
from litgpt_demo.errors import EXIT_CODES, JOB_FAILURE_CLASSES, FailureClass
from litgpt_demo.node.evidence import gather
from litgpt_demo.runs import NodeReport, node_reports
from litgpt_demo.storage import open_storage

LOST_PEER = "RuntimeError: Connection closed by peer"
NOON = 1_000_000.0


def failed(**exit_codes: int) -> JobStatus:
    codes = {int(node.removeprefix("node")): code for node, code in exit_codes.items()}
    return JobStatus(state=JobState.FAILED, native="node 0 ended with 1", exit_codes=codes)


def rank(number: int, message: str = "", *, exit_code: int | None = 1, **more: Any) -> dict[str, Any]:
    return {"rank": number, "exit_code": exit_code, "message": message, **more}


def report(node: int, fault: FailureClass | None, *ranks: dict[str, Any], after: float = 0, **more: Any) -> NodeReport:
    """What a node writes of its end, `after` seconds after noon."""
    shown = {"exit_code": 0 if fault is None else EXIT_CODES[fault], "fault": None if fault is None else fault.value}
    shown |= {"node": node, "message": "", "ended": NOON + after, "ranks": ranks}
    return NodeReport.model_validate(shown | more)


def lost(node: int, *, after: float = 0) -> NodeReport:
    return report(node, FailureClass.NETWORK, rank(node, LOST_PEER), after=after)


def hung(node: int, *, silent: float, **more: Any) -> NodeReport:
    return report(node, FailureClass.HANG, rank(node, f"Hung: rank {node}", time=NOON - silent, **more))


def diagnosis(*reports: NodeReport, status: JobStatus | None = None) -> Diagnosis:
    """The diagnosis of these reports, which is the same in any order."""
    found = {diagnose(status or failed(), some, (), logs="/runs/1") for some in permutations(reports)}
    assert len(found) == 1
    return found.pop()


def culprit(*reports: NodeReport, status: JobStatus | None = None) -> tuple[Any, ...]:
    found = diagnosis(*reports, status=status)
    return found.fault, found.node, found.rank


def test_victim_that_lost_a_peer_never_explains_its_death() -> None:
    for fault in {*JOB_FAILURE_CLASSES} - {FailureClass.NETWORK}:
        did = report(1, fault, rank(1, "what really happened"), after=0.6)
        found = diagnosis(lost(0, after=0.5), did, lost(2, after=0.4))
        assert (found.fault, found.node, found.rank, found.evidence) == (fault, 1, 1, "what really happened")
    assert culprit(lost(0), lost(2))[0] is FailureClass.NETWORK


def test_hang_names_the_node_that_fell_silent_first() -> None:
    assert culprit(hung(0, silent=900), hung(1, silent=904), hung(2, silent=901)) == (FailureClass.HANG, 1, 1)
    # Its peers' stacks say that they wait; a stopped process explains those that went on when it did.
    assert culprit(hung(0, silent=9, waits=True), hung(3, silent=1)) == (FailureClass.HANG, 3, 3)
    assert culprit(hung(0, silent=9), hung(3, silent=1, held=True)) == (FailureClass.HANG, 3, 3)


def test_killed_silent_node_is_the_culprit() -> None:
    """A preemption is not counted: the machine that kills its job would get one attempt after the other."""
    status = failed(node0=EXIT_CODES[FailureClass.NETWORK], node1=-9, node2=EXIT_CODES[FailureClass.PREEMPTED])
    found = diagnosis(lost(0), report(2, FailureClass.PREEMPTED, after=6), status=status)
    assert (found.fault, found.node, found.rank) == (FailureClass.NODE, 1, None)
    assert found.evidence == "the node's process ended with signal 9"
    status = failed(node0=EXIT_CODES[FailureClass.PREEMPTED], node1=-9)
    assert culprit(report(0, FailureClass.PREEMPTED, after=5.5), status=status) == (FailureClass.NODE, 1, None)


def test_evicted_node_is_the_culprit_whatever_it_reported() -> None:
    for expected in (FailureClass.PREEMPTED, FailureClass.NETWORK):
        status = replace(failed(node0=45, node1=42), evictions={1: "low on memory"})
        found = diagnosis(report(0, FailureClass.PREEMPTED, after=6), report(1, expected, after=0.5), status=status)
        assert (found.fault, found.node, found.action) == (FailureClass.OUT_OF_MEMORY, 1, Action.STOP)
        assert found.evidence == "low on memory"
    both = replace(failed(node0=-9, node1=-9), evictions={1: "evicted by its kubelet"})
    assert culprit(status=both) == (FailureClass.NODE, 1, None), "it comes before those that ended with it"


def test_more_specific_cause_wins_before_the_first_node() -> None:
    for severe, mild in (
        (FailureClass.USER, FailureClass.OUT_OF_MEMORY),
        (FailureClass.DATA, FailureClass.NODE),
        (FailureClass.HANG, FailureClass.NODE),
    ):
        assert culprit(report(0, mild), report(1, severe))[:2] == (severe, 1)
    assert culprit(report(3, FailureClass.DATA), report(1, FailureClass.DATA))[:2] == (FailureClass.DATA, 1)
    assert culprit(report(1, FailureClass.USER, rank(1, "NameError: 'lr'")), hung(0, silent=900)) == (
        FailureClass.USER,
        1,
        1,
    )


def test_evidence_is_the_message_of_the_culprit() -> None:
    """With its traceback, unless the error is one of ours."""
    lines = ["Traceback (most recent call last):", "litgpt_demo.errors.DiskFull: /d is full"]
    found = diagnosis(report(0, FailureClass.DISK_FULL, rank(0, "DiskFull: /d is full", traceback=lines)))
    assert found.evidence == "DiskFull: /d is full"
    lines = ["Traceback (most recent call last):", '  File "mine.py", line 3', "ValueError: no"]
    found = diagnosis(report(0, FailureClass.UNKNOWN, rank(0, "ValueError: no", traceback=lines)))
    assert found.evidence.splitlines() == ["ValueError: no", *(f"    {line}" for line in lines)]
    killed = report(1, FailureClass.NODE, rank(2, exit_code=-9), rank(3, LOST_PEER), message="killed by signal 9")
    assert diagnosis(killed).evidence == "killed by signal 9", "the words of the peer that lost it are no evidence"
    assert diagnosis(report(0, FailureClass.HANG)).evidence == "ended with exit code 46"


def test_broken_hardware_explains_even_an_error_of_the_program() -> None:
    lost = {"source": "kernel", "text": "NVRM: Xid (PCI:0000:4e:00): 79, pid=2431, GPU has fallen off the bus."}
    error = rank(0, "IndexError: index 4096 is out of bounds", step=30)
    found = diagnosis(report(0, FailureClass.USER, error, traces=[lost], host="gke-a"))
    assert (found.fault, found.machine, found.step) == (FailureClass.NODE, "gke-a", None)
    by_program = lost | {"text": lost["text"].replace(" 79,", " 31,")}
    assert diagnosis(report(0, FailureClass.USER, error, traces=[by_program])).fault is FailureClass.USER


@pytest.mark.parametrize("message", ["", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."])
def test_memory_kills_of_a_container_explain_a_killed_process(message: str, tmp_path: Path) -> None:
    """Also if the kernel's log cannot be read, as in most containers. Else a healthy machine would be blamed."""
    [trace, *_] = gather({}, recorders=tmp_path, since=time.time(), killed=1)
    traces = [{"source": trace.source, "text": trace.text}]
    killed = rank(0, message, exit_code=1 if message else -9)
    found = diagnosis(report(0, FailureClass.NODE, killed, traces=traces))
    assert found.fault is FailureClass.OUT_OF_MEMORY
    assert trace.text in found.evidence


def test_a_gpu_that_stopped_says_at_which_step() -> None:
    error = rank(3, "torch.AcceleratorError: CUDA error: unspecified launch failure", step=417)
    found = diagnosis(report(1, FailureClass.NODE, error, host="gke-b"), lost(0))
    assert (found.step, found.machine) == (417, "gke-b")
    assert diagnosis(report(1, FailureClass.NODE, rank(3, "uncorrectable ECC error", step=417))).step is None


def test_without_reports_platform_exit_code_or_last_lines_count() -> None:
    status = JobStatus(state=JobState.FAILED, native="supervisor lost")
    found = diagnose(status, (), [LogLine(0, f"line {number}") for number in range(40)], logs="/1")
    assert (found.fault, found.node, found.action) == (FailureClass.NODE, None, Action.RESTART)
    last = [f"[node 0] line {number}" for number in range(25, 40)]
    assert found.evidence.splitlines() == ["supervisor lost; last lines:", *last]
    query = "its nodes left neither a report nor a log line"
    assert diagnose(status, [report(0, None)], (), logs="/1").evidence == f"supervisor lost; {query}"
    for code, fault in (
        (EXIT_CODES[FailureClass.DATA], FailureClass.DATA),
        (2, FailureClass.USER),
        (-9, FailureClass.NODE),
        (137, FailureClass.UNKNOWN),
    ):
        assert culprit(status=failed(node4=code)) == (fault, 4, None)
    full = replace(status, native="[Errno 28] No space left on device")
    assert diagnosis(status=full).fault is FailureClass.DISK_FULL


def test_diagnosis_has_bounded_evidence() -> None:
    long = rank(0, "x" * 100_000, traceback=["y" * 100_000] * 1000)
    found = diagnosis(report(1, FailureClass.HANG, long, host="gke-pool-1"))
    assert found.lines == ("x" * 1000, *["    " + "y" * 996] * 59)


VICTIMS = ("lost its peer", "waited", "was asked to leave", "terminated", "ended well")
CULPRITS = ("gone", "killed", "process killed", "hung")
ENDS = (*VICTIMS, *CULPRITS, "out of memory", "wrong", "preempted")


def end_of(node: int, how: str) -> NodeReport | None:
    """The report that a node leaves of such an end; None where it leaves none."""
    return {
        "lost its peer": lost(node, after=1),
        "waited": report(node, FailureClass.HANG, rank(node, "Timed out waiting 6000ms", waits=True)),
        "was asked to leave": report(node, FailureClass.PREEMPTED, after=60, signalled_at=NOON + 30),
        "ended well": report(node, None),
        "process killed": report(node, FailureClass.NODE, rank(node, exit_code=-9), after=1),
        "hung": hung(node, silent=0),
        "out of memory": report(node, FailureClass.OUT_OF_MEMORY, rank(node, "OutOfMemoryError: 3 GB")),
        "wrong": report(node, FailureClass.USER, rank(node, "ValueError: 3")),
        "preempted": report(node, FailureClass.PREEMPTED, signalled_at=NOON),
    }.get(how)


def judged(ends: Sequence[str], order: Sequence[int]) -> Diagnosis:
    """The diagnosis where machine `m<i>` ended as `ends[i]` says, and was the node `order[i]`."""
    machines = {node: f"m{machine}" for machine, node in enumerate(order)}
    reports = [end_of(node, how) for node, how in zip(order, ends, strict=True)]
    shown = [entry.model_copy(update={"host": machines[entry.node]}) for entry in reports if entry is not None]
    killed = {node: {"killed": -9, "terminated": -15}.get(how) for node, how in zip(order, ends, strict=True)}
    codes = {entry.node: entry.exit_code for entry in shown} | {node: code for node, code in killed.items() if code}
    status = JobStatus(state=JobState.FAILED, native="failed", exit_codes=codes, hosts=machines)
    return diagnose(status, shown, (), logs="/attempts/1", nodes=len(ends))


@given(st.lists(st.sampled_from(ENDS), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_no_victim_or_one_of_several_suspects_is_blamed(ends: list[str], chance: Random) -> None:
    order = list(range(len(ends)))
    if (found := judged(ends, order)).machine:
        how = ends[int(found.machine[1:])]
        assert (how in CULPRITS, ends.count(how)) == (True, 1)
    # Which number a machine had as a node says nothing.
    chance.shuffle(order)
    assert judged(ends, order).machine == found.machine


def test_the_one_machine_that_the_others_lost_is_to_blame() -> None:
    for how in CULPRITS:
        found = judged(["lost its peer", how, "lost its peer"], [0, 1, 2])
        assert (found.machine, found.clear) == ("m1", True), how
        assert "machine: m1" in str(found)
    assert judged(["terminated", "killed", "terminated"], [0, 1, 2]).machine == "m1"
    for host in ("Workstation", "a b", "a" * 64, "{evil}"):  # what can be no label cannot be avoided
        assert diagnosis(report(0, FailureClass.NODE, rank(0), host=host), status=failed(node0=43)).machine == ""


@pytest.mark.parametrize(
    "forged",
    [
        '{"node":0,"fault":null,"message":"","ended":1,"exit_code":1' + "0" * 5000 + "}",
        '{"node":0,"exit_code":1,"fault":null,"ended":1,"message":"\\ud800"}',
        report(1, FailureClass.NODE).model_dump_json(),
        json.dumps(report(0, FailureClass.NODE).model_dump(mode="json") | {"message": "x" * 9_000_000}),
    ],
    ids=["digits", "half a surrogate pair", "another node's", "9 MB"],
)
def test_a_report_beyond_the_limits_counts_as_none(forged: str, tmp_path: Path) -> None:
    (tmp_path / "node-0.json").write_text(forged)
    assert node_reports(open_storage(str(tmp_path)), bad := Unreadable("nodes' reports")) == []
    assert len(str(bad)) < 1000


SMALL = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(SMALL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner))
HUNG = hung(0, silent=1).model_dump(mode="json")
FIELDS = st.sampled_from(["node", "exit_code", "fault", "message", "ended", "signalled_at", "ranks"])


@given(
    st.binary(max_size=300)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(FIELDS, JSON).map(lambda changes: json.dumps(HUNG | changes).encode())
)
def test_any_content_of_a_report_has_a_diagnosis(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "node-0.json").write_bytes(content)
        reports = node_reports(open_storage(folder))
    str(diagnosis(*reports, status=failed(node0=43)))
