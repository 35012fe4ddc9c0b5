"""Verification: what is wrong with a dataset is said, file by file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_in, settings_for

from litgpt_demo.data.dataset import open_dataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.verification import main, require_sound, verify_dataset
from litgpt_demo.errors import DataError
from litgpt_demo.manifests import write_manifest
from litgpt_demo.storage import open_storage


def problems(folder: Path, **fields: object) -> tuple[str, ...]:
    """Those of the dataset under a manifest with other fields."""
    write_manifest(open_storage(str(folder)), open_dataset(str(folder)).model_copy(update=fields))
    return verify_dataset(str(folder)).problems


@pytest.mark.parametrize("spoil", [Path.mkdir, lambda path: path.symlink_to(path), lambda path: path.write_text("x")])
def test_whatever_lies_in_a_files_place_is_found_and_no_other_file_is_blamed(
    copied: Path, spoil: Callable[[Path], None]
) -> None:
    file = copied / "tokenizer/tokenizer.json"
    file.unlink()
    spoil(file)
    assert all("tokenizer/tokenizer.json" in problem for problem in verify_dataset(str(copied)).problems)
    with pytest.raises(DataError, match=r"is not what its manifest says: .*: remove that folder and prepare it again"):
        require_sound(str(copied))


def test_counts_and_ids_that_the_manifest_has_wrong_are_problems(copied: Path) -> None:
    manifest = open_dataset(str(copied))
    largest = int(np.memmap(copied / "train.bin", dtype=manifest.dtype, mode="r").max())
    wrong = manifest.train.model_copy(update={"tokens": manifest.train.tokens + 1, "documents": 20})
    assert problems(copied, train=wrong) == (
        f"train holds {manifest.train.tokens} tokens, its manifest says {manifest.train.tokens + 1}",
        f"train closes 18 documents with id {manifest.end_of_text}, its manifest says 20",
    )
    found = problems(copied, train=manifest.train, vocab_size=largest)
    assert f"train.bin holds the id {largest}, the vocabulary ends at {largest - 1}" in found
    found = problems(copied, vocab_size=manifest.vocab_size, end_of_text=299)
    assert f"val.bin ends in the middle of a document: its last id is {manifest.end_of_text}" in found
    assert any("has format 77" in problem for problem in problems(copied, format=77))


def test_files_that_the_manifest_does_not_list_are_problems_that_their_removal_ends(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strays = [copied / "notes.txt", copied / "tokenizer" / "vocab.json"]
    for stray in strays:
        stray.write_text("mine")
    assert verify_dataset(str(copied)).problems == tuple(f"{stray} is not in the manifest" for stray in strays)
    with pytest.raises(DataError, match=r"notes\.txt is not in .*: remove the files that it does not list"):
        require_sound(str(copied))
    for stray in strays:
        stray.unlink()
    assert main([str(copied)]) == 0
    assert "21 documents" in capsys.readouterr().out


def test_a_dataset_is_read_again_wherever_it_lies(root: str, tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(corpus_in(tmp_path / "corpus")))
    prepare(planned, storage := open_storage(root))
    where = storage.address(planned.path)
    assert verify_dataset(where).problems == ()
    content = storage.read(f"{planned.path}/val.bin")
    storage.write(f"{planned.path}/val.bin", bytes([content[0] ^ 1]) + content[1:])
    assert any(problem.startswith("val.bin has crc32c") for problem in verify_dataset(where).problems)
    storage.remove(f"{planned.path}/train.bin")
    assert f"{where}/train.bin is missing" in verify_dataset(where).problems
