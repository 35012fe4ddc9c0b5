"""The result of a run, read back from its folder and its record: what runs are compared by, and what notebooks get."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from launcher.errors import UnknownRun
from launcher.runs.index import Index
from litgpt_demo.documents import Unreadable
from litgpt_demo.evaluation import EvaluationManifest, Score
from litgpt_demo.manifests import read_manifest
from litgpt_demo.metrics import Row, damaged_lines
from litgpt_demo.runs import EVALUATIONS, read_metrics
from litgpt_demo.storage import MANIFEST, Storage

_EVALUATION = re.compile(rf"(?P<key>[^/]+)/{re.escape(MANIFEST)}")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run as it is now: its settings, its curves and its scores."""

    name: str
    config: Mapping[str, JsonValue]
    """The config of its last attempt, every default filled in."""
    rows: Sequence[Row] = ()
    """The metrics; none of a script, and none before the first step."""
    scores: Sequence[Score] = ()
    """The scores of its evaluations, by task and metric each once, those of the latest step."""


def result_of_run(index: Index, run: str, bad: Unreadable | None = None) -> RunResult:
    """Return the result of a run.

    Args:
        bad: counts lines of its metrics that cannot be read.

    Raises:
        UnknownRun: the index has no such run.
        DataError: its record or an evaluation cannot be read.
    """
    records = index.records(run)
    if not records:
        root = index.root.address()
        raise UnknownRun(f"the index of {root} has no run {run}; `train-litgpt runs {shlex.quote(root)}` lists them")
    folder = index.root.within(f"runs/{run}")
    rows = read_metrics(folder, damaged_lines() if bad is None else bad)
    return RunResult(name=run, config=records[-1].config, rows=rows, scores=_scores(folder))


def _scores(run: Storage) -> tuple[Score, ...]:
    folder = run.within(EVALUATIONS)
    keys = sorted(found["key"] for path in folder.list() if (found := _EVALUATION.fullmatch(path)))
    made = [one for key in keys if (one := read_manifest(folder.within(key), EvaluationManifest)) is not None]
    named = {score.name: score for one in sorted(made, key=lambda one: one.step) for score in one.scores}
    return tuple(named[name] for name in sorted(named))
