"""The restart policy: whether another attempt follows one that ended badly, when, and which machines it avoids. Pure.

Each class of failures has a count of its own (litgpt_demo.config.RestartSettings has the rules). Where its rule
forgives, an attempt that has committed a new checkpoint is not counted, and clears the count: a machine that is taken
away every hour may go on for weeks, and a program that only says that it was preempted may not. A script's own
checkpoints are not known here, so that each of its attempts is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from launcher.runs.diagnosis import ADVICE, Verdict
from launcher.runs.index import MOST_EXCLUDED, AttemptVerdict
from litgpt_demo.config import RestartRule, RestartSettings
from litgpt_demo.errors import JOB_FAILURE_CLASSES, FailureClass

_JITTER = 0.25
"""The greatest part of a wait that is left out, so that jobs which ended together do not return together."""

_HELPS: Mapping[FailureClass, str] = {
    FailureClass.NODE: "have the machines looked at that attempts/<n>/verdict.json names, and run again",
    FailureClass.NETWORK: "measure the network (flow benchmark-network) and mend what is slow or lost, and run again",
    FailureClass.HANG: "the stacks in the attempts' folders say who hung; raise train.hang_after if a rank was slow",
    FailureClass.PREEMPTED: "have a training save more often (train.checkpoint_every) or give it more time to "
    "(platform.grace); of a script every preemption is counted, for what it saves is not known",
}
"""The advice where a budget is used up; the other classes have that of their verdict."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows an attempt that ended badly."""

    wait: float | None = None
    """Seconds before another attempt; None where none follows."""
    why: str = ""
    """The reason for the wait; where none follows, only what the attempt's verdict does not say."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The new attempts that a run may have."""

    run: str
    """The name of the run, from which the jitter follows."""
    max_restarts: int
    settings: RestartSettings = field(default_factory=RestartSettings)

    def rule(self, fault: FailureClass) -> RestartRule | None:
        """The rule for a class of failures, its number filled in; None for a user error, which has none."""
        rule: RestartRule | None = getattr(self.settings, _setting(fault), None)
        if rule is None or rule.attempts is not None:
            return rule
        return rule.model_copy(update={"attempts": self.max_restarts})

    def after(self, verdicts: Sequence[AttemptVerdict]) -> Decision:
        """Return what follows the last of these attempts, oldest first; all of them ended badly.

        An attempt that was started after the budget had said to stop was a person's decision, and begins a new count.
        """
        decision = Decision(wait=0.0)
        spent: Counter[FailureClass] = Counter()
        idle = 0
        for one in verdicts:
            if decision.wait is None:
                spent, idle = Counter(), 0
            if one.progressed:
                spent = Counter({fault: count for fault, count in spent.items() if not self._forgives(fault)})
            idle = 0 if one.progressed else idle + 1
            spent[one.fault] += not (one.progressed and self._forgives(one.fault))
            decision = self._decided(one, spent[one.fault], idle)
        return decision

    def _forgives(self, fault: FailureClass) -> bool:
        # Who allows none gets none. A preemption alone is no failure of anything: only its own rule can forbid it.
        rule = self.rule(fault)
        if rule is None or not rule.forgive:
            return False
        return bool(rule.attempts) or (fault is FailureClass.PREEMPTED and self.settings.preempted.attempts is None)

    def _decided(self, last: AttemptVerdict, spent: int, idle: int) -> Decision:
        fault, rule = last.fault, self.rule(last.fault)
        if rule is None:
            return Decision()
        if spent > (rule.attempts or 0):
            if not rule.attempts and getattr(RestartSettings(), _setting(fault)).attempts == 0:
                return Decision()  # the class has no budget by itself, and its verdict says what to do
            counted = " without a new checkpoint" if rule.forgive else ""
            return Decision(
                why=f"no new attempt is left after {fault}: {spent} attempts ended so{counted}, and "
                f"restarts.{_setting(fault)} allows {rule.attempts} new ones; {_HELPS.get(fault, ADVICE[fault])}, or "
                "raise max_restarts"
            )
        if not spent:  # what costs nothing must not come back without a pause
            why = f"the attempt ended as {fault}, and left a new checkpoint"
            return Decision(wait=min(rule.wait, self.settings.longest_wait), why=why)
        why = f"{fault}: {spent} of {rule.attempts} new attempts"
        if not idle:
            return Decision(wait=0.0, why=why)
        whole = min(rule.wait * 2.0 ** min(idle - 1, 32), self.settings.longest_wait)
        jitter = _JITTER * crc32(f"{self.run}-{last.attempt}".encode()) / 2**32  # the same attempt has the same wait
        idly = f"{why}; attempts in a row that committed no new checkpoint: {idle}"
        return Decision(wait=whole * (1 - jitter), why=idly)

    def __str__(self) -> str:
        rules = {
            fault: rule for fault in JOB_FAILURE_CLASSES if (rule := self.rule(fault)) is not None and rule.attempts
        }
        told = [
            f"{fault} {rule.attempts}" + (" (a new checkpoint clears the count)" if rule.forgive else "")
            for fault, rule in rules.items()
        ]
        none = ", ".join(fault for fault in JOB_FAILURE_CLASSES if fault not in rules)
        return f"new attempts after {', '.join(told)}; none after {none}" if told else "no new attempts after a failure"


def _setting(fault: FailureClass) -> str:
    return fault.value.replace(" ", "_")


def without_machine(verdict: Verdict, earlier: Sequence[AttemptVerdict]) -> Verdict:
    """Return the verdict; as a user error where a GPU of another machine had stopped at the same step.

    A kernel's error is reported up to a step after the kernel, so that steps next to each other are the same one.
    """
    step, machine = verdict.step, verdict.machine
    if step is None or not machine:
        return verdict
    for before in earlier:
        if before.step is not None and abs(before.step - step) <= 1 and before.machine not in {"", machine}:
            why = (
                f"attempt {before.attempt} ended so at step {before.step} on the machine {before.machine}, and this "
                f"one at step {step} on {machine}: the program is the cause, not a machine"
            )
            return replace(verdict, fault=FailureClass.USER, evidence=f"{verdict.evidence}\n    {why}")
    return verdict


def blamed(verdicts: Sequence[AttemptVerdict], *, times: int) -> tuple[str, ...]:
    """Return the machines that so many attempts blame, in the order in which they came to that; none for 0 times."""
    counts: Counter[str] = Counter()
    often: list[str] = []
    for one in verdicts:
        counts[one.machine] += 1
        if one.machine and counts[one.machine] == times:
            often.append(one.machine)
    return tuple(often[:MOST_EXCLUDED])
