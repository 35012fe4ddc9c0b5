"""No manifest, not done; and what a manifest lists is compared byte by byte before it is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bucket_faults import FOREVER, Fault, FaultyBucket
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.config import Settings
from litgpt_demo.errors import DataError, NetworkError
from litgpt_demo.manifests import FileRecord, bring, differences, read_manifest, write_manifest
from litgpt_demo.storage import BucketStorage, Storage, open_storage

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


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_changed_bit_of_a_manifest_is_found(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("sealed")
    storage = open_storage(str(folder))
    write_manifest(storage, Listing(files=(FileRecord(path="a", size=1, crc32c="00000000"),)))
    content = bytearray((folder / "manifest.json").read_bytes())
    content[place % len(content)] ^= 1 << bit
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"{folder}/manifest\.json is not"):
        read_manifest(storage, Listing)


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


def test_fetching_goes_on_where_a_large_file_was_interrupted(
    bucket: BucketStorage, proxy: FaultyBucket, tmp_path: Path
) -> None:
    place = replace(bucket, part_size=1000, patience=0.1)
    record = FileRecord.of(place.write("train.bin", bytes(9000)))
    proxy.arm(Fault(on="download", do="refuse", skip=6, times=FOREVER))
    with pytest.raises(NetworkError):
        bring(place, [record], lambda: tmp_path / "scratch")
    proxy.arm()
    bring(place, [record], lambda: tmp_path / "scratch")
    assert proxy.seen.count("download") == 3


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
