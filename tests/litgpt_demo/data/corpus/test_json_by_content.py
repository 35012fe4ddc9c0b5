"""JSON lines are never trained on as text by mistake, whatever the files are called: C4's own are `*.json.gz`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from litgpt_demo.config import Corpus, DataConfig
from litgpt_demo.data.corpus import corpus_identity, documents, sources
from litgpt_demo.errors import UserError

TEXTS = ["first page", "second page\nwith a line", "third"]
LINES = "".join(json.dumps({"text": text, "url": "https://example.org"}) + "\n" for text in TEXTS)


def corpus(folder: Path, **settings: Any) -> Corpus:
    return DataConfig.model_validate({"corpus": {"kind": "files", "paths": [str(folder)], **settings}}).corpus


def read(corpus: Corpus, scratch: Path) -> list[str]:
    return list(documents(corpus, sources(corpus), scratch=scratch))


@pytest.mark.parametrize("name", ["c4-train.00000-of-01024.json.gz", "part.json", "part.jsonl"])
def test_an_object_a_line_is_a_document_a_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "c4").mkdir()
    content = LINES.encode()
    (tmp_path / "c4" / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(corpus(tmp_path / "c4"), tmp_path) == TEXTS


@pytest.mark.parametrize("separator", [None, "\n", "\n\n"])
def test_text_that_is_all_json_lines_is_refused_with_the_setting_to_use(tmp_path: Path, separator: str | None) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "dump.txt").write_text(LINES)
    with pytest.raises(UserError, match=r"'text', 'url'.*data\.corpus\.format=jsonl and data\.corpus\.column=text"):
        read(corpus(tmp_path / "texts", separator=separator), tmp_path)
    meant = corpus(tmp_path / "texts", format="text", separator=separator)
    assert "\n".join(read(meant, tmp_path)).strip() == LINES.strip()


@pytest.mark.parametrize(
    "text", ["", "plain words", '{"only": "one line of several is an object"}\nand this is none', "[1]\n[2]"]
)
def test_other_text_is_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text(text)
    assert read(corpus(tmp_path / "texts"), tmp_path) == [text][: len(text)]


def test_what_was_made_of_such_files_as_text_is_another_dataset(tmp_path: Path) -> None:
    (tmp_path / "part.json").write_text(LINES)
    told: Any = corpus_identity(corpus(tmp_path), sources(corpus(tmp_path)))
    assert told["settings"]["json"] == "lines"
    hub = DataConfig.model_validate({"corpus": {"kind": "hub", "name": "a/b"}}).corpus
    assert "format" not in corpus_identity(hub, [])["settings"]  # type: ignore[index,call-overload]
