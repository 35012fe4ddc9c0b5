"""Scores of a training at some of its checkpoints, by its own ranks and in its own layout and precision.

The validation split is measured as an evaluation measures it; questions of lm-evaluation-harness are samples of which
the answer alone counts. Rank 0 knows texts, tokenizer and harness; the others know tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from litgpt_demo.config import EvaluationConfig
from litgpt_demo.data.batches import AnyWindows, MixedWindows, Numbers
from litgpt_demo.errors import UserError, words_of
from litgpt_demo.evaluation import VALIDATION, Score, require_tasks
from litgpt_demo.evaluation.bits import bits_and_perplexity, size_of
from litgpt_demo.training.reporting import Reporter, warn
from litgpt_demo.training.setup import Training
from litgpt_demo.training.step import summed_losses

Ids = npt.NDArray[np.int64]


class Scoring:
    """The scores at every so many checkpoints. Every rank has one and calls it alike."""

    def __init__(self, training: Training, settings: EvaluationConfig, every: int, report: Reporter) -> None:
        """
        Args:
            every: steps from one scoring to the next.

        Raises:
            UserError: a task cannot be asked here, on any rank.
        """
        self._training, self._settings, self._every = training, settings, every
        self._windows = _first_samples(training.data.validation, settings.validation_windows)
        self._texts: dict[str, tuple[int, int]] = {}
        self._tokenizer: Tokenizer | None = None  # of rank 0
        self._told, self._questions = training.ranks.first(lambda: (report.scored(), self._open()))

    @classmethod
    def of(cls, training: Training, report: Reporter) -> Scoring | None:
        """Return the scoring that the run asks for, if it does."""
        settings = training.spec.evaluation
        if settings is None or settings.every_checkpoints is None:
            return None
        return cls(training, settings, settings.every_checkpoints * training.spec.train.checkpoint_every, report)

    def _open(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Open on rank 0 what the others need not have. Return the questions."""
        data = self._training.data
        self._tokenizer = Tokenizer.from_file(str(data.tokenizer / "tokenizer.json"))
        for name, (windows, numbers) in self._windows.items():
            targets = windows.read(numbers)[1]
            size = size_of(self._tokenizer, targets, data.manifest.end_of_text)
            self._texts[name] = int((targets >= 0).sum()), size
        if not self._settings.tasks:
            return []
        require_tasks(self._settings)
        from litgpt_demo.evaluation.questions import questions

        try:
            return questions(self._settings, self._tokenizer, data.manifest.end_of_text)
        except UserError:
            raise
        except Exception as error:  # of a data set's own code, or of the service that has it
            raise UserError(
                f"evaluation.tasks={', '.join(self._settings.tasks)} cannot be read on the node of rank 0, where "
                f"evaluation.every_checkpoints asks them: {words_of(error)}; see that it reaches what they need, or "
                "leave every_checkpoints empty, which asks them at the end"
            ) from error

    def due(self, step: int) -> bool:
        """Return whether the state after `step` steps is to be scored, and has not been."""
        return step > 0 and step % self._every == 0 and step not in self._told

    def back(self, step: int) -> None:
        """Training has gone back to where `step` steps were done: later states come anew, and differ."""
        self._told = {told for told in self._told if told <= step}

    def scores(self, step: int, beat: Callable[[], object]) -> list[Score]:
        """Score the state after `step` steps; empty on other ranks than 0.

        Args:
            beat: called before every forward pass.
        """
        self._told.add(step)
        sums = summed_losses(self._training, list(self._windows.values()), beat).tolist()
        likelihoods = log_likelihoods(self._training, self._questions, beat)
        if self._tokenizer is None:
            return []
        means = {name: one[0] / one[1] if one[1] else math.nan for name, one in zip(self._windows, sums, strict=True)}
        return [*self._of_validation(means), *self._of_tasks(self._tokenizer, likelihoods)]

    def _of_validation(self, means: dict[str, float]) -> list[Score]:
        tokens, size = (sum(column) for column in zip(*self._texts.values(), strict=True))
        nats = sum(mean * self._texts[name][0] for name, mean in means.items() if self._texts[name][0])
        scores = _scores(VALIDATION, nats / tokens if tokens else math.nan, tokens, size)
        named = ((name, mean) for name, mean in means.items() if name)
        return scores + [
            one for name, mean in named for one in _scores(f"{VALIDATION}/{name}", mean, *self._texts[name])
        ]

    def _of_tasks(self, tokenizer: Tokenizer, likelihoods: list[float]) -> list[Score]:
        if not self._questions:
            return []
        from litgpt_demo.evaluation.questions import scored

        end_of_text = self._training.data.manifest.end_of_text
        try:
            return scored(self._settings, tokenizer, end_of_text, asked=self._questions, likelihoods=likelihoods)
        except Exception as error:  # of a harness or a service that it asks; no score is worth a training
            warn(f"the tasks are not scored: {words_of(error)}")
            return []


def _first_samples(windows: AnyWindows, count: int) -> dict[str, tuple[AnyWindows, Numbers]]:
    """Return the first samples of each source by its name; "" is the only one."""
    sources = windows.sources if isinstance(windows, MixedWindows) else {"": windows}
    return {name: (one, np.arange(min(count, len(one)), dtype=np.uint64)) for name, one in sources.items()}


def _scores(task: str, mean: float, tokens: int, size: int) -> list[Score]:
    return [
        Score(task=task, metric=name, value=value if math.isfinite(value) else None, higher_is_better=False)
        for name, (value, _) in bits_and_perplexity(mean, tokens, size).items()
    ]


@torch.no_grad()
def log_likelihoods(
    training: Training, questions: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], beat: Callable[[], object]
) -> list[float]:
    """Return the log-likelihood of each answer after its context, in nats. Every rank has to call it.

    Of a question that is longer than a sample, the beginning is left out.

    Args:
        beat: called before every forward pass.
    """
    if not questions:
        return []
    fabric, reader, count = training.fabric, training.reader, len(questions)
    length, module = training.spec.model.sequence_length, training.model.module
    sums, masked = torch.zeros(count, 2, dtype=torch.float64, device=fabric.device), module.masked
    training.model.eval()
    module.masked = True
    # Every rank makes the same number of forward passes: those of a sharded model are collective.
    for first in range(0, count, reader.count):
        beat()
        number = min(first + reader.number, count - 1)
        inputs, targets = (part.to(fabric.device) for part in as_sample(*questions[number], length))
        loss = training.model(inputs, targets).double()
        if first + reader.number < count:
            sums[number] += torch.stack([loss, torch.ones_like(loss)])
    module.masked = masked
    training.model.train()
    if fabric.world_size > 1:
        dist.all_reduce(sums)
    return [-length * nats / ranks for nats, ranks in sums.tolist()]  # losses are means over the whole sample


def as_sample(context: Sequence[int], answer: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of which the answer alone counts, each of shape (1, length)."""
    tokens = np.array([*context, *answer][-(length + 1) :], dtype=np.int64)
    inputs, targets = np.zeros((1, length), dtype=np.int64), np.full((1, length), -1, dtype=np.int64)
    inputs[0, : len(tokens) - 1] = tokens[:-1]
    counted = min(len(answer), len(tokens) - 1)
    targets[0, len(tokens) - 1 - counted : len(tokens) - 1] = tokens[len(tokens) - counted :]
    return torch.from_numpy(inputs), torch.from_numpy(targets)
