"""Logs of all nodes, merged: every line once, whatever breaks in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from gke_jobs import begun, gke
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_cluster import Cluster
from waiting import until

from launcher.job import JobId, JobState, LogLine
from launcher.platforms.kubernetes import logs
from launcher.platforms.kubernetes.logs import Place
from launcher.platforms.kubernetes.platform import GkePlatform
from litgpt_demo.errors import EXIT_CODES, Fault


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_PAUSES", (0.02,))


def say(cluster: Cluster, node: int, *lines: str) -> None:
    pod = cluster.pods(f"demo-1-nodes-0-{node}-")[0]["metadata"]["name"]
    for line in lines:
        cluster.say(pod, line)


class Reader:
    """Follows a job as the launcher does: the status, then a page of its logs."""

    def __init__(self, platform: GkePlatform, job_id: JobId, position: str = "") -> None:
        self.platform, self.job_id, self.position = platform, job_id, position
        self.lines: list[LogLine] = []

    def look(self) -> bool:
        over = self.platform.status(self.job_id).state.final
        page = self.platform.logs(self.job_id, self.position)
        self.position = page.position
        self.lines += page.lines
        return over

    def of(self, node: int) -> list[str]:
        return [line.text for line in self.lines if line.node == node]

    def until(self, count: int) -> None:
        until(lambda: self.look() or len(self.lines) >= count)


def test_a_broken_connection_loses_and_doubles_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.cut_logs(*(range(7, 2000, 61)))
    reader = Reader(*begun(cluster, tmp_path))
    told = [f"line {number}" for number in range(120)]
    for begin in range(0, 120, 20):
        for node in (0, 1):
            say(cluster, node, *told[begin : begin + 20])
        reader.look()
    cluster.finish("demo")
    until(reader.look)
    assert reader.of(0) == reader.of(1) == told


def test_a_position_gives_the_same_lines_again_to_whoever_has_it(cluster: Cluster, tmp_path: Path) -> None:
    """An answer may be lost on its way, or the orchestrator die; its successor has the position, or none at all."""
    reader = Reader(*begun(cluster, tmp_path))
    say(cluster, 0, "a")
    say(cluster, 1, "b")
    reader.until(2)
    before = reader.position
    say(cluster, 0, "c")
    until(lambda: reader.platform.logs(reader.job_id, before).lines)
    say(cluster, 0, "d")
    until(lambda: len(reader.platform.logs(reader.job_id, before).lines) == 2)
    reader.platform.close()
    successor, beginner = Reader(gke(cluster), reader.job_id, before), Reader(gke(cluster), reader.job_id)
    successor.until(2)
    beginner.until(4)
    assert (successor.of(0), beginner.of(0)) == (["c", "d"], ["a", "c", "d"])


def test_the_next_life_of_a_node_has_a_log_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    reader = Reader(*begun(cluster, tmp_path, restarts=1))
    say(cluster, 0, "first life")
    reader.until(1)
    cluster.finish("-0-1", code=EXIT_CODES[Fault.NODE])
    until(lambda: reader.look() or reader.platform.status(reader.job_id).restarts == 1)
    until(lambda: reader.platform.status(reader.job_id).state is JobState.RUNNING)
    say(cluster, 0, "second life")
    reader.until(2)
    cluster.finish("demo")
    until(reader.look)
    assert reader.of(0) == ["first life", "second life"]


# --- positions --------------------------------------------------------------------------------------------------------


def file(seconds: list[int]) -> list[bytes]:
    """A log's lines: times in order, several in one second, some at the very same moment."""
    moments = [f"2026-01-01T00:00:{second // 3:02d}.{second % 3}00000000Z" for second in sorted(seconds)]
    return [f"{moment} line {number}".encode() for number, moment in enumerate(moments)]


@settings(max_examples=200, deadline=None)
@given(
    seconds=st.lists(st.integers(0, 20), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_reading_on_from_any_line_gives_every_line_once(seconds: list[int], cuts: list[int]) -> None:
    whole, place, got = file(seconds), Place(), []
    for cut in [*sorted(cuts), len(whole) + 1]:
        # The API gives all lines of the second that it is asked from.
        since = [line for line in whole if line.decode()[:19] + "Z" >= place.since]
        stop = max(0, cut - len(got))
        for count, (text, behind) in enumerate(logs._lines(since, place, "pod")):  # type: ignore[arg-type]
            if count >= stop:
                break
            got.append(text)
            place = behind
    assert got == [f"line {number}" for number in range(len(whole))]
