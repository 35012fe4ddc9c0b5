"""Verification: what is wrong with a dataset is said, file by file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_in, settings_for

from litgpt_demo.data.dataset import FORMAT, open_dataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.verification import main, require_sound, verify_dataset
from litgpt_demo.errors import DataError
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


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("spoil", [flip_a_bit, replace_by_folder, replace_by_link_to_itself])
@pytest.mark.parametrize(("file", "blamed"), [("train.bin", "train"), ("tokenizer/tokenizer.json", "tokenizer")])
def test_whatever_happened_to_a_file_is_found_and_no_other_file_is_blamed(
    copied: Path, file: str, blamed: str, spoil: Callable[[Path], None]
) -> None:
    spoil(copied / file)
    found = verify_dataset(str(copied)).problems
    assert any(file in problem for problem in found)
    assert all(problem.removeprefix(f"{copied}/").startswith(blamed) for problem in found)
    with pytest.raises(DataError, match=r"is not what its manifest says: .*: remove that folder and prepare it again"):
        require_sound(str(copied))


def test_counts_and_ids_that_the_manifest_has_wrong_are_problems(copied: Path) -> None:
    manifest = open_dataset(str(copied))
    train = np.memmap(copied / "train.bin", dtype=manifest.dtype, mode="r")
    largest = int(max(train.max(), np.memmap(copied / "val.bin", dtype=manifest.dtype, mode="r").max()))
    wrong = manifest.train.model_copy(update={"tokens": manifest.train.tokens + 1, "documents": 20})
    assert verify_dataset(rewritten(copied, train=wrong)).problems == (
        f"train holds {manifest.train.tokens} tokens, its manifest says {manifest.train.tokens + 1}",
        f"train closes 18 documents with id {manifest.end_of_text}, its manifest says 20",
    )
    found = verify_dataset(rewritten(copied, train=manifest.train, vocab_size=largest)).problems
    assert any(f"holds the id {largest}, the vocabulary ends at {largest - 1}" in problem for problem in found)
    found = verify_dataset(rewritten(copied, vocab_size=manifest.vocab_size, end_of_text=299)).problems
    assert f"val.bin ends in the middle of a document: its last id is {manifest.end_of_text}" in found
    found = verify_dataset(rewritten(copied, format=77)).problems
    assert f"the manifest has format 77, and this version knows format {FORMAT}" in found


def test_files_that_the_manifest_does_not_list_are_problems_that_their_removal_ends(copied: Path) -> None:
    strays = ("notes.txt", "tokenizer/vocab.json")
    for name in strays:
        (copied / name).write_text("mine")
    found = verify_dataset(str(copied))
    assert found.problems == tuple(f"{copied}/{name} is not in the manifest" for name in strays)
    with pytest.raises(DataError, match=r"notes\.txt is not in .*: remove the files that it does not list"):
        require_sound(str(copied))
    for name in strays:
        (copied / name).unlink()
    assert verify_dataset(str(copied)).problems == ()


def test_a_dataset_is_read_again_wherever_it_lies(root: str, tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(corpus_in(tmp_path / "corpus")))
    prepare(planned, storage := open_storage(root))
    where = storage.address(planned.path)
    assert verify_dataset(where).problems == ()
    content = bytearray(storage.read(f"{planned.path}/val.bin"))
    content[0] ^= 1
    storage.write(f"{planned.path}/val.bin", bytes(content))
    assert any(problem.startswith("val.bin has crc32c") for problem in verify_dataset(where).problems)
    storage.remove(f"{planned.path}/train.bin")
    assert f"{where}/train.bin is missing" in verify_dataset(where).problems


def test_the_command_says_what_it_read(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(copied)]) == 0
    assert "21 documents" in capsys.readouterr().out
