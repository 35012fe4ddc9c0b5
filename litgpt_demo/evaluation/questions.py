"""Questions of lm-evaluation-harness for a model that it cannot call: a training's, which many ranks hold together.

The harness runs twice with a model that answers from a list. First it is told nothing and writes down what it is asked;
then the ranks find the log-likelihoods, and it is told those. Imports lm_eval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn, TypeAlias

from lm_eval.api.model import TemplateLM
from tokenizers import Tokenizer

from litgpt_demo.config import EvaluationConfig
from litgpt_demo.errors import UserError
from litgpt_demo.evaluation import Score
from litgpt_demo.evaluation.harness import ask, scores_in

Question: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a context, and those of the answer whose likelihood is asked."""


class Answers(TemplateLM):  # type: ignore[misc]
    """A language model that answers from a list, and writes down what it is asked."""

    def __init__(self, tokenizer: Tokenizer, end_of_text: int, known: Sequence[float] | None = None) -> None:
        """
        Args:
            known: the log-likelihood of each answer, in the order in which they are asked; None gives each 0.
        """
        super().__init__()
        self._tokenizer, self._end_of_text, self._known = tokenizer, end_of_text, known
        self.asked: list[Question] = []

    @property
    def eot_token_id(self) -> int:
        return self._end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self._tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)).ids)

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        first = len(self.asked)
        self.asked += [(tuple(context), tuple(answer)) for _, context, answer in requests]
        known = [0.0] * len(requests) if self._known is None else self._known[first : len(self.asked)]
        return [(likelihood, False) for likelihood in known]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        _refuse({request.task_name for request in requests})

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        _refuse({request.task_name for request in requests})


def questions(settings: EvaluationConfig, tokenizer: Tokenizer, end_of_text: int) -> list[Question]:
    """Return what the tasks ask, in the order in which they do.

    Raises:
        UserError: there is no such task, or one that is not of multiple choice.
    """
    model = Answers(tokenizer, end_of_text)
    found = ask(lambda: model, settings)
    if others := set(_not_of_choice(found)):
        _refuse(others)
    return model.asked


def scored(
    settings: EvaluationConfig, tokenizer: Tokenizer, end_of_text: int, *, asked: Sequence[Question],
    likelihoods: Sequence[float],
) -> list[Score]:  # fmt: skip
    """Return the scores of the tasks.

    Args:
        asked: what `questions` returned.
        likelihoods: the log-likelihood of each answer, in nats.

    Raises:
        UserError: the tasks ask something else now.
    """
    model = Answers(tokenizer, end_of_text, likelihoods)
    found = ask(lambda: model, settings)
    if model.asked != list(asked):
        raise UserError(f"evaluation.tasks={', '.join(settings.tasks)} asked other questions than before")
    return list(scores_in(found))


def _not_of_choice(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tasks that ask more than which answer is the likeliest."""
    for task, config in found["configs"].items():
        metrics = {metric["metric"] for metric in config.get("metric_list") or ()}
        if config["output_type"] != "multiple_choice" or "exact_match" in metrics:
            yield task


def _refuse(tasks: Set[str | None] | Set[str]) -> NoReturn:
    raise UserError(
        f"evaluation.tasks names {', '.join(sorted(map(str, tasks)))}, and evaluation.every_checkpoints asks a model "
        "in training only which of several answers is the likeliest (output_type: multiple_choice); leave "
        "every_checkpoints empty, which asks any task at the end, or leave those tasks out"
    )
