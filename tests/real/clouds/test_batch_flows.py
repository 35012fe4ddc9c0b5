"""Whole flows on GCP Batch: a training that loses a VM, pi on two machines, and how fast all-reduce is between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch import Cloud, running_batch
from waiting import until

from flows.run_torchrun import run_torchrun
from launcher.config import RunConfig, validated
from launcher.events import Listener, MetricsRow, Note, Output
from launcher.images.settings import PrebuiltImage
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.runs.run import plan_run
from litgpt_demo.metrics import curve, rows_of

pytestmark = [pytest.mark.long, pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(600)]

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setattr(BatchPlatform, "poll_seconds", 0.5)
    monkeypatch.setattr(BatchPlatformConfig, "open", lambda settings: BatchPlatform(settings, grace=3, settle=0.5))
    with running_batch(tmp_path / "cloud", shared=[tmp_path]) as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        made.export("10.0.0.2", "/data", tmp_path)
        yield made


def two_machines(folder: Path, **changes: Any) -> BatchPlatformConfig:
    asked = {
        "kind": "batch", "project": "my-project", "location": "us-central1", "machine": "n2-standard-8", "gpus": 0,
        "nodes": 2, "spot": True, "nfs": "10.0.0.2:/data", "nfs_path": str(folder), "gate": 0, "grace": 5,
    }  # fmt: skip
    return BatchPlatformConfig.model_validate({**asked, **changes})


def test_a_training_whose_vm_is_taken_away_goes_on_in_a_new_job_and_ends_with_its_models(
    tmp_path: Path,
    cloud: Cloud,
    pushed_image: PrebuiltImage,
    tiny: Callable[..., RunConfig],
    run_again: Callable[..., Any],
) -> None:
    changes = {
        "train.micro_batch": 2,
        "train.max_steps": 80,
        "train.checkpoint_every": 20,
        "train.evaluate_every": 40,
    }
    document = tiny(changes).model_dump(mode="json")
    document |= {
        "platform": two_machines(tmp_path).model_dump(mode="json"), "image": pushed_image.model_dump(mode="json"),
    }  # fmt: skip
    config = validated(RunConfig, document, where="batch")
    storage = plan_run(config).storage
    spoiler = threading.Thread(target=preempt_after_a_checkpoint, args=(cloud, tmp_path), daemon=True)
    spoiler.start()
    done = run_again(config)
    spoiler.join(1)
    assert done.final.step == 80
    assert len(cloud.created) == 2
    assert cloud.vms() == []
    rows = list(rows_of(storage.read("metrics.jsonl").decode()))
    first, second = [row["step"] for row in rows if row["kind"] == "start"]
    assert (first, second >= 20) == (0, True), (first, second)
    assert sorted(curve(rows, "step", "loss")) == list(range(1, 81))
    notes = " ".join(event.what for event in done.events if isinstance(event, Note))
    assert "preempted on node 1" in notes
    said = "\n".join(event.line for event in done.events if isinstance(event, Output))
    assert "[node 0] LITGPT_NODE_RANK=0" in said
    assert "[node 1] LITGPT_NODE_RANK=1" in said
    kept = storage.list()
    assert {"attempts/2/node-0.log", "attempts/2/node-1.json", "final/litgpt/lit_model.pth"} <= set(kept)


def preempt_after_a_checkpoint(cloud: Cloud, folder: Path) -> None:
    """Take the second VM of the first job away when the ranks have agreed on something to go on from."""
    saved = '"kind":"checkpoint","step":20,'
    until(lambda: any(saved in path.read_text() for path in folder.glob("runs/*/metrics.jsonl")), seconds=250)
    cloud.preempt(cloud.created[0], 1)


def test_the_first_application_finds_pi_on_two_machines(
    tmp_path: Path, cloud: Cloud, pushed_image: PrebuiltImage
) -> None:
    coroutine = run_torchrun(
        script=str(CHECKOUT / "examples/pi.py"),  # the same place in the image
        name="pi",
        root=str(tmp_path),
        args=("--steps", "1000003"),
        platform=two_machines(tmp_path, processes=2),
        image=pushed_image,
    )
    logs = asyncio.run(coroutine)
    (log,) = tmp_path.glob("runs/pi-*/attempts/1/node-0.log")
    assert logs == str(log.parent)
    assert "pi = 3.141592653589" in log.read_text()
    assert "4 ranks on 2 nodes" in log.read_text()
    assert cloud.live() == []


def test_all_reduce_is_measured_between_two_machines(tmp_path: Path, cloud: Cloud, pushed_image: PrebuiltImage) -> None:
    coroutine = run_torchrun(
        script="-m litgpt_demo",
        name="all-reduce",
        root=str(tmp_path),
        args=("collectives", "--seconds", "2", "--largest", str(2**21)),
        platform=two_machines(tmp_path),
        image=pushed_image,
    )
    rows: list[dict[str, Any]] = []
    with Listener(lambda event: rows.append(dict(event.row)) if isinstance(event, MetricsRow) else None):
        asyncio.run(coroutine)
    (row,) = [one for one in rows if one["kind"] == "network"]
    assert (row["ranks"], row["nodes"]) == (2, 2)
    assert row["busbw"] == pytest.approx(row["algbw"], rel=0.01)  # 2 (n - 1) / n of it, with 2 ranks
