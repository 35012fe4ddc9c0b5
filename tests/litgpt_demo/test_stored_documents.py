"""Stored JSON that is damaged is named with its address and what to do; none of its damage goes unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.documents import parse_json, sealed
from litgpt_demo.errors import DataError
from litgpt_demo.runs import (
    RunDocument,
    read_document,
    read_spec,
    write_document,
)
from litgpt_demo.storage import Storage, open_storage

SPEC = TrainingSpec(
    run="gpt-0123456789", dataset="gs://bucket/datasets/d-1", dataset_key="0123456789", model=ModelConfig(),
    train=TrainConfig(), steps=12, world_size=2,
)  # fmt: skip
DOCUMENT = RunDocument(run={"name": "gpt", "root": "out"}, training=SPEC, software={"image": "local"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    return open_storage(str(tmp_path_factory.mktemp("run")))


def test_a_runs_config_comes_back_as_it_was_written(run: Storage) -> None:
    write_document(run, DOCUMENT)
    assert read_document(run) == DOCUMENT
    assert read_spec(run) == SPEC
    older = {"run": {"name": "gpt"}, "training": SPEC.model_dump(mode="json"), "software": {}}
    run.write("config.json", json.dumps(older, indent=1).encode())
    assert read_spec(run) == SPEC, "one of an older version has no checksum"


def test_other_users_cannot_look_into_a_new_runs_folder(tmp_path: Path) -> None:
    write_document(open_storage(str(tmp_path / "runs" / "gpt-0123456789")), DOCUMENT)
    assert (tmp_path / "runs" / "gpt-0123456789").stat().st_mode & 0o077 == 0


FIX = "; `train-litgpt run` with the run's config writes it anew"


@given(flips=st.lists(st.integers(min_value=0), min_size=1, max_size=3, unique=True))
def test_no_flipped_bit_changes_what_the_nodes_are_told(run: Storage, flips: list[int]) -> None:
    write_document(run, DOCUMENT)
    content = bytearray(run.read("config.json"))
    for flip in {flip % (len(content) * 8) for flip in flips}:
        content[flip // 8] ^= 1 << flip % 8
    run.write("config.json", bytes(content))
    assert says(outcome(lambda: read_document(run)), f"{run.address('config.json')} is not ", FIX)


def test_a_config_that_was_edited_is_named_with_what_to_do(run: Storage) -> None:
    write_document(run, DOCUMENT)
    run.write("config.json", run.read("config.json").replace(b'"steps": 12', b'"steps": 13'))
    assert says(outcome(lambda: read_document(run)), f"{run.address('config.json')} is not ", FIX)


def outcome(read: Callable[[], object]) -> object:
    """What is read, or the error's words."""
    try:
        return read()
    except DataError as error:
        return str(error)


def says(found: object, beginning: str, end: str) -> bool:
    return isinstance(found, str) and found.startswith(beginning) and found.endswith(end)


@given(
    st.dictionaries(
        st.text(), st.none() | st.integers(-(2**63), 2**64) | st.text() | st.lists(st.booleans()), min_size=1
    )
)
def test_a_seal_comes_off_whatever_was_sealed(document: dict[str, Any]) -> None:
    content = sealed(json.dumps(document, indent=1).encode(), "config")
    assert parse_json(content, dict[str, Any], where="there", fix="none") == document


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error_with_words(content: bytes) -> None:
    found = outcome(lambda: parse_json(content, dict[str, Any], where="gs://b/x.json", fix="do this"))
    assert isinstance(found, dict) or says(found, "gs://b/x.json is not ", "; do this")
