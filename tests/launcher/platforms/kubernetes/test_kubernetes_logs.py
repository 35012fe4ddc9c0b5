"""Logs of all nodes, merged: every line once, whatever breaks in between."""

from datetime import UTC, datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_cluster import Cluster
from kubernetes_jobs import begun, kubernetes
from waiting import until

from launcher.errors import PlatformUnreachable
from launcher.job import JobId, JobState, LogLine
from launcher.platforms.kubernetes import logs
from launcher.platforms.kubernetes.logs import LogCursor
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from litgpt_demo.errors import EXIT_CODES, FailureClass


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_PAUSES", (0.02,))


def say(cluster: Cluster, node: int, *lines: str) -> None:
    pod = cluster.pods(f"demo-1-000000-nodes-0-{node}-")[0]["metadata"]["name"]
    for line in lines:
        cluster.say(pod, line)


def read(platform: KubernetesPlatform, job_id: JobId, position: str = "", *, lines: int) -> tuple[list[LogLine], str]:
    """So many lines behind a position, or all until the job ends, as who follows it gets them; and where that is."""
    found: list[LogLine] = []

    def enough() -> bool:
        nonlocal position
        over = platform.status(job_id).state.is_final
        page = platform.logs(job_id, position)
        position = page.position
        found.extend(page.lines)
        return over or len(found) >= lines

    until(enough)
    return found, position


def texts(lines: list[LogLine], node: int = 0) -> list[str]:
    return [line.text for line in lines if line.node == node]


def test_logs_lose_and_repeat_no_line_when_a_connection_breaks(cluster: Cluster, tmp_path: Path) -> None:
    cluster.cut_logs(*(range(7, 2000, 61)))
    platform, job_id = begun(cluster, tmp_path)
    written = [f"line {number}" for number in range(120)]
    for node in (0, 1):
        say(cluster, node, *written[:60])
    first, position = read(platform, job_id, lines=60)
    for node in (0, 1):
        say(cluster, node, *written[60:])
    cluster.finish("demo")
    rest, _ = read(platform, job_id, position, lines=240)
    assert texts(first + rest) == texts(first + rest, 1) == written
    times = [line.time or 0.0 for line in first + rest if line.node == 0]
    assert (times[0] > 0, times == sorted(times)) == (True, True)


def test_position_returns_the_same_lines_to_every_reader(cluster: Cluster, tmp_path: Path) -> None:
    """An answer may be lost on its way, or the orchestrator die; its successor has the position, or none at all."""
    platform, job_id = begun(cluster, tmp_path)
    say(cluster, 0, "a", "b")
    _, before = read(platform, job_id, lines=2)
    say(cluster, 0, "c")
    until(lambda: platform.logs(job_id, before).lines)
    say(cluster, 0, "d")
    until(lambda: len(platform.logs(job_id, before).lines) == 2)
    platform.close()
    assert texts(read(kubernetes(cluster), job_id, before, lines=2)[0]) == ["c", "d"]
    assert texts(read(kubernetes(cluster), job_id, lines=4)[0]) == ["a", "b", "c", "d"]
    cluster.answer(503, resource="pods/log")
    with pytest.raises(PlatformUnreachable):  # no page without the lines
        kubernetes(cluster).logs(job_id)


def test_next_life_of_a_node_has_its_own_log(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path, in_place_restarts=1)
    say(cluster, 0, "first life")
    first, position = read(platform, job_id, lines=1)
    cluster.finish("-0-1", code=EXIT_CODES[FailureClass.NODE])
    until(lambda: platform.status(job_id).restarts == 1)
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    say(cluster, 0, "second life")
    second, _ = read(platform, job_id, position, lines=1)
    assert (texts(first), texts(second)) == (["first life"], ["second life"])


# --- positions --------------------------------------------------------------------------------------------------------

BEGIN = datetime(2026, 10, 25, 0, 59, 56, tzinfo=UTC)
ZONES = st.sampled_from([(0, 0), (2, 1), (-7, -8), (5.5, 5.5)])
"""Hours from UTC before and after summer time ends, within the log, where the machine's clock is set back."""


def stamp(moment: datetime, zone: tuple[float, float]) -> str:
    """As a machine in that zone stamps a line."""
    offset = timedelta(hours=zone[moment >= BEGIN + timedelta(seconds=4)])
    return moment.astimezone(timezone(offset)).isoformat().replace("+00:00", "Z")


@settings(max_examples=200)
@given(zone=ZONES, thirds=st.lists(st.integers(0, 20), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=6))
def test_reading_from_any_cursor_returns_each_line_once(
    zone: tuple[float, float], thirds: list[int], cuts: list[int]
) -> None:
    """In any zone; some lines are of the very same moment, and the API gives all of the second it is asked from."""
    moments = [BEGIN + timedelta(seconds=third // 3, milliseconds=third % 3 * 100) for third in sorted(thirds)]
    log = [(moment, f"{stamp(moment, zone)} line {number}".encode()) for number, moment in enumerate(moments)]
    place, got = LogCursor(), list[str]()
    for cut in [*sorted(cuts), len(log) + 1]:
        since: Any = [line for at, line in log if not place.since or at >= datetime.fromisoformat(place.since)]
        for text, behind in islice(logs._lines(since, place, "pod"), max(0, cut - len(got))):
            got.append(text)
            place = behind
    assert got == [f"line {number}" for number in range(len(log))]


def test_line_without_a_stamp_keeps_the_cursor_of_the_last_one() -> None:
    lines: Any = [b"2026-10-25T03:00:00.5+02:00 one", b"failed to create fsnotify watcher: too many open files"]
    *_, (text, place) = logs._lines(lines, LogCursor(), "pod")
    assert (text, place.since) == (lines[1].decode(), "2026-10-25T01:00:00Z")
