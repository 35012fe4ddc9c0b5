"""Step 5: the last checkpoint, verified, becomes models that open in LitGPT and in Hugging Face's transformers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Self

from prefect import task

from launcher.events import Note, Step, StepDone, StepStarted
from launcher.runs.diagnosis import ADVICE
from launcher.runs.run import Run
from litgpt_demo.errors import TrainLitgptError, fault_of_exit_code
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.runs import FINAL
from litgpt_demo.storage.access import environment_of_readers
from tasks.steps import emit, options_of


class Collector:
    """The process that collects a run's model: torch stays out of the orchestrator, and its memory goes with it.

    It may be started before it has anything to do. Its imports take as long as a job that is through takes to end.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def start(self) -> None:
        """Start the process, unless it is there; it waits for `collect`, and ends with this process."""
        if self._process is None:
            address = self._run.storage.address()
            command = [sys.executable, "-m", "litgpt_demo", "collect", "--run", address, "--on-word"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment_of_readers(os.environ),
            )

    async def collect(self) -> FinalManifest:
        """Let it collect.

        Raises:
            TrainLitgptError: the checkpoint does not verify, or the model differs; its class is the process's.
        """
        self.start()
        process = self._process
        assert process is not None
        output, _ = await asyncio.to_thread(process.communicate, b"collect\n")
        self._process = None
        if process.returncode == 0 and (final := await asyncio.to_thread(exported, self._run.storage)) is not None:
            return final
        last = output.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        fault = fault_of_exit_code(process.returncode or 1)
        raise TrainLitgptError(f"{last[0]} ({fault}; {ADVICE[fault]})", fault=fault)


@task(**options_of(Step.CHECKPOINTS))
async def collect_checkpoints(run: Run, collector: Collector) -> FinalManifest:
    """Collect the run's last checkpoint, or find it collected.

    Raises:
        TrainLitgptError: the checkpoint does not verify, or the model loaded back differs.
    """
    storage = run.storage
    emit(StepStarted(step=Step.CHECKPOINTS))
    done = await asyncio.to_thread(exported, storage)
    final = done or await collector.collect()
    for finding in final.findings:
        emit(Note(what=finding))
    what = f"step {final.step}, validation loss {final.validation_loss:.4f} in {storage.address(FINAL)}"
    emit(StepDone(step=Step.CHECKPOINTS, what=what, reused=done is not None))
    return final
