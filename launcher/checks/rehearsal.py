"""The dataset's preparation, rehearsed before anything is rented: what it would be refused for at the end is known now.

A small corpus is prepared in full, in a scratch folder, so that its refusals are those of the preparation itself. Of a
larger one on this machine the start is read; what that says of the whole is a guess, and only warns.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from launcher.config import RunConfig
from launcher.findings import finding_of
from launcher.formatting import bytes_text, count_text
from launcher.runs.run import Run, training_spec
from litgpt_demo.config import OpenWebTextCorpus
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.findings import Finding
from litgpt_demo.storage import open_storage

WHOLE = 4_000_000
"""Bytes of a corpus that is prepared in full, which takes two seconds; of a larger one so much is read."""
_OPENED = 64_000_000
"""Bytes of a file that is opened to read its start: its checksum is compared first, which reads all of it."""
_BYTES_PER_TOKEN = 4
"""About what GPT-2's tokenizer makes of English."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """An estimate of a whole corpus by its start."""

    documents: int
    """About how many there are in all."""
    document_bytes: float
    """The mean."""


Rehearsal: TypeAlias = DatasetManifest | Start | Finding | None
"""The manifest of a dataset that was prepared in full, the start of a larger one, or why it would be refused."""


def rehearse(planned: PlannedDataset) -> Rehearsal:
    """Prepare a small corpus, or read the start of a larger one; nothing of it is kept."""
    from litgpt_demo.data.preparation import prepare
    from litgpt_demo.data.tokens import Encoder

    if planned.unknown:
        return None
    try:
        if _bytes_to_read(planned) <= WHOLE:
            with tempfile.TemporaryDirectory(prefix="train-litgpt-rehearsal-") as folder:
                return prepare(planned, open_storage(folder))
        if planned.tokenizer is not None:
            Encoder(planned.tokenizer)  # it must be one that texts can be encoded with
        return _start(planned)
    except TrainLitgptError as error:
        return finding_of(error, "data.refused")


def check_rehearsal(run: Run, rehearsal: Rehearsal) -> Iterator[Finding]:
    """Yield why this run could not be made of what the rehearsal found."""
    if isinstance(rehearsal, Finding):
        yield rehearsal
    elif isinstance(rehearsal, DatasetManifest):
        try:
            training_spec(run, rehearsal)
        except TrainLitgptError as error:
            yield finding_of(error, "data.too-small")
    elif rehearsal is not None:
        yield from _doubts(run.config, rehearsal)


def _bytes_to_read(planned: PlannedDataset) -> int:
    """The bytes that the corpus has as stored, or that the config takes of it."""
    stored, corpus = sum(source.size for source in planned.sources), planned.data.corpus
    limit = None if isinstance(corpus, OpenWebTextCorpus) else corpus.max_bytes
    return stored if limit is None else min(stored, limit)


def _start(planned: PlannedDataset) -> Start | None:
    """Read the first documents of a corpus on this machine; None where that would take long."""
    from litgpt_demo.data.corpus import documents

    corpus, first = planned.data.corpus, planned.sources[0]
    if isinstance(corpus, OpenWebTextCorpus) or first.is_remote or first.size > _OPENED:
        return None
    begun = corpus.model_copy(update={"max_bytes": WHOLE})
    skip_bad = planned.data.on_bad_document == "skip"
    with tempfile.TemporaryDirectory(prefix="train-litgpt-rehearsal-") as folder:
        texts = documents(begun, planned.sources, scratch=Path(folder), skip_bad=skip_bad)
        sizes = [len(text.encode()) for text in texts]
    if not sizes:
        return None
    mean = sum(sizes) / len(sizes)
    return Start(documents=round(_bytes_to_read(planned) / mean), document_bytes=mean)


def _doubts(config: RunConfig, start: Start) -> Iterator[Finding]:
    """Yield what may turn out too small once it is counted."""
    length, fraction = config.model.sequence_length, config.data.validation_fraction
    tokens = math.ceil(fraction * start.documents) * start.document_bytes / _BYTES_PER_TOKEN
    if tokens <= length:
        yield Finding(
            "warning",
            "data.validation",
            f"the validation split will have about {count_text(round(tokens))} tokens, by the start of the corpus, and "
            f"one sample of model.sequence_length={length} needs {length + 1:,}",
            "raise data.validation_fraction, or take shorter sequences",
        )
    all_tokens = start.documents * start.document_bytes / _BYTES_PER_TOKEN
    steps = config.train.steps(tokens=round(all_tokens), sequence_length=length)
    if config.train.warmup_steps >= steps:
        yield Finding(
            "warning",
            "train.warmup_steps",
            f"train.warmup_steps={config.train.warmup_steps} may leave nothing of the run: by its start the corpus of "
            f"{bytes_text(round(start.documents * start.document_bytes))} makes about {steps:,} steps",
            "lower it, or set train.max_steps",
        )
