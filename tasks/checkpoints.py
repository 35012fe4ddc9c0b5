"""Step 5: the last checkpoint, verified, becomes models that open in LitGPT and in Hugging Face's transformers."""

from __future__ import annotations

import asyncio
import sys

from prefect import task

from launcher.events import Note, Step, StepDone, StepStarted
from launcher.runs.diagnosis import ADVICE
from launcher.runs.run import Run
from litgpt_demo.errors import DataError, Fault, LitgptDemoError, fault_of_exit_code
from litgpt_demo.export import FinalManifest, collected
from litgpt_demo.runs import FINAL
from tasks.steps import options_of, say


@task(**options_of(Step.CHECKPOINTS))
async def collect_checkpoints(run: Run) -> FinalManifest:
    """Collect in a process of its own: torch stays out of the orchestrator, and its memory goes when it is done.

    Raises:
        DataError: the checkpoint does not verify, or the model loaded back differs.
    """
    storage = run.storage
    say(StepStarted(step=Step.CHECKPOINTS))
    done = await asyncio.to_thread(collected, storage)
    final = done or await _collect(run)
    for finding in final.findings:
        say(Note(what=finding))
    what = f"step {final.step}, validation loss {final.validation_loss:.4f} in {storage.address(FINAL)}"
    say(StepDone(step=Step.CHECKPOINTS, what=what, reused=done is not None))
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
    if process.returncode == 0 and (final := await asyncio.to_thread(collected, run.storage)) is not None:
        return final
    last = output.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    fault = fault_of_exit_code(process.returncode or 1)
    raise _error_class(fault)(f"{last[0]} ({fault}; {ADVICE[fault]})")


def _error_class(fault: Fault) -> type[LitgptDemoError]:
    return DataError if fault in {Fault.USER, Fault.DATA} else LitgptDemoError
