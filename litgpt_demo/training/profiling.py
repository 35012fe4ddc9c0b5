"""What a few steps are made of: torch's profiler writes a trace of them and, on a GPU, a snapshot of its memory.

Both lie in the run's `profile/`. A recording that fails costs itself, never the training.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerAction, profile

from litgpt_demo.errors import TrainLitgptError, words_of
from litgpt_demo.training.reporting import warn
from litgpt_demo.training.setup import Training
from litgpt_demo.training.step import FIRST_PASS

FOLDER = "profile"
_MOST_ALLOCATIONS = 200_000  # of a snapshot, with a few hundred bytes of stack each; older ones go


class Profiler:
    """Records the steps that `train.profile` asks for, on the ranks that it names."""

    def __init__(self, training: Training, *, resumed_from: int) -> None:
        self._training = training
        self._profile: profile | None = None
        self.next = -1
        """The step, from 0, before which to call `turn`; -1 where there is none."""
        asked, steps = training.spec.train.profile, training.spec.steps
        if asked is None or training.fabric.global_rank not in asked.ranks:
            return
        self._first, self._last = max(asked.numbers[0] - 1, resumed_from), min(asked.numbers[-1], steps)
        if self._first < self._last:
            self.next = self._first
        else:
            warn(f"train.profile.steps={asked.steps} records nothing: this attempt has the steps after {resumed_from}")

    def turn(self, step: int) -> None:
        """Begin to record, mark the next step, or end and write; what this takes counts as time of the steps."""
        if step == self._last:
            self.end(step)
            return
        self.next = step + 1
        if self._profile is not None:
            self._profile.step()
        else:
            if self._training.fabric.device.type == "cuda":
                torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")
            # Every step is recorded; with a schedule torch also marks where each begins, by its number.
            self._profile = profile(schedule=lambda _: ProfilerAction.RECORD, record_shapes=True, profile_memory=True)
            self._profile.step_num = step + 1
            self._profile.start()

    def end(self, done: int, *, keep: bool = True) -> None:
        """End a recording, if there is one, after `done` steps, and leave it in the run's folder if it is kept."""
        recorded, self._profile, self.next = self._profile, None, -1
        if recorded is None:
            return
        run, scratch, fabric = self._training.run, self._training.scratch, self._training.fabric
        self._training.heart.beat(done, "writing the profile", allow=FIRST_PASS)
        name = f"steps-{self._first + 1}-{done}-rank-{fabric.global_rank}"
        try:
            recorded.stop()
            if not keep:
                return
            files = [scratch / f"{name}.json.gz"]
            recorded.export_chrome_trace(str(files[0]))
            if fabric.device.type == "cuda":
                files.append(scratch / f"{name}.memory.pickle")
                torch.cuda.memory._dump_snapshot(str(files[1]))  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(enabled=None)
            for file in files:
                run.upload(file, f"{FOLDER}/{file.name}", move=True)
        except (TrainLitgptError, OSError, RuntimeError) as error:
            warn(f"the profile of the steps up to {done} is lost: {words_of(error)}")
