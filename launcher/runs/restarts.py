"""The restart budget: whether another attempt follows one that ended badly, and when. Pure.

A fault is counted. A preemption is free if its attempt has committed a new checkpoint, and counted otherwise, until the
next checkpoint clears the count: a machine that is taken away every hour may go on for weeks, and a program that only
says that it was preempted may not. A script's own checkpoints are not known here, so that its preemptions are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from zlib import crc32

from launcher.runs.diagnosis import ACTIONS, Action
from launcher.runs.index import AttemptVerdict


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """The wait before another attempt: twice as long after each one in a row that committed no new checkpoint."""

    first: float = 5.0
    """Seconds; after a preemption no wait is shorter, also if the attempt committed a new checkpoint."""
    most: float = 600.0
    """Seconds."""
    jitter: float = 0.25
    """The greatest part of a wait that is left out, so that jobs which ended together do not return together."""

    def seconds(self, idle: int, seed: str) -> float:
        """Return the wait after `idle` attempts in a row without a new checkpoint; the same seed has the same wait."""
        if not idle:
            return 0.0
        whole = min(self.first * 2.0 ** min(idle - 1, 32), self.most)
        return whole * (1 - self.jitter * crc32(seed.encode()) / 2**32)


@dataclass(frozen=True, kw_only=True)
class Again:
    """Another attempt follows."""

    wait: float = 0.0
    """Seconds."""
    why: str = ""
    """The reason for the wait."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """No attempt follows."""

    why: str = ""
    """The reason, where the last attempt's verdict is not all of it."""


Decision: TypeAlias = Again | Stop


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The new attempts that a run may have."""

    run: str
    """The name of the run, from which the jitter follows."""
    max_restarts: int
    backoff: Backoff = field(default_factory=Backoff)

    def after(self, verdicts: Sequence[AttemptVerdict]) -> Decision:
        """Return what follows the last of these attempts, oldest first; all of them ended badly.

        An attempt that was started after the budget had said to stop was a person's decision, and begins a new count.
        """
        decision: Decision = Again()
        faults = preempted = idle = 0
        for one in verdicts:
            if isinstance(decision, Stop):
                faults = preempted = idle = 0
            action = ACTIONS[one.fault]
            preempted = 0 if one.progressed else preempted + (action is Action.RESTART_FREE)
            idle = 0 if one.progressed else idle + 1
            faults += action is Action.RESTART
            decision = self._decided(one, faults=faults, preempted=preempted, idle=idle)
        return decision

    def _decided(self, last: AttemptVerdict, *, faults: int, preempted: int, idle: int) -> Decision:
        if ACTIONS[last.fault] is Action.STOP:
            return Stop()
        if faults + preempted > self.max_restarts:
            return Stop(why=self._used_up(faults, preempted))
        wait = self.backoff.seconds(idle, f"{self.run}-{last.attempt}")
        why = f"attempts in a row that committed no new checkpoint: {idle}" if idle else ""
        if ACTIONS[last.fault] is Action.RESTART_FREE:  # what costs nothing must not come back without a pause
            wait, why = max(wait, self.backoff.first), why or "the attempt was preempted"
        return Again(wait=wait, why=why)

    def _used_up(self, faults: int, preempted: int) -> str:
        counted = [f"attempts that ended with a fault: {faults}"] if faults else []
        if not preempted:
            return f"max_restarts={self.max_restarts} new attempts are used up; {counted[0]}"
        counted.append(f"preempted attempts in a row that committed no new checkpoint: {preempted}")
        return (
            f"max_restarts={self.max_restarts} new attempts are used up; {', '.join(counted)}; have a training "
            "save more often (train.checkpoint_every) or give it more time to (platform.grace); of a script every "
            "preemption is counted, for what it saves is not known: raise max_restarts"
        )
