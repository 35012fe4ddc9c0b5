"""Verification: what is wrong with a dataset is said, file by file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from bucket_emulator import bucket_emulator
from corpora import corpus_in, cut_into, prepared, settings_for

from litgpt_demo.data.dataset import FORMAT, DatasetManifest, open_dataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.verification import main, require_sound, verify_dataset
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.manifests import write_manifest
from litgpt_demo.storage import open_storage


def rewritten(folder: Path, **fields: object) -> str:
    """The dataset under a manifest with other fields."""
    write_manifest(open_storage(str(folder)), open_dataset(str(folder)).model_copy(update=fields))
    return str(folder)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0")


def test_a_sound_dataset_has_no_problems(dataset: tuple[DatasetManifest, Path]) -> None:
    manifest, folder = dataset
    assert verify_dataset(str(folder)).problems == ()
    assert require_sound(str(folder)) == manifest


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("file", ["train.bin", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("put_there", [a_folder, a_link_to_itself])
def test_what_is_no_file_where_one_should_be_is_a_problem_among_others(
    copied: Path, file: str, put_there: Callable[[Path], None]
) -> None:
    put_there(copied / file)
    assert f"{copied / file} is not a file" in verify_dataset(str(copied)).problems


def test_an_address_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(UserError, match="link' is a symbolic link that leads to itself"):
        verify_dataset(str(link))


@pytest.mark.parametrize("file", ["train.bin", "val.bin", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("spoil", [flip_a_bit, cut_short, lengthen, Path.unlink])
def test_whatever_happened_to_a_file_is_found_and_no_other_file_is_blamed(
    copied: Path, file: str, spoil: Callable[[Path], None]
) -> None:
    spoil(copied / file)
    found = verify_dataset(str(copied)).problems
    assert any(file in problem for problem in found)
    blamed = {"train.bin": "train", "val.bin": "val", "tokenizer/tokenizer.json": "tokenizer"}[file]
    assert all(problem.removeprefix(f"{copied}/").startswith(blamed) for problem in found)
    with pytest.raises(DataError, match=r"is not what its manifest says: .*: remove that folder and prepare it again"):
        require_sound(str(copied))


def test_a_flipped_bit_is_told_by_both_checksums(copied: Path) -> None:
    flip_a_bit(copied / "tokenizer" / "tokenizer.json")
    assert [problem.split()[2] for problem in verify_dataset(str(copied)).problems] == ["crc32c", "sha256"]


def test_counts_that_the_manifest_has_wrong_are_problems(copied: Path) -> None:
    train = open_dataset(str(copied)).train
    wrong = train.model_copy(update={"tokens": train.tokens + 1, "documents": train.documents + 2})
    assert verify_dataset(rewritten(copied, train=wrong)).problems == (
        f"train holds {train.tokens} tokens, its manifest says {train.tokens + 1}",
        f"train closes 18 documents with id {open_dataset(str(copied)).end_of_text}, its manifest says 20",
    )


def test_ids_beyond_the_vocabulary_and_unclosed_documents_are_problems(copied: Path) -> None:
    manifest = open_dataset(str(copied))
    train = np.memmap(copied / "train.bin", dtype=manifest.dtype, mode="r")
    largest = int(max(train.max(), np.memmap(copied / "val.bin", dtype=manifest.dtype, mode="r").max()))
    found = verify_dataset(rewritten(copied, vocab_size=largest)).problems
    assert any(f"holds the id {largest}, the vocabulary ends at {largest - 1}" in problem for problem in found)
    found = verify_dataset(rewritten(copied, vocab_size=manifest.vocab_size, end_of_text=299)).problems
    closed = np.count_nonzero(train == 299)
    assert f"train closes {closed} documents with id 299, its manifest says 18" in found
    assert f"val.bin ends in the middle of a document: its last id is {manifest.end_of_text}" in found


def test_files_that_the_manifest_does_not_list_are_problems_that_their_removal_ends(copied: Path) -> None:
    (copied / "notes.txt").write_text("mine")
    (copied / "tokenizer" / "vocab.json").write_text("{}")
    found = verify_dataset(str(copied))
    strays = ("notes.txt", "tokenizer/vocab.json")
    assert found.problems == tuple(f"{copied}/{name} is not in the manifest" for name in strays)
    with pytest.raises(
        DataError, match=r"notes\.txt is not in the manifest; .*: remove the files that it does not list"
    ):
        require_sound(str(copied))
    for name in strays:
        (copied / name).unlink()
    assert verify_dataset(str(copied)).problems == ()
    (copied / "notes.txt").write_text("mine")
    flip_a_bit(copied / "train.bin")
    assert verify_dataset(str(copied)).remedy == "remove that folder and prepare it again"


def test_a_format_that_this_version_does_not_know_is_a_problem(copied: Path) -> None:
    assert verify_dataset(rewritten(copied, format=77)).problems == (
        f"the manifest has format 77, and this version knows format {FORMAT}",
    )


def test_numbered_files_are_counted_together_and_blamed_one_by_one(tmp_path: Path) -> None:
    with cut_into(300, 200):
        manifest, folder = prepared(corpus_in(tmp_path / "corpus"), tmp_path / "root", max_file_bytes=900)
    assert len(manifest.train.files) > 1
    assert verify_dataset(str(folder)).problems == ()
    flip_a_bit(folder / "train-00001.bin")
    assert {problem.split()[0] for problem in verify_dataset(str(folder)).problems} <= {"train-00001.bin", "train"}


def test_a_dataset_in_a_bucket_is_read_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_emulator("datasets") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        planned = plan_dataset(settings_for(corpus_in(tmp_path / "corpus")))
        prepare(planned, storage := open_storage(f"gs://datasets/{uuid4().hex}"))
        where = storage.address(planned.path)
        assert verify_dataset(where).problems == ()
        content = bytearray(storage.read(f"{planned.path}/val.bin"))
        content[0] ^= 1
        storage.write(f"{planned.path}/val.bin", bytes(content))
        assert any(problem.startswith("val.bin has crc32c") for problem in verify_dataset(where).problems)
        storage.remove(f"{planned.path}/train.bin")
        assert f"{where}/train.bin is missing" in verify_dataset(where).problems


def test_the_verify_command_says_what_it_read_or_what_is_wrong(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(copied)]) == 0
    assert "21 documents" in capsys.readouterr().out
    (copied / "val.bin").unlink()
    with pytest.raises(DataError, match=r"val\.bin is missing"):
        main([str(copied)])
    with pytest.raises(DataError, match="has no manifest"):
        main([str(copied / "tokenizer")])
