"""lm-evaluation-harness on the exported Hugging Face model. Imports torch, transformers and lm_eval."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from litgpt_demo.config import EvaluationConfig
from litgpt_demo.errors import UserError
from litgpt_demo.evaluation import Score


def language_model(folder: Path, *, batch_size: int) -> Any:
    """Return the model in `folder` as the harness asks it, in float32, on a GPU if there is one."""
    import torch
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=str(folder),
        dtype="float32",
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=batch_size,
        # Not every architecture's window and softcapping are in the other ones; the export is proved with this one.
        attn_implementation="eager",
        trust_remote_code=False,
    )


def scores(folder: Path, settings: EvaluationConfig) -> tuple[list[Score], dict[str, Any]]:
    """Ask the Hugging Face model in `folder` the tasks.

    Returns:
        The scores, and all that the harness says of them without the single questions.

    Raises:
        UserError: there is no such task.
    """
    found = ask(lambda: language_model(folder, batch_size=settings.batch_size), settings)
    return list(scores_in(found)), {name: value for name, value in found.items() if name != "samples"}


def ask(opened: Callable[[], Any], settings: EvaluationConfig) -> dict[str, Any]:
    """Ask a model of the harness the tasks. Return all that the harness says of them.

    Args:
        opened: returns the model, once the tasks are known to be there.

    Raises:
        UserError: there is no such task.
    """
    from lm_eval import simple_evaluate

    own = None if settings.task_files is None else Path(settings.task_files).resolve()
    manager = _manager(settings.tasks, own)
    require_known(settings.tasks, manager.all_tasks)
    model = opened()
    with chdir(own or Path.cwd()):  # where the paths in `data_files` begin
        found: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=list(settings.tasks),
            num_fewshot=settings.few_shot,
            limit=settings.limit,
            batch_size=settings.batch_size,
            task_manager=manager,
            log_samples=False,
        )
    return found


def _manager(tasks: tuple[str, ...], own: Path | None) -> Any:
    """Return the tasks that there are: those of the folder alone where that has all, for the harness has 14,000."""
    from lm_eval.tasks import TaskManager

    if own is not None:
        manager = TaskManager(include_path=str(own), include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return manager
    return TaskManager(include_path=None if own is None else str(own))


def require_known(tasks: tuple[str, ...], known: list[str]) -> None:
    """Refuse tasks that the harness has not heard of.

    Raises:
        UserError: there are some; names those that read alike.
    """
    for task in tasks:
        if task not in known:
            near = difflib.get_close_matches(task, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists them all"
            raise UserError(
                f"evaluation.tasks names {task!r}, which is no task or group of lm-evaluation-harness or of "
                f"evaluation.task_files; {hint}"
            )


def scores_in(found: Mapping[str, Any]) -> Iterator[Score]:
    """Yield the scores in the results of the harness, where each is called `<metric>,<filter>`."""
    for task, figures in {**found["results"], **found.get("groups", {})}.items():
        for name, value in figures.items():
            metric, comma, which = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{which}")
            yield Score(
                task=task,
                metric=metric if which == "none" else f"{metric},{which}",
                value=value if math.isfinite(value) else None,
                stderr=error if isinstance(error, int | float) and math.isfinite(error) else None,
                higher_is_better=found.get("higher_is_better", {}).get(task, {}).get(metric),
                samples=found.get("n-samples", {}).get(task, {}).get("effective"),
                few_shot=found.get("n-shot", {}).get(task),
            )
