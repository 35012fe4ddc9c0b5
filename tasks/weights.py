"""The weights that a training starts from, put where the nodes reach them."""

from __future__ import annotations

import asyncio
import os
import sys

from prefect import task

from launcher.events import Note
from launcher.formatting import count_text
from launcher.runs.diagnosis import ADVICE
from launcher.runs.run import Run
from litgpt_demo.errors import TrainLitgptError, fault_of_exit_code
from litgpt_demo.pretrained import finished_weights
from litgpt_demo.storage.access import environment_of_readers
from tasks.steps import RETRIED, as_it_is, emit


async def stage_weights(run: Run) -> None:
    """Stage the weights to start from, or find them staged by their key; without any there is nothing to do."""
    if run.weights is not None:
        await _stage(as_it_is(run))


@task(name="stage-weights", task_run_name="stage-weights", **RETRIED)
async def _stage(run: Run) -> None:
    """Stage the weights under the root, in a process of their own: torch stays out of the orchestrator.

    Raises:
        TrainLitgptError: they do not fit, or cannot be read; its class is the process's.
    """
    assert run.weights is not None
    assert run.weights_path is not None
    place = run.root.within(run.weights_path)
    if (done := await asyncio.to_thread(finished_weights, place)) is None:
        await _in_a_process(run)
        if (done := await asyncio.to_thread(finished_weights, place)) is None:
            raise TrainLitgptError(
                f"model.from={run.weights.address} has changed since the run was planned; run it again"
            )
    emit(Note(what=f"weights: {count_text(done.parameters)} parameters of {done.address} in {run.weights_path}"))


async def _in_a_process(run: Run) -> None:
    assert run.weights is not None
    arguments = {
        "--root": run.root.address(),
        "--dataset": run.root.address(run.dataset.path),
        # By its address: a run's name is looked up where the run is planned.
        "--model": run.config.model.model_copy(update={"pretrained": run.weights.address}).model_dump_json(),
    }
    hub = {name: value for name, value in os.environ.items() if name.startswith("HF_")}  # its address, token and cache
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "litgpt_demo", "weights"),
        *(word for pair in arguments.items() for word in pair),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment_of_readers(os.environ) | hub,
    )
    try:
        output, _ = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        last = output.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        fault = fault_of_exit_code(process.returncode)
        raise TrainLitgptError(f"{last[0]} ({fault}; {ADVICE[fault]})", fault=fault)
