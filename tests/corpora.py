"""What the tests of datasets prepare: small corpora, the settings for them, and what has to come of them."""

import bz2
import gzip
import json
import lzma
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from litgpt_demo.config import Corpus, DataConfig, FileCorpus, Filters
from litgpt_demo.data import shards
from litgpt_demo.data.corpus import kind_of
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.readers import Source
from litgpt_demo.data.shards import documents
from litgpt_demo.data.tokens import TokenizerFiles
from litgpt_demo.storage import BucketStorage, open_storage

SEPARATOR = "\n---\n"
TEXTS = [f"Document {number}: " + " ".join(str(number * factor) for factor in range(30)) + " ü" for number in range(21)]
TEXTS[4] = "A document that quotes <|endoftext|> is one document."


Document: TypeAlias = str | None
"""None is one that cannot be read."""


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"4d" * 32)
"""What a clone without Git LFS has in the place of a file."""


def as_text(texts: Sequence[Document]) -> bytes:
    return SEPARATOR.encode().join(b"\xff" if text is None else text.encode() for text in texts)


def as_jsonl(texts: Sequence[Document]) -> bytes:
    lines = [
        b"{" if text is None else json.dumps({"id": number, "text": text}, ensure_ascii=number % 2 == 0).encode()
        for number, text in enumerate(texts)
    ]
    return b"".join(line + b"\n" for line in lines)


def as_parquet(
    texts: Sequence[Document] | pa.Array, *, kind: pa.DataType | None = None, compression: str = "snappy"
) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, kind or pa.string())})
    pq.write_table(table, sink, row_group_size=2, compression=compression, write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


FORMATS: dict[str, Callable[[Sequence[Document]], bytes]] = {
    ".txt": as_text,
    ".jsonl": as_jsonl,
    ".parquet": as_parquet,
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def corpus_in(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    return write(folder, {"a.txt": as_text(texts[:9]), "b.txt": as_text(texts[9:])})


def files(*paths: str | Path, **fields: object) -> FileCorpus:
    return FileCorpus.model_validate({"kind": "files", "paths": [str(path) for path in paths], **fields})


def of_each(address: str | Path, *ends: str) -> list[str]:
    """Patterns that select each format of a folder, since a folder of several is refused."""
    found = ends or {path.suffix for path in Path(address).rglob("*.*") if path.is_file()}
    return [f"{address}/**/*{end}" for end in sorted(found)]


def list_files(corpus: Corpus) -> list[Source]:
    return kind_of(corpus).list_files([])


def read(corpus: Corpus, scratch: Path) -> list[str]:
    return list(documents(DataConfig(corpus=corpus), list_files(corpus), scratch))


def put_objects(bucket: BucketStorage, *names: str) -> None:
    """Make empty objects below the bucket's root, under names that the storage itself would not take."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.storage import Client

    name, _, root = bucket.root.removeprefix("gs://").partition("/")
    anonymous = AnonymousCredentials()  # type: ignore[no-untyped-call]
    objects = Client(project="markers", credentials=anonymous).bucket(name)
    for name in names:
        objects.blob(f"{root}/{name}").upload_from_string(b"")


def settings_for(folder: Path, paths: Sequence[str] = (), **fields: Any) -> DataConfig:
    return DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": paths or [str(folder)], "separator": SEPARATOR},
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
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def large_vocabulary(folder: Path, size: int = 300) -> Path:
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


def with_bos(tokenizer: Path) -> Path:
    """Have the tokenizer put a BOS of its own before a text, as Llama's does."""
    definition = HfTokenizer.from_file(str(tokenizer))
    definition.add_special_tokens(["<s>"])
    bos = definition.token_to_id("<s>")
    definition.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", bos)])
    definition.save(str(tokenizer))
    config = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": True}
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


@contextmanager
def cut_into(shard: int, batch: int = shards.BATCH_BYTES) -> Iterator[None]:
    """Makes many shards (of so many stored bytes) and batches (of so many bytes of text) of a test's few documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_SMALLEST", shard)
        patch.setattr(shards, "_LARGEST", shard)
        patch.setattr(shards, "BATCH_BYTES", batch)
        yield


_ODD = (
    "<|endoftext|>", "the quick brown fox ", "don't ", "你好，世界", "שלום ", "नमस्ते ", "🎉", "\n\n", "    ", "12345",
    "---\n", "é", "Дождь ", "|--|", "٣٫١٤",
)  # fmt: skip
DOCUMENTS = st.one_of(
    st.sampled_from(["", "Said before.", "Said before.", "Said before, and at more length: it is said again."]),
    st.lists(st.text(max_size=8) | st.sampled_from(_ODD), max_size=12).map("".join),
)
Files: TypeAlias = list[tuple[str, list[Document]]]
"""Format and documents of each."""
FILES: st.SearchStrategy[Files] = st.lists(
    st.tuples(
        st.sampled_from(sorted(FORMATS)),
        st.lists(st.one_of(DOCUMENTS, DOCUMENTS, DOCUMENTS, st.none()), max_size=9),
    ),
    min_size=2,
    max_size=5,
)
FILTERS = st.builds(
    Filters,
    min_characters=st.sampled_from([None, 1, 15]),
    max_characters=st.sampled_from([None, 30, 1000]),
    min_letter_ratio=st.sampled_from([None, 0.5, 1]),
    drop_duplicates=st.booleans(),
)


def expected(files: Files, tokenizer: TokenizerFiles, data: DataConfig) -> dict[str, Any]:
    """What DESIGN and the settings' words make of the files, in other words than the source's.

    One document after the other, with Hugging Face's tokenizer.
    """
    read = list(_up_to(files, data.corpus.max_bytes))  # type: ignore[union-attr]
    dropped, kept = Counter[str](), list[str]()
    for text in read:
        if text is not None and (reason := reason_to_drop(text, data.filters, kept)):
            dropped[reason] += 1
        elif text is not None:
            kept.append(text)
    plain = HfTokenizer.from_str(json.dumps(json.loads(tokenizer.files["tokenizer.json"]) | {"added_tokens": []}))
    ids = [[*plain.encode(text, add_special_tokens=False).ids, tokenizer.end_of_text] for text in kept]
    order = np.random.default_rng(data.split_seed).permutation(len(kept)).tolist()
    held_out = set(order[: math.ceil(data.validation_fraction * len(kept))])
    return {
        "train": _bytes(tokens for number, tokens in enumerate(ids) if number not in held_out),
        "validation": _bytes(tokens for number, tokens in enumerate(ids) if number in held_out),
        "documents": len(kept),
        "text bytes": sum(len(text.encode()) for text in kept),
        "by the power of two of their tokens": Counter(len(tokens).bit_length() - 1 for tokens in ids),
        "dropped": dropped,
        "bad": read.count(None),
    }


def found(planned: PlannedDataset, root: Path, manifest: DatasetManifest) -> dict[str, Any]:
    """What the dataset holds, in the same words."""
    train, validation = (
        b"".join((root / planned.path / file.path).read_bytes() for file in split.files)
        for split in (manifest.train, manifest.validation)
    )
    return {
        "train": train,
        "validation": validation,
        "documents": manifest.documents,
        "text bytes": manifest.text_bytes,
        "by the power of two of their tokens": +Counter(dict(enumerate(manifest.document_lengths))),
        "dropped": Counter(manifest.dropped),
        "bad": manifest.bad_documents,
    }


def _up_to(files: Files, max_bytes: int | None) -> Iterator[Document]:
    seen = 0
    for form, texts in files:
        if form == ".txt":  # its separators may lie elsewhere than they were put
            pieces = as_text(texts).split(SEPARATOR.encode())
            texts = [None if b"\xff" in piece else piece.decode() for piece in pieces]
        for text in texts:
            yield text
            seen += len((text or "").encode())
            if max_bytes is not None and seen >= max_bytes:
                return


def reason_to_drop(text: str, filters: Filters, before: Sequence[str]) -> str | None:
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
