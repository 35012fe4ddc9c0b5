"""Drills with the job on Run:ai: the orchestrator's own, and a worker whose machine is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runai

from cli.drills.ground import Scene
from cli.drills.judging import DrillResult
from cli.drills.table import Drill, at_step, trains_again
from launcher.images.settings import PrebuiltImage

pytestmark = [pytest.mark.drill, pytest.mark.training, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pods have by a claim."""
    return tmp_path_factory.mktemp("runai")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[runai.Cluster]:
    claims = {"scratch": str(folder)}
    with runai.running(folder / "cluster", claims=claims, version="2.18", told_gpus=2, grace=15) as made:
        yield made


@pytest.fixture(scope="module")
def held(
    cluster: runai.Cluster, folder: Path, pushed_image: PrebuiltImage, held_on: Callable[..., Any]
) -> Iterator[Callable[[Drill], DrillResult]]:
    with runai.serving(cluster) as api, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNAI_CLIENT_ID", api.application[0])
        patch.setenv("RUNAI_CLIENT_SECRET", api.application[1])
        platform = {
            "kind": "runai", "project": "team-a", "url": api.url, "nodes": 2, "processes": 1, "grace": 10, "gate": 0,
            "claims": [{"name": "scratch", "path": str(folder)}],
        }  # fmt: skip
        image = pushed_image.model_dump(mode="json")
        with held_on({"root": str(folder), "platform": platform, "image": image}) as hold:
            yield hold


def test_an_orchestrator_is_disturbed(held: Callable[[Drill], DrillResult], orchestrator_drill: Drill) -> None:
    assert held(orchestrator_drill).violations == ()


def test_a_workers_machine_is_lost(cluster: runai.Cluster, held: Callable[[Drill], DrillResult]) -> None:
    def lose(scene: Scene) -> None:
        [name] = [name for name, phase in cluster.phases("team-a").items() if phase == "Running"]
        cluster.kill_pod("team-a", name, 1)

    drill = Drill(
        name="worker-lost", injected="a lost machine", when=at_step(16), inject=lose, attempts=(2,),
        back=trains_again, told=("attempt 1 ended: ",),
    )  # fmt: skip
    assert held(drill).violations == ()
