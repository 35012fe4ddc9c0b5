"""Several jobs as one array, on Slurm's own daemons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from services.slurm_cluster import SlurmCluster
from waiting import until

from launcher.errors import PlatformRefused
from launcher.job import Job, JobId, JobState, Submission
from launcher.platforms.slurm import render
from launcher.platforms.slurm.commands import slurm_of
from launcher.platforms.slurm.platform import SlurmPlatform

SLEEP, NAME = "sleep 300", "grid-1a2b"


@pytest.fixture
def trials_of(
    platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job], tmp_path: Path
) -> Callable[..., tuple[SlurmPlatform, list[Submission]]]:
    """Makes a platform, and the first jobs of so many trials of a sweep on it."""

    def make(count: int, line: str = SLEEP, **settings: object) -> tuple[SlurmPlatform, list[Submission]]:
        platform = platform_of(nodes=1, **settings)
        folders = [tmp_path / "runs" / f"trial-{index}" / "attempts" / "1" for index in range(count)]
        jobs = [job_of(line, nodes=1, name=f"trial-{index}", directory=str(at)) for index, at in enumerate(folders)]
        return platform, [platform.render(job) for job in jobs]

    return make


def queue(slurm: SlurmCluster) -> list[str]:
    """Return number and name of each job that is not over."""
    return sorted(slurm.run("squeue", "--array", "--noheader", "--format=%i %j").splitlines())


def states(platform: SlurmPlatform, ids: Sequence[JobId]) -> list[str]:
    return [platform.status(one).state.value for one in ids]


def text(platform: SlurmPlatform, job_id: JobId) -> str:
    return "\n".join(line.text for line in platform.logs(job_id).lines)


def test_the_jobs_of_a_sweep_are_one_array_and_each_is_followed_and_cancelled_by_itself(
    slurm: SlurmCluster, trials_of: Callable[..., tuple[SlurmPlatform, list[Submission]]]
) -> None:
    platform, jobs = trials_of(3)
    ids = [one.job_id for one in jobs]
    platform.submit_together(jobs, name=NAME, parallel=2)
    (number,) = {line.partition("_")[0] for line in queue(slurm)}
    assert queue(slurm) == [f"{number}_{index} {NAME}" for index in range(3)]
    until(lambda: states(platform, ids) == ["running", "running", "pending"])
    told = until(lambda: [one.what for one in platform.status(ids[2]).reasons if "max_parallel" in one.what])
    assert "JobArrayTaskLimit" in told[0]

    platform.submit_together(jobs, name=NAME, parallel=2)
    slurm_of.cache_clear()  # as another process, which was not there when they were submitted
    assert len(queue(slurm)) == 3
    assert platform.left(ids[1]) == (f"job {number}_1 (RUNNING)",)

    until(lambda: "begins" in text(platform, ids[0]))
    platform.cancel(ids[0])
    assert "node 0 saved" in text(platform, ids[0])
    assert platform.status(ids[0]).state is JobState.CANCELLED
    until(lambda: "begins" in text(platform, ids[2]))
    platform.cancel(ids[2])  # the last that began has the number of the whole array too
    assert states(platform, ids) == ["cancelled", "running", "cancelled"]
    assert platform.left(ids[1])


def test_an_array_whose_answer_was_lost_is_found_by_what_slurm_keeps_of_it(
    slurm: SlurmCluster, trials_of: Callable[..., tuple[SlurmPlatform, list[Submission]]], tmp_path: Path
) -> None:
    platform, jobs = trials_of(3, "exit 0")
    ids = [one.job_id for one in jobs]
    references = [render.JobReference.of(one) for one in ids]
    for reference in references:
        Path(reference.directory).mkdir(parents=True)
    script = tmp_path / "array.sh"
    script.write_text(render.array_script(
        {one.directory: job.body["script"] for one, job in zip(references, jobs, strict=True)},
        name=NAME, folder=str(tmp_path), mark=references[0].array_mark, parallel=1,
    ))  # fmt: skip
    number = slurm.run("sbatch", "--parsable", "--hold", str(script))
    assert states(platform, ids) == ["pending"] * 3
    platform.submit_together(jobs, name=NAME, parallel=1)
    assert len(queue(slurm)) == 3
    platform.cancel(ids[1])
    slurm.run("scontrol", "release", number)
    until(lambda: states(platform, ids) == ["succeeded", "cancelled", "succeeded"], seconds=120)
    assert platform.status(ids[2]).exit_codes == {0: 0}


def test_an_array_that_slurm_does_not_take_leaves_no_job_behind(
    slurm: SlurmCluster, trials_of: Callable[..., tuple[SlurmPlatform, list[Submission]]]
) -> None:
    platform, jobs = trials_of(2, partition="nowhere")
    with pytest.raises(PlatformRefused, match="invalid partition specified: nowhere"):
        platform.submit_together(jobs, name=NAME, parallel=1)
    assert queue(slurm) == []
    assert states(platform, [one.job_id for one in jobs]) == ["absent", "absent"]
