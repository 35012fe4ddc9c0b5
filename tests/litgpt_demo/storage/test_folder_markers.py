"""Empty objects such as `checkpoints/`, which consoles, gsutil and FUSE mounts make for folders, are no files."""

from pathlib import Path

import pytest
from corpora import contents, corpus_in, files, put_objects, settings_for
from states import keep, pair

from litgpt_demo.data.dataset import plan_dataset, verify_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.errors import UserError
from litgpt_demo.storage import BucketStorage, open_storage
from litgpt_demo.training.checkpoints import list_complete


def mark(bucket: BucketStorage, *folders: str) -> None:
    """Make a marker of each folder, and of the root."""
    put_objects(bucket, "", *(f"{folder}/" for folder in folders))


def test_a_checkpoints_successor_removes_no_other_checkpoint(bucket: BucketStorage) -> None:
    run = bucket.within("runs/one")
    keep(run, pair(1), 10)
    mark(bucket, "runs", "runs/one", "runs/one/checkpoints", "runs/one/checkpoints/step-00000010")
    run.write("checkpoints/notes.txt", b"a person's")
    keep(run, pair(2), 20)
    assert [found.step for found in list_complete(run)] == [20, 10]
    assert run.read("checkpoints/notes.txt") == b"a person's"


def test_dataset_is_made_from_a_corpus_with_folder_markers(bucket: BucketStorage, tmp_path: Path) -> None:
    for path, content in contents(corpus_in(tmp_path)).items():
        bucket.write(f"texts/{path}", content)
    mark(bucket, "texts", "texts/deep")
    planned = plan_dataset(settings_for(tmp_path, corpus=files(bucket.address("texts"))))
    mark(bucket, "datasets", planned.path)
    made = prepare(planned, bucket)
    mark(bucket, "datasets", planned.path)
    assert prepare(planned, bucket) == made
    assert verify_dataset(bucket.address(planned.path)) == made


def test_removal_takes_only_a_name_of_a_file_or_folder(root: str) -> None:
    storage = open_storage(root)
    storage.write("checkpoints/a", b"")
    for path in ("", ".", "/", "checkpoints/", "a//b", "./a"):
        with pytest.raises(UserError):
            storage.remove(path)
    assert storage.list() == ["checkpoints/a"]
