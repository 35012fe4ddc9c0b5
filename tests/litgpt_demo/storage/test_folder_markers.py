"""Empty objects such as `checkpoints/`, which consoles, gsutil and FUSE mounts make for folders, are no files."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpora import corpus_in, files, settings_for
from states import keep, pair

from litgpt_demo.data.corpus.listing import sources
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.verification import verify_dataset
from litgpt_demo.errors import UserError
from litgpt_demo.storage import BucketStorage, bucket_path, open_storage
from litgpt_demo.training.checkpoints import committed


def mark(bucket: BucketStorage, *folders: str) -> None:
    """Make a marker of each folder, and of the root."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.storage import Client

    name, _, root = bucket_path(bucket.root).partition("/")
    objects = Client(project="markers", credentials=AnonymousCredentials()).bucket(name)
    for folder in ("", *(f"{folder}/" for folder in folders)):
        objects.blob(f"{root}/{folder}").upload_from_string(b"")


def test_a_checkpoints_successor_removes_no_other_checkpoint(bucket: BucketStorage) -> None:
    run = bucket.within("runs/one")
    keep(run, pair(1), 10)
    mark(bucket, "runs", "runs/one", "runs/one/checkpoints", "runs/one/checkpoints/step-00000010")
    run.write("checkpoints/notes.txt", b"a person's")
    keep(run, pair(2), 20)
    assert [found.step for found in committed(run)] == [20, 10]
    assert run.read("checkpoints/notes.txt") == b"a person's"


def test_a_dataset_is_prepared_found_done_and_verified(bucket: BucketStorage, tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(corpus_in(tmp_path)))
    mark(bucket, "datasets", planned.path)
    made = prepare(planned, bucket)
    mark(bucket, "datasets", planned.path)
    assert prepare(planned, bucket) == made
    checked = verify_dataset(bucket.address(planned.path))
    assert not checked.problems
    assert not checked.strays


def test_a_corpus_folder_that_a_console_made_has_the_files_that_were_put_there(bucket: BucketStorage) -> None:
    mark(bucket, "texts", "texts/deep")
    bucket.write("texts/one.txt", b"text")
    bucket.write("texts/deep/two.txt", b"text")
    assert [source.name for source in sources(files(bucket.address("texts")))] == ["deep/two.txt", "one.txt"]


@pytest.mark.parametrize("path", ["", ".", "/", "checkpoints/", "a//b", "./a"])
def test_nothing_is_removed_under_a_name_that_is_no_files_or_folders(root: str, path: str) -> None:
    storage = open_storage(root)
    storage.write("checkpoints/a", b"")
    with pytest.raises(UserError):
        storage.remove(path)
    assert storage.list() == ["checkpoints/a"]
