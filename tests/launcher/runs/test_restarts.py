"""What follows an attempt that ended badly: another one at once, after a wait, or none."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runs.diagnosis import ACTIONS, Action
from launcher.runs.index import AttemptVerdict
from launcher.runs.restarts import Again, Backoff, Budget, Decision, Stop
from litgpt_demo.errors import JOB_FAULTS, Fault

ENDINGS = st.lists(st.tuples(st.sampled_from(JOB_FAULTS), st.booleans()), min_size=1, max_size=40)


PAUSE = Again(wait=5.0, why="the attempt was preempted")


def attempts(*endings: tuple[Fault, bool]) -> list[AttemptVerdict]:
    """Attempts by how they ended, and whether each committed a new checkpoint."""
    made, step = [], 0
    for number, (fault, progressed) in enumerate(endings, start=1):
        made.append(AttemptVerdict(attempt=number, fault=fault, before=step, after=step + 10 * progressed))
        step = made[-1].after
    return made


def after(*endings: tuple[Fault, bool], max_restarts: int) -> Decision:
    return Budget(run="owt-0123456789", max_restarts=max_restarts).after(attempts(*endings))


def test_a_machine_taken_away_again_and_again_costs_nothing_while_the_training_gets_on() -> None:
    assert after(*[(Fault.PREEMPTED, True)] * 500, max_restarts=0) == PAUSE


def test_a_preemption_without_a_new_checkpoint_is_counted_as_a_fault_is() -> None:
    for fault in (Fault.PREEMPTED, Fault.NODE):
        assert isinstance(after(*[(fault, False)] * 2, max_restarts=2), Again)
        assert isinstance(after(*[(fault, False)] * 3, max_restarts=2), Stop)
    assert isinstance(after((Fault.NODE, False), (Fault.PREEMPTED, False), max_restarts=1), Stop)


def test_a_new_checkpoint_clears_the_count_of_preemptions_and_not_that_of_faults() -> None:
    idle, busy = (Fault.PREEMPTED, False), (Fault.PREEMPTED, True)
    assert isinstance(after(*[idle, busy] * 50, idle, max_restarts=1), Again)
    assert isinstance(after((Fault.NODE, True), busy, (Fault.NODE, True), max_restarts=1), Stop)


def test_training_again_what_was_trained_before_is_no_progress() -> None:
    before_the_newest = AttemptVerdict(attempt=3, fault=Fault.PREEMPTED, before=100, after=90)
    assert isinstance(Budget(run="owt", max_restarts=0).after([before_the_newest]), Stop)


@pytest.mark.parametrize("fault", [fault for fault in JOB_FAULTS if ACTIONS[fault] is Action.STOP])
def test_what_comes_back_is_not_tried_again_however_far_it_got(fault: Fault) -> None:
    assert after((fault, True), max_restarts=9) == Stop()


def test_what_was_used_up_is_said_with_what_helps() -> None:
    told = after((Fault.NODE, True), (Fault.PREEMPTED, False), (Fault.PREEMPTED, False), max_restarts=2)
    assert isinstance(told, Stop)
    assert "max_restarts=2 new attempts are used up" in told.why
    assert "ended with a fault: 1" in told.why
    assert "committed no new checkpoint: 2" in told.why
    assert "train.checkpoint_every" in told.why


def test_who_starts_a_run_again_after_its_budget_was_used_up_has_a_new_one() -> None:
    broken = (Fault.NODE, False)
    assert isinstance(after(broken, broken, max_restarts=1), Stop)
    assert isinstance(after(broken, broken, broken, max_restarts=1), Again)
    assert isinstance(after((Fault.USER, False), broken, max_restarts=1), Again)


@given(ENDINGS, st.integers(min_value=0, max_value=5))
def test_no_more_than_the_budget_follow_in_a_row_without_progress(
    endings: list[tuple[Fault, bool]], max_restarts: int
) -> None:
    row = 0
    for count, (_, progressed) in enumerate(endings, start=1):
        row = 0 if progressed else row + 1
        if isinstance(after(*endings[:count], max_restarts=max_restarts), Stop):
            return
        assert row <= max_restarts


# --- the waits --------------------------------------------------------------------------------------------------------


def test_the_wait_doubles_up_to_its_cap_and_ends_with_the_first_progress() -> None:
    endings = [(Fault.PREEMPTED, False)] * 12
    waits = [decided.wait for n in range(1, 13) if isinstance(decided := after(*endings[:n], max_restarts=99), Again)]
    nominal = [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600, 600]
    assert all(0.75 * whole <= wait <= whole for wait, whole in zip(waits, nominal, strict=True))
    assert all(later > earlier for earlier, later in pairwise(waits[:7]))
    assert after(*endings, (Fault.PREEMPTED, True), max_restarts=99) == PAUSE


@given(ENDINGS)
def test_after_a_preemption_there_is_a_pause_however_far_the_attempt_got(endings: list[tuple[Fault, bool]]) -> None:
    for progressed in (False, True):
        decided = after(*endings, (Fault.PREEMPTED, progressed), max_restarts=99)
        assert isinstance(decided, Again)
        assert decided.wait >= Backoff().first


def test_a_wait_says_why() -> None:
    decided = after((Fault.NODE, True), (Fault.NODE, False), (Fault.PREEMPTED, False), max_restarts=3)
    assert isinstance(decided, Again)
    assert decided.why == "attempts in a row that committed no new checkpoint: 2"


@given(st.integers(min_value=1, max_value=100_000), st.text())
def test_a_wait_is_never_longer_than_its_cap_and_is_the_same_each_time(idle: int, seed: str) -> None:
    wait = Backoff(most=60).seconds(idle, seed)
    assert 0 < wait <= 60
    assert wait == Backoff(most=60).seconds(idle, seed)


def test_jobs_that_ended_together_do_not_come_back_together() -> None:
    assert len({round(Backoff().seconds(5, f"owt-{number}"), 3) for number in range(50)}) > 40
