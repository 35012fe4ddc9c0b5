"""Stored JSON that is damaged is named with its address and what to do; none of its damage goes unnoticed."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.config import ModelConfig, Settings, TrainConfig, TrainingSpec
from litgpt_demo.documents import FileRecord, differences, fetch_verified, parse_json, read_manifest, write_manifest
from litgpt_demo.errors import DataError
from litgpt_demo.runs import RunDocument, read_document, read_spec, write_document
from litgpt_demo.storage import Storage, open_storage

SPEC = TrainingSpec(
    run="gpt-0123456789", dataset="gs://bucket/datasets/d-1", dataset_hash="0123456789", model=ModelConfig(),
    train=TrainConfig(), steps=12, world_size=2,
)  # fmt: skip
DOCUMENT = RunDocument(run={"name": "gpt", "root": "out"}, training=SPEC, software={"image": "local"})


def test_other_users_cannot_look_into_a_new_runs_folder(tmp_path: Path) -> None:
    write_document(open_storage(str(tmp_path / "runs" / "gpt-0123456789")), DOCUMENT)
    assert (tmp_path / "runs" / "gpt-0123456789").stat().st_mode & 0o077 == 0


@given(flips=st.lists(st.integers(min_value=0), max_size=3, unique=True))
def test_no_flipped_bit_changes_what_the_nodes_are_told(
    tmp_path_factory: pytest.TempPathFactory, flips: list[int]
) -> None:
    run = open_storage(str(tmp_path_factory.mktemp("run")))
    write_document(run, DOCUMENT)
    assert (read_document(run), read_spec(run)) == (DOCUMENT, SPEC)
    content = bytearray(sound := run.read("config.json"))
    for flip in flips:
        content[flip // 8 % len(content)] ^= 1 << flip % 8
    run.write("config.json", bytes(content))
    if content == sound:
        assert read_spec(run) == SPEC
    else:
        with pytest.raises(DataError, match=r"config\.json is not .*; copy a sound one.* `train-litgpt run` .* again$"):
            read_document(run)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error_with_words(content: bytes) -> None:
    try:
        parse_json(content, dict[str, Any], where="gs://b/x.json", fix="do this")
    except DataError as error:
        found = str(error)
        assert re.fullmatch("(?s)gs://b/x.json is not .*; do this", found)


# --- manifests: without one nothing is done, and what it lists is compared before it is used ------------------------

CONTENTS = {"train.bin": b"0123456789", "tokenizer/tokenizer.json": b"{}", ".metadata": b"hidden"}


class Listing(Settings):
    """A manifest of any kind."""

    files: tuple[FileRecord, ...]


@pytest.fixture
def place(root: str) -> Storage:
    return open_storage(root)


def filled(place: Storage) -> Listing:
    return Listing(files=tuple(FileRecord.of(place.write(*item)) for item in CONTENTS.items()))


def test_folder_is_complete_once_its_manifest_exists(place: Storage) -> None:
    listing = filled(place)
    assert read_manifest(place, Listing) is None
    write_manifest(place, listing)
    assert read_manifest(place, Listing) == listing
    for text in (b"", b"\xff", b'{"files": 3}', b'{"files": [], "extra": 1}'):
        place.write("manifest.json", text)
        with pytest.raises(DataError, match=r"manifest\.json is not a valid Listing .* run again"):
            read_manifest(place, Listing)


def test_damaged_files_are_fetched_again_and_verified(place: Storage, tmp_path: Path) -> None:
    listing = filled(place)
    folder = fetch_verified(place, listing.files, lambda: tmp_path / "scratch")
    assert {name: (folder / name).read_bytes() for name in CONTENTS} == CONTENTS
    assert differences(folder, listing.files) == []
    if folder == tmp_path / "scratch":  # fetched; what lies in a folder is used where it is
        kept = (folder / ".metadata").stat()
        (folder / "train.bin").write_bytes(b"0123456788")
        assert fetch_verified(place, listing.files, lambda: folder) == folder
        assert differences(folder, listing.files) == []
        assert (folder / ".metadata").stat() == kept


def test_a_file_that_is_not_as_listed_is_named(place: Storage, tmp_path: Path) -> None:
    listing = filled(place)
    for content, message in (
        (b"012345678", r"train\.bin has 9 bytes, but its manifest says 10"),
        (b"0123456788", r"train\.bin has crc32c [0-9a-f]{8}, but its manifest says 280c069e"),
    ):
        place.write("train.bin", content)
        with pytest.raises(DataError, match=message):
            fetch_verified(place, listing.files, lambda: tmp_path / "scratch")
    place.remove("train.bin")
    with pytest.raises(DataError, match=r"train\.bin is missing"):
        fetch_verified(place, listing.files, lambda: tmp_path / "scratch")
