"""Drills of the bucket: it is away for a minute, refuses, cuts its streams, or answers other bytes than it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, Fault, FaultyBucket, faulty_bucket

from cli.drills.ground import Scene
from cli.drills.judging import DrillResult
from cli.drills.table import Drill, at_step, said, taken_up

KINDS: list[Any] = ["begin", "upload", "download", "delete", "compose", "look"]
_OUTAGE = 60.0


@pytest.fixture(scope="module")
def bucket() -> Iterator[FaultyBucket]:
    with bucket_emulator("drills") as address, faulty_bucket(address) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def held(bucket: FaultyBucket, held_on: Callable[..., Any]) -> Iterator[Callable[[Drill], DrillResult]]:
    with held_on({"root": "gs://drills/here", "train.max_steps": 96}, bucket.url) as hold:
        yield hold


def refused(status: int) -> list[Fault]:
    """Every request is answered with this status."""
    return [Fault(on=kind, do="refuse", status=status, times=FOREVER) for kind in KINDS]


def test_the_bucket_answers_503_for_a_minute(bucket: FaultyBucket, held: Callable[[Drill], DrillResult]) -> None:
    def away(scene: Scene) -> None:
        bucket.arm(*refused(503))
        time.sleep(_OUTAGE)  # who looked meanwhile would be kept waiting for longer
        bucket.arm()

    result = held(
        Drill(
            name="bucket-503", injected="the bucket answers 503 for 60 s", when=at_step(16), inject=away,
            attempts=(1, 2), back=said("✓ 4/5"),
        )
    )  # fmt: skip
    assert result.violations == ()


def test_the_bucket_refuses_for_good_and_the_same_command_goes_on_when_it_may_again(
    bucket: FaultyBucket, held: Callable[[Drill], DrillResult]
) -> None:
    def forbidden(scene: Scene) -> None:
        bucket.arm(*refused(403))
        scene.end_of(scene.commands[0])
        bucket.arm()

    result = held(
        Drill(
            name="bucket-403", injected="the bucket refuses until somebody mends it", when=at_step(16),
            inject=forbidden, ends=(40,), again=True, told=("403|refused|storage.object",), attempts=(1, 2),
            back=taken_up,
        )
    )  # fmt: skip
    assert result.violations == ()


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("cut", [Fault(on="download", do="cut", times=40), Fault(on="upload", do="lose", times=20)]),
        ("corrupt", [Fault(on="download", do="flip", times=20), Fault(on="upload", do="flip request", times=10)]),
    ],
    ids=["streams are cut", "bytes are flipped"],
)
def test_what_the_bucket_spoils_is_asked_for_again(
    bucket: FaultyBucket, held: Callable[[Drill], DrillResult], name: str, faults: list[Fault]
) -> None:
    result = held(
        Drill(
            name=f"bucket-{name}", injected=f"a bucket whose streams are {name}", when=at_step(16),
            inject=lambda scene: bucket.arm(*faults), attempts=(1, 2), back=said("✓ 4/5"),
        )
    )  # fmt: skip
    bucket.arm()
    assert result.violations == ()
