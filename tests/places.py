"""The two kinds of places that everything is stored in: a folder, and a bucket behind a proxy that can be armed."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from bucket_emulator import bucket_emulator
from bucket_faults import FaultyBucket, faulty_bucket

from litgpt_demo.storage import BucketStorage


@pytest.fixture
def proxy(request: pytest.FixtureRequest) -> Iterator[FaultyBucket]:
    """A proxy without faults before a bucket of the test's own, whose scratch folders no other suite shares."""
    name = f"{request.path.stem.replace('_', '-')}-{uuid4().hex}"
    with bucket_emulator(name) as address, faulty_bucket(address, name) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: FaultyBucket, monkeypatch: pytest.MonkeyPatch) -> BucketStorage:
    """An empty folder in it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    return BucketStorage(root=f"gs://{proxy.bucket}/root")


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty place, once of each kind."""
    return str(tmp_path / "root") if request.param == "folder" else request.getfixturevalue("bucket").root
