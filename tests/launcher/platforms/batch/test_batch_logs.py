"""Log lines of all nodes, whole and once, however late and disordered they come."""

from __future__ import annotations

import json

import grpc
import pytest
from batch import Cloud
from batch_jobs import job_of, settings_of
from waiting import until

from launcher.errors import PlatformUnreachable
from launcher.job import JobId
from launcher.platforms.batch.platform import BatchPlatform

LINES = 5
"""That a VM writes when it has started: who it is."""


def begun(cloud: Cloud, platform: BatchPlatform) -> JobId:
    job_id = platform.submit(platform.render(job_of(settings_of())))
    until(lambda: len(cloud.entries.visible) == 2 * LINES)
    return job_id


def write(cloud: Cloud, job_id: JobId, node: int, *texts: str) -> None:
    for text in texts:
        cloud.records[job_id].log(node, 0, text)


def test_lines_that_come_late_and_in_disorder_are_read_once_on_more_than_a_page(cloud: Cloud) -> None:
    platform = BatchPlatform(settings_of())
    job_id = begun(cloud, platform)
    cloud.entries.held = True
    for number in range(1200):
        write(cloud, job_id, number % 12, f"line {number}")  # nodes are told apart above ten
    lines, position = [], ""
    while cloud.entries.waiting or not position:
        cloud.entries.release(500)
        page = platform.logs(job_id, position)
        lines, position = [*lines, *page.lines], page.position
    written = [(line.node, line.text) for line in lines if line.text.startswith("line ")]
    assert sorted(written) == sorted((number % 12, f"line {number}") for number in range(1200))
    assert platform.logs(job_id, position).lines == ()


def test_lines_of_several_lines_and_of_json_arrive_as_text(cloud: Cloud) -> None:
    platform = BatchPlatform(settings_of())
    job_id = begun(cloud, platform)
    row = {"step": 3, "loss": 2.5, "more": {"list": [1, None, True]}}
    write(cloud, job_id, 0, "two\nlines", '{"message": "said"}', json.dumps(row))
    *_, one, two, said, structured = platform.logs(job_id).lines
    assert (one.text, two.text, said.text) == ("two", "lines", "said")
    assert json.loads(structured.text) == row


def test_another_life_of_the_name_is_read_from_its_beginning(cloud: Cloud) -> None:
    platform = BatchPlatform(settings_of())
    job_id = begun(cloud, platform)
    page = platform.logs(job_id, "")
    moved = json.loads(page.position) | {"uid": "somebody-else", "newest": "2999-01-01T00:00:00+00:00"}
    assert platform.logs(job_id, json.dumps(moved)).lines == page.lines


def test_logs_that_cannot_be_read_just_now_are_asked_for_again(cloud: Cloud) -> None:
    platform = BatchPlatform(settings_of())
    job_id = begun(cloud, platform)
    cloud.refuse("ListLogEntries", grpc.StatusCode.RESOURCE_EXHAUSTED)
    with pytest.raises(PlatformUnreachable, match="reading the log"):
        platform.logs(job_id)
    assert len(platform.logs(job_id).lines) == 2 * LINES
