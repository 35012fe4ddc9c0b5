"""The verdict on recorded failures: how often its class and its culprit are right, and what the record holds."""

from __future__ import annotations

from collections import Counter

from bench.verdict import ASKED, first_rank, last_traceback, ours, score
from launcher.runs.diagnosis import ADVICE
from litgpt_demo.errors import JOB_FAULTS
from tests.faults.case import CASES, cases, judged

EVERY = tuple(cases())


def test_at_least_sixty_failures_are_recorded_and_half_of_them_were_held_out() -> None:
    assert len(EVERY) >= 60
    assert 2 * sum(case.held_out for case in EVERY) >= len(EVERY)
    counted = Counter(case.how for case in EVERY)
    assert counted["made"] > counted["documented"]
    assert {case.fault for case in EVERY} == set(JOB_FAULTS) - {"unknown"}


def test_class_and_culprit_are_right_but_for_the_class_of_one() -> None:
    classes, culprits, wrong = score(ours, EVERY)
    assert wrong == ["nan-detected-1-of-2x1: unknown of node 1, rank 1; it was user error of node 1, rank 1"]
    assert min(classes, culprits) >= ASKED


def test_neither_torchruns_first_rank_nor_the_last_traceback_is_as_good() -> None:
    for judge in (first_rank, last_traceback):
        classes, culprits, _ = score(judge, EVERY)
        assert max(classes, culprits) < ASKED


def test_every_verdict_has_evidence_within_bounds_and_one_action() -> None:
    for case in EVERY:
        verdict = judged(case)
        assert 0 < len(verdict.lines) <= 60, case.name
        assert all(len(line) <= 1000 for line in verdict.lines), case.name
        assert verdict.finding.fix == ADVICE[verdict.fault]


def test_nothing_recorded_names_the_machine_that_it_was_made_on() -> None:
    text = CASES.read_text()
    assert not any(name in text for name in ("/root", "/tmp/", "/home/"))
