"""Verification: what is wrong with a dataset is said, file by file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from litgpt_demo.dataset import open_dataset
from litgpt_demo.manifests import write_manifest
from litgpt_demo.storage import open_storage
from litgpt_demo.verification import verify


def rewritten(folder: Path, **fields: object) -> str:
    """The dataset under a manifest with other fields."""
    write_manifest(open_storage(str(folder)), open_dataset(str(folder)).model_copy(update=fields))
    return str(folder)


def test_a_flipped_bit_is_found_by_its_file(copied: Path) -> None:
    content = bytearray((copied / "train.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (copied / "train.bin").write_bytes(content)
    found = verify(str(copied)).problems
    assert [problem.split(", its manifest says")[0].split(" has ")[1].split()[0] for problem in found[:2]] == [
        "crc32c",
        "sha256",
    ]
    assert all(problem.startswith("train") for problem in found)


def test_ids_beyond_the_vocabulary_and_unclosed_documents_are_problems(copied: Path) -> None:
    manifest = open_dataset(str(copied))
    train = np.memmap(copied / "train.bin", dtype=manifest.dtype, mode="r")
    largest = int(max(train.max(), np.memmap(copied / "val.bin", dtype=manifest.dtype, mode="r").max()))
    found = verify(rewritten(copied, vocab_size=largest)).problems
    assert any(f"holds the id {largest}, the vocabulary ends at {largest - 1}" in problem for problem in found)
    found = verify(rewritten(copied, vocab_size=manifest.vocab_size, end_of_text=299)).problems
    closed = np.count_nonzero(train == 299)
    assert f"train closes {closed} documents with id 299, its manifest says 18" in found
    assert f"val.bin ends in the middle of a document: its last id is {manifest.end_of_text}" in found
