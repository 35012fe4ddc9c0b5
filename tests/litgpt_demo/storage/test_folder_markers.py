"""Empty objects such as `checkpoints/`, which consoles, gsutil and FUSE mounts make for folders, are no files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_emulator import bucket_emulator
from corpora import corpus_in, settings_for
from states import keep, pair

from litgpt_demo.config import DataConfig
from litgpt_demo.data.corpus.listing import sources
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.verification import verify_dataset
from litgpt_demo.errors import UserError
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import committed


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with bucket_emulator("markers") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield open_storage("gs://markers/team/base")


def mark(*folders: str) -> None:
    """Make a marker of each folder, and of the root."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.storage import Client

    bucket = Client(project="markers", credentials=AnonymousCredentials()).bucket("markers")
    for name in ("team/base/", *(f"team/base/{folder}/" for folder in folders)):
        bucket.blob(name).upload_from_string(b"")


def test_a_checkpoints_successor_removes_no_other_checkpoint(bucket: Storage) -> None:
    run = bucket.within("runs/one")
    keep(run, pair(1), 10)
    mark("runs", "runs/one", "runs/one/checkpoints", "runs/one/checkpoints/step-00000010")
    run.write("checkpoints/notes.txt", b"a person's")
    keep(run, pair(2), 20)
    assert [found.step for found in committed(run)] == [20, 10]
    assert run.read("checkpoints/notes.txt") == b"a person's"


def test_a_dataset_is_prepared_found_done_and_verified(bucket: Storage, tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(corpus_in(tmp_path)))
    mark("datasets", planned.path)
    made = prepare(planned, bucket)
    mark("datasets", planned.path)
    assert prepare(planned, bucket) == made
    checked = verify_dataset(bucket.address(planned.path))
    assert not checked.problems
    assert not checked.strays


def test_a_corpus_folder_that_a_console_made_has_the_files_that_were_put_there(bucket: Storage) -> None:
    mark("texts", "texts/deep")
    bucket.write("texts/one.txt", b"text")
    bucket.write("texts/deep/two.txt", b"text")
    corpus = {"kind": "files", "paths": [bucket.address("texts")]}
    found = sources(DataConfig.model_validate({"corpus": corpus}).corpus)
    assert [source.name for source in found] == ["deep/two.txt", "one.txt"]


@pytest.mark.parametrize("path", ["", ".", "/", "checkpoints/", "a//b", "./a"])
def test_nothing_is_removed_under_a_name_that_is_no_files_or_folders(
    bucket: Storage, tmp_path: Path, path: str
) -> None:
    for root in (bucket, open_storage(str(tmp_path))):
        root.write("checkpoints/a", b"")
        with pytest.raises(UserError):
            root.remove(path)
        assert root.list() == ["checkpoints/a"]
