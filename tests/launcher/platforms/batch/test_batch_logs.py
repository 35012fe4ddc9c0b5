"""Log lines of all nodes, whole and once, however late and disordered they come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime

import grpc
import pytest
from batch import Cloud
from batch.entries import Entries, condition
from batch_jobs import end_of
from google.cloud.logging_v2.types import LogEntry
from waiting import until

from launcher.errors import PlatformUnreachable
from launcher.job import Job, JobId, JobState, LogLine
from launcher.platforms.batch.logs import filter_of
from launcher.platforms.batch.platform import BatchPlatform

Make = Callable[..., BatchPlatform]


def begun(cloud: Cloud, platform: BatchPlatform, job: Job) -> JobId:
    """A job whose VMs have said who they are: five lines each."""
    job_id = platform.submit(platform.render(job))
    until(lambda: sum(one.kind == "container" for one in cloud.started) == job.nodes)
    return job_id


def write(cloud: Cloud, job_id: JobId, node: int, *texts: str) -> None:
    record = cloud._service.records[job_id]
    for text in texts:
        cloud._loop.call_soon_threadsafe(record.gang.log, node, 0, text)


def followed(platform: BatchPlatform, job_id: JobId, count: int) -> list[LogLine]:
    lines: list[LogLine] = []
    position, give_up = "", time.monotonic() + 10
    while len(lines) < count and time.monotonic() < give_up:
        page = platform.logs(job_id, position)
        lines, position = [*lines, *page.lines], page.position
        time.sleep(0.02)
    assert platform.logs(job_id, position).lines == ()
    return lines


def test_lines_that_come_late_and_in_disorder_are_read_once(
    cloud: Cloud, platform_of: Make, job: Callable[..., Job]
) -> None:
    platform = platform_of()
    job_id = begun(cloud, platform, job())
    cloud.log_delay = 0.5
    for number in range(60):
        write(cloud, job_id, number % 2, f"line {number}")
    lines = followed(platform, job_id, 70)
    assert len(lines) == 70
    told = sorted((line.node, line.text) for line in lines if line.text.startswith("line "))
    assert told == sorted((number % 2, f"line {number}") for number in range(60))
    platform.cancel(job_id)


def test_a_log_of_more_than_a_page_is_read_to_its_end(cloud: Cloud, platform_of: Make, job: Callable[..., Job]) -> None:
    platform = platform_of(nodes=1)
    job_id = begun(cloud, platform, job(nodes=1))
    write(cloud, job_id, 0, *(f"line {number}" for number in range(1200)))
    lines = followed(platform, job_id, 1205)
    assert [line.text for line in lines[5:]] == [f"line {number}" for number in range(1200)]
    platform.cancel(job_id)


def test_nodes_are_told_apart_above_ten(cloud: Cloud, platform_of: Make, job: Callable[..., Job]) -> None:
    platform = platform_of()
    job_id = begun(cloud, platform, job())
    for node in (1, 10, 11):
        write(cloud, job_id, node, f"mine {node}")
    lines = followed(platform, job_id, 13)
    assert {line.node: line.text for line in lines if line.text.startswith("mine")} == {
        node: f"mine {node}" for node in (1, 10, 11)
    }
    platform.cancel(job_id)


def test_lines_of_several_lines_and_of_json_arrive_as_text(
    cloud: Cloud, platform_of: Make, job: Callable[..., Job]
) -> None:
    platform = platform_of(nodes=1)
    job_id = begun(cloud, platform, job(nodes=1))
    row = {"step": 3, "loss": 2.5, "more": {"list": [1, None, True]}}
    write(cloud, job_id, 0, "two\nlines", '{"message": "said"}', json.dumps(row))
    *_, one, two, said, structured = followed(platform, job_id, 9)
    assert (one.text, two.text, said.text) == ("two", "lines", "said")
    assert json.loads(structured.text) == row
    platform.cancel(job_id)


def test_another_life_of_the_name_is_read_from_its_beginning(
    cloud: Cloud, platform_of: Make, job: Callable[..., Job]
) -> None:
    platform = platform_of(nodes=1)
    job_id = begun(cloud, platform, job(nodes=1))
    page = platform.logs(job_id, "")
    moved = json.loads(page.position) | {"uid": "somebody-else", "newest": "2999-01-01T00:00:00+00:00"}
    assert platform.logs(job_id, json.dumps(moved)).lines == page.lines
    platform.cancel(job_id)


def test_a_job_is_not_over_before_its_last_lines_can_be_there(
    cloud: Cloud, platform_of: Make, job: Callable[..., Job]
) -> None:
    from batch_jobs import IMAGE

    cloud.options.recorded[IMAGE] = {0: 0, 1: 0}
    quick = platform_of()
    job_id = quick.submit(quick.render(job()))
    assert end_of(quick, job_id).state is JobState.SUCCEEDED
    patient = BatchPlatform(quick._settings, settle=3600)
    assert patient.status(job_id).state is JobState.RUNNING
    assert "on their way" in patient.status(job_id).native
    assert BatchPlatform(quick._settings, settle=3600, clock=lambda: time.time() + 3601).status(job_id).state.final


def test_logs_that_cannot_be_read_just_now_are_asked_for_again(
    cloud: Cloud, platform_of: Make, job: Callable[..., Job]
) -> None:
    platform = platform_of(nodes=1)
    job_id = begun(cloud, platform, job(nodes=1))
    cloud.refuse("ListLogEntries", grpc.StatusCode.RESOURCE_EXHAUSTED)
    with pytest.raises(PlatformUnreachable, match="reading the log"):
        platform.logs(job_id)
    assert len(platform.logs(job_id).lines) == 5
    platform.cancel(job_id)


def test_the_filter_says_whose_lines_and_from_when() -> None:
    since = datetime(2026, 8, 1, 12, tzinfo=UTC)
    asked = filter_of("p", "uid-1", since)
    holds = condition(asked)
    mine = LogEntry(log_name="projects/p/logs/batch_task_logs", labels={"job_uid": "uid-1"}, timestamp=since)
    assert holds(mine)
    assert not holds(LogEntry(log_name=mine.log_name, labels={"job_uid": "uid-11"}, timestamp=since))
    assert not holds(LogEntry(log_name="projects/p/logs/batch_agent_logs", labels=mine.labels, timestamp=since))
    assert not holds(
        LogEntry(log_name=mine.log_name, labels=mine.labels, timestamp=datetime(2026, 8, 1, 11, tzinfo=UTC))
    )


def test_the_stand_in_refuses_filters_that_it_does_not_know() -> None:
    entries = Entries("p", lambda: 0.0)
    entries.write("batch_task_logs", "x", {})
    with pytest.raises(Exception, match="Unparseable filter"):
        condition('severity="INFO"')
