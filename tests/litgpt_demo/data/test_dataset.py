"""Datasets by their inputs: which hash they have, when they are done, and what is wrong with one that was damaged."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import SEPARATOR, corpus_in, large_vocabulary, settings_for

from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import finished_dataset, open_dataset, plan_dataset, stage, verify_dataset, warnings_of
from litgpt_demo.documents import write_manifest
from litgpt_demo.errors import DataError
from litgpt_demo.storage import open_storage


def test_dataset_hash_has_the_settings_that_decide_the_bytes(
    tmp_path: Path,
) -> None:
    """The folder of a tokenizer does not."""
    folder = corpus_in(tmp_path / "corpus")
    corpus = {"kind": "files", "paths": [str(folder)], "separator": SEPARATOR}
    changes: list[dict[str, Any]] = [{}, {"validation_fraction": 0.2}, {"split_seed": 1}]
    places = [large_vocabulary(tmp_path / name, size) for name, size in (("one", 300), ("two", 300), ("other", 301))]
    first, same, larger = ({"tokenizer": {"kind": "file", "path": str(path)}} for path in places)
    changes += [first, larger, {"tokenizer": {"kind": "train", "vocab_size": 301}}]
    changes += [{"corpus": {**corpus, "separator": "\n"}}, {"corpus": {**corpus, "max_bytes": 500}}]
    assert len({plan_dataset(settings_for(folder, **change)).content_hash for change in changes}) == len(changes)
    assert plan_dataset(settings_for(folder, **first)).path == plan_dataset(settings_for(folder, **same)).path
    planned = plan_dataset(settings_for(folder))
    assert planned.path == f"datasets/corpus-{planned.content_hash}"
    for pattern in ("*.txt", "**/*.txt", "[ab].txt", "?.txt"):
        assert plan_dataset(settings_for(folder, [f"{folder}/{pattern}"])).path == planned.path, "one dataset"


def test_dataset_hash_is_pinned(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    for policy, expected in (("fail", "35f82f1f96"), ("skip", "b698c8f0bb")):
        settings = {"corpus": {"kind": "files", "paths": [str(tmp_path)]}, "on_bad_document": policy}
        assert plan_dataset(DataConfig.model_validate(settings)).content_hash == expected
        limited = plan_dataset(DataConfig.model_validate({**settings, "max_document_bytes": 1000})).content_hash
        assert (limited == expected) == (policy == "fail"), "the limit decides the bytes where it leaves documents out"


UNIX, WINDOWS, TYPED = "\n\n", "\r\n\r\n", r"\n\n"
UNSEEN = [(UNIX, WINDOWS), (WINDOWS, UNIX), (TYPED, UNIX), (TYPED, WINDOWS), ("---", ""), (UNIX, UNIX)]


@pytest.mark.parametrize(("separator", "used"), UNSEEN, ids=range(6))
def test_unseen_separator_is_a_warning_with_the_one_found(root: str, tmp_path: Path, separator: str, used: str) -> None:
    text = f"one{used}two".encode()
    open_storage(root).write("texts/a.txt", text)
    open_storage(root).write("texts/b.txt.gz", gzip.compress(text))
    corpus = {"kind": "files", "paths": [f"{root}/texts"], "separator": separator}
    warnings = "".join(map(str, warnings_of(plan_dataset(settings_for(tmp_path, corpus=corpus)))))
    nowhere = f"warning [data.separator] data.corpus.separator={json.dumps(separator)} is nowhere in the first "
    assert warnings.startswith(nowhere) if separator != used else warnings == ""
    advice = f", but {json.dumps(used)} is -> set data.corpus.separator={json.dumps(used)} (in a shell"
    assert (advice in warnings) == (used not in {"", separator})


def test_a_dataset_that_lost_a_file_or_its_manifest_is_none(copied: Path, tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(corpus_in(tmp_path / "corpus")))
    shutil.copytree(copied, tmp_path / planned.path)
    (tmp_path / planned.path / "val.bin").unlink()
    with pytest.raises(DataError, match=r"has a manifest, but its val\.bin is missing; .*folder and run again"):
        finished_dataset(open_storage(str(tmp_path)), planned)
    (copied / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"has no manifest.*train-litgpt prepare"):
        stage(str(copied), tmp_path / "scratch")


def problems(folder: Path, **fields: object) -> list[str]:
    """Those of the dataset under a manifest with other fields, and the remedy."""
    write_manifest(open_storage(str(folder)), open_dataset(str(folder)).model_copy(update=fields))
    with pytest.raises(DataError, match="is not what its manifest says") as raised:
        verify_dataset(str(folder))
    return [*raised.value.what.split("\n✗ ")[1:], raised.value.fix]


@pytest.mark.parametrize("spoil", [Path.mkdir, lambda path: path.symlink_to(path), lambda path: path.write_text("x")])
def test_verification_names_only_the_replaced_file(copied: Path, spoil: Callable[[Path], None]) -> None:
    file = copied / "tokenizer/tokenizer.json"
    file.unlink()
    spoil(file)
    *found, remedy = problems(copied)
    assert all("tokenizer/tokenizer.json" in problem for problem in found)
    assert remedy == "remove that folder and prepare it again"


def test_counts_and_ids_that_the_manifest_has_wrong_are_problems(copied: Path) -> None:
    manifest = open_dataset(str(copied))
    largest = int(np.memmap(copied / "train.bin", dtype=manifest.dtype, mode="r").max())
    wrong = manifest.train.model_copy(update={"tokens": 1, "documents": 20})
    assert problems(copied, train=wrong)[:-1] == [
        f"train holds {manifest.train.tokens} tokens, but its manifest says 1",
        f"train closes 18 documents with id {manifest.end_of_text}, but its manifest says 20",
    ]
    problem = f"train.bin holds the id {largest}, but the vocabulary ends at {largest - 1}"
    assert problem in problems(copied, train=manifest.train, vocab_size=largest)
    problem = f"val.bin ends in the middle of a document: its last id is {manifest.end_of_text}"
    assert problem in problems(copied, end_of_text=299)
    assert any("has format 77" in problem for problem in problems(copied, format=77))


def test_unlisted_files_are_problems_until_removed(copied: Path) -> None:
    stray = copied / "tokenizer" / "vocab.json"
    stray.write_text("mine")
    assert problems(copied) == [f"{stray} is not in the manifest", "remove the files that it does not list"]
    stray.unlink()
    assert verify_dataset(str(copied)).documents == 21
