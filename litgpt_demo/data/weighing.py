"""The check of a mixture's settings against one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def mixture_problems(
    names: Sequence[str], weights: Sequence[Sequence[float]], stages: Sequence[Mapping[str, Any]], tokenizer: str
) -> Iterator[str]:
    """Yield why sources cannot be mixed so.

    Args:
        names: the sources'.
        weights: those of each stage, in the order of the sources.
        stages: the stages as they are written.
        tokenizer: its kind.
    """
    if tokenizer == "train":
        yield (
            "data.tokenizer.kind=train: the sources of data.mixture share one tokenizer, which has to exist before "
            "they are prepared; give {kind: hub, name: openai-community/gpt2} or, of a dataset that is there, "
            "{kind: file, path: …/tokenizer/tokenizer.json}"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"data.mixture has several sources called {', '.join(twice)}; give them a name each"
    yield from _stage_problems(names, stages)
    for end in ("until_step", "until_share"):
        given = [stage[end] for stage in stages if stage[end] is not None]
        if given != sorted(set(given)):
            yield f"data.stages: {end} is {given}; each stage has to end after the one before"
    if any(sum(one) <= 0 for one in weights):
        yield "data.mixture: a stage has weights of 0 alone; give a source a weight above 0"


def _stage_problems(names: Sequence[str], stages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, stage in enumerate(stages):
        where, last = f"data.stages[{number}]", number == len(stages) - 1
        ends = [name for name in ("until_step", "until_share") if stage[name] is not None]
        if not last and len(ends) != 1:
            yield f"{where} needs an end: give either until_step or until_share"
        if last and ends:
            yield (
                f"{where} is the last stage and goes on to the end of the run; leave out its {' and '.join(ends)}, or "
                "add the stage that follows"
            )
        if strangers := sorted(set(stage["weights"]) - set(names)):
            yield (
                f"{where}.weights names {', '.join(strangers)}, which is no source of data.mixture; its sources are "
                f"{', '.join(names)}"
            )
