"""Whole flows on Run:ai: a training by REST whose worker's machine is lost, and pi by the command line."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import runai
from runai.cluster import signal_pod
from waiting import until

from launcher.config import RunConfig, validated
from launcher.images.settings import PrebuiltImage
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.runs.run import plan_run
from litgpt_demo.metrics import curve, rows_of

pytestmark = pytest.mark.prefect


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[runai.Cluster]:
    """Looked at often, and its pods given little time."""
    monkeypatch.setattr(RunaiPlatform, "poll_seconds", 0.5)
    monkeypatch.setattr(RunaiPlatformConfig, "open", lambda settings: RunaiPlatform(settings, settle=5))
    with runai.running(
        tmp_path / "runai", claims={"scratch": str(tmp_path)}, version="2.18", told_gpus=2, grace=15
    ) as made:
        yield made


def two_pods(folder: Path, **changes: Any) -> RunaiPlatformConfig:
    claims = [{"name": "scratch", "path": str(folder)}]
    given = {"kind": "runai", "project": "team-a", "nodes": 2, "claims": claims, "grace": 3, **changes}
    return RunaiPlatformConfig.model_validate(given)


def test_a_training_whose_worker_is_lost_goes_on_in_a_new_workload_and_ends_with_its_models(
    tmp_path: Path,
    cluster: runai.Cluster,
    pushed_image: PrebuiltImage,
    tiny: Callable[..., RunConfig],
    run_again: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose_a_worker_after_a_checkpoint() -> None:
        saved = '"kind":"checkpoint","step":20'
        until(lambda: any(saved in path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")))
        (training,) = cluster.trainings.values()
        signal_pod(training.pods[1], signal.SIGKILL)

    steps = {"train.max_steps": 100, "train.checkpoint_every": 20, "train.evaluate_every": 50, "train.micro_batch": 2}
    with runai.serving(cluster) as api, ThreadPoolExecutor(1) as aside:
        monkeypatch.setenv("RUNAI_CLIENT_ID", api.application[0])
        monkeypatch.setenv("RUNAI_CLIENT_SECRET", api.application[1])
        document = tiny(steps).model_dump(mode="json")
        document["platform"] = two_pods(tmp_path, url=api.url).model_dump(mode="json")
        document["image"] = pushed_image.model_dump(mode="json")
        config = validated(RunConfig, document, where="runai")
        lost = aside.submit(lose_a_worker_after_a_checkpoint)
        done = run_again(config)
        lost.result()
    assert done.final.step == 100
    storage = plan_run(config).storage
    rows = list(rows_of(storage.read("metrics.jsonl").decode()))
    first, second = [row["step"] for row in rows if row["kind"] == "start"]
    assert (first, second >= 20) == (0, True), (first, second)
    assert sorted(curve(rows, "step", "loss")) == list(range(1, 101))
    assert {"attempts/2/node-0.log", "attempts/2/node-1.json", "final/litgpt/lit_model.pth"} <= set(storage.list())
    assert api.application[1] not in storage.read("config.json").decode()
