from __future__ import annotations

import json

from launcher.job import LogLine
from launcher.runs.log_choice import LogChoice, Tail

HELLO = LogLine(0, "node 0 starts")
LINES = [HELLO, LogLine(0, "[rank0]: a"), LogLine(0, "[rank1]: b"), LogLine(1, "[rank2]: c")]


def row(**values: object) -> str:
    return "[rank0]:@litgpt-metrics " + json.dumps({"kind": "step", "step": 1, **values})


def test_without_a_wish_all_lines_are_wanted() -> None:
    assert list(LogChoice().among(LINES)) == LINES


def test_lines_of_nodes_and_of_ranks_are_told_apart() -> None:
    assert list(LogChoice(nodes=[1]).among(LINES)) == LINES[3:]
    assert list(LogChoice(ranks=[0, 2]).among(LINES)) == [LINES[1], LINES[3]]
    assert list(LogChoice(nodes=[0], ranks=[2]).among(LINES)) == []


def test_the_platforms_time_of_a_line_decides_whether_it_is_recent() -> None:
    old, new = LogLine(0, "old", 99.0), LogLine(0, "new", 100.0)
    assert list(LogChoice(since=100.0).among([old, new, HELLO])) == [new, HELLO]


def test_where_the_platform_tells_no_time_a_line_has_that_of_the_metrics_before_it() -> None:
    choice = LogChoice(since=1000.0)
    before = [LogLine(0, row(kind="start", node_started=900.0, elapsed=5.0)), LogLine(0, "old")]
    later = [LogLine(0, row(elapsed=101.0)), LogLine(0, "new"), LogLine(1, "of another node")]
    assert list(choice.among(before)) == []
    assert list(choice.among(later)) == later


def test_the_tail_is_of_each_node() -> None:
    tail = Tail(1)
    tail.add(LINES[:2])
    tail.add(LINES[2:])
    assert tail.lines() == LINES[2:]
