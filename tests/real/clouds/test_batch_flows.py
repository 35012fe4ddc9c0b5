"""A whole flow on GCP Batch: a training that loses a VM, on the stand-in of the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from batch import Cloud, running_batch
from waiting import until

from launcher.config import RunConfig, validated
from launcher.events import Note
from launcher.images.settings import PrebuiltImage
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.runs.run import plan_run
from litgpt_demo.metrics import curve, rows_of

pytestmark = pytest.mark.prefect


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setattr(BatchPlatform, "poll_seconds", 0.5)
    monkeypatch.setattr(BatchPlatformConfig, "open", lambda settings: BatchPlatform(settings, grace=3, settle=0.5))
    with running_batch(tmp_path / "cloud") as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


def test_a_training_whose_vm_is_taken_away_goes_on_in_a_new_job_and_ends_with_its_models(
    tmp_path: Path,
    cloud: Cloud,
    pushed_image: PrebuiltImage,
    tiny: Callable[..., RunConfig],
    run_again: Callable[..., Any],
) -> None:
    platform = {
        "kind": "batch", "project": "my-project", "location": "us-central1", "machine": "n2-standard-8", "gpus": 0,
        "nodes": 2, "spot": True, "nfs": "10.0.0.2:/data", "nfs_path": str(tmp_path), "gate": 0, "grace": 5,
    }  # fmt: skip
    steps = {"train.max_steps": 80, "train.checkpoint_every": 20, "train.evaluate_every": 40, "train.micro_batch": 2}
    document = tiny(steps).model_dump(mode="json")
    document |= {"platform": platform, "image": pushed_image.model_dump(mode="json")}
    config = validated(RunConfig, document, where="batch")

    def preempt_after_a_checkpoint() -> None:
        saved = '"kind":"checkpoint","step":20,'
        until(lambda: any(saved in path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")))
        (job,) = cloud.records
        cloud.records[job].vms[1].lose(50001)

    with ThreadPoolExecutor(1) as aside:
        preempted = aside.submit(preempt_after_a_checkpoint)
        done = run_again(config)
        preempted.result()
    assert done.final.step == 80
    assert len(cloud.records) == 2
    assert cloud.live() == []
    storage = plan_run(config).storage
    rows = list(rows_of(storage.read("metrics.jsonl").decode()))
    first, second = [row["step"] for row in rows if row["kind"] == "start"]
    assert (first, second >= 20) == (0, True), (first, second)
    assert sorted(curve(rows, "step", "loss")) == list(range(1, 81))
    assert any("preempted on node 1" in event.what for event in done.events if isinstance(event, Note))
    assert {"attempts/2/node-0.log", "attempts/2/node-1.json", "final/litgpt/lit_model.pth"} <= set(storage.list())
