"""What follows an attempt that ended badly: another one at once, after a wait, or none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.runs.diagnosis import ACTIONS, Action
from launcher.runs.index import MOST_EXCLUDED, AttemptVerdict
from launcher.runs.restarts import Again, Budget, Decision, Stop, blamed
from litgpt_demo.config import RestartSettings
from litgpt_demo.errors import JOB_FAULTS, Fault

ENDINGS = st.lists(st.tuples(st.sampled_from(JOB_FAULTS), st.booleans()), min_size=1, max_size=40)


PAUSE = Again(wait=5.0, why="the attempt ended as preempted, and left a new checkpoint")
COUNTED = [fault for fault in JOB_FAULTS if ACTIONS[fault] is Action.RESTART]


def attempts(*endings: tuple[Fault, bool]) -> list[AttemptVerdict]:
    """Attempts by how they ended, and whether each committed a new checkpoint."""
    made, step = [], 0
    for number, (fault, progressed) in enumerate(endings, start=1):
        made.append(AttemptVerdict(attempt=number, fault=fault, before=step, after=step + 10 * progressed))
        step = made[-1].after
    return made


def after(*endings: tuple[Fault, bool], max_restarts: int, **restarts: Any) -> Decision:
    settings = RestartSettings.model_validate(restarts)
    return Budget(run="owt-0123456789", max_restarts=max_restarts, settings=settings).after(attempts(*endings))


@pytest.mark.parametrize("fault", [Fault.PREEMPTED, Fault.NODE, Fault.NETWORK])
def test_a_machine_that_fails_again_and_again_costs_nothing_while_the_training_gets_on(fault: Fault) -> None:
    decided = after(*[(fault, True)] * 500, max_restarts=1)
    assert isinstance(decided, Again)
    assert decided.wait >= 5  # what costs nothing must not come back without a pause


def test_who_allows_no_new_attempt_gets_none_unless_a_machine_was_only_taken_away() -> None:
    for fault in (Fault.NODE, Fault.NETWORK):
        assert isinstance(after((fault, True), max_restarts=0), Stop)
        assert isinstance(after((fault, True), max_restarts=9, **{fault.value.replace(" ", "_"): 0}), Stop)
    assert isinstance(after(*[(Fault.PREEMPTED, True)] * 500, max_restarts=0), Again)
    assert isinstance(after((Fault.PREEMPTED, True), max_restarts=9, preempted=0), Stop)


def test_a_hang_is_counted_however_far_the_attempt_got() -> None:
    assert isinstance(after(*[(Fault.HANG, True)] * 2, max_restarts=2), Again)
    assert isinstance(after(*[(Fault.HANG, True)] * 3, max_restarts=2), Stop)


@pytest.mark.parametrize("fault", COUNTED)
def test_each_class_has_a_budget_of_its_own(fault: Fault) -> None:
    assert isinstance(after(*[(fault, False)] * 2, max_restarts=2), Again)
    assert isinstance(after(*[(fault, False)] * 3, max_restarts=2), Stop)
    others = [(other, False) for other in COUNTED if other is not fault]
    assert isinstance(after(*others * 2, *[(fault, False)] * 2, max_restarts=2), Again)


@pytest.mark.parametrize("fault", [fault for fault in JOB_FAULTS if fault is not Fault.USER])
def test_a_class_may_have_another_budget_than_max_restarts(fault: Fault) -> None:
    name = fault.value.replace(" ", "_")
    assert isinstance(after(*[(fault, False)] * 4, max_restarts=1, **{name: 4}), Again)
    assert isinstance(after(*[(fault, False)] * 5, max_restarts=1, **{name: {"attempts": 4}}), Stop)
    assert isinstance(after((fault, False), max_restarts=9, **{name: 0}), Stop)


def test_a_user_error_has_no_budget_and_can_be_given_none() -> None:
    assert after((Fault.USER, True), max_restarts=9) == Stop()
    with pytest.raises(ValidationError, match="user_error"):
        RestartSettings.model_validate({"user_error": 1})


def test_what_a_rule_leaves_out_is_the_default_of_its_class() -> None:
    given = RestartSettings.model_validate({"network_fault": 9, "preempted": {"wait": 60}, "unknown": {"wait": 1}})
    assert (given.network_fault.attempts, given.network_fault.wait, given.network_fault.forgive) == (9, 15, True)
    assert (given.preempted.attempts, given.preempted.wait, given.preempted.forgive) == (None, 60, True)
    assert given.unknown.attempts == 0
    assert given.node_fault == RestartSettings().node_fault
    with pytest.raises(ValidationError, match="attempts"):
        RestartSettings.model_validate({"network_fault": -1})


def test_a_new_checkpoint_clears_the_counts_of_the_classes_that_forgive() -> None:
    idle, busy = (Fault.PREEMPTED, False), (Fault.NODE, True)
    assert isinstance(after(*[idle, busy] * 50, idle, max_restarts=1), Again)
    assert isinstance(after((Fault.HANG, False), busy, (Fault.HANG, False), max_restarts=1), Stop)
    assert isinstance(after(*[(Fault.NODE, True)] * 2, max_restarts=1, node_fault={"forgive": False}), Stop)


def test_training_again_what_was_trained_before_is_no_progress() -> None:
    before_the_newest = AttemptVerdict(attempt=3, fault=Fault.PREEMPTED, before=100, after=90)
    assert isinstance(Budget(run="owt", max_restarts=0).after([before_the_newest]), Stop)


@pytest.mark.parametrize("fault", [fault for fault in JOB_FAULTS if ACTIONS[fault] is Action.STOP])
def test_what_comes_back_is_not_tried_again_however_far_it_got(fault: Fault) -> None:
    assert after((fault, True), max_restarts=9) == Stop()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault.NODE, ("node fault: 3 attempts", "restarts.node_fault allows 2", "verdict.json")),
        (Fault.NETWORK, ("network fault: 3 attempts", "benchmark-network")),
        (Fault.HANG, ("hang: 3 attempts ended so,", "train.hang_after")),
        (Fault.PREEMPTED, ("preempted: 3 attempts ended so without a new checkpoint", "train.checkpoint_every")),
    ],
)
def test_the_budget_that_is_used_up_is_named_with_what_helps(fault: Fault, told: tuple[str, ...]) -> None:
    decided = after((Fault.USER, False), *[(fault, False)] * 3, max_restarts=2)
    assert isinstance(decided, Stop)
    assert all(words in decided.why for words in (*told, "raise max_restarts"))


def test_who_starts_a_run_again_after_its_budget_was_used_up_has_a_new_one() -> None:
    broken = (Fault.NODE, False)
    assert isinstance(after(broken, broken, max_restarts=1), Stop)
    assert isinstance(after(broken, broken, broken, max_restarts=1), Again)
    assert isinstance(after((Fault.USER, False), broken, max_restarts=1), Again)


@given(ENDINGS, st.integers(min_value=0, max_value=5))
def test_no_more_than_the_budgets_follow_in_a_row_without_progress(
    endings: list[tuple[Fault, bool]], max_restarts: int
) -> None:
    row = 0
    for count, (_, progressed) in enumerate(endings, start=1):
        row = 0 if progressed else row + 1
        if isinstance(after(*endings[:count], max_restarts=max_restarts), Stop):
            return
        assert row <= max_restarts * len(COUNTED)


def test_a_plan_reads_what_each_class_may_cost() -> None:
    assert str(Budget(run="owt", max_restarts=3, settings=RestartSettings.model_validate({"hang": 1}))) == (
        "new attempts after node fault 3 (a new checkpoint clears the count), network fault 3 (a new checkpoint clears "
        "the count), preempted 3 (a new checkpoint clears the count), hang 1; none after user error, data error, out "
        "of memory, disk full, unknown"
    )
    assert str(Budget(run="owt", max_restarts=0)) == "no new attempts after a failure"


# --- the waits --------------------------------------------------------------------------------------------------------


def test_the_wait_doubles_up_to_its_cap_and_ends_with_the_first_progress() -> None:
    endings = [(Fault.PREEMPTED, False)] * 12
    waits = [decided.wait for n in range(1, 13) if isinstance(decided := after(*endings[:n], max_restarts=99), Again)]
    nominal = [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600, 600]
    assert all(0.75 * whole <= wait <= whole for wait, whole in zip(waits, nominal, strict=True))
    assert all(later > earlier for earlier, later in pairwise(waits[:7]))
    assert after(*endings, (Fault.PREEMPTED, True), max_restarts=99) == PAUSE


def test_each_class_has_a_wait_of_its_own() -> None:
    for fault, first in ((Fault.NODE, 5), (Fault.NETWORK, 15), (Fault.HANG, 5)):
        decided = after((fault, False), max_restarts=1)
        assert isinstance(decided, Again)
        assert 0.75 * first <= decided.wait <= first
    longer = after((Fault.HANG, False), max_restarts=1, hang={"wait": 100}, longest_wait=50)
    assert isinstance(longer, Again)
    assert 0.75 * 50 <= longer.wait <= 50
    forgiven = after((Fault.PREEMPTED, True), max_restarts=1, longest_wait=1)
    assert isinstance(forgiven, Again)
    assert forgiven.wait == 1


def test_a_wait_says_which_budget_it_takes_from() -> None:
    decided = after((Fault.HANG, True), (Fault.NODE, False), (Fault.NODE, False), max_restarts=3)
    assert isinstance(decided, Again)
    assert decided.why == ("node fault: 2 of 3 new attempts; attempts in a row that committed no new checkpoint: 2")


@given(st.integers(min_value=1, max_value=300), st.text())
def test_a_wait_is_never_longer_than_its_cap_and_is_the_same_each_time(idle: int, run: str) -> None:
    settings = RestartSettings.model_validate({"longest_wait": 60})
    budget = Budget(run=run, max_restarts=1000, settings=settings)
    decided = budget.after(attempts(*[(Fault.NODE, False)] * idle))
    assert isinstance(decided, Again)
    assert 0 < decided.wait <= 60
    assert decided == budget.after(attempts(*[(Fault.NODE, False)] * idle))


def test_jobs_that_ended_together_do_not_come_back_together() -> None:
    ended = attempts(*[(Fault.NODE, False)] * 5)
    decided = [Budget(run=f"owt-{number}", max_restarts=9).after(ended) for number in range(50)]
    assert len({round(one.wait, 3) for one in decided if isinstance(one, Again)}) > 40


# --- machines to avoid ------------------------------------------------------------------------------------------------


def blaming(*machines: str) -> list[AttemptVerdict]:
    return [
        AttemptVerdict(attempt=number, fault=Fault.NODE, before=0, after=0, machine=machine)
        for number, machine in enumerate(machines, start=1)
    ]


def test_a_machine_is_avoided_after_it_was_blamed_twice() -> None:
    assert blamed(blaming("gke-a", "gke-b"), times=2) == ()
    assert blamed(blaming("gke-a", "gke-b", "", "gke-a"), times=2) == ("gke-a",)
    assert blamed(blaming("b", "a", "a", "c", "b", "c", "c"), times=2) == ("a", "b", "c")
    assert blamed(blaming("gke-a"), times=1) == ("gke-a",)
    assert blamed(blaming("gke-a", "gke-a"), times=0) == ()


def test_where_everything_is_blamed_only_so_many_are_avoided() -> None:
    many = [f"node-{number}" for number in range(100)]
    assert len(blamed(blaming(*many, *many), times=2)) == MOST_EXCLUDED


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=12), st.sampled_from(["", "a", "b", "c"]))
def test_a_machine_that_is_avoided_stays_so_whatever_comes_later(machines: list[str], last: str) -> None:
    before, later = blamed(blaming(*machines), times=2), blamed(blaming(*machines, last), times=2)
    assert later[: len(before)] == before
    assert {*later[len(before) :]} <= {last} - {""}
