"""A hundred ways to spoil a checkpoint, and a dataset: verification finds each, and falls over none."""

from __future__ import annotations

import re
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
from litgpt_demo.data.verification import require_sound
from litgpt_demo.errors import DataError
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import committed, open_checkpoint

Damage: TypeAlias = tuple[str, int, int, int]
"""What happens to one file or to two, and where; numbers are taken modulo."""
DAMAGES = st.tuples(
    st.sampled_from(["flip", "truncate", "insert", "zeros", "remove", "swap"]),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 2**40),
)


def spoilt(content: bytes | None, kind: str, place: int) -> bytes | None:
    """What a file holds then; None where it is gone."""
    if kind == "remove" or not content:
        return None
    before, rest = content[: place % len(content)], content[place % len(content) :]
    middle = {"flip": bytes([rest[0] ^ 1 << place % 8]), "insert": b"\0" + rest[:1], "zeros": bytes(len(rest[:512]))}
    return before if kind == "truncate" else before + middle[kind] + rest[512 if kind == "zeros" else 1 :]


class Spoilable:
    """A folder whose files can be spoilt and are made whole again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.whole: dict[Path, bytes | None] = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self.files = sorted(self.whole)

    @contextmanager
    def spoilt(self, damage: Damage) -> Iterator[set[Path]]:
        """Within it the files are damaged, of which those are given that are others now."""
        kind, one, other, place = damage
        path, second = self.files[one % len(self.files)], self.files[other % len(self.files)]
        if kind == "swap":
            changes = {path: self.whole[second], second: self.whole[path]}
        else:
            changes = {path: spoilt(self.whole[path], kind, place)}
        self._write(changes)
        try:
            yield {path for path, changed in changes.items() if changed != self.whole[path]}
        finally:
            self._write({path: self.whole[path] for path in changes})

    def _write(self, contents: dict[Path, bytes | None]) -> None:
        for path, content in contents.items():
            path.unlink() if content is None else path.write_bytes(content)


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


@settings(max_examples=100)
@given(damage=DAMAGES)
def test_a_dataset_verifies_and_is_staged_if_and_only_if_every_byte_is_as_it_was(
    spoilable_dataset: Spoilable, damage: Damage
) -> None:
    folder = spoilable_dataset.root
    with spoilable_dataset.spoilt(damage) as changed:
        if not changed:
            assert require_sound(str(folder))
            assert stage(str(folder), folder) == folder
            return
        names = (re.escape(path.relative_to(folder).as_posix()) for path in changed)
        told = "|".join(["has no manifest", *names])
        with pytest.raises(DataError, match=told):
            require_sound(str(folder))
        with pytest.raises(DataError):
            stage(str(folder), folder)
