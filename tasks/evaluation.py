"""Step 6: the collected model is scored, where the config asks for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from prefect import task
from prefect.artifacts import acreate_table_artifact

from launcher.events import Step, StepDone, StepStarted
from launcher.reports.report import scores_table
from launcher.runs.run import Run
from litgpt_demo.config import EvaluationConfig
from litgpt_demo.evaluation import EvaluationManifest, evaluated
from litgpt_demo.runs import EVALUATIONS
from litgpt_demo.storage.access import environment_of_readers
from tasks.checkpoints import failure_of
from tasks.steps import emit, options_of


@task(**options_of(Step.EVALUATION))
async def evaluate_model(run: Run) -> EvaluationManifest | None:
    """Score the run's collected model, or find it scored; None where the config does not ask for it.

    Raises:
        TrainLitgptError: it cannot be scored, as where a task is not known.
    """
    emit(StepStarted(step=Step.EVALUATION))
    if (settings := run.config.evaluation) is None:
        emit(StepDone(step=Step.EVALUATION, what="not asked for: the config has no `evaluation`"))
        return None
    there = await asyncio.to_thread(evaluated, run.storage, settings)
    made = there or await _evaluated(run, settings)
    rows = scores_table(made.scores)
    await acreate_table_artifact(rows, key=f"scores-{run.name}", description=f"Scores of step {made.step}")
    shown = ", ".join(f"{row['task']} {row['metric']} {row['value']}" for row in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    what = f"{shown}{more} in {run.storage.address(f'{EVALUATIONS}/{made.key}')}"
    emit(StepDone(step=Step.EVALUATION, what=what, reused=there is not None))
    return made


async def _evaluated(run: Run, settings: EvaluationConfig) -> EvaluationManifest:
    """Score it in a process of its own: torch stays out of the orchestrator, and its memory goes with it."""
    asked = ["--run", run.storage.address(), "--settings", settings.model_dump_json()]
    process = subprocess.Popen(
        [sys.executable, "-m", "litgpt_demo", "evaluate", *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment_of_readers(os.environ),
    )
    try:
        output, _ = await asyncio.to_thread(process.communicate)
    except BaseException:
        process.kill()  # the thread that reads its output sees its end
        raise
    if process.returncode == 0 and (made := await asyncio.to_thread(evaluated, run.storage, settings)) is not None:
        return made
    raise failure_of(process.returncode, output)
