"""Step 6, where it is asked for: the collected model is scored by the tasks of lm-evaluation-harness."""

from __future__ import annotations

import asyncio
import os
import subprocess

from prefect.artifacts import acreate_table_artifact

from launcher.checks.preflight import check_evaluation
from launcher.errors import require
from launcher.evaluation import Evaluation, place_of, read_evaluation, write_on_card
from launcher.events import Step, StepDone, StepStarted
from launcher.runs.diagnosis import ADVICE
from litgpt_demo import PYTHON
from litgpt_demo.config import EvaluationConfig
from litgpt_demo.errors import TrainLitgptError, UserError, fault_of_exit_code
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.runs import EVALUATIONS, HUGGINGFACE
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.private import environment_of_readers
from tasks.steps import emit, step_task


@step_task(Step.EVALUATION.task)
async def evaluate(run: str, asked: EvaluationConfig) -> FinalManifest:
    """Score the collected model of the run at an address, or find it scored, and show the scores on its card and in
    Prefect; returns the manifest of the model."""
    emit(StepStarted(step=Step.EVALUATION, what=", ".join(asked.tasks)))
    require(check_evaluation(asked))
    storage = open_storage(run)
    final = await asyncio.to_thread(exported, storage)
    if final is None or final.huggingface is None:
        what = f"{storage.address(HUGGINGFACE)} is not there, and it is what is scored"
        raise UserError(what, fix="run the training to its end, or `train-litgpt collect`")
    path = await asyncio.to_thread(place_of, final, asked)
    found = await asyncio.to_thread(read_evaluation, storage, path)
    made = found or await _evaluated(storage, asked, path)
    final = await asyncio.to_thread(write_on_card, storage, final)
    await acreate_table_artifact(made.table, key=f"scores-{final.run}", description="Scores of the collected model")
    told = "; ".join(f"{name} {value}" for name, value in made.pairs)
    what = f"{told} in {storage.address(EVALUATIONS)}"
    emit(StepDone(step=Step.EVALUATION, what=what, reused=found is not None))
    return final


async def _evaluated(run: Storage, asked: EvaluationConfig, path: str) -> Evaluation:
    """Score it in a process of its own: torch stays out of this one, and task files may run Python."""
    command = [*PYTHON, "-m", "launcher.evaluation", run.address()]
    pipe, environ = subprocess.PIPE, environment_of_readers(os.environ)
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environ)
    try:
        output, _ = await asyncio.to_thread(process.communicate, asked.model_dump_json().encode())
    except BaseException:
        process.kill()  # the thread that reads its output sees its end
        raise
    if (code := process.returncode) == 0 and (made := await asyncio.to_thread(read_evaluation, run, path)) is not None:
        return made
    last = output.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    fault = fault_of_exit_code(code or 1)
    raise TrainLitgptError(f"{last[0]} ({fault}; {ADVICE[fault]})", fault=fault)
