"""Step 6, where it is asked for: the collected model is scored by the tasks of lm-evaluation-harness."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Self, cast

from prefect.artifacts import acreate_table_artifact

from launcher.checks.preflight import check_evaluation
from launcher.errors import require
from launcher.evaluation import Evaluation, evaluations, place_of, read_evaluation, write_on_card
from launcher.events import Note, Step, StepDone, StepStarted
from launcher.runs.diagnosis import ADVICE
from launcher.runs.run import Run
from litgpt_demo import PYTHON
from litgpt_demo.config import EvaluationConfig
from litgpt_demo.errors import TrainLitgptError, UserError, fault_of_exit_code, words_of
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.metrics import Row
from litgpt_demo.runs import EVALUATIONS, HUGGINGFACE
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.private import environment_of_readers
from tasks.report import could_show
from tasks.steps import as_it_is, emit, reach, step_task


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
    what = f"{'; '.join(f'{name} {value}' for name, value in made.pairs)} in {storage.address(EVALUATIONS)}"
    emit(StepDone(step=Step.EVALUATION, what=what, reused=found is not None))
    return final


class CheckpointScores:
    """While it is entered, every `train.evaluate_with`th checkpoint is scored beside the training, one after the other.

    That of the last step is left to step 6. What cannot be scored is a warning, and never the end of the training.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._due, self._steps = run, asyncio.Queue[int | None](), 0

    async def __aenter__(self) -> Self:
        self._work = asyncio.create_task(self._until_the_end())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._due.put_nowait(None)
        if kind is not None:
            self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)

    def follow(self, row: Row) -> None:
        """Take a row of the training's metrics; that of a checkpoint may be one to score."""
        train = self._run.config.train
        match row:
            case {"kind": "start", "steps": int(steps)}:
                self._steps = steps
            case {"kind": "checkpoint", "step": int(step)} if train.evaluate_with and step != self._steps:
                if step % (train.evaluate_with * train.checkpoint_every) == 0:
                    self._due.put_nowait(step)

    async def _until_the_end(self) -> None:
        while (step := await self._due.get()) is not None:
            try:
                await evaluate_checkpoint(as_it_is(self._run), step)
            except Exception as error:
                what = f"the checkpoint of step {step} has no scores: {words_of(error)}"
                emit(Note(what=what, severity="warning"))


@step_task("evaluate-checkpoint", run_name="evaluate step {step}", again=False)
async def evaluate_checkpoint(run: Run, step: int) -> None:
    """Score the checkpoint of a step, or find it scored, and show the scores in Prefect."""
    asked = cast(EvaluationConfig, run.config.evaluation)
    path = await asyncio.to_thread(place_of, step, asked)
    if await asyncio.to_thread(read_evaluation, run.storage, path) is not None:
        return
    beside = run.config.platform.on_this_machine  # the training needs the memory of its GPUs
    made = await _evaluated(run.storage, asked, path, step=step, gpu=not beside)
    rows = [{"step": one.step, **row} for one in await asyncio.to_thread(evaluations, run.storage) for row in one.table]
    shown = acreate_table_artifact(rows, key=f"scores-{run.name}", description="Scores so far")
    await could_show(shown, otherwise=f"the scores of step {step} could not be shown; they are in {path}")
    emit(Note(what=f"step {step}: {'; '.join(f'{name} {value}' for name, value in made.pairs)}"))
    scores = {name: score.value for name, score in made.objectives.items()}
    reach("checkpoint.evaluated", run.name, run.root.address(), step=step, scores=scores)


async def _evaluated(
    run: Storage, asked: EvaluationConfig, path: str, *, step: int | None = None, gpu: bool = True
) -> Evaluation:
    """Score it in a process of its own: torch stays out of this one, and task files may run Python."""
    words = [*PYTHON, "-m", "launcher.evaluation", run.address()]
    command = words if step is None else ["nice", "-n", "19", *words, str(step)]  # a training may need the cores
    pipe, environ = subprocess.PIPE, environment_of_readers(os.environ) | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
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
