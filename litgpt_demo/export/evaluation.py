"""Scores of a collected model by lm-evaluation-harness: their file, and the evaluation itself.

The evaluation needs torch and the extra `evaluate`, and has its own process. The rest is for readers of scores.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import FiniteFloat

from litgpt_demo.config import EvaluationConfig, Settings, content_hash
from litgpt_demo.documents import FileRecord, fetch_verified, parse_json, with_checksum, write_manifest
from litgpt_demo.errors import TrainLitgptError, Unreachable, UserError, failure_text, fault_of_exception, one_line
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
    """With the filter of its answers, if it has one, as `exact_match,strict-match`."""
    value: FiniteFloat
    error: FiniteFloat | None
    """The standard error; None if the harness has none."""
    samples: int
    few_shot: int
    larger_is_better: bool = True
    """By the harness; true if it does not say."""

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.value:.4f}"
        return f"{self.value:.4f} ± {self.error:.4f}"


class Evaluation(Settings):
    """The scores of one model on some tasks, as they are stored in a run's folder."""

    step: int
    settings: EvaluationConfig
    scores: tuple[Score, ...]
    versions: dict[str, str]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Task and metric, and the score, to be shown."""
        first = "" if self.settings.limit is None else f", first {self.settings.limit:,} samples"
        return [(f"{score.task}, {score.metric} ({score.few_shot}-shot{first})", str(score)) for score in self.scores]

    @property
    def objectives(self) -> dict[str, Score]:
        """The scores by their names in a sweep."""
        return {f"evaluation.{score.task}.{score.metric}": score for score in self.scores}

    @property
    def table(self) -> list[dict[str, Any]]:
        return [score.model_dump(mode="json") for score in self.scores]


def _files(final: FinalManifest) -> list[FileRecord]:
    return [file for file in final.files if f"{FINAL}/{file.path}".startswith(f"{HUGGINGFACE}/")]


def place_of(model: FinalManifest | int, settings: EvaluationConfig) -> str:
    """Return the path of the scores in the run's folder. It follows from settings, tasks, and the model or its step."""
    which = f"step {model}" if isinstance(model, int) else " ".join(file.crc32c for file in _files(model))
    tasks = []
    if settings.folder is not None:  # the harness also imports files next to those of the tasks
        paths = [path for path in settings.folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        tasks = [f"{path.relative_to(settings.folder)} {sha256_of(path)}" for path in sorted(paths)]
    what = settings.model_dump(mode="json", exclude={"task_folder", "batch_size", "every_checkpoints"})
    return f"{EVALUATIONS}/{content_hash(what, which, ' '.join(tasks))}.json"


def read_evaluation(run: Storage, path: str) -> Evaluation | None:
    """Return the scores of this path, or None if there are none yet."""
    try:
        content = run.read(path)
    except FileNotFoundError:
        return None
    return parse_json(content, Evaluation, where=run.address(path), fix="remove it, and evaluate again")


def found_scores(run: Storage, final: FinalManifest, settings: EvaluationConfig | None) -> Evaluation | None:
    """Return the scores of this model by these settings, or None if there are none yet."""
    return None if settings is None else read_evaluation(run, place_of(final, settings))


def evaluations(run: Storage, step: int | None = None) -> list[Evaluation]:
    """Return all scores of the model at this step, or at any step, oldest first."""
    return list(evaluations_by_path(run, step).values())


def evaluations_by_path(run: Storage, step: int | None = None) -> dict[str, Evaluation]:
    """Return the same, each by its path in the run's folder."""
    paths = [path for path in run.list(EVALUATIONS) if _RESULT.fullmatch(path)]
    found = [(path, read_evaluation(run, path)) for path in paths]
    chosen = [(path, scored) for path, scored in found if scored is not None and step in (None, scored.step)]
    return dict(sorted(chosen, key=lambda entry: entry[1].step))


def write_on_card(run: Storage, final: FinalManifest) -> FinalManifest:
    """Write all scores of the model to its card, and return its new manifest.

    The caller holds the lease of the run's evaluations: two writers would leave a card that the manifest denies.
    """
    pairs = [pair for scored in evaluations(run, final.step) for pair in scored.pairs]
    rows = "\n".join(f"| {name} | {value} |" for name, value in pairs)
    place = run.within(FINAL)
    before = place.read(CARD).decode()
    head, mark, tail = before.rpartition("\n## Use\n")  # the last one: a model may have written such a line too
    card = f"{_PART.sub('', head)}\n## Scores\n\n| | |\n| --- | --- |\n{rows}\n{mark}{tail}"
    if card == before and any(file.path == CARD for file in final.files):
        return final
    # The manifest lacks the card for a moment, because it must never name other bytes than the stored ones.
    others = tuple(file for file in final.files if file.path != CARD)
    write_manifest(place, final.model_copy(update={"files": others}))
    stored = FileRecord.of(place.write(CARD, card.encode()), sha256=sha256(card.encode()).hexdigest())
    made = final.model_copy(update={"files": (*others, stored)})
    write_manifest(place, made)
    return made


def evaluate(run: Storage, settings: EvaluationConfig, step: int | None = None) -> Evaluation:
    """Score the run's final/huggingface, or the checkpoint of a step, and store the scores in the run's folder.

    Existing scores are returned. A missing model, task or harness raises a UserError.
    """
    which = exported(run) if step is None else step
    if which is None or (isinstance(which, FinalManifest) and which.huggingface is None):
        raise UserError(f"{run.address(HUGGINGFACE)} does not exist", fix="collect the run: `train-litgpt collect`")
    path = place_of(which, settings)
    done = read_evaluation(run, path)
    if done is not None:
        return done
    import torch
    from lm_eval import simple_evaluate

    report_progress("loading the tasks and their data")
    manager, tasks = _loaded(settings)
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
                num_fewshot=settings.few_shot, limit=settings.limit, batch_size=settings.batch_size,
                task_manager=manager, log_samples=False, device="cuda" if torch.cuda.is_available() else "cpu",
            )  # fmt: skip
        except (AssertionError, IndexError) as failure:
            problem = _empty_choice(manager.load(tasks)["tasks"])
            if problem is not None:
                raise problem from failure
            raise
    scores = list[Score]()
    for task, figures in result["results"].items():  # a group has the samples of its tasks
        samples, shots = result["n-samples"].get(task, {}).get("effective", 0), result["n-shot"].get(task, 0)
        better = result["higher_is_better"].get(task, {})
        for name, value in figures.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, float) and math.isfinite(value) and not metric.endswith("_stderr"):
                error = figures.get(f"{metric}_stderr,{kind}")
                known_error = error if isinstance(error, float) and math.isfinite(error) else None
                full_name = metric if kind == "none" else name
                scores.append(
                    Score(
                        task=task, metric=full_name, value=value, error=known_error, samples=samples, few_shot=shots,
                        larger_is_better=better.get(metric) is not False,
                    )
                )  # fmt: skip
    versions = {name: version(name) for name in ("lm_eval", "transformers", "torch", "datasets")}
    reached = which if isinstance(which, int) else which.step
    made = Evaluation(step=reached, settings=settings, scores=tuple(scores), versions=versions)
    run.write(path, with_checksum(made.model_dump_json(indent=1).encode(), "record"))
    return made


def _loaded(settings: EvaluationConfig) -> tuple[TaskManager, list[Any]]:
    """Load each task or group of tasks with its data by itself, so that an error names its task."""
    from lm_eval.tasks import TaskManager

    manager, loaded = TaskManager(include_path=settings.folder), list[Any]()
    missing = sorted({*settings.tasks} - {*manager.all_tasks})
    if missing:
        what = f"evaluation.tasks: the harness {version('lm_eval')} has no task {', '.join(missing)}"
        raise UserError(what, fix="`lm-eval ls tasks` lists them; evaluation.task_folder adds your own")
    if settings.folder is not None:
        os.chdir(settings.folder)  # tasks name their files relative to it
    for name in settings.tasks:
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
        if not isinstance(error, TrainLitgptError) or error.__cause__:
            traceback.print_exc()
        print(one_line(failure_text(error)), flush=True)
        return fault_of_exception(error).exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
