"""Corpora that the tests of this folder write, and the short ways to read them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import zstandard
from pyarrow import parquet

from litgpt_demo.config import Corpus, FileCorpus, key_of
from litgpt_demo.data.corpus import corpus_identity, documents, sources

SEPARATOR = "\n---\n"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def as_text(texts: Sequence[str]) -> bytes:
    return SEPARATOR.join(texts).encode()


def as_jsonl(texts: Sequence[str]) -> bytes:
    return b"".join(
        json.dumps({"id": number, "text": text}, ensure_ascii=number % 2 == 0).encode() + b"\n"
        for number, text in enumerate(texts)
    )


def as_parquet(
    texts: Sequence[str] | pa.Array, *, kind: pa.DataType | None = None, compression: str = "snappy"
) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, kind or pa.string())})
    parquet.write_table(table, sink, row_group_size=2, compression=compression, write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


FORMATS: dict[str, Callable[[Sequence[str]], bytes]] = {".txt": as_text, ".jsonl": as_jsonl, ".parquet": as_parquet}


def files(*paths: str | Path, **fields: object) -> FileCorpus:
    return FileCorpus.model_validate({"kind": "files", "paths": [str(path) for path in paths], **fields})


def read(corpus: Corpus, scratch: Path) -> list[str]:
    return list(documents(corpus, sources(corpus), scratch=scratch))


def identity(corpus: Corpus) -> str:
    return key_of(corpus_identity(corpus, sources(corpus)))


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
