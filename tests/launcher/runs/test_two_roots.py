"""One config under two roots is two jobs, and a root that was moved keeps its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from strict_platform import StrictPlatform

from launcher.config import ScriptConfig
from launcher.errors import RunIsLive
from launcher.job import Job, JobId
from launcher.platforms.base import Platform
from launcher.platforms.local.platform import RESULT, SUBMISSION, LocalPlatform
from launcher.runs.attempts import Attempts, Claim
from launcher.runs.index import Index

RUN = "gpt-0123456789"


def claim_under(root: str, platform: Platform, *, marked: bool = True) -> Claim:
    """A claim on a script under a root; without `marked` its job is named as jobs were before roots were part of it."""

    def make_job(attempt: int) -> Job:
        directory = f"{root}/runs/{RUN}/attempts/{attempt}"
        own = {"root": root} if marked else {}
        return Job(name=RUN, attempt=attempt, nodes=1, processes=1, program=("a.py",), directory=directory, **own)

    attempts = Attempts(index=Index.of(root), run=RUN, open=lambda section: platform)
    return Claim(
        attempts=attempts,
        config=ScriptConfig(name="gpt", root=root, script="a.py"),
        platform=platform,
        make_job=make_job,
    )


def begin(claim: Claim) -> JobId:
    return claim.platform.submit(claim.platform.render(claim.make_job(claim.take().attempt)))


def test_each_root_starts_sees_and_cancels_its_own_job(tmp_path: Path) -> None:
    platform = StrictPlatform()
    one, other = (claim_under(str(tmp_path / root), platform) for root in ("team-a", "team-b"))
    first = begin(one)
    assert other.attempts.live() is None
    second = begin(other)
    assert set(platform.live()) == {first, second}
    assert other.attempts.cancel() == [second]
    assert platform.live() == [first]
    assert begin(one) == first, "its own is taken up as before"


def test_a_job_that_lives_while_the_software_is_updated_is_found_and_cancelled(tmp_path: Path) -> None:
    platform = StrictPlatform()
    old = begin(claim_under(str(tmp_path), platform, marked=False))
    updated = claim_under(str(tmp_path), platform)
    live = updated.attempts.live()
    assert live is not None
    assert live.job_id == old
    assert updated.take().job_id == old
    assert updated.attempts.cancel() == [old]


def test_a_root_that_was_moved_or_is_mounted_elsewhere_still_knows_its_jobs(tmp_path: Path) -> None:
    platform, (old, new) = StrictPlatform(), (tmp_path / "old", tmp_path / "new")
    job_id = begin(claim_under(str(old), platform))
    old.rename(new)
    moved = claim_under(str(new), platform)
    live = moved.attempts.live()
    assert live is not None
    assert (live.job_id, live.record.directory) == (job_id, f"{new}/runs/{RUN}/attempts/1")
    with pytest.raises(RunIsLive, match=f"it writes to {old}, where this root was: .*--cancel-old"):
        moved.take()
    assert moved.attempts.cancel() == [job_id]
    assert moved.take().attempt == 2


def test_a_local_job_is_found_in_its_folder_wherever_that_was_moved(tmp_path: Path) -> None:
    platform, (old, new) = LocalPlatform(state=tmp_path / "state"), (tmp_path / "old", tmp_path / "new")
    directory = Path(claim_under(str(old), platform).take().directory)
    directory.mkdir(parents=True)
    (directory / SUBMISSION).write_text("{}")
    (directory / RESULT).write_text(
        '{"state": "failed", "native": "node 0 ended with 43", "exit_codes": {"0": 43}, "started": 1, "ended": 2}'
    )
    old.rename(new)
    last = claim_under(str(new), platform).attempts.last()
    assert last is not None
    assert last.status.native == "node 0 ended with 43"
    assert claim_under(str(new), platform).take().attempt == 2


def test_a_local_job_whose_root_is_a_bucket_has_a_folder_of_its_own(tmp_path: Path) -> None:
    platform = LocalPlatform(state=tmp_path)
    jobs = [
        Job(name=RUN, root=root, attempt=1, nodes=1, processes=1, program=("a.py",), directory=f"{root}/runs/{RUN}")
        for root in ("gs://team-a", "gs://team-b")
    ]
    assert len({platform.render(job).job_id for job in jobs}) == 2
    assert len({job.all_labels["train-litgpt/run"] for job in jobs}) == 2
