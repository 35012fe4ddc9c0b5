"""Slurm's states, reasons and lists of nodes, in our words."""

from __future__ import annotations

import pytest

from launcher.job import JobState
from launcher.platforms.slurm.states import (
    SEPARATOR,
    QueuedJob,
    endings,
    hosts,
    is_refused,
    job_state,
    node_code,
    pending,
    queued,
)


def waiting(reason: str, start: float | None = None) -> QueuedJob:
    return QueuedJob(
        number="1", name="a", state="PENDING", reason=reason, start=start, end=None, nodes=(), comment=""
    )  # fmt: skip


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", []),
        ("n0", ["n0"]),
        ("n[0-2,7]", ["n0", "n1", "n2", "n7"]),
        ("login,gpu[008-010]", ["login", "gpu008", "gpu009", "gpu010"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("n[0-1]-ib", ["n0-ib", "n1-ib"]),
    ],
)
def test_lists_of_nodes_are_read_as_slurm_writes_them(listed: str, names: list[str]) -> None:
    assert list(hosts(listed)) == names


def test_a_word_that_is_not_known_stops_nothing() -> None:
    assert job_state("HIBERNATING") is JobState.UNKNOWN
    assert job_state("CANCELLED by 1000") is JobState.CANCELLED
    assert job_state("CANCELLED+") is JobState.CANCELLED


def test_a_copy_of_a_job_that_runs_on_another_cluster_of_a_federation_says_nothing_of_its_end() -> None:
    assert job_state("REVOKED") is JobState.UNKNOWN


def test_lines_that_are_none_of_squeue_s_are_left_out() -> None:
    row = SEPARATOR.join(("7_3", "RUNNING", "None", "1700000000", "N/A", "n[0-1]", "owt-1", "any | thing"))
    assert queued(f"welcome to the cluster\n{row}\n{row[:20]}\n") == [
        QueuedJob(
            number="7_3",
            name="owt-1",
            state="RUNNING",
            reason="None",
            start=1.7e9,
            end=None,
            nodes=("n0", "n1"),
            comment="any | thing",
        )
    ]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs of a higher priority come first (Priority)"),
        ("Resources", "waits until enough nodes are free"),
        ("AssocGrpGRES", "all jobs together are at the limit on GPUs or other resources for the account"),
        ("QOSMaxJobsPerUserLimit", "it is at the limit on running jobs for you under the QOS"),
        ("QOSGrpCpuLimit", "all jobs together are at the limit on CPUs for the QOS"),
        ("AssocMaxWallDurationPerJobLimit", "it is at the limit on running time for the account"),
        ("QOSMaxGRESPerUser", "GPUs or other resources for you under the QOS"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", "nodes that it needs are down, drained or reserved"),
        ("PartitionTimeLimit", "its time limit is above the partition's"),
        ("JobHeldUser", "somebody with your account holds it"),
        ("BadConstraints", "no node has what it asks for"),
        ("SomethingNew", "Slurm says SomethingNew"),
    ],
)
def test_the_reason_why_a_job_waits_is_told_in_words(reason: str, words: str) -> None:
    assert words in pending(waiting(reason)).what
    assert pending(waiting(reason)).fix


def test_a_start_that_slurm_expects_is_told_to_ten_minutes() -> None:
    first, again = (pending(waiting("Priority", 1_700_000_000 + seconds)).what for seconds in (1, 60))
    assert "expects it to start about 2023-11-1" in first
    assert first == again, "a scheduler that changes its mind by seconds is no news"


def test_what_no_waiting_changes_is_refused() -> None:
    for reason in ("PartitionTimeLimit", "InvalidAccount", "QOSMaxWallDurationPerJobLimit", "AssocMaxCpuPerJobLimit"):
        assert is_refused(reason), reason
    for reason in ("Priority", "Resources", "AssocGrpGRES", "QOSMaxJobsPerUserLimit", "JobHeldUser", "PartitionDown"):
        assert not is_refused(reason), reason


@pytest.mark.parametrize(
    ("state", "codes", "down", "known", "told"),
    [
        ("FAILED", {0: 41, 1: 45}, (), {0: 41, 1: 45}, set()),
        ("TIMEOUT", {0: 45}, (), {0: 45, 1: 45}, {1}),
        ("TIMEOUT", {0: -9, 1: 43}, (), {0: 45, 1: 43}, {0}),
        ("PREEMPTED", {}, (), {0: 45, 1: 45}, {0, 1}),
        ("NODE_FAIL", {}, ("b",), {0: -15, 1: 43}, {1}),
        ("NODE_FAIL", {0: 45, 1: 44}, ("b",), {0: 45, 1: 43}, {1}),
        ("NODE_FAIL", {0: 44}, (), {0: 44, 1: 43}, {1}),
        ("BOOT_FAIL", {}, ("a",), {0: 43, 1: -15}, {0}),
        ("OUT_OF_MEMORY", {0: 45, 1: -9}, (), {0: 45, 1: 42}, {1}),
        ("OUT_OF_MEMORY", {0: 42, 1: 45}, (), {0: 42, 1: 45}, set()),
        ("DEADLINE", {}, (), {0: 40, 1: 40}, {0, 1}),
    ],
)
def test_nodes_that_could_not_tell_end_as_slurm_s_word_says(
    state: str, codes: dict[int, int], down: tuple[str, ...], known: dict[int, int], told: set[int]
) -> None:
    found, words = endings(state, codes, 2, script=None, on={0: "a", 1: "b"}, down=down)
    assert (found, set(words)) == (known, told)
    assert all(state in text for text in words.values())


def test_nodes_that_were_all_killed_are_told_from_a_script_that_ended_before_they_began() -> None:
    assert endings("FAILED", {}, 2, script=137, on={}, down=()) == ({0: -9, 1: -9}, {})
    known, told = endings("FAILED", {}, 2, script=40, on={}, down=())
    assert (known, "before its nodes began" in told[0]) == ({0: 40}, True)


def test_a_shell_s_code_of_a_signal_is_the_signal() -> None:
    assert [node_code(code) for code in (0, 41, 137, 143, 255)] == [0, 41, -9, -15, 255]
