"""Datasets by their inputs: which key they have, when they are done, and that half a dataset is none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from corpora import SEPARATOR, corpus_in, large_vocabulary, settings_for

from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import finished_dataset, plan_dataset, stage
from litgpt_demo.errors import DataError
from litgpt_demo.storage import open_storage


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": {"kind": "train", "vocab_size": 301}},
        {"validation_fraction": 0.2},
        {"split_seed": 1},
        {"corpus": {"kind": "files", "paths": ["corpus"], "separator": "\n"}},
        {"corpus": {"kind": "files", "paths": ["corpus"], "separator": SEPARATOR, "max_bytes": 500}},
    ],
)
def test_a_setting_that_decides_the_bytes_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    folder = corpus_in(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    assert plan_dataset(settings_for(folder, **change)).key != plan_dataset(settings_for(folder)).key


def test_a_dataset_keeps_the_key_that_it_had_in_older_versions(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    for policy, key in (("fail", "35f82f1f96"), ("skip", "ebc8f6dfc5")):
        settings = {"corpus": {"kind": "files", "paths": [str(tmp_path)]}, "on_bad_document": policy}
        assert plan_dataset(DataConfig.model_validate(settings)).key == key
        limited = plan_dataset(DataConfig.model_validate({**settings, "max_document_bytes": 1000})).key
        assert (limited == key) == (policy == "fail"), "where long documents are left out, the limit decides the bytes"


def test_a_tokenizer_counts_by_its_content_not_by_its_place(tmp_path: Path) -> None:
    folder = corpus_in(tmp_path / "corpus")
    places = [large_vocabulary(tmp_path / name, size) for name, size in (("one", 300), ("two", 300), ("other", 301))]
    keys = [plan_dataset(settings_for(folder, tokenizer={"kind": "file", "path": str(path)})).key for path in places]
    assert keys[0] == keys[1] != keys[2]


def test_a_dataset_that_lost_a_file_or_its_manifest_is_none(copied: Path, tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(corpus_in(tmp_path / "corpus")))
    shutil.copytree(copied, tmp_path / planned.path)
    (tmp_path / planned.path / "val.bin").unlink()
    with pytest.raises(DataError, match=r"has a manifest but val\.bin is missing; .*delete the folder and run again"):
        finished_dataset(open_storage(str(tmp_path)), planned)
    (copied / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"has no manifest.*train-litgpt prepare"):
        stage(str(copied), tmp_path / "scratch")
