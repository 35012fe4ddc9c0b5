"""What every platform promises, on the stand-ins of all clouds, whose nodes are processes of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from waiting import until

from launcher.job import JobState

sys.path.append(str(Path(__file__).parents[2] / "launcher" / "platforms"))
from test_platform_contract import *  # noqa: F403  the same tests, with the places of this file
from test_platform_contract import Place, batch_place, gke_place, local_place, runai_place, submitted

PLACES = {
    "local": local_place,
    "gke": partial(gke_place, simulate=False),
    "gke-job": partial(gke_place, simulate=False, workload="job"),
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


def test_a_failing_program_ends_the_job_with_the_exit_code_of_its_fault(place: Place) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(41)\ntime.sleep(600)"
    with submitted(place, "fails", text) as job_id:
        until(lambda: not place.platform.status(job_id).state.live)
        seen = place.platform.status(job_id)
        assert seen.state is JobState.FAILED
        assert seen.exit_codes[1] == 41
        assert seen.native
