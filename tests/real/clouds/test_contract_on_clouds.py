"""What every platform promises, on the stand-ins of all clouds, whose nodes are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import runai
from batch import running_batch
from batch_jobs import settings_of
from runai_jobs import settings_of as runai_settings
from waiting import until

from launcher.job import JobState
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.rest import Rest

sys.path.append(str(Path(__file__).parents[2] / "launcher" / "platforms"))
from test_platform_contract import *  # noqa: F403  the same tests, with the places of this file
from test_platform_contract import IMAGE, Place, gke_place, local_place, submitted


@contextlib.contextmanager
def batch_place(folder: Path) -> Iterator[Place]:
    settings = settings_of(nfs="10.0.0.2:/data", nfs_path=str(folder), gate=0, grace=2)
    with running_batch(folder / "cloud") as cloud, pytest.MonkeyPatch.context() as patch:
        for name, value in cloud.environment.items():
            patch.setenv(name, value)
        yield Place(
            platform=BatchPlatform(settings, grace=4, settle=0),
            directory=str(folder / "runs"),
            live_jobs=lambda: len(cloud.live()),
            written=lambda: cloud.calls.count("CancelJob") + cloud.calls.count("CreateJob"),
            image=IMAGE,
        )


@contextlib.contextmanager
def runai_place(folder: Path, *, variant: str, version: str) -> Iterator[Place]:
    """By REST or by the command line; each generation with the environment that pods had in its time."""
    claims = [{"name": "scratch", "path": str(folder)}]
    with (
        runai.running(folder / "runai", claims={"scratch": str(folder)}, version=version, told_gpus=2) as cluster,
        runai.serving(cluster) as api,
        contextlib.ExitStack() as stack,
        pytest.MonkeyPatch.context() as patch,
    ):
        if variant != "rest":
            program = stack.enter_context(runai.program(folder, cluster, variant))
            patch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        by = {"api": "rest", "url": api.url} if variant == "rest" else {"api": "cli", "cli": "runai"}
        settings = runai_settings(claims=claims, grace=2, **by)
        yield Place(
            platform=RunaiPlatform(settings, Rest(settings, api.credentials()) if variant == "rest" else None),
            directory=str(folder / "runs"),
            live_jobs=lambda: len(cluster.live()),
            written=lambda: (len(cluster.submissions), [one.wanted for one in cluster.trainings.values()]),
            image=IMAGE,
        )


PLACES = {
    "local": local_place,
    "gke": partial(gke_place, simulate=False),
    "gke-job": partial(gke_place, simulate=False, workload="job"),
    "runai-v1": partial(runai_place, variant="v1", version="2.13"),
    "runai-v2": partial(runai_place, variant="v2-newest", version="2.18"),
    "runai-rest": partial(runai_place, variant="rest", version="2.18"),
    "batch": batch_place,
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with PLACES[request.param](tmp_path) as made:
        yield made


@pytest.fixture
def running_place(place: Place) -> Place:
    return place


def test_a_failing_program_ends_the_job_with_the_exit_code_of_its_fault(place: Place) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(41)\ntime.sleep(600)"
    with submitted(place, "fails", text) as job_id:
        until(lambda: not place.platform.status(job_id).state.live)
        seen = place.platform.status(job_id)
        assert seen.state is JobState.FAILED
        assert seen.exit_codes[1] == 41
        assert seen.native
