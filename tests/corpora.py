"""What the tests of datasets prepare: small corpora, the settings for them, and what has to come of them."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from litgpt_demo.config import DataConfig, Filters
from litgpt_demo.data.corpus import reading, shards
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.tokens import TokenizerFiles
from litgpt_demo.storage import open_storage

SEPARATOR = "\n---\n"
TEXTS = [f"Document {number}: " + " ".join(str(number * other) for other in range(30)) + " ü" for number in range(21)]
TEXTS[4] = "A document that quotes <|endoftext|> is one document."


def corpus_in(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    """Two files of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(SEPARATOR.join(texts[:9]))
    (folder / "b.txt").write_text(SEPARATOR.join(texts[9:]))
    return folder


def settings_for(folder: Path, **fields: Any) -> DataConfig:
    return DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": [str(folder)], "separator": SEPARATOR},
            "tokenizer": {"kind": "train", "vocab_size": 300},
            "validation_fraction": 0.1,
        }
        | fields
    )


def prepared(folder: Path, root: Path, **fields: Any) -> tuple[DatasetManifest, Path]:
    """The dataset of a folder of texts, and where it lies."""
    planned = plan_dataset(settings_for(folder, **fields))
    return prepare(planned, open_storage(str(root))), root / planned.path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def large_vocabulary(folder: Path, size: int) -> Path:
    """A byte-level tokenizer with one merge and ids up to `size`, most of them never met."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    vocabulary |= {f"<unused {number}>": number for number in range(len(alphabet), size - 2)}
    vocabulary |= {"<|endoftext|>": size - 2, "Do": size - 1}
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=[("D", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@contextmanager
def cut_into(shard: int, batch: int = reading.BATCH_BYTES) -> Iterator[None]:
    """Makes many shards and batches of a test's few documents.

    Args:
        shard: stored bytes of a shard.
        batch: bytes of text of a batch.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_SMALLEST", shard)
        patch.setattr(shards, "_LARGEST", shard)
        patch.setattr(reading, "BATCH_BYTES", batch)
        yield


# --- any corpus -------------------------------------------------------------------------------------------------------

Document: TypeAlias = str | None
"""None is one that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """A file to be written, and what can be read in it."""

    format: Literal["txt", "jsonl", "parquet"]
    documents: list[Document]
    row_group: int = 3

    def write(self, path: Path) -> None:
        match self.format:
            case "txt":
                path.write_bytes(self._text())
            case "jsonl":
                lines = [b"{" if one is None else json.dumps({"text": one}).encode() for one in self.documents]
                path.write_bytes(b"".join(line + b"\n" for line in lines))
            case "parquet":
                table = pa.table({"text": pa.array(self.documents, pa.string())})
                pq.write_table(table, path, row_group_size=self.row_group)

    def read(self) -> list[Document]:
        """What a reader finds: a text file's separators may lie elsewhere than they were put."""
        if self.format != "txt":
            return self.documents
        return [None if b"\xff" in one else one.decode() for one in self._text().split(SEPARATOR.encode())]

    def _text(self) -> bytes:
        return SEPARATOR.encode().join(b"\xff" if one is None else one.encode() for one in self.documents)


def write_corpus(folder: Path, files: Sequence[CorpusFile]) -> Path:
    folder.mkdir(parents=True)
    for number, file in enumerate(files):
        file.write(folder / f"{number:02d}.{file.format}")
    return folder


_ODD = (
    "<|endoftext|>", "the quick brown fox ", "don't ", "你好，世界", "שלום ", "नमस्ते ", "🎉", "\n\n", "    ", "12345",
    "---\n",
)  # fmt: skip
_WORDS = st.one_of(st.text(max_size=8), st.sampled_from(_ODD))
DOCUMENTS = st.one_of(
    st.sampled_from(["", "Said before.", "Said before.", "Said before, and at more length: it is said again."]),
    st.lists(_WORDS, max_size=12).map("".join),
)


def corpus_files(documents: st.SearchStrategy[Document] = DOCUMENTS) -> st.SearchStrategy[list[CorpusFile]]:
    """A few files of a few documents."""
    return st.lists(
        st.builds(
            CorpusFile,
            format=st.sampled_from(["txt", "jsonl", "parquet"]),
            documents=st.lists(documents, max_size=9),
            row_group=st.integers(1, 4),
        ),
        min_size=2,
        max_size=5,
    )


# --- what has to come of it -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A dataset, made slowly: one document after the other, with Hugging Face's tokenizer."""

    train: bytes
    validation: bytes
    documents: int
    text_bytes: int
    lengths: Counter[int]
    """Documents by the power of two that their number of tokens reaches."""
    dropped: Counter[str]
    bad: int


def expected(documents: Sequence[Document], tokenizer: TokenizerFiles, data: DataConfig) -> Expected:
    """What DESIGN and the settings' words make of these documents, in other words than the source's."""
    read = list(_up_to(documents, data.corpus.max_bytes))  # type: ignore[union-attr]
    dropped, kept = Counter[str](), list[str]()
    for text in read:
        if text is not None and (reason := _reason(text, data.filters, kept)):
            dropped[reason] += 1
        elif text is not None:
            kept.append(text)
    plain = HfTokenizer.from_str(
        json.dumps(json.loads(tokenizer.files["tokenizer.json"]) | {"added_tokens": []}),
    )
    ids = [[*plain.encode(text, add_special_tokens=False).ids, tokenizer.end_of_text] for text in kept]
    held_out = np.random.default_rng(data.split_seed).permutation(len(kept)).tolist()
    held_out = set(held_out[: math.ceil(data.validation_fraction * len(kept))])
    return Expected(
        train=_bytes(tokens for number, tokens in enumerate(ids) if number not in held_out),
        validation=_bytes(tokens for number, tokens in enumerate(ids) if number in held_out),
        documents=len(kept),
        text_bytes=sum(len(text.encode()) for text in kept),
        lengths=Counter(len(tokens).bit_length() - 1 for tokens in ids),
        dropped=dropped,
        bad=read.count(None),
    )


def _up_to(documents: Sequence[Document], max_bytes: int | None) -> Iterator[Document]:
    seen = 0
    for text in documents:
        yield text
        seen += len((text or "").encode())
        if max_bytes is not None and seen >= max_bytes:
            return


def _reason(text: str, filters: Filters, before: Sequence[str]) -> str | None:
    visible = [character for character in text if not character.isspace()]
    letters = [character for character in visible if unicodedata.category(character)[0] in "LM"]
    if not text:
        return "empty"
    if len(text) < (filters.min_characters or 0):
        return "too short"
    if filters.max_characters is not None and len(text) > filters.max_characters:
        return "too long"
    if filters.min_letter_ratio is not None and len(letters) < filters.min_letter_ratio * max(1, len(visible)):
        return "too few letters"
    return "duplicate" if filters.drop_duplicates and text in before else None


def _bytes(documents: Iterator[list[int]]) -> bytes:
    return np.array([token for tokens in documents for token in tokens], dtype="<u2").tobytes()


def found(planned: PlannedDataset, root: Path, manifest: DatasetManifest) -> Expected:
    """What the dataset holds, in the same words."""

    def split(files: Sequence[Any]) -> bytes:
        return b"".join((root / planned.path / file.path).read_bytes() for file in files)

    return Expected(
        train=split(manifest.train.files),
        validation=split(manifest.validation.files),
        documents=manifest.documents,
        text_bytes=manifest.text_bytes,
        lengths=+Counter(dict(enumerate(manifest.document_lengths))),
        dropped=Counter(manifest.dropped),
        bad=manifest.bad_documents,
    )
