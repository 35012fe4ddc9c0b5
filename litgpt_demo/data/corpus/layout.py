"""The layouts of documents in the files of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from litgpt_demo.config import Corpus, FileCorpus, HubCorpus, OpenWebTextCorpus, StdlibCorpus
from litgpt_demo.data.corpus.compression import ending_of
from litgpt_demo.data.corpus.source import Source

Format = Literal["text", "jsonl", "parquet"]

_FORMATS: dict[str, Format] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layouts of documents in the files of a corpus."""

    format: Literal["auto"] | Format = "auto"
    column: str = "text"
    separator: str | None = None

    @classmethod
    def of(cls, corpus: Corpus) -> Layout:
        match corpus:
            case StdlibCorpus():
                return cls(format="text")
            case FileCorpus():
                return cls(format=corpus.format, column=corpus.column, separator=corpus.separator)
            case HubCorpus():
                return cls(format=corpus.format, column=corpus.column)
            case OpenWebTextCorpus():
                return cls(column=corpus.as_hub().column)

    def format_of(self, name: str) -> Format:
        """Return the format that the user gave, else the one of the name; a compression may follow the format."""
        return _FORMATS.get(_ending(name), "text") if self.format == "auto" else self.format

    def separator_of(self, source: Source) -> bytes | None:
        """The bytes between two documents of a file in which any document can be found by them; else None."""
        form = self.format_of(source.name)
        if form == "text" and self.separator is not None:
            return self.separator.encode()
        return b"\n" if form == "jsonl" else None


def goes_by_json(corpus: Corpus, source: Source) -> bool:
    """Return whether the file is taken for JSON lines because its name ends in .json."""
    return Layout.of(corpus).format == "auto" and _ending(source.name) == ".json"


def _ending(name: str) -> str:
    path = PurePosixPath(name.lower())
    return (path.with_suffix("") if ending_of(name) else path).suffix
