"""Step 5: the last checkpoint, verified, becomes models that open in LitGPT and in Hugging Face's transformers."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import replace
from functools import partial
from importlib import import_module

from launcher.events import Note, Step, StepDone, StepProgress, StepStarted
from launcher.job import Job
from launcher.runs.attempts import job_handle
from launcher.runs.index import Index
from launcher.runs.lease import POLL_INTERVAL, Lease
from launcher.runs.run import Run
from litgpt_demo import PYTHON
from litgpt_demo.errors import DataError
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.metrics import Row
from litgpt_demo.runs import FINAL
from litgpt_demo.storage.private import environment_of_readers
from tasks.processes import Child
from tasks.report import show_state
from tasks.steps import emit, step_task
from tasks.training import run_job

_HEAD_START = 8.0
"""Seconds before the last step at which the process starts, because its imports take six on an idle core."""
LARGE = 10e9
"""Bytes of weights in float32 from which on a job of the platform collects them: the export takes three times their
size on disk, and its check their size in memory."""


def is_collected_by_a_job(run: Run) -> bool:
    """Return whether the model is too large for the orchestrator's machine, and the platform has others."""
    return 4 * run.parameters > LARGE and not run.config.platform.on_this_machine


class Collector:
    """The process that collects a run's model, so that torch and its memory stay out of the orchestrator. It starts
    shortly before the training's last step, and stores the models when `collect` is called."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._process: Child | None = None
        self._steps, self._begun = math.inf, False

    def close(self) -> None:
        """End the process, if it runs, before it stores anything."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def follow(self, row: Row) -> None:
        """Take a row of the training's metrics, and start the process when the end is near."""
        match row:
            case {"kind": "start", "steps": int(steps)} if not is_collected_by_a_job(self._run):
                self._steps = steps
            case {"kind": "step", "step": int(step), "step_seconds": int() | float() as seconds}:
                if (self._steps - step) * seconds < _HEAD_START:
                    self._start()
            case {"kind": "end", "step": self._steps}:  # its last checkpoint is committed
                self._start(begin=True)

    def _start(self, *, begin: bool = False) -> Child:
        """Start the process, unless it runs. It imports its libraries, and waits for `begin`."""
        if self._process is None:
            command = [*PYTHON, "-m", "litgpt_demo", "collect", "--run", self._run.storage.address(), "--on-word"]
            # The ranks may still run. Threads that spin while they wait for each other would take their cores.
            environment = {"OMP_WAIT_POLICY": "PASSIVE"} | environment_of_readers(os.environ)
            self._process = Child(command, environ=environment)
            self._begun = False
        if begin and not self._begun:
            self._begun = True
            self._process.write("begin")
        return self._process

    async def collect(self) -> FinalManifest:
        """Collect and return the models, after the job has ended."""
        process, self._process = self._start(begin=True), None
        process.write("finish")
        final, _ = await asyncio.gather(
            process.end(partial(exported, self._run.storage), on_progress=_show),
            asyncio.to_thread(import_module, "matplotlib.figure"),  # half a second, and the report needs it
        )
        return final


def _show(what: str, _: int | None) -> None:
    emit(StepProgress(step=Step.CHECKPOINTS, what=what))


@step_task(Step.CHECKPOINTS.task)
async def collect_checkpoints(run: Run, collector: Collector, *, image: str | None) -> FinalManifest:
    """Collect the run's last checkpoint, unless it is collected already."""
    emit(StepStarted(step=Step.CHECKPOINTS, what="making and checking the models"))
    final = await asyncio.to_thread(exported, run.storage)
    reused = final is not None
    if not reused:
        await show_state("Collecting")
    if final is None and is_collected_by_a_job(run):
        final = await _collected_by_a_job(run, image)
    elif final is None:
        final, reused = await _collected(run, collector)
    for finding in final.findings:
        emit(Note(what=finding))
    what = f"step {final.step}, validation loss {final.validation_loss:.4f} in {run.storage.address(FINAL)}"
    emit(StepDone(step=Step.CHECKPOINTS, what=what, reused=reused))
    return final


async def _collected(run: Run, collector: Collector) -> tuple[FinalManifest, bool]:
    with Lease(Index(run.root), run.name) as lease:
        while True:
            is_leader = await asyncio.to_thread(lease.take)
            final = await asyncio.to_thread(exported, run.storage)
            if final is not None:
                return final, True
            if is_leader:
                return await collector.collect(), False
            # Only one process at a time makes models of a run on a disk: this one must not delay the leader's.
            await asyncio.to_thread(collector.close)
            await asyncio.sleep(POLL_INTERVAL)


async def _collected_by_a_job(run: Run, image: str | None) -> FinalManifest:
    """Collect in the run's next attempt, on one node: its job is restarted and cancelled like any other."""
    config, program = run.config, ("-m", "litgpt_demo", "collect", "--run", run.storage.address())
    collecting = replace(run, config=config.model_copy(update={"platform": config.platform.for_one_process()}))

    def make_job(attempt: int) -> Job:
        return replace(collecting.job(attempt=attempt, image=image), program=program, stage=())

    handle = replace(await asyncio.to_thread(job_handle, collecting), make_job=make_job)
    for _ in range(2):  # the first may be the training's job, which has saved everything but has not ended
        await run_job(handle)
        final = await asyncio.to_thread(exported, run.storage)
        if final is not None:
            return final
    raise DataError(
        f"the job that collects {run.name} succeeded, but {run.storage.address(FINAL)} is incomplete",
        fix="run it again; if that folder is incomplete again, another program removes files there",
    )
