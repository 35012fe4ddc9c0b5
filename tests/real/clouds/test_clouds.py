"""The contract of every platform, and whole trainings, on emulated clouds whose nodes are processes of this machine."""

import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runai
from runai_jobs import job_of, settings_of
from waiting import until

from launcher.config import RunConfig, validated
from launcher.events import Note
from launcher.images.settings import PrebuiltImage
from launcher.job import JobState
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.rest import Rest
from launcher.runs.run import plan_run
from litgpt_demo.metrics import curve, rows_of

sys.path.append(str(Path(__file__).parents[2] / "launcher" / "platforms"))
from test_platform_contract import *  # noqa: F403  the same tests, with the places of this file
from test_platform_contract import Place, batch_place, kubernetes_place, local_place, runai_place, submitted

PLACES = {
    "local": local_place,
    "kubernetes": partial(kubernetes_place, simulate=False),
    "kubernetes-job": partial(kubernetes_place, simulate=False, workload="job"),
    "runai-v1": partial(runai_place, simulate=False, variant="v1", version="2.13"),
    "runai-v2": partial(runai_place, simulate=False, variant="v2"),
    "runai-rest": partial(runai_place, simulate=False, variant="rest"),
    "batch": partial(batch_place, simulate=False),
}


@pytest.fixture(params=PLACES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with PLACES[request.param](tmp_path) as place:
        yield place


@pytest.fixture
def running_place(place: Place) -> Place:
    return place


def test_failed_program_ends_the_job_with_its_exit_code(place: Place) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(41)\ntime.sleep(600)"
    with submitted(place, "fails", text) as job_id:
        until(lambda: not place.platform.status(job_id).state.is_live)
        seen = place.platform.status(job_id)
        assert seen.state is JobState.FAILED
        assert seen.exit_codes[1] == 41
        assert seen.native


@pytest.mark.prefect
@pytest.mark.parametrize("place", [batch_place, runai_place])
def test_training_continues_in_a_new_job_when_its_machine_goes(
    place: Callable[..., Any],
    tmp_path: Path,
    pushed_image: PrebuiltImage,
    tiny: Callable[..., RunConfig],
    run_again: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends with its models."""

    def lose_after_a_checkpoint() -> None:
        saved = '"kind":"checkpoint","step":20,'
        until(lambda: any(saved in path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")))
        cloud.lose()

    # On Batch the model counts as a large one, which a job of the platform collects.
    collecting = place is batch_place
    monkeypatch.setattr("tasks.checkpoints.LARGE", 0 if collecting else math.inf)
    steps = {"train.max_steps": 80, "train.checkpoint_every": 20, "train.evaluate_every": 40, "train.micro_batch": 2}
    with place(tmp_path, simulate=False) as cloud, ThreadPoolExecutor(1) as aside:
        for name, value in cloud.environment.items():
            monkeypatch.setenv(name, value)
        settings = cloud.platform._settings
        monkeypatch.setattr(type(settings), "open", lambda _: cloud.platform)
        monkeypatch.setattr(type(cloud.platform), "poll_seconds", 0.5)
        document = tiny(steps).model_dump(mode="json")
        document |= {"platform": settings.model_dump(mode="json"), "image": pushed_image.model_dump(mode="json")}
        config = validated(RunConfig, document, where="test")
        lost = aside.submit(lose_after_a_checkpoint)
        done = run_again(config)
        lost.result()
        assert cloud.live_jobs() == 0
    assert done.final.step == 80
    storage = plan_run(config).storage
    rows = list(rows_of(storage.read("metrics.jsonl").decode()))
    first, second = [row["step"] for row in rows if row["kind"] == "start"]
    assert (first, second >= 20) == (0, True), (first, second)
    assert sorted(curve(rows, "step", "loss")) == list(range(1, 81))
    assert any("node 1" in event.what for event in done.events if isinstance(event, Note))
    assert {"attempts/2/node-0.log", "attempts/2/node-1.json", "final/litgpt/lit_model.pth"} <= set(storage.list())
    third = {path for path in storage.within("attempts/3").list() if path.endswith(".json")}
    assert third == ({"node-0.json"} if collecting else set())


LIVES = """
import pathlib, sys, time
second_life = pathlib.Path(sys.argv[0]).with_name("second-life").exists()
print("again" if second_life else "first", flush=True)
time.sleep(1 if second_life else 600)
"""


def test_preempted_training_returns_as_the_same_workload(tmp_path: Path) -> None:
    """Its logs continue."""
    (script := tmp_path / "program.py").write_text(LIVES)
    with (
        runai.running(tmp_path / "runai", pvcs={"scratch": str(tmp_path)}, told_gpus=2) as cluster,
        runai.serving(cluster) as api,
    ):
        pvcs = [{"name": "scratch", "path": str(tmp_path)}]
        config = settings_of(api="rest", url=api.url, grace_period=2, pvcs=pvcs)
        platform = RunaiPlatform(config, Rest(config, api.credentials()))
        platform.settle = 4
        fields = {"name": "fate", "processes": 1, "program": (str(script),), "stage": ()}
        job_id = platform.submit(platform.render(job_of(**fields, directory=str(tmp_path / "attempts/1"))))
        log = cluster.folder / "team-a/fate-1-000000/0.log"
        until(lambda: log.exists() and "]:first" in log.read_text())
        (tmp_path / "second-life").touch()
        cluster.trainings["team-a", "fate-1-000000"].wanted = "preempt"
        until(lambda: not platform.status(job_id).state.is_live)
        seen = platform.status(job_id)
        assert (seen.state, seen.exit_codes) == (JobState.SUCCEEDED, {0: 0, 1: 0})
        assert "[node 0] [rank0]:again" in [str(line) for line in platform.logs(job_id).lines]
