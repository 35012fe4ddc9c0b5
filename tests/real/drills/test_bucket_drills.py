"""Drills of the bucket: it is down for a minute, refuses, cuts its streams, or returns wrong bytes."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, FailureClass, FaultyBucket, faulty_bucket
from drill_ground import Scene, step

KINDS: list[Any] = ["begin", "upload", "download", "delete", "compose", "look"]


@pytest.fixture(autouse=True)
def _sound_again(bucket: FaultyBucket) -> Iterator[None]:
    yield
    bucket.arm()


@pytest.fixture(scope="module")
def bucket() -> Iterator[FaultyBucket]:
    with bucket_emulator("drills") as address, faulty_bucket(address) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def place(bucket: FaultyBucket) -> tuple[dict[str, Any], dict[str, str]]:
    changes = {"root": "gs://drills/here", "train.max_steps": 96}
    return changes, {"STORAGE_EMULATOR_HOST": bucket.url}


def refused(status: int) -> list[FailureClass]:
    """Every request is answered with this status."""
    return [FailureClass(on=kind, do="refuse", status=status, times=FOREVER) for kind in KINDS]


@pytest.mark.parametrize(
    ("faults", "seconds"),
    [
        (refused(503), 60),
        ([FailureClass(on="download", do="cut", times=40), FailureClass(on="upload", do="lose", times=20)], 0),
        ([FailureClass(on="download", do="flip", times=20), FailureClass(on="upload", do="flip request", times=10)], 0),
    ],
    ids=["503 for a minute", "streams are cut", "bytes are flipped"],
)
def test_spoiled_answers_of_a_bucket_are_requested_again(
    bucket: FaultyBucket, scene: Scene, faults: list[FailureClass], seconds: int
) -> None:
    command = scene.run()
    scene.until(step(16))
    bucket.arm(*faults)
    if seconds:
        time.sleep(seconds)  # who looked meanwhile would be kept waiting for longer
        bucket.arm()
    assert scene.end_of(command) == 0
    bucket.arm()
    scene.require_promises(attempts=(1, 2))


def test_same_command_continues_once_the_bucket_allows_it(bucket: FaultyBucket, scene: Scene) -> None:
    command = scene.run()
    scene.until(step(16))
    bucket.arm(*refused(403))
    assert scene.end_of(command) == 40
    bucket.arm()
    assert scene.end_of(scene.run()) == 0
    scene.require_promises("403|refused|storage.object", attempts=(1, 2))
