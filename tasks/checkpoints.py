"""Step 5: the last checkpoint, verified, becomes models that open in LitGPT and in Hugging Face's transformers."""

from __future__ import annotations

import asyncio
import sys

from prefect import task

from launcher.events import Note, StepDone, StepStarted
from launcher.runs.diagnosis import ADVICE
from launcher.runs.run import Run
from litgpt_demo.errors import TrainLitgptError, fault_of_exit_code
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.runs import FINAL
from tasks.steps import RETRIED, emit


@task(name="collect-checkpoints", task_run_name="collect-checkpoints", **RETRIED)
async def collect_checkpoints(run: Run) -> FinalManifest:
    """Collect in a process of its own: torch stays out of the orchestrator, and its memory goes when it is done.

    Raises:
        DataError: the checkpoint does not verify, or the model loaded back differs.
    """
    storage = run.storage
    emit(StepStarted(step="checkpoints"))
    done = await asyncio.to_thread(exported, storage)
    final = done or await _collect(run)
    for finding in final.findings:
        emit(Note(what=finding))
    what = f"step {final.step}, validation loss {final.validation_loss:.4f} in {storage.address(FINAL)}"
    emit(StepDone(step="checkpoints", what=what, reused=done is not None))
    return final


async def _collect(run: Run) -> FinalManifest:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "litgpt_demo", "collect", "--run", run.storage.address(),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0 and (final := await asyncio.to_thread(exported, run.storage)) is not None:
        return final
    last = output.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    fault = fault_of_exit_code(process.returncode or 1)
    raise TrainLitgptError(f"{last[0]} ({fault}; {ADVICE[fault]})", fault=fault)
