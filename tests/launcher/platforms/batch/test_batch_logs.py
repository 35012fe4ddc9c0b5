"""Log lines of all nodes, whole and once, however late and disordered they come."""

from __future__ import annotations

import json
import random

import grpc
import pytest
from batch import Cloud
from batch_jobs import job_of, settings_of

from launcher.errors import PlatformUnreachable
from launcher.job import JobId
from launcher.platforms.batch.platform import BatchPlatform


@pytest.fixture
def platform() -> BatchPlatform:
    return BatchPlatform(settings_of())


@pytest.fixture
def job_id(cloud: Cloud, platform: BatchPlatform) -> JobId:
    return platform.submit(platform.render(job_of(settings_of())))


def test_lines_that_come_late_and_in_disorder_are_read_once_on_more_than_a_page(
    cloud: Cloud, platform: BatchPlatform, job_id: JobId
) -> None:
    # Nodes are told apart above ten.
    coming = [cloud.entry(job_id, number % 12, f"line {number}") for number in range(1200)]
    random.Random(0).shuffle(coming)
    lines, position = [], ""
    for some in (coming[:500], coming[500:1000], coming[1000:]):
        cloud.entries += some
        page = platform.logs(job_id, position)
        lines, position = [*lines, *page.lines], page.position
    expected = sorted((number % 12, f"line {number}") for number in range(1200))
    assert sorted((line.node, line.text) for line in lines) == expected
    assert platform.logs(job_id, position).lines == ()


def test_lines_of_several_lines_and_of_json_arrive_as_text(
    cloud: Cloud, platform: BatchPlatform, job_id: JobId
) -> None:
    row = {"step": 3, "loss": 2.5, "more": {"list": [1, None, True]}}
    for text in ("two\nlines", '{"message": "said"}', json.dumps(row)):
        cloud.write(job_id, 0, text)
    one, two, said, structured = platform.logs(job_id).lines
    assert (one.text, two.text, said.text) == ("two", "lines", "said")
    assert json.loads(structured.text) == row


def test_another_life_of_the_name_is_read_from_its_beginning_and_what_cannot_be_read_is_asked_for_again(
    cloud: Cloud, platform: BatchPlatform, job_id: JobId
) -> None:
    cloud.write(job_id, 1, "here")
    cloud.refuse("ListLogEntries", grpc.StatusCode.RESOURCE_EXHAUSTED)
    with pytest.raises(PlatformUnreachable, match="reading the log"):
        platform.logs(job_id)
    page = platform.logs(job_id)
    assert [line.text for line in page.lines] == ["here"]
    moved = json.loads(page.position) | {"uid": "somebody-else", "newest": "2999-01-01T00:00:00+00:00"}
    assert platform.logs(job_id, json.dumps(moved)).lines == page.lines
