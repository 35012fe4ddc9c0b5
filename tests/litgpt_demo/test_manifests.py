"""No manifest, not done; and what a manifest lists is compared byte by byte before it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from litgpt_demo.config import Settings
from litgpt_demo.errors import DataError
from litgpt_demo.manifests import FileRecord, bring, differences, read_manifest, write_manifest
from litgpt_demo.storage import Storage, open_storage

CONTENTS = {"train.bin": b"0123456789", "tokenizer/tokenizer.json": b"{}", ".metadata": b"hidden"}


class Listing(Settings):
    """A manifest of any kind."""

    files: tuple[FileRecord, ...]


@pytest.fixture
def place(root: str) -> Storage:
    return open_storage(root)


def filled(place: Storage) -> Listing:
    return Listing(files=tuple(FileRecord.of(place.write(name, content)) for name, content in CONTENTS.items()))


def test_a_folder_is_done_when_its_manifest_is_there_and_says_what_was_written(place: Storage) -> None:
    listing = filled(place)
    assert read_manifest(place, Listing) is None
    write_manifest(place, listing)
    assert read_manifest(place, Listing) == listing
    for text in (b"", b"\xff", b'{"files": 3}', b'{"files": [], "extra": 1}'):
        place.write("manifest.json", text)
        with pytest.raises(DataError, match=r"manifest\.json is not a valid Listing .* run again"):
            read_manifest(place, Listing)


def test_files_are_brought_with_every_byte_as_listed_again_where_one_is_wrong(place: Storage, tmp_path: Path) -> None:
    listing = filled(place)
    folder = bring(place, listing.files, lambda: tmp_path / "scratch")
    assert {name: (folder / name).read_bytes() for name in CONTENTS} == CONTENTS
    assert differences(folder, listing.files) == []
    if folder == tmp_path / "scratch":  # fetched; what lies in a folder is used where it is
        kept = (folder / ".metadata").stat()
        (folder / "train.bin").write_bytes(b"0123456788")
        assert bring(place, listing.files, lambda: folder) == folder
        assert differences(folder, listing.files) == []
        assert (folder / ".metadata").stat() == kept


def test_a_file_that_is_not_as_listed_is_named(place: Storage, tmp_path: Path) -> None:
    listing = filled(place)
    for content, words in (
        (b"012345678", r"train\.bin has 9 bytes, its manifest says 10"),
        (b"0123456788", r"train\.bin has crc32c [0-9a-f]{8}, its manifest says 280c069e"),
    ):
        place.write("train.bin", content)
        with pytest.raises(DataError, match=words):
            bring(place, listing.files, lambda: tmp_path / "scratch")
    place.remove("train.bin")
    with pytest.raises(DataError, match=r"train\.bin is missing"):
        bring(place, listing.files, lambda: tmp_path / "scratch")
