"""Whole flows on Run:ai: a training by REST whose worker's machine is lost, and the product's first examples by both
command lines: pi on two pods, and how fast all-reduce is between them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runai
from waiting import until

from flows.run_torchrun import run_torchrun
from launcher.config import RunConfig, validated
from launcher.events import Listener, MetricsRow, Note, Output
from launcher.images.settings import PrebuiltImage
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.runs.run import plan_run
from litgpt_demo.metrics import curve, rows_of

pytestmark = [pytest.mark.long, pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(300)]

CHECKOUT = Path(__file__).parents[2]


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
    return RunaiPlatformConfig.model_validate(
        {"kind": "runai", "project": "team-a", "nodes": 2, "claims": claims, "grace": 3, **changes}
    )


def test_a_training_whose_worker_is_lost_goes_on_in_a_new_workload_and_ends_with_its_models(
    tmp_path: Path,
    cluster: runai.Cluster,
    pushed_image: PrebuiltImage,
    tiny: Callable[..., RunConfig],
    run_again: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"train.micro_batch": 2, "train.max_steps": 100, "train.checkpoint_every": 20, "train.evaluate_every": 50}
    with runai.serving(cluster) as api:
        monkeypatch.setenv("RUNAI_CLIENT_ID", api.application[0])
        monkeypatch.setenv("RUNAI_CLIENT_SECRET", api.application[1])
        document = tiny(changes).model_dump(mode="json")
        platform = two_pods(tmp_path, url=api.url)  # `auto` finds the credentials
        document |= {"platform": platform.model_dump(mode="json"), "image": pushed_image.model_dump(mode="json")}
        config = validated(RunConfig, document, where="runai")
        spoiler = threading.Thread(target=lose_a_worker_after_a_checkpoint, args=(cluster, tmp_path), daemon=True)
        spoiler.start()
        done = run_again(config)
        spoiler.join(1)
    assert done.final.step == 100
    storage = plan_run(config).storage
    rows = rows_of(storage.read("metrics.jsonl").decode())
    starts = [row["step"] for row in rows if row["kind"] == "start"]
    assert starts[0] == 0
    assert starts[1] >= 20
    assert sorted(curve(rows, "step", "loss")) == list(range(1, 101))
    notes = " ".join(event.what for event in done.events if isinstance(event, Note))
    assert "attempt 1 ended" in notes
    assert {"attempts/2/node-0.log", "attempts/2/node-1.json", "final/litgpt/lit_model.pth"} <= set(storage.list())
    assert api.application[1] not in storage.read("config.json").decode()


def lose_a_worker_after_a_checkpoint(cluster: runai.Cluster, folder: Path) -> None:
    """The machine of the first attempt's worker goes when there is something to go on from."""
    saved = '"kind":"checkpoint","step":20'
    until(lambda: any(saved in path.read_text() for path in folder.glob("runs/*/metrics.jsonl")), seconds=250)
    (name,) = cluster.phases("team-a")
    cluster.kill_pod("team-a", name, 1)


def test_pi_is_found_on_two_pods_by_the_older_command_line(
    tmp_path: Path, cluster: runai.Cluster, pushed_image: PrebuiltImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product's first example, in the environment that the example was written for: WORLD_SIZE counts pods."""
    cluster.change(version="2.13")
    monkeypatch.setenv("PATH", str(runai.program(tmp_path, cluster, "v1").parent), prepend=os.pathsep)
    coroutine = run_torchrun(
        script=str(CHECKOUT / "examples/pi.py"),  # the same place in the image
        name="pi",
        root=str(tmp_path),
        args=("--steps", "1000003"),
        env={"SAID": 'it\'s "quoted", with $HOME and a comma'},
        platform=two_pods(tmp_path, processes=2),
        image=pushed_image,
    )
    outputs: list[str] = []
    with Listener(lambda event: outputs.append(event.line) if isinstance(event, Output) else None):
        asyncio.run(coroutine)
    (line,) = [one for one in outputs if "3.14159" in one]
    assert line.startswith("[node 0]")
    assert "4" in line


def test_all_reduce_is_measured_between_two_pods_by_the_newer_command_line(
    tmp_path: Path, cluster: runai.Cluster, pushed_image: PrebuiltImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And WORLD_SIZE counts GPUs, which the four ranks are not."""
    monkeypatch.setenv("PATH", str(runai.program(tmp_path, cluster, "v2-newest").parent), prepend=os.pathsep)
    coroutine = run_torchrun(
        script="-m litgpt_demo",
        name="all-reduce",
        root=str(tmp_path),
        args=("collectives", "--seconds", "2", "--largest", str(2**21)),
        platform=two_pods(tmp_path, processes=2),
        image=pushed_image,
    )
    rows: list[dict[str, Any]] = []
    with Listener(lambda event: rows.append(dict(event.row)) if isinstance(event, MetricsRow) else None):
        asyncio.run(coroutine)
    (row,) = [one for one in rows if one["kind"] == "network"]
    assert (row["ranks"], row["nodes"]) == (4, 2)
    assert row["busbw"] == pytest.approx(1.5 * row["algbw"], rel=0.01)
