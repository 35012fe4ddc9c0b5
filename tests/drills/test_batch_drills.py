"""Drills with the job on GCP Batch: the orchestrator's own, and a VM that is taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch import Cloud, running_batch

from cli.drills.ground import Scene
from cli.drills.judging import DrillResult
from cli.drills.table import Drill, at_step, trains_again
from launcher.images.settings import PrebuiltImage

pytestmark = [pytest.mark.drill, pytest.mark.training, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that VMs mount."""
    return tmp_path_factory.mktemp("batch")


@pytest.fixture(scope="module")
def cloud(folder: Path) -> Iterator[Cloud]:
    with running_batch(folder / "cloud", shared=[folder]) as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        made.export("10.0.0.2", "/data", folder)
        yield made


@pytest.fixture(scope="module")
def held(
    cloud: Cloud, folder: Path, pushed_image: PrebuiltImage, held_on: Callable[..., Any]
) -> Iterator[Callable[[Drill], DrillResult]]:
    platform = {
        "kind": "batch", "project": "my-project", "location": "us-central1", "machine": "n2-standard-8", "gpus": 0,
        "nodes": 2, "processes": 1, "spot": True, "nfs": "10.0.0.2:/data", "nfs_path": str(folder), "gate": 0,
        "grace": 10,
    }  # fmt: skip
    image = pushed_image.model_dump(mode="json")
    with held_on({"root": str(folder), "platform": platform, "image": image}) as hold:
        yield hold


def test_an_orchestrator_is_disturbed(held: Callable[[Drill], DrillResult], orchestrator_drill: Drill) -> None:
    assert held(orchestrator_drill).violations == ()


def test_a_vm_is_taken_away(cloud: Cloud, held: Callable[[Drill], DrillResult]) -> None:
    def take(scene: Scene) -> None:
        cloud.preempt(cloud.created[-1], 1)

    drill = Drill(
        name="vm-preempted", injected="a VM that is taken away", when=at_step(16), inject=take, attempts=(2,),
        back=trains_again, told=("attempt 1 ended: .*preempted",),
    )  # fmt: skip
    assert held(drill).violations == ()
