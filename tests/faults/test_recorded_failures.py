"""The diagnosis of recorded failures: how often its class and its culprit are right, and what it says."""

from bench.diagnosis import ASKED, first_rank, last_traceback, score
from launcher.runs.diagnosis import ADVICE
from tests.faults.case import cases, judged

EVERY = tuple(cases())


def test_class_and_culprit_are_right_but_for_the_class_of_one() -> None:
    classes, culprits, wrong = score(judged, EVERY)
    assert wrong == ["nan-detected-1-of-2x1: unknown of node 1, rank 1; it was user error of node 1, rank 1"]
    assert min(classes, culprits) >= ASKED
    for judge in (first_rank, last_traceback):  # neither torchrun's first rank nor the last traceback is as good
        assert max(score(judge, EVERY)[:2]) < ASKED


def test_diagnosis_has_bounded_evidence_with_one_action() -> None:
    for case in EVERY:
        diagnosis = judged(case)
        assert 0 < len(diagnosis.lines) <= 60, case.name
        assert all(len(line) <= 1000 for line in diagnosis.lines), case.name
        assert diagnosis.fault in ADVICE
