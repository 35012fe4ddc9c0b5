"""What follows an attempt that ended badly: another one at once, after a wait, or none."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.config import RunConfig, ScriptConfig
from launcher.runs.diagnosis import RESTARTED, Action, Diagnosis
from launcher.runs.index import MOST_EXCLUDED, AttemptDiagnosis
from launcher.runs.restarts import RestartPolicy, nodes_to_exclude, without_machine
from litgpt_demo.config import RestartSettings, TrainConfig
from litgpt_demo.errors import JOB_FAILURE_CLASSES, FailureClass

Ending = tuple[FailureClass, bool]
"""How an attempt ended, and whether it committed a new checkpoint."""
COUNTED = [fault for fault in JOB_FAILURE_CLASSES if fault in RESTARTED]


def after(*endings: Ending, max_restarts: int = 1, run: str = "owt", **restarts: Any) -> float | None:
    """The seconds until the attempt that follows these; None where none does."""
    made, step = [], 0
    for number, (fault, progressed) in enumerate(endings, start=1):
        made.append(AttemptDiagnosis(attempt=number, fault=fault, before=step, after=step + 10 * progressed))
        step = made[-1].after
    settings = RestartSettings.model_validate(restarts)
    return RestartPolicy(run=run, max_restarts=max_restarts, settings=settings).decide(made).wait


def goes_on(*endings: Ending, **settings: Any) -> bool:
    return after(*endings, **settings) is not None


def test_failures_with_progress_use_up_no_budget() -> None:
    for fault in (FailureClass.PREEMPTED, FailureClass.NODE, FailureClass.NETWORK):
        assert (after(*[(fault, True)] * 500) or 0) >= 5, "what costs nothing must not come back at once"


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (ScriptConfig(script="/train.py", max_restarts=0), "max_restarts"),
        (RunConfig(train=TrainConfig(max_restarts=0)), "train.max_restarts"),
        (RunConfig(train=TrainConfig(restart_policy={"node_fault": 0})), "train.restart_policy.node_fault.attempts"),
    ],
)
def test_advice_names_the_setting_of_the_config(config: RunConfig | ScriptConfig, limit: str) -> None:
    failed = AttemptDiagnosis(attempt=1, fault=FailureClass.NODE, before=0, after=0)
    assert RestartPolicy.of(config, "owt").decide([failed]).why.endswith(f"or raise {limit}")


def test_zero_restarts_apply_to_all_but_preemptions() -> None:
    for fault in (FailureClass.NODE, FailureClass.NETWORK):
        assert not goes_on((fault, True), max_restarts=0)
        assert not goes_on((fault, True), max_restarts=9, **{fault.replace(" ", "_"): 0})
    assert goes_on(*[(FailureClass.PREEMPTED, True)] * 500, max_restarts=0)
    assert not goes_on((FailureClass.PREEMPTED, True), max_restarts=9, preempted=0)
    before_the_newest = AttemptDiagnosis(attempt=3, fault=FailureClass.PREEMPTED, before=100, after=90)
    again = RestartPolicy(run="owt", max_restarts=0).decide([before_the_newest])
    assert again.wait is None, "training again what was trained before is no progress"


def test_each_class_has_a_budget_of_its_own() -> None:
    for fault in COUNTED:
        others = [(peer, False) for peer in COUNTED if peer is not fault]
        assert goes_on(*others * 2, *[(fault, False)] * 2, max_restarts=2)
        assert not goes_on(*[(fault, False)] * 3, max_restarts=2)
        assert goes_on(*[(fault, False)] * 4, **{fault.replace(" ", "_"): 4})
        assert not goes_on(*[(fault, False)] * 5, **{fault.replace(" ", "_"): {"attempts": 4}})


def test_class_without_default_budget_restarts_only_with_a_rule() -> None:
    assert not any(goes_on((fault, True), max_restarts=9) for fault in {*JOB_FAILURE_CLASSES} - {*COUNTED})
    assert goes_on((FailureClass.OUT_OF_MEMORY, False), max_restarts=0, out_of_memory=1)
    with pytest.raises(ValidationError, match="user_error"):
        RestartSettings.model_validate({"user_error": 1})


def test_new_checkpoint_resets_the_counts_of_forgiving_classes() -> None:
    idle, busy = (FailureClass.PREEMPTED, False), (FailureClass.NODE, True)
    assert not goes_on(*[(FailureClass.HANG, True)] * 3, max_restarts=2), (
        "a hang is counted however far the attempt got"
    )
    assert goes_on(*[idle, busy] * 50, idle)
    assert not goes_on((FailureClass.HANG, False), busy, (FailureClass.HANG, False))
    assert not goes_on(busy, busy, node_fault={"reset_on_progress": False})


def test_new_command_after_a_used_up_budget_has_a_new_one() -> None:
    broken = (FailureClass.NODE, False)
    assert not goes_on(broken, broken)
    assert goes_on(broken, broken, broken)
    assert goes_on((FailureClass.USER, False), broken)


@given(
    st.lists(st.tuples(st.sampled_from(JOB_FAILURE_CLASSES), st.booleans()), min_size=1, max_size=40),
    st.integers(min_value=0, max_value=5),
)
def test_attempts_without_progress_stay_within_the_budgets(endings: list[Ending], max_restarts: int) -> None:
    row = 0
    for count, (_, progressed) in enumerate(endings, start=1):
        row = 0 if progressed else row + 1
        if not goes_on(*endings[:count], max_restarts=max_restarts):
            return
        assert row <= max_restarts * len(COUNTED)


def test_wait_doubles_up_to_its_cap_until_the_first_progress() -> None:
    endings = [(FailureClass.PREEMPTED, False)] * 12
    waits = [after(*endings[:count], max_restarts=99) or 0 for count in range(1, 13)]
    nominal = [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600, 600]
    assert all(0.75 * longest <= wait <= longest for wait, longest in zip(waits, nominal, strict=True))
    assert all(later > earlier for earlier, later in pairwise(waits[:7]))
    assert after(*endings, (FailureClass.PREEMPTED, True), max_restarts=99) == 5


def test_progress_begins_the_doubling_of_the_wait_again() -> None:
    idle, busy = (FailureClass.PREEMPTED, False), (FailureClass.PREEMPTED, True)
    assert after(*[idle] * 6, busy, idle, max_restarts=99) == pytest.approx(5, rel=0.25)
    assert after(*[idle] * 6, (FailureClass.HANG, True), max_restarts=99) == 0, "a hang that got on is repeated at once"


@given(st.integers(min_value=1, max_value=300), st.text())
def test_wait_is_capped_and_differs_between_runs(idle: int, run: str) -> None:
    wait, again, different = (
        after(*[(FailureClass.NODE, False)] * idle, max_restarts=1000, run=name, longest_wait=60)
        for name in (run, run, f"{run}!")
    )
    assert wait == again != different
    assert 0 < (wait or 0) <= 60


def test_a_gpu_error_on_two_machines_at_one_step_is_the_programs() -> None:
    def ended(machine: str, step: int | None, *earlier: AttemptDiagnosis) -> Diagnosis:
        diagnosis = Diagnosis(
            fault=FailureClass.NODE, evidence="illegal memory access", host=machine, clear=True, step=step
        )
        return without_machine(diagnosis, earlier)

    first = AttemptDiagnosis(attempt=1, fault=FailureClass.NODE, before=0, after=400, machine="gke-a", step=417)
    found = ended("gke-b", 418, first)
    assert (found.fault, found.action, found.machine) == (FailureClass.USER, Action.STOP, "")
    text = "attempt 1 ended so at step 417 on machine gke-a, and this one at step 418 on machine gke-b"
    assert text in found.evidence
    assert [
        ended(machine, step, first).fault for machine, step in (("gke-b", 431), ("gke-a", 417), ("", 417), ("b", None))
    ] == [FailureClass.NODE] * 4
    assert ended("gke-b", 417, first.model_copy(update={"step": None})).fault is FailureClass.NODE


def test_a_machine_is_avoided_after_it_was_blamed_twice() -> None:
    def avoided(*machines: str, times: int = 2) -> tuple[str, ...]:
        diagnosis = AttemptDiagnosis(attempt=1, fault=FailureClass.NODE, before=0, after=0)
        return nodes_to_exclude(
            [diagnosis.model_copy(update={"machine": machine}) for machine in machines], times=times
        )

    assert avoided("gke-a", "gke-b") == ()
    assert avoided("b", "", "a", "a", "", "c", "b", "c", "c") == ("a", "b", "c")
    assert avoided("gke-a", times=1) == ("gke-a",)
    assert avoided("gke-a", "gke-a", times=0) == ()
    many = [f"node-{number}" for number in range(100)]
    assert len(avoided(*many, *many)) == MOST_EXCLUDED
