"""Whole trainings on the stand-ins of Batch and Run:ai that lose a machine."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import runai
from batch import running_batch
from runai.cluster import signal_pod
from waiting import until

from launcher.config import RunConfig, validated
from launcher.events import Note
from launcher.images.settings import PrebuiltImage
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.runs.run import plan_run
from litgpt_demo.metrics import curve, rows_of

pytestmark = pytest.mark.prefect


@dataclass
class Place:
    """Where a training of two nodes runs."""

    platform: dict[str, Any]
    lose: Callable[[], None]
    """Take node 1's machine away."""
    environment: dict[str, str]
    told: str
    """What a note says of it."""


@contextlib.contextmanager
def batch_place(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    patch.setattr(BatchPlatform, "poll_seconds", 0.5)
    patch.setattr(BatchPlatformConfig, "open", lambda settings: BatchPlatform(settings, grace=3, settle=0.5))
    platform = {
        "kind": "batch", "project": "my-project", "location": "us-central1", "machine": "n2-standard-8", "gpus": 0,
        "nodes": 2, "spot": True, "nfs": "10.0.0.2:/data", "nfs_path": str(folder), "gate": 0, "grace": 5,
    }  # fmt: skip
    with running_batch(folder / "cloud") as cloud:

        def lose() -> None:
            (record,) = cloud.records.values()
            record.vms[1].end(50001)

        yield Place(platform, lose, cloud.environment, "preempted on node 1")
        assert (len(cloud.records), cloud.live()) == (2, [])


@contextlib.contextmanager
def runai_place(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    patch.setattr(RunaiPlatform, "poll_seconds", 0.5)
    patch.setattr(RunaiPlatformConfig, "open", lambda settings: RunaiPlatform(settings, settle=5))
    claims = {"scratch": str(folder)}
    with (
        runai.running(folder / "runai", claims=claims, told_gpus=2, grace=15) as cluster,
        runai.serving(cluster) as api,
    ):

        def lose() -> None:
            (training,) = cluster.trainings.values()
            signal_pod(training.pods[1], signal.SIGKILL)

        mounted = [{"name": "scratch", "path": str(folder)}]
        platform = {"kind": "runai", "project": "team-a", "nodes": 2, "claims": mounted, "grace": 3, "url": api.url}
        yield Place(platform, lose, api.credentials(), "attempt 1")
        assert (len(cluster.submissions), cluster.live()) == (2, [])
        for path in folder.rglob("*.json*"):
            assert api.application[1] not in path.read_text(), f"{path} has the secret"


@pytest.mark.parametrize("place", [batch_place, runai_place])
def test_a_training_whose_machine_is_taken_away_goes_on_in_a_new_job_and_ends_with_its_models(
    place: Callable[..., contextlib.AbstractContextManager[Place]],
    tmp_path: Path,
    pushed_image: PrebuiltImage,
    tiny: Callable[..., RunConfig],
    run_again: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose_after_a_checkpoint() -> None:
        saved = '"kind":"checkpoint","step":20,'
        until(lambda: any(saved in path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")))
        there.lose()

    steps = {"train.max_steps": 80, "train.checkpoint_every": 20, "train.evaluate_every": 40, "train.micro_batch": 2}
    with place(tmp_path, monkeypatch) as there, ThreadPoolExecutor(1) as aside:
        for name, value in there.environment.items():
            monkeypatch.setenv(name, value)
        document = tiny(steps).model_dump(mode="json")
        document |= {"platform": there.platform, "image": pushed_image.model_dump(mode="json")}
        config = validated(RunConfig, document, where="test")
        lost = aside.submit(lose_after_a_checkpoint)
        done = run_again(config)
        lost.result()
    assert done.final.step == 80
    storage = plan_run(config).storage
    rows = list(rows_of(storage.read("metrics.jsonl").decode()))
    first, second = [row["step"] for row in rows if row["kind"] == "start"]
    assert (first, second >= 20) == (0, True), (first, second)
    assert sorted(curve(rows, "step", "loss")) == list(range(1, 81))
    assert any(there.told in event.what for event in done.events if isinstance(event, Note))
    assert {"attempts/2/node-0.log", "attempts/2/node-1.json", "final/litgpt/lit_model.pth"} <= set(storage.list())
