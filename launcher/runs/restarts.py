"""The restart policy: whether another attempt follows a failed one, when, and which machines it avoids.

Each failure class has its own count and rule (litgpt_demo.config.RestartSettings). With `reset_on_progress`, an attempt
that has committed a new checkpoint is not counted and resets the count. A machine that is preempted every hour
can thus train for weeks, but a program that only claims to be preempted cannot. A script's checkpoints are unknown, so
that each of its attempts counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from launcher.config import RunConfig, ScriptConfig
from launcher.runs.diagnosis import ADVICE, Diagnosis
from launcher.runs.index import MOST_EXCLUDED, AttemptDiagnosis
from litgpt_demo.config import RestartRule, RestartSettings
from litgpt_demo.errors import JOB_FAILURE_CLASSES, FailureClass

_JITTER = 0.25
"""The largest random share of a wait that is left out, so that jobs that ended together do not return together."""

_HELPS: Mapping[FailureClass, str] = {
    FailureClass.NODE: "have the machines of attempts/<n>/diagnosis.json repaired, and run again",
    FailureClass.NETWORK: "measure the network (train-litgpt benchmark-network), repair slow links, and run again",
    FailureClass.HANG: "the stacks in the attempts' folders name the hung rank; if it is slow, raise "
    "train.hang_timeout, or the max_silence of a script",
    FailureClass.PREEMPTED: "save more often (train.checkpoint_every) or raise platform.grace_period; "
    "every preemption of a script counts, because its checkpoints are unknown",
}
"""The advice when a budget is used up; for the other classes it is that of the diagnosis."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether and when an attempt follows a failed one."""

    wait: float | None = None
    """Seconds before the next attempt; None if none follows."""
    why: str = ""
    """The reason for the wait; if no attempt follows, only what the diagnosis does not say."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """The restarts that a run can have."""

    run: str
    """The name of the run, which decides the jitter."""
    section: str = ""
    """The section of the config that has these settings, with its dot; a script has them at its top level."""
    max_restarts: int
    settings: RestartSettings = field(default_factory=RestartSettings)

    @classmethod
    def of(cls, config: RunConfig | ScriptConfig, run: str) -> RestartPolicy:
        """Return the policy of a config for the run of this name."""
        section, owner = ("train.", config.train) if isinstance(config, RunConfig) else ("", config)
        return cls(run=run, section=section, max_restarts=owner.max_restarts, settings=owner.restart_policy)

    def rule(self, fault: FailureClass) -> RestartRule | None:
        """Return the rule of a failure class with its number of attempts; None for a user error, which has none."""
        rule: RestartRule | None = getattr(self.settings, _setting(fault), None)
        if rule is None or rule.attempts is not None:
            return rule
        return rule.model_copy(update={"attempts": self.max_restarts})

    def decide(self, diagnoses: Sequence[AttemptDiagnosis]) -> Decision:
        """Return what follows the last of these failed attempts, oldest first. An attempt that follows a used-up
        budget was started by a user: counting begins again there."""
        decision = Decision(wait=0.0)
        spent = Counter[FailureClass]()
        attempts_without_progress = 0
        for diagnosis in diagnoses:
            if decision.wait is None:
                spent.clear()
                attempts_without_progress = 0
            if diagnosis.progressed:
                attempts_without_progress = 0
                for fault in [*spent]:
                    if self._resets_on_progress(fault):
                        del spent[fault]
            else:
                attempts_without_progress += 1
            if not diagnosis.progressed or not self._resets_on_progress(diagnosis.fault):
                spent[diagnosis.fault] += 1
            decision = self._decision_after(diagnosis, spent[diagnosis.fault], attempts_without_progress)
        return decision

    def _resets_on_progress(self, fault: FailureClass) -> bool:
        # attempts=0 disables restarts, except that max_restarts=0 does not apply to preemptions.
        rule = self.rule(fault)
        if rule is None or not rule.reset_on_progress:
            return False
        return bool(rule.attempts) or (fault is FailureClass.PREEMPTED and self.settings.preempted.attempts is None)

    def _decision_after(self, last: AttemptDiagnosis, spent: int, attempts_without_progress: int) -> Decision:
        fault, rule = last.fault, self.rule(last.fault)
        if rule is None:
            return Decision()
        if spent > (rule.attempts or 0):
            if not rule.attempts and getattr(RestartSettings(), _setting(fault)).attempts == 0:
                return Decision()  # the class has no budget by default, and its diagnosis has the advice
            ended = "attempts that ended so"
            if rule.reset_on_progress:
                ended += " without a new checkpoint"
            limit = f"{self.section}max_restarts"
            if getattr(self.settings, _setting(fault)).attempts is not None:
                limit = f"{self.section}restart_policy.{_setting(fault)}.attempts"
            why = f"no new attempt is left after {fault}: {ended}: {spent}, and {limit}={rule.attempts}"
            return Decision(why=f"{why}; {_HELPS.get(fault, ADVICE[fault])}, or raise {limit}")
        if not spent:  # an attempt that costs no budget must not restart without a pause
            why = f"the attempt ended as {fault}, and left a new checkpoint"
            return Decision(wait=min(rule.wait, self.settings.longest_wait), why=why)
        why = f"{fault}: {spent} of {rule.attempts} new attempts"
        if not attempts_without_progress:
            return Decision(wait=0.0, why=why)
        wait = min(rule.wait * 2.0 ** min(attempts_without_progress - 1, 32), self.settings.longest_wait)
        jitter = _JITTER * crc32(f"{self.run}-{last.attempt}".encode()) / 2**32  # the same attempt has the same wait
        why = f"{why}; attempts in a row that committed no new checkpoint: {attempts_without_progress}"
        return Decision(wait=wait * (1 - jitter), why=why)

    def __str__(self) -> str:
        allowed, forbidden = list[str](), list[str]()
        for fault in JOB_FAILURE_CLASSES:
            rule = self.rule(fault)
            if rule is None or not rule.attempts:
                forbidden.append(fault)
            elif rule.reset_on_progress:
                allowed.append(f"{fault} {rule.attempts} (a new checkpoint resets the count)")
            else:
                allowed.append(f"{fault} {rule.attempts}")
        if not allowed:
            return "no new attempts after a failure"
        return f"new attempts after {', '.join(allowed)}; none after {', '.join(forbidden)}"


def _setting(fault: FailureClass) -> str:
    return fault.value.replace(" ", "_")


def without_machine(diagnosis: Diagnosis, earlier: Sequence[AttemptDiagnosis]) -> Diagnosis:
    """Return the diagnosis, as a user error if a GPU of another machine has stopped at the same step. Adjacent steps
    count as the same one, because a kernel's error is reported up to a step later."""
    step, machine = diagnosis.step, diagnosis.machine
    if step is None or not machine:
        return diagnosis
    for before in earlier:
        if before.step is None or before.machine in {"", machine} or abs(before.step - step) > 1:
            continue
        why = (
            f"attempt {before.attempt} ended so at step {before.step} on machine {before.machine}, and this one at "
            f"step {step} on machine {machine}: the program is the cause"
        )
        return replace(diagnosis, fault=FailureClass.USER, evidence=f"{diagnosis.evidence}\n    {why}")
    return diagnosis


def nodes_to_exclude(diagnoses: Sequence[AttemptDiagnosis], *, times: int) -> tuple[str, ...]:
    """Return the machines that at least `times` attempts blame, in the order in which they did; none for 0 times."""
    counts, excluded = Counter[str](), list[str]()
    for diagnosis in diagnoses:
        counts[diagnosis.machine] += 1
        if diagnosis.machine and counts[diagnosis.machine] == times:
            excluded.append(diagnosis.machine)
    return tuple(excluded[:MOST_EXCLUDED])
