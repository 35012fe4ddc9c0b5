"""Profiles of a few steps: a timeline of operators and kernels, and on a GPU the memory's history, for each rank asked.

They land in the run's `profiles/<steps>/`: `rank-<n>.json.gz` opens in https://ui.perfetto.dev, and
`rank-<n>.memory.pickle` in https://pytorch.org/memory_viz. `train.profile` names the steps beforehand. `train-litgpt
profile RUN` asks a training that runs, by a small file that rank 0 looks for in a thread; all ranks hear of it with the
step's numbers (litgpt_demo.training.exchange), so that a training that nobody profiles does nothing more in its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from litgpt_demo.errors import TrainLitgptError, words_of
from litgpt_demo.runs import PROFILE_REQUEST, PROFILES, read_profile_request
from litgpt_demo.training.reporting import warn
from litgpt_demo.training.setup import Training

LOOK = 10.0
"""Seconds between two looks for a request."""
_MOST_MEMORY = 1_000_000  # allocations in a memory's history: of some steps of a large model


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Steps to be profiled, the same on every rank."""

    steps: range
    mine: bool
    """This rank records."""
    requested: bool


class Profiling:
    """The profiles of one rank. Each rank knows of all of them, and records those that ask for it."""

    def __init__(self, training: Training, *, look: float = LOOK) -> None:
        self._training, self._look, self._over = training, look, Event()
        self._rank, asked = training.fabric.global_rank, training.spec.train.profile
        self._windows: list[_Window] = []
        if asked is not None:
            self._windows.append(_Window(steps=asked.numbers, mine=self._rank in asked.ranks, requested=False))
        self._now: _Window | None = None
        self._profiler: Any = None
        self.requested = False
        """Rank 0 has found a request that the ranks have not been told of."""
        if training.fabric.is_global_zero:
            Thread(target=self._watch, name="profile requests", daemon=True).start()

    @property
    def busy(self) -> bool:
        """True while a rank records, which makes it slower than it is."""
        return self._now is not None

    def before(self, step: int) -> None:
        """Begin to record if this is one of the steps that are asked for, counted from 1."""
        if not self._windows or self._now is not None:
            return
        self._windows = [window for window in self._windows if step < window.steps.stop]
        self._now = next((window for window in self._windows if step in window.steps), None)
        if self._now is not None and self._now.mine:
            self._guarded(self._begin)

    def after(self, step: int) -> float:
        """Stop after the last of the steps; returns the seconds that writing took."""
        if self._now is None or step + 1 < self._now.steps.stop:
            return 0.0
        began = monotonic()
        self._finish(self._now)
        return monotonic() - began

    def heed(self, done: int) -> None:
        """Take up the request that rank 0 has told all ranks of, from the next step on."""
        if any(window.requested for window in self._windows):  # they were told of it with an earlier step
            return
        try:
            request = read_profile_request(self._training.run)
        except (TrainLitgptError, OSError) as error:
            warn(f"the request for a profile cannot be read, and nothing is profiled: {words_of(error)}")
            self._served()
            return
        steps = range(done + 1, done + 1 + request.steps)
        self._windows.append(_Window(steps=steps, mine=self._rank in request.ranks, requested=True))

    def _finish(self, window: _Window) -> None:
        if self._profiler is not None:
            self._guarded(lambda: self._write(window.steps))
        self._profiler, self._now = None, None
        self._windows = [other for other in self._windows if other is not window]
        if window.requested:
            self._served()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._now is not None:
            self._finish(self._now)
        if self.requested or any(window.requested for window in self._windows):  # it has come too late
            self._served()

    def _begin(self) -> None:
        on_gpu = self._training.fabric.device.type == "cuda"
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_MEMORY)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = profile(activities=kinds, profile_memory=True, record_shapes=True)
        self._profiler.start()

    def _write(self, steps: range) -> None:
        rank, on_gpu = self._rank, self._training.fabric.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()  # kernels of the last step that are still to run belong to it
        self._profiler.stop()
        folder = self._training.scratch / PROFILES
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / f"rank-{rank}.json.gz"]
        self._profiler.export_chrome_trace(str(written[0]))
        if on_gpu:
            written.append(folder / f"rank-{rank}.memory.pickle")
            torch.cuda.memory._dump_snapshot(str(written[1]))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        place = f"{PROFILES}/step-{steps.start:08}-{steps.stop - 1:08}"
        for path in written:
            self._training.run.upload(path, f"{place}/{path.name}", move=True)
        print(f"profile of rank {rank}: {self._training.run.address(place)}", flush=True)

    def _guarded(self, action: Callable[[], object]) -> None:
        """Try it; what fails costs the profile, and not the training."""
        try:
            action()
        except Exception as error:  # torch's profiler, its tracing library and the driver fail in ways of their own
            warn(f"steps are not profiled: {words_of(error)}")
            self._profiler = None

    def _served(self) -> None:
        """Remove the request, which all ranks have read: none gets to the end of a step without the others."""
        if self._training.fabric.is_global_zero:
            with suppress(TrainLitgptError, OSError):
                self._training.run.remove(PROFILE_REQUEST)
            self.requested = False

    def _watch(self) -> None:
        known = False
        while not self._over.wait(self._look):
            with suppress(TrainLitgptError, OSError):  # the next look may find what this one could not
                there = self._training.run.exists(PROFILE_REQUEST)
                self.requested, known = self.requested or (there and not known), there
