"""A hundred ways to spoil a checkpoint, and a dataset: verification finds each, and falls over none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import keep, pair

from litgpt_demo.data.dataset import DatasetManifest, stage
from litgpt_demo.data.verification import verify_dataset
from litgpt_demo.errors import DataError
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import committed, open_checkpoint

Damage: TypeAlias = tuple[str, int, int, int]
"""What happens to one file or to two, and where."""
Content: TypeAlias = bytes | None  # of a file that is not there


def damaged(contents: list[bytes], damage: Damage) -> dict[int, Content]:
    """By number of the file, what it holds after one was spoilt or two were swapped; numbers are taken modulo."""
    kind, file, file_or_bit, byte = damage
    one, other = file % len(contents), file_or_bit % len(contents)
    content = contents[one]
    place = byte % (len(content) + (kind == "insert"))
    before, there, behind = content[:place], content[place : place + 1], content[place + 1 :]
    spoilt: dict[str, Content] = {
        "flip": before + bytes([there[0] ^ 1 << file_or_bit % 8]) + behind if there else None,
        "truncate": before,
        "insert": before + b"\0" + there + behind,
        "zeros": before + bytes(len(content[place : place + 512])) + content[place + 512 :],
        "remove": None,
    }
    return {one: contents[other], other: content} if kind == "swap" else {one: spoilt[kind]}


DAMAGES = st.tuples(
    st.sampled_from(["flip", "truncate", "insert", "zeros", "remove", "swap"]),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 2**40),
)


class Spoilable:
    """A folder whose files can be spoilt and are made whole again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(path for path in root.rglob("*") if path.is_file())
        self.contents = [path.read_bytes() for path in self.files]

    @contextmanager
    def spoilt(self, damage: Damage) -> Iterator[set[Path]]:
        """Within it the files are damaged, of which those are given that are others now."""
        changes = {self.files[number]: content for number, content in damaged(self.contents, damage).items()}
        for path, content in changes.items():
            path.unlink() if content is None else path.write_bytes(content)
        whole = dict(zip(self.files, self.contents, strict=True))
        try:
            yield {path for path, content in changes.items() if content != whole[path]}
        finally:
            for path in changes:
                path.write_bytes(whole[path])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Spoilable:
    """Two of one run."""
    run = open_storage(str(tmp_path_factory.mktemp("checkpoints")))
    for number in (4, 8):
        keep(run, pair(number, width=8), number)
    return Spoilable(Path(run.root))


def verified(run: Storage) -> list[int]:
    steps = []
    for manifest in committed(run):
        try:
            open_checkpoint(run, manifest, lambda: pytest.fail("a local checkpoint is read where it is"))
        except DataError:
            continue
        steps.append(manifest.step)
    return steps


@settings(max_examples=100)
@given(damage=DAMAGES)
def test_a_checkpoint_verifies_if_and_only_if_every_byte_is_as_it_was(checkpoints: Spoilable, damage: Damage) -> None:
    run = open_storage(str(checkpoints.root))
    with checkpoints.spoilt(damage) as changed:
        hurt = {path.parent.name for path in changed}
        assert verified(run) == [step for step in (8, 4) if f"step-{step:08d}" not in hurt]


@pytest.fixture(scope="module")
def spoilable_dataset(dataset: tuple[DatasetManifest, Path], tmp_path_factory: pytest.TempPathFactory) -> Spoilable:
    folder = tmp_path_factory.mktemp("datasets") / dataset[1].name
    return Spoilable(Path(shutil.copytree(dataset[1], folder)))


def problems(folder: Path) -> list[str]:
    try:
        return list(verify_dataset(str(folder)).problems)
    except DataError as error:
        return [str(error)]


@settings(max_examples=100)
@given(damage=DAMAGES)
def test_a_dataset_verifies_and_is_staged_if_and_only_if_every_byte_is_as_it_was(
    spoilable_dataset: Spoilable, damage: Damage
) -> None:
    folder = spoilable_dataset.root
    with spoilable_dataset.spoilt(damage) as changed:
        found = problems(folder)
        assert bool(found) == bool(changed)
        if changed:
            told = [name for path in changed for name in (path.relative_to(folder).as_posix(), os.fspath(folder))]
            assert any(name in text for text in found for name in told)
            with pytest.raises(DataError):
                stage(str(folder), folder)
        else:
            assert stage(str(folder), folder) == folder
