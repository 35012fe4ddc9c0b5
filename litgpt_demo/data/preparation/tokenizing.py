"""The tokenizer of a dataset, in its place next to it: trained or copied once, then read by every worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from itertools import chain
from threading import Lock

from litgpt_demo.config import Settings, TrainedTokenizer
from litgpt_demo.data.corpus import BadDocument, documents
from litgpt_demo.data.dataset import PlannedDataset
from litgpt_demo.data.preparation.ledger import SHARDS, Work, skipped_ones, write_record
from litgpt_demo.data.tokens import Encoder, TokenizerFiles, train_tokenizer
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.storage import Storage, open_storage

_RECORD = "tokenizer.json"


class TokenizerRecord(Settings):
    """The ledger's entry for the tokenizer."""

    files: tuple[FileRecord, ...]
    end_of_text: int
    vocab_size: int
    hash: str
    """The hash, as in DatasetManifest.tokenizer_hash."""
    dtype: str


def settle_tokenizer(planned: PlannedDataset, work: Work, report: Callable[[int, int], None]) -> TokenizerRecord:
    """Put the tokenizer in its place; one that is to be trained on the corpus is trained by the first run only.

    Args:
        report: as `train_tokenizer` takes it.

    Raises:
        DataError: there is too little text for the vocabulary.
    """
    if planned.tokenizer is None and (there := _noted(work.storage)) is not None:
        return there
    tokenizer = planned.tokenizer or _trained(planned, work, report)
    files = tuple(
        FileRecord.of(work.storage.write(f"tokenizer/{name}", content), sha256=sha256(content).hexdigest())
        for name, content in sorted(tokenizer.files.items())
    )
    record = TokenizerRecord(
        files=files,
        end_of_text=tokenizer.end_of_text,
        vocab_size=tokenizer.vocab_size,
        hash=tokenizer.hash,
        dtype=tokenizer.dtype,
    )
    write_record(work, _RECORD, record)
    return record


def _trained(planned: PlannedDataset, work: Work, report: Callable[[int, int], None]) -> TokenizerFiles:
    assert isinstance(planned.data.tokenizer, TrainedTokenizer)
    skip_bad = planned.data.on_bad_document == "skip"
    scratch, most = work.make_scratch(), planned.data.max_document_bytes
    corpus, bad = planned.data.corpus, list[BadDocument]()
    texts = documents(corpus, planned.sources, scratch=scratch, skip_bad=skip_bad, most=most, skipped=bad)
    if (first := next(texts, None)) is None and bad:
        places = [f"{one.place}: {one.reason}" for one in bad]
        raise DataError(f"data.corpus ({corpus.kind}) holds no text{skipped_ones(len(bad), places)}")
    return train_tokenizer(planned.data.tokenizer, chain([] if first is None else [first], texts), report)


def _noted(storage: Storage) -> TokenizerRecord | None:
    """The record of an earlier run, if every byte that it speaks of is there."""
    try:
        record = _read_record(storage)
        intact = all(sha256(storage.read(file.path)).hexdigest() == file.sha256 for file in record.files)
    except (FileNotFoundError, DataError):  # DataError: of another version of this code
        return None
    return record if intact else None


def _read_record(storage: Storage) -> TokenizerRecord:
    """Return the record of the tokenizer that this preparation encodes with."""
    path = f"{SHARDS}/{_RECORD}"
    fix = f"remove {storage.address(SHARDS)} and prepare again"
    return parse_json(storage.read(path), TokenizerRecord, where=storage.address(path), fix=fix)


def encoder_at(address: str) -> Encoder:
    """A worker's encoder for the dataset at `address`: made once per process."""
    with _one_at_a_time:  # functools.cache lets two threads make the same thing
        return _encoder_at(address)


_one_at_a_time = Lock()


@cache
def _encoder_at(address: str) -> Encoder:
    storage = open_storage(address)
    record = _read_record(storage)
    files = {file.path.partition("/")[2]: storage.read(file.path) for file in record.files}
    return Encoder(TokenizerFiles(files=files, end_of_text=record.end_of_text, vocab_size=record.vocab_size))
