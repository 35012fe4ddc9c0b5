"""What every platform promises, on Slurm's own daemons, and what only Slurm can do to a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from litgpt_demo import PYTHON

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "launcher" / "platforms")]
from ground import Cluster, slurm_cluster
from test_platform_contract import *  # noqa: F403  the same tests, with the place of this file
from test_platform_contract import Place


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=3) as cluster:
        yield cluster


def settings_of(**changes: Any) -> SlurmPlatformConfig:
    asked = {"kind": "slurm", "nodes": 2, "grace": 2, "gate": 0, "venv": str(Path(PYTHON[0]).parents[1])}
    return SlurmPlatformConfig.model_validate({**asked, **changes})


@pytest.fixture(params=["slurm"])
def made(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Place:
    return Place(
        platform=SlurmPlatform(settings_of(), settle=5),
        folder=tmp_path,
        live_jobs=lambda: len(cluster.live()),
        written=lambda: cluster.call("squeue", "-h", "-o", "%i %j"),
        environment=cluster.environment,
    )


@pytest.fixture
def running_place(place: Place) -> Place:
    return place
