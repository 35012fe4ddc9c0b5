"""Scores of a collected model, by lm-evaluation-harness: what is asked, what is written down, and the asking itself.

The asking needs torch and the extra `evaluate`, and has a process of its own; the rest is read by whoever shows scores.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import FiniteFloat

from litgpt_demo.config import EvaluationConfig, Settings, content_hash
from litgpt_demo.documents import FileRecord, fetch_verified, parse_json, with_checksum, write_manifest
from litgpt_demo.errors import TrainLitgptError, Unreachable, UserError, fault_of_exception, one_line
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.export.card import CARD
from litgpt_demo.parent import follow_parent, report_progress
from litgpt_demo.runs import EVALUATIONS, FINAL, HUGGINGFACE
from litgpt_demo.storage import Storage, open_storage, sha256_of

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

_OFFLINE = (
    "to score without a network, evaluate these tasks once where the Hub can be reached and copy its cache (HF_HOME) "
    "here, or give tasks with their data in evaluation.task_folder"
)
_RESULT = re.compile(rf"{EVALUATIONS}/[^/]+\.json")
_PART = re.compile(r"\n## Scores\n\n(\|.*\n)*\Z")


class Score(Settings):
    task: str
    metric: str
    """With the filter of the answers that it is of, as `exact_match,strict-match`, where there is one."""
    value: FiniteFloat
    error: FiniteFloat | None
    """The standard error; None where the harness has none."""
    samples: int
    few_shot: int
    larger_is_better: bool = True
    """As the harness has it; where it does not know, larger is."""

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.error is None else f" ± {self.error:.4f}")


class Evaluation(Settings):
    """The scores of one model on some tasks, as a run's folder keeps them."""

    step: int
    asked: EvaluationConfig
    scores: tuple[Score, ...]
    versions: dict[str, str]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Task and metric, and the score, to be shown."""
        first = "" if self.asked.limit is None else f", first {self.asked.limit:,} samples"
        return [(f"{one.task}, {one.metric} ({one.few_shot}-shot{first})", str(one)) for one in self.scores]

    @property
    def objectives(self) -> dict[str, Score]:
        """The scores by what a sweep calls them."""
        return {f"evaluation.{score.task}.{score.metric}": score for score in self.scores}

    @property
    def table(self) -> list[dict[str, Any]]:
        return [score.model_dump(mode="json") for score in self.scores]


def _files(final: FinalManifest) -> list[FileRecord]:
    return [file for file in final.files if f"{FINAL}/{file.path}".startswith(f"{HUGGINGFACE}/")]


def place_of(model: FinalManifest | int, asked: EvaluationConfig) -> str:
    """Return where the scores lie below the run's folder: by what is asked, and the model's files or its step."""
    which = f"step {model}" if isinstance(model, int) else " ".join(file.crc32c for file in _files(model))
    folder = asked.folder
    there = [] if folder is None else [path for path in folder.rglob("*") if path.is_file()]
    files = sorted(path for path in there if "__pycache__" not in path.parts)  # the harness imports what is beside them
    tasks = [f"{path.relative_to(folder or path)} {sha256_of(path)}" for path in files]
    what = asked.model_dump(mode="json", exclude={"task_folder", "batch_size", "every_checkpoints"})
    return f"{EVALUATIONS}/{content_hash(what, which, ' '.join(tasks))}.json"


def read_evaluation(run: Storage, path: str) -> Evaluation | None:
    """Return the scores that lie there, None where there are none yet."""
    try:
        content = run.read(path)
    except FileNotFoundError:
        return None
    return parse_json(content, Evaluation, where=run.address(path), fix="remove it, and evaluate again")


def found_scores(run: Storage, final: FinalManifest, asked: EvaluationConfig | None) -> Evaluation | None:
    """Return the scores of this model by what is asked, None where there are none yet or nothing is asked."""
    return None if asked is None else read_evaluation(run, place_of(final, asked))


def evaluations(run: Storage, step: int | None = None) -> list[Evaluation]:
    """Return all scores of the model at this step, or at all, the oldest first."""
    paths = [path for path in run.list(EVALUATIONS) if _RESULT.fullmatch(path)]
    found = [one for path in paths if (one := read_evaluation(run, path)) is not None]
    return sorted((one for one in found if step in (None, one.step)), key=lambda one: one.step)


def write_on_card(run: Storage, final: FinalManifest) -> FinalManifest:
    """Put all scores of the model on its card; return its manifest, in which the card is another file by then.

    The caller holds the lease of the run's evaluations: two writers at once leave a card that the manifest denies.
    """
    pairs = [pair for one in evaluations(run, final.step) for pair in one.pairs]
    rows = "\n".join(f"| {name} | {value} |" for name, value in pairs)
    place = run.within(FINAL)
    before = place.read(CARD).decode()
    head, mark, tail = before.rpartition("\n## Use\n")  # the last one: a model may have written such a line too
    card = f"{_PART.sub('', head)}\n## Scores\n\n| | |\n| --- | --- |\n{rows}\n{mark}{tail}"
    if card == before and any(file.path == CARD for file in final.files):
        return final
    # Without the card for a moment: a manifest never tells of other bytes than those that are there.
    others = tuple(file for file in final.files if file.path != CARD)
    write_manifest(place, final.model_copy(update={"files": others}))
    stored = FileRecord.of(place.write(CARD, card.encode()))
    made = final.model_copy(update={"files": (*others, stored)})
    write_manifest(place, made)
    return made


def evaluate(run: Storage, asked: EvaluationConfig, step: int | None = None) -> Evaluation:
    """Ask the run's final/huggingface, or the checkpoint of a step, the tasks; leave the scores in the run's folder, or
    find them there.

    A UserError where there is no such model, no such task, or no harness.
    """
    which = exported(run) if step is None else step
    if which is None or (isinstance(which, FinalManifest) and which.huggingface is None):
        raise UserError(f"{run.address(HUGGINGFACE)} is not there", fix="collect the run: `train-litgpt collect`")
    if (done := read_evaluation(run, path := place_of(which, asked))) is not None:
        return done
    import torch
    from lm_eval import simple_evaluate

    report_progress("loading the tasks and their data")
    manager, tasks = _loaded(asked)
    report_progress("loading the model")
    with tempfile.TemporaryDirectory(prefix="evaluate-") as scratch:
        if isinstance(which, int):
            from litgpt_demo.export.models import huggingface_of

            model = huggingface_of(run, which, Path(scratch))
        else:
            folder = fetch_verified(run.within(FINAL), _files(which), lambda: Path(scratch))
            model = folder / HUGGINGFACE.removeprefix(f"{FINAL}/")
        try:
            result: Mapping[str, Any] = simple_evaluate(
                model="hf", model_args={"pretrained": str(model), "dtype": "float32"}, tasks=tasks,
                num_fewshot=asked.few_shot, limit=asked.limit, task_manager=manager, batch_size=asked.batch_size,
                log_samples=False, device="cuda" if torch.cuda.is_available() else "cpu",
            )  # fmt: skip
        except (AssertionError, IndexError) as failure:
            if (problem := _empty_choice(manager.load(tasks)["tasks"])) is not None:
                raise problem from failure
            raise
    scores = list[Score]()
    for task, figures in result["results"].items():  # a group is among them, whose samples are its tasks'
        samples, shots = result["n-samples"].get(task, {}).get("effective", 0), result["n-shot"].get(task, 0)
        better = result["higher_is_better"].get(task, {})
        for name, value in figures.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, float) and math.isfinite(value) and not metric.endswith("_stderr"):
                error = figures.get(f"{metric}_stderr,{kind}")
                known_error = error if isinstance(error, float) and math.isfinite(error) else None
                told = metric if kind == "none" else name
                scores.append(
                    Score(
                        task=task, metric=told, value=value, error=known_error, samples=samples, few_shot=shots,
                        larger_is_better=better.get(metric) is not False,
                    )
                )  # fmt: skip
    versions = {name: version(name) for name in ("lm_eval", "transformers", "torch", "datasets")}
    reached = which if isinstance(which, int) else which.step
    made = Evaluation(step=reached, asked=asked, scores=tuple(scores), versions=versions)
    run.write(path, with_checksum(made.model_dump_json(indent=1).encode(), "record"))
    return made


def _loaded(asked: EvaluationConfig) -> tuple[TaskManager, list[Any]]:
    """Load the tasks and groups of tasks with their data, one by one, so that an error names its task."""
    from lm_eval.tasks import TaskManager

    manager, loaded = TaskManager(include_path=asked.folder), list[Any]()
    if missing := sorted({*asked.tasks} - {*manager.all_tasks}):
        what = f"evaluation.tasks: the harness {version('lm_eval')} has no task {', '.join(missing)}"
        raise UserError(what, fix="`lm-eval ls tasks` lists them; evaluation.task_folder adds your own")
    if asked.folder is not None:
        os.chdir(asked.folder)  # tasks name their files relative to it
    for name in asked.tasks:
        try:
            found = manager.load([name])
        except Exception as error:
            what = f"evaluation.tasks: {name} cannot be loaded: {type(error).__name__}: {one_line(error)}"
            of_the_hub = isinstance(error, OSError) and type(error) is not FileNotFoundError  # a file of the task's own
            if of_the_hub and os.environ.get("HF_HUB_OFFLINE"):
                raise Unreachable(what, fix=_OFFLINE) from error
            raise TrainLitgptError(what, fault=fault_of_exception(error)) from error
        loaded += [found["groups"][name]] if name in found["groups"] else found["tasks"].values()
    return manager, loaded


def _empty_choice(tasks: Mapping[str, Any]) -> UserError | None:
    """Find a choice without text: it has no likelihood, and the harness 0.4 ends in an error that names no task."""
    for name, task in tasks.items():
        for request in task.instances:
            if request.request_type == "loglikelihood" and not request.args[1]:
                what = f"evaluation.tasks: choice {request.idx + 1} of sample {request.doc_id + 1} of {name} is empty"
                return UserError(what, fix="give it text in the task's data or in its doc_to_choice")
    return None


def main(argv: Sequence[str]) -> int:
    """Run `python -m litgpt_demo.export.evaluation ADDRESS [STEP]`: score that run's model, or its checkpoint.

    A config's `evaluation` comes on stdin, as one line of JSON. After a failure the last line printed is the reason.
    """
    lines = follow_parent()
    try:
        evaluate(open_storage(argv[0]), EvaluationConfig.model_validate_json(lines.get()), *map(int, argv[1:]))
    except Exception as error:
        known = isinstance(error, TrainLitgptError)
        if not known or error.__cause__:
            traceback.print_exc()
        print(one_line(error) if known else f"{type(error).__name__}: {one_line(error)}", flush=True)
        return fault_of_exception(error).exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
