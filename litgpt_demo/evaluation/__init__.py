"""Evaluation: a run's collected model is scored, and the scores are found again by their key.

evaluations/<key>/   harness.json  manifest.json

The key holds what decides the scores: the model's files, the tasks with their files, and the version of the harness.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from litgpt_demo.config import EvaluationConfig
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import UserError
from litgpt_demo.export import FinalManifest, bring_model, collected
from litgpt_demo.export.card import replace_card, with_scores
from litgpt_demo.manifests import FileRecord, read_manifest, write_manifest
from litgpt_demo.runs import EVALUATIONS, HUGGINGFACE, LITGPT, read_spec
from litgpt_demo.settings import Settings, key_of
from litgpt_demo.storage import Storage, open_storage

FORMAT = 1
"""Part of every evaluation's key: raise it when the same settings mean other scores."""

VALIDATION = "validation"
"""The task of our own scores, of all sources together; of one source it is `validation/<name>`."""
_DETAILS = "harness.json"


class Score(Settings):
    """One figure of a model."""

    task: str
    metric: str
    value: float | None
    """None where it is not finite."""
    stderr: float | None = None
    """Its standard error; None where it has none, or is not known."""
    higher_is_better: bool | None = None
    """None where the task does not say."""
    samples: int | None = None
    """The number of questions, or of validation samples."""
    few_shot: int | None = None
    """The number of solved examples before each question; None for what asks no questions."""

    @property
    def name(self) -> str:
        """The name by which a sweep refers to it."""
        return f"{self.task}/{self.metric}"

    def __str__(self) -> str:
        if self.value is None:
            return "not finite"
        return f"{self.value:.4f}" + ("" if self.stderr is None else f" ± {self.stderr:.4f}")


class EvaluationManifest(Settings):
    """The manifest of an evaluation, with its scores."""

    key: str
    run: str
    step: int
    """The step of the model that was scored."""
    settings: EvaluationConfig
    harness: str | None = None
    """The version of lm-evaluation-harness, where tasks were asked for."""
    scores: tuple[Score, ...]
    files: tuple[FileRecord, ...]


def require_tasks(settings: EvaluationConfig) -> None:
    """See that this machine can score what is asked for, as far as that is quickly said.

    Raises:
        UserError: the harness is not installed, or there is no such folder.
    """
    if settings.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"evaluation.tasks={', '.join(settings.tasks)} needs lm-evaluation-harness, which is not installed here: "
            'pip install "train-litgpt[evaluate]", or leave evaluation.tasks empty'
        )
    if settings.task_files is not None and not Path(settings.task_files).is_dir():
        raise UserError(f"evaluation.task_files={settings.task_files} is not a folder of this machine; give one")


def evaluation_key(final: FinalManifest, settings: EvaluationConfig) -> str:
    """Return the key of an evaluation of this model."""
    weights = sorted((record.path, record.crc32c) for record in final.files if "/" in record.path)
    asked = settings.model_dump(mode="json", exclude=set(settings.NOT_IN_KEY))
    model: list[Any] = [final.dataset_key, [list(record) for record in weights]]
    return key_of(FORMAT, model, asked, _content(settings.task_files), _harness_version(settings))


def _content(folder: str | None) -> dict[str, Any] | None:
    """Return the checksum of each file in the folder, by its path there."""
    if folder is None:
        return None
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}


def _harness_version(settings: EvaluationConfig) -> str | None:
    return importlib.metadata.version("lm_eval") if settings.tasks else None


def evaluated(run: Storage, settings: EvaluationConfig) -> EvaluationManifest | None:
    """The evaluation of the run's collected model with these settings, if it is done.

    Raises:
        UserError: this machine cannot score what is asked for, so that the evaluation has no key.
    """
    require_tasks(settings)
    final = collected(run)
    if final is None:
        return None
    return read_manifest(run.within(f"{EVALUATIONS}/{evaluation_key(final, settings)}"), EvaluationManifest)


def score_model(run: Storage, settings: EvaluationConfig) -> EvaluationManifest:
    """Score the run's collected model, or find it scored; the scores are in its card after that.

    Raises:
        UserError: there is no collected model, or no such task.
        DataError: the model or the dataset is not what its manifest says.
    """
    require_tasks(settings)
    final = collected(run)
    if final is None:
        raise UserError(f"{run.address()} has no collected model; `train-litgpt collect` makes one of its checkpoint")
    place = run.within(f"{EVALUATIONS}/{evaluation_key(final, settings)}")
    made = read_manifest(place, EvaluationManifest) or _score(run, final, settings, place)
    shown = [(score.task, score.metric, str(score), score.samples) for score in made.scores]
    replace_card(run, lambda card: with_scores(card, shown))
    return made


def _score(run: Storage, final: FinalManifest, settings: EvaluationConfig, place: Storage) -> EvaluationManifest:
    from litgpt_demo.evaluation import harness, validation

    files: list[FileRecord] = []
    with tempfile.TemporaryDirectory(prefix="litgpt-evaluate-") as folder:
        scratch = Path(folder)
        model = bring_model(run, LITGPT, scratch)
        scores = validation.scores(model, read_spec(run), settings.validation_windows, scratch)
        if settings.tasks:
            found, details = harness.scores(bring_model(run, HUGGINGFACE, scratch), settings)
            scores += found
            files.append(FileRecord.of(place.write(_DETAILS, json.dumps(details, indent=1, default=str).encode())))
    made = EvaluationManifest(
        key=place.address().rsplit("/", 1)[-1],
        run=final.run,
        step=final.step,
        settings=settings,
        harness=_harness_version(settings),
        scores=tuple(scores),
        files=tuple(files),
    )
    write_manifest(place, made)
    return made


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo evaluate --run ADDRESS --settings JSON`."""
    parser = argparse.ArgumentParser(prog="litgpt_demo evaluate", description=__doc__)
    parser.add_argument("--run", required=True, help="address of the run's folder")
    parser.add_argument("--settings", default="{}", help="the config's `evaluation` section, as JSON")
    args = parser.parse_args(argv)
    settings = parse_json(args.settings.encode(), EvaluationConfig, where="--settings", fix="give a JSON object")
    for score in score_model(open_storage(args.run), settings).scores:
        print(f"{score.name}: {score}")
    return 0
