"""The optional stage of evaluation: the tasks of lm-evaluation-harness score the collected model."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Self, cast

from prefect.artifacts import acreate_table_artifact

from launcher.checks.arithmetic import gpu_names, host_memory
from launcher.checks.preflight import check_evaluation
from launcher.errors import raise_on_errors
from launcher.events import Note, Step, StepDone, StepProgress, StepStarted
from launcher.formatting import bytes_text
from launcher.provenance.statements import PROVENANCE, write_statements
from launcher.runs.lease import POLL_INTERVAL, FolderLease
from launcher.runs.run import Run
from litgpt_demo import PYTHON
from litgpt_demo.config import EvaluationConfig
from litgpt_demo.data.hub import can_reach_hub
from litgpt_demo.errors import UserError, one_line
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.export.evaluation import Evaluation, evaluations, place_of, read_evaluation, write_on_card
from litgpt_demo.metrics import Row
from litgpt_demo.runs import EVALUATIONS, FINAL, HUGGINGFACE
from litgpt_demo.secrets import Cleaner
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.private import environment_of_readers
from tasks.processes import Child
from tasks.report import update_ui
from tasks.steps import emit, emit_milestone, opaque, step_task

_MOST_LINES = 2_000  # the newest lines of an evaluation's output that are kept
_LONGEST = 2_000  # characters of each
_SCORING = "Running "  # begins the name of what takes long, as lm-evaluation-harness shows it


@step_task(Step.EVALUATION.task, retry=False)
async def evaluate(run: str, evaluation: EvaluationConfig) -> FinalManifest:
    """Score the collected model of the run at an address, unless it is scored already; return the model's manifest."""
    emit(StepStarted(step=Step.EVALUATION, what=", ".join(evaluation.tasks)))
    raise_on_errors(check_evaluation(evaluation))
    storage = open_storage(run)
    await asyncio.to_thread(_model_of, storage)  # a lease would make the folder of a run that does not exist
    async with _alone(storage):
        final = await asyncio.to_thread(_model_of, storage)
        path = await asyncio.to_thread(place_of, final, evaluation)
        found = await asyncio.to_thread(read_evaluation, storage, path)
        made = found or await _evaluated(storage, evaluation, path, parameters=final.parameters)
        # The manifest again: scoring may have taken hours.
        final = await asyncio.to_thread(_publish_scores, storage)
    await acreate_table_artifact(made.table, key=f"scores-{final.run}", description="Scores of the collected model")
    what = f"{'; '.join(f'{name} {value}' for name, value in made.pairs)} in {storage.address(EVALUATIONS)}"
    emit(StepDone(step=Step.EVALUATION, what=what, reused=found is not None))
    return final


def _publish_scores(run: Storage) -> FinalManifest:
    """Write all scores on the model's card, and in its statements if it has any; return the model's manifest."""
    final = write_on_card(run, _model_of(run))
    if run.exists(f"{FINAL}/{PROVENANCE}"):  # else the end of the run writes them
        write_statements(run)
    return final


def _model_of(run: Storage) -> FinalManifest:
    final = exported(run)
    if final is None or final.huggingface is None:
        what = f"{run.address(HUGGINGFACE)} does not exist, but an evaluation needs it"
        raise UserError(what, fix="run the training to its end, or run `train-litgpt collect RUN`")
    return final


@asynccontextmanager
async def _alone(run: Storage) -> AsyncIterator[None]:
    """Hold the lease of the run's evaluations: of several processes one scores, and the others reuse its scores."""
    with FolderLease(run.within(f"{EVALUATIONS}/lease")) as lease:
        is_reported = False
        while not await asyncio.to_thread(lease.take):
            if not is_reported and lease.holder is not None:
                emit(Note(what=f"{lease.holder} is evaluating {run.address()}; waiting for its scores"))
                is_reported = True
            await asyncio.sleep(POLL_INTERVAL)
        yield


class CheckpointScores:
    """Scores every N-th checkpoint (`evaluation.every_checkpoints`) in parallel to the training, one at a time, while
    it is entered. A checkpoint that cannot be scored causes a warning, and never ends the training."""

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
        """Queue the checkpoint of a metrics row if it is to be scored."""
        config = self._run.config
        interval = None if config.evaluation is None else config.evaluation.every_checkpoints
        match row:
            case {"kind": "start", "steps": int(steps)}:
                self._steps = steps
            case {"kind": "checkpoint", "step": int(step)} if interval and step != self._steps:
                if step % (interval * config.train.checkpoint_every) == 0:
                    self._due.put_nowait(step)

    async def _until_the_end(self) -> None:
        while True:
            step = await self._due.get()
            if step is None:
                return
            try:
                await evaluate_checkpoint(opaque(self._run), step)
            except Exception as error:
                what = f"the checkpoint of step {step} has no scores: {one_line(error)}"
                emit(Note(what=what, severity="warning"))


@step_task("evaluate-checkpoint", run_name="evaluate step {step}", retry=False)
async def evaluate_checkpoint(run: Run, step: int) -> None:
    """Score the checkpoint of a step, unless it is scored already, and show the scores in Prefect."""
    evaluation = cast(EvaluationConfig, run.config.evaluation)
    path = await asyncio.to_thread(place_of, step, evaluation)
    if await asyncio.to_thread(read_evaluation, run.storage, path) is not None:
        return
    uses_gpu = not run.config.platform.on_this_machine  # else the training needs the memory of its GPUs
    async with _alone(run.storage):
        made = await asyncio.to_thread(read_evaluation, run.storage, path)
        if made is None:
            made = await _evaluated(run.storage, evaluation, path, parameters=run.parameters, step=step, gpu=uses_gpu)
    rows = []
    for scored in await asyncio.to_thread(evaluations, run.storage):
        rows += [{"step": scored.step, **row} for row in scored.table]
    shown = acreate_table_artifact(rows, key=f"scores-{run.name}", description="Scores so far")
    await update_ui(shown, otherwise=f"the scores of step {step} could not be shown; they are in {path}")
    emit(Note(what=f"step {step}: {'; '.join(f'{name} {value}' for name, value in made.pairs)}"))
    scores = {name: score.value for name, score in made.objectives.items()}
    emit_milestone("checkpoint.evaluated", run.name, run.root.address(), step=step, scores=scores)


async def _evaluated(
    run: Storage, evaluation: EvaluationConfig, path: str, *, parameters: int, step: int | None = None, gpu: bool = True
) -> Evaluation:
    needed, room = 4 * parameters, host_memory()
    if needed > room and not (gpu and gpu_names()):
        what = f"the weights of {run.address()} take {bytes_text(needed)} in float32, but this machine has "
        fix = f"evaluate it on a machine with more memory or a GPU: train-litgpt evaluate {run.address()}"
        raise UserError(f"{what}{bytes_text(room)} of memory", fix=fix)
    command = [*PYTHON, "-m", "litgpt_demo.export.evaluation", run.address()]
    if step is not None:
        command = ["nice", "-n", "19", *command, str(step)]  # a training may need the cores
    environ = environment_of_readers(os.environ)
    if not gpu:
        environ |= {"CUDA_VISIBLE_DEVICES": ""}
    if not await asyncio.to_thread(can_reach_hub):
        # The libraries would retry for minutes; their cache needs no network.
        environ["HF_HUB_OFFLINE"] = "1"
        if step is None:  # else each checkpoint would repeat it
            emit(Note(what="the Hugging Face Hub cannot be reached: tasks are read from the cache of this machine"))
    log, printed, shown = f"{path.removesuffix('.json')}.log", deque[str](maxlen=_MOST_LINES), ""
    clean = Cleaner()

    def keep(line: str) -> None:
        printed.append(clean(line)[:_LONGEST])

    def show(what: str, percent: int | None) -> None:
        nonlocal shown
        if step is None and what and f"{what} {percent}" != shown:
            shown = f"{what} {percent}"
            fraction = None if percent is None or not what.startswith(_SCORING) else percent / 100
            emit(StepProgress(step=Step.EVALUATION, what=what, fraction=fraction))

    child = Child(command, environ=environ)
    child.write(evaluation.model_dump_json())
    try:
        fix = f"all that it printed is in {run.address(log)}"
        return await child.end(partial(read_evaluation, run, path), on_line=keep, on_progress=show, fix=fix)
    finally:
        if printed:
            await asyncio.to_thread(run.write, log, "\n".join([*printed, ""]).encode())
