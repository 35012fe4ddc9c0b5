"""Our own scores: bits per byte and perplexity of the model on the validation split, of each source. Imports torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.batches import MixedWindows
from litgpt_demo.evaluation import VALIDATION, Score
from litgpt_demo.evaluation.bits import Measured, size_of, text_scores
from litgpt_demo.export.models import held_out
from litgpt_demo.export.proof import opened_by_litgpt


def scores(folder: Path, spec: TrainingSpec, windows: int, scratch: Path) -> list[Score]:
    """Score the LitGPT model in `folder` on the first samples of each source's validation split, and of all together.

    Raises:
        DataError: the dataset is not what its manifest says, or another one.
    """
    data = held_out(spec, scratch)
    tokenizer = Tokenizer.from_file(str(data.tokenizer / "tokenizer.json"))
    sources = data.validation.sources if isinstance(data.validation, MixedWindows) else {"": data.validation}
    found = {}
    with opened_by_litgpt(folder, accelerator="auto") as model:
        for name, source in sources.items():
            count = min(windows, len(source))
            tokens = source.read(np.arange(count, dtype=np.uint64))[1]
            size = size_of(tokenizer, tokens, data.manifest.end_of_text)
            nats, learned = np.array(model.nats(source, count), dtype=np.float64).T
            found[name] = Measured(nats, learned, size)
    return [
        *text_scores(VALIDATION, *found.values()),
        *(score for name, one in found.items() if name for score in text_scores(f"{VALIDATION}/{name}", one)),
    ]
