"""Scores of a collected model, by lm-evaluation-harness: what is asked, what is written down, and the asking itself.

The asking needs torch and the extra `evaluate`, and has a process of its own; the rest is read by whoever shows scores.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from litgpt_demo.config import EvaluationConfig, Settings, key_of
from litgpt_demo.documents import FileRecord, bring, parse_json, sealed, write_manifest
from litgpt_demo.errors import TrainLitgptError, UserError
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.export.card import CARD
from litgpt_demo.runs import EVALUATIONS, FINAL, HUGGINGFACE
from litgpt_demo.storage import Storage, open_storage, sha256_of

_PART = re.compile(r"## Scores\n.*?(?=\n## )", re.DOTALL)


class Score(Settings):
    """One figure of a task."""

    task: str
    metric: str
    """With the filter of the answers that it is of, as `exact_match,strict-match`, where there is one."""
    value: FiniteFloat
    error: FiniteFloat | None
    """The standard error; None where the harness has none."""
    samples: int
    few_shot: int

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
        return [(f"{score.task}, {score.metric}", str(score)) for score in self.scores]

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows of a table of the scores."""
        return [score.model_dump(mode="json") for score in self.scores]


def place_of(final: FinalManifest, asked: EvaluationConfig) -> str:
    """Return where the scores lie below the run's folder: by the model's files, and what is asked of it."""
    model = [file.crc32c for file in final.files if f"{FINAL}/{file.path}".startswith(f"{HUGGINGFACE}/")]
    folder = asked.folder
    files = [] if folder is None else sorted(path for path in folder.rglob("*") if path.is_file())
    tasks = [f"{path.relative_to(folder or path)} {sha256_of(path)}" for path in files]
    what = asked.model_dump(mode="json", exclude={"task_folder", "batch_size"})
    return f"{EVALUATIONS}/{key_of(what, ' '.join(model), ' '.join(tasks))}.json"


def read_evaluation(run: Storage, path: str) -> Evaluation | None:
    """Return the scores that lie there, None where there are none yet."""
    try:
        content = run.read(path)
    except FileNotFoundError:
        return None
    return parse_json(content, Evaluation, where=run.address(path), fix="remove it, and evaluate again")


def evaluations(run: Storage, step: int) -> list[Evaluation]:
    """Return all scores of the model that was collected at this step."""
    found = [read_evaluation(run, path) for path in run.list(EVALUATIONS)]
    return [one for one in found if one is not None and one.step == step]


def write_on_card(run: Storage, final: FinalManifest) -> FinalManifest:
    """Put all scores of the model on its card; return its manifest, in which the card is another file by then."""
    pairs = [pair for one in evaluations(run, final.step) for pair in one.pairs]
    rows = "\n".join(f"| {name} | {value} |" for name, value in pairs)
    place, part = run.within(FINAL), f"## Scores\n\n| | |\n| --- | --- |\n{rows}\n"
    before = place.read(CARD).decode()
    old = _PART.search(before)
    card = before.replace(old[0] if old else "## Use\n", part if old else f"{part}\n## Use\n", 1)
    if card == before:
        return final
    # Without the card for a moment: a manifest never tells of other bytes than those that are there.
    others = tuple(file for file in final.files if file.path != CARD)
    write_manifest(place, final.model_copy(update={"files": others}))
    stored = FileRecord.of(place.write(CARD, card.encode()))
    made = final.model_copy(update={"files": (*others, stored)})
    write_manifest(place, made)
    return made


def evaluate(run: Storage, asked: EvaluationConfig) -> Evaluation:
    """Ask the run's final/huggingface the tasks, and leave the scores in the run's folder, or find them there.

    A UserError where there is no such model, no such task, or no harness.
    """
    final = exported(run)
    if final is None or final.huggingface is None:
        raise UserError(f"{run.address(HUGGINGFACE)} is not there", fix="collect the run: `train-litgpt collect`")
    if (done := read_evaluation(run, path := place_of(final, asked))) is not None:
        return done
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=asked.folder)
    known = manager.all_tasks
    if missing := [task for task in asked.tasks if task not in known]:
        what = f"evaluation.tasks: the harness {version('lm_eval')} has no task {', '.join(missing)}"
        raise UserError(what, fix="`lm-eval ls tasks` lists them; evaluation.task_folder adds your own")
    inside = [file for file in final.files if f"{FINAL}/{file.path}".startswith(f"{HUGGINGFACE}/")]
    with tempfile.TemporaryDirectory(prefix="evaluate-") as scratch:
        model = bring(run.within(FINAL), inside, lambda: Path(scratch)) / HUGGINGFACE.removeprefix(f"{FINAL}/")
        if asked.folder is not None:
            os.chdir(asked.folder)  # tasks name their files relative to it
        result: Mapping[str, Any] = simple_evaluate(
            model="hf", model_args={"pretrained": str(model), "dtype": "float32"}, tasks=list(asked.tasks),
            num_fewshot=asked.few_shot, limit=asked.limit, task_manager=manager, batch_size=asked.batch_size,
            log_samples=False, device="cuda" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip
    scores = list[Score]()
    for task, figures in result["results"].items():  # a group is among them, whose samples are its tasks'
        samples, shots = result["n-samples"].get(task, {}).get("effective", 0), result["n-shot"].get(task, 0)
        for name, value in figures.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, float) and math.isfinite(value) and not metric.endswith("_stderr"):
                error = figures.get(f"{metric}_stderr,{kind}")
                known_error = error if isinstance(error, float) and math.isfinite(error) else None
                told = metric if kind == "none" else name
                scores.append(
                    Score(task=task, metric=told, value=value, error=known_error, samples=samples, few_shot=shots)
                )
    versions = {name: version(name) for name in ("lm_eval", "transformers", "torch", "datasets")}
    made = Evaluation(step=final.step, asked=asked, scores=tuple(scores), versions=versions)
    run.write(path, sealed(made.model_dump_json(indent=1).encode(), "record"))
    return made


def main(argv: Sequence[str]) -> int:
    """`python -m launcher.evaluation ADDRESS`: what to ask of that run comes on stdin, as a config's `evaluation`."""
    try:
        evaluate(open_storage(argv[0]), EvaluationConfig.model_validate_json(sys.stdin.read()))
    except TrainLitgptError as error:
        print(error)
        return error.fault.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
