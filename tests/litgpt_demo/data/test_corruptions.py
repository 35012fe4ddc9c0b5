"""A hundred ways to spoil a checkpoint, and a dataset: verification finds each, and falls over none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import keep, pair

from litgpt_demo.data.dataset import DatasetManifest, stage, verify_dataset
from litgpt_demo.documents import bring
from litgpt_demo.errors import DataError
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import committed, folder_of

Damage: TypeAlias = tuple[str, int, int, int]
"""What happens to one file or to two, and where; numbers are taken modulo."""
DAMAGES = st.tuples(
    st.sampled_from(["flip", "truncate", "insert", "zeros", "remove", "swap"]),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 2**40),
)


@contextmanager
def spoilt(root: Path, damage: Damage) -> Iterator[set[Path]]:
    """Within it the files of a folder are damaged, of which those are given that are others now."""
    kind, one, other, place = damage
    whole = {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    path, second = (list(whole)[number % len(whole)] for number in (one, other))
    content = whole[path]
    before, rest = content[: place % max(1, len(content))], content[place % max(1, len(content)) :]
    changes: dict[Path, bytes | None] = {path: None}
    if kind == "swap":
        changes = {path: whole[second], second: content}
    elif kind == "truncate" and content:
        changes[path] = before
    elif kind != "remove" and content:
        flipped = bytes([rest[0] ^ 1 << place % 8])
        middle = {"flip": flipped, "insert": b"\0" + rest[:1], "zeros": bytes(len(rest[:512]))}
        changes[path] = before + middle[kind] + rest[512 if kind == "zeros" else 1 :]
    for name, changed in changes.items():
        name.unlink() if changed is None else name.write_bytes(changed)
    try:
        yield {name for name, changed in changes.items() if changed != whole[name]}
    finally:
        for name in changes:
            name.write_bytes(whole[name])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """With two checkpoints."""
    run = open_storage(str(tmp_path_factory.mktemp("checkpoints")))
    for number in (4, 8):
        keep(run, pair(number, width=8), number)
    return run


def verified(run: Storage) -> list[int]:
    steps = []
    for manifest in committed(run):
        with suppress(DataError):
            bring(run.within(folder_of(manifest.step)), manifest.files, lambda: pytest.fail("it is read where it is"))
            steps.append(manifest.step)
    return steps


@settings(max_examples=100)
@given(damage=DAMAGES)
def test_a_checkpoint_verifies_if_and_only_if_every_byte_is_as_it_was(run: Storage, damage: Damage) -> None:
    with spoilt(Path(run.root), damage) as changed:
        hurt = {path.parent.name for path in changed}
        assert verified(run) == [step for step in (8, 4) if f"step-{step:08d}" not in hurt]


@pytest.fixture(scope="module")
def folder(dataset: tuple[DatasetManifest, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(dataset[1], tmp_path_factory.mktemp("datasets") / dataset[1].name))


@settings(max_examples=100)
@given(damage=DAMAGES)
def test_a_dataset_verifies_and_is_staged_if_and_only_if_every_byte_is_as_it_was(folder: Path, damage: Damage) -> None:
    with spoilt(folder, damage) as changed:
        if not changed:
            assert verify_dataset(str(folder))
            assert stage(str(folder), folder) == folder
            return
        names = (re.escape(path.relative_to(folder).as_posix()) for path in changed)
        told = "|".join(["has no manifest", *names])
        with pytest.raises(DataError, match=told):
            verify_dataset(str(folder))
        with pytest.raises(DataError):
            stage(str(folder), folder)
