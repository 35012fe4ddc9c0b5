"""Bits per byte and perplexity, from losses and the text that they are of.

Bits per byte do not depend on the tokenizer: the loss of all tokens, end-of-text included, is divided by the UTF-8
bytes of the text that the tokens decode to, in which end-of-text has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from litgpt_demo.evaluation import Score

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """The first samples of a validation split."""

    nats: Numbers
    """The loss of each sample, summed over its tokens."""
    tokens: Numbers
    """The tokens of each sample: of a conversation those that are learned."""
    size: int
    """UTF-8 bytes of the text that the tokens decode to."""


def text_bytes(tokenizer: Tokenizer, tokens: Sequence[int] | npt.NDArray[np.int64], end_of_text: int) -> int:
    """Return the UTF-8 bytes of the text that the tokens decode to, document by document.

    A character that the first or the last token cuts counts as U+FFFD, with three bytes.
    """
    documents = (list(part) for ends, part in groupby(map(int, tokens), key=end_of_text.__eq__) if not ends)
    return sum(len(tokenizer.decode(document, skip_special_tokens=False).encode()) for document in documents)


def size_of(tokenizer: Tokenizer, targets: npt.NDArray[np.int64], end_of_text: int) -> int:
    """Return the UTF-8 bytes of the targets of samples that follow one another; those that are not learned have none.

    Args:
        targets: token ids, negative where they are not learned; shape (samples, length).
    """
    tokens = targets.reshape(-1)
    return text_bytes(tokenizer, np.where(tokens < 0, end_of_text, tokens), end_of_text)


def text_scores(task: str, *parts: Measured) -> list[Score]:
    """Return bits per byte and perplexity of these samples.

    Standard errors are of the mean loss of a token over samples, a ratio where they have unequally many; that of the
    perplexity by the delta method. The bytes are counted, and have no error.
    """
    nats, tokens = (np.concatenate(several) for several in zip(*((one.nats, one.tokens) for one in parts), strict=True))
    count, size, samples = float(tokens.sum()), sum(part.size for part in parts), len(nats)
    mean = float(nats.sum()) / count if count else math.nan
    beside = nats - mean * tokens
    error = float(beside.std(ddof=1)) * math.sqrt(samples) / count if samples > 1 and count else None
    return [
        Score(
            task=task,
            metric=name,
            value=value if math.isfinite(value) else None,
            stderr=None if error is None or not math.isfinite(slope * error) else slope * error,
            higher_is_better=False,
            samples=samples,
        )
        for name, (value, slope) in bits_and_perplexity(mean, count, size).items()
    ]


def bits_and_perplexity(mean: float, tokens: float, size: int) -> dict[str, tuple[float, float]]:
    """Return bits per byte, where there are bytes, and perplexity; and how much each grows with the mean loss.

    Args:
        mean: of the loss of a token, in nats.
        size: the UTF-8 bytes of the text that the tokens decode to.
    """
    scale = tokens / size / math.log(2) if size else None
    perplexity = math.exp(mean) if mean < 700 else math.inf  # e^709 is the largest float
    bits = {} if scale is None else {"bits_per_byte": (mean * scale, scale)}
    return bits | {"perplexity": (perplexity, perplexity)}
