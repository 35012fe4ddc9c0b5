"""The way into a node of a job that Slurm runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from pydantic import ValidationError
from services.slurm_cluster import SlurmCluster
from waiting import until

from launcher.errors import ConfigProblem
from launcher.job import Job, JobState
from launcher.platforms.base import BY_HAND
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig


def test_srun_enters_a_node_next_to_what_runs_there(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of()
    job_id = platform.submit(platform.render(job_of("sleep 300")))
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    hosts = platform.status(job_id).hosts
    for node in (0, 1):
        way = platform.entrance(job_id, node, terminal=False)
        typed = 'echo "$SLURMD_NODENAME"\nexit 3\n'
        done = subprocess.run(way.words, input=typed, capture_output=True, text=True, timeout=180)
        assert done.stdout.split() == [hosts[node]], done.stderr
        assert done.returncode == 3
    assert "--pty" in platform.entrance(job_id, 0, terminal=True).words
    with pytest.raises(ConfigProblem, match="has no node 2 that runs; there are 2"):
        platform.entrance(job_id, 2, terminal=True)
    platform.cancel(job_id)


def test_nodes_wait_and_each_runs_the_jobs_command_as_often_as_it_is_typed(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(interactive=True)
    job = job_of('echo "by hand: node $SLURM_NODEID of $SLURM_NNODES, $WORD"', env={"WORD": "it's given"})
    submission = platform.render(job)
    assert "slurm.interactive" in {finding.code for finding in platform.check(submission)}
    job_id = platform.submit(submission)
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    hosts = platform.status(job_id).hosts

    def typed(node: int) -> str:
        way = platform.entrance(job_id, node, terminal=False)
        words = f'eval "${BY_HAND}"\npwd\nexit 3\n'
        done = subprocess.run(way.words, input=words, capture_output=True, text=True, timeout=180)
        return done.stdout if done.returncode == 3 else ""

    until(lambda: typed(0) and typed(1))
    for node in (0, 1, 1):
        begins, runs, folder = typed(node).splitlines()
        assert begins.startswith(f"node {node} begins on {hosts[node]}, node 0 is at ")
        assert runs == f"by hand: node {node} of 2, it's given"
        assert folder == job.directory
    assert platform.status(job_id).state is JobState.RUNNING, "nobody has cancelled it"
    platform.cancel(job_id)
    assert platform.status(job_id).state is JobState.CANCELLED
    assert platform.left(job_id) == ()


def test_a_container_of_pyxis_that_would_have_to_wait_is_refused() -> None:
    with pytest.raises(ValidationError, match="outside of the container that Pyxis made"):
        SlurmPlatformConfig.model_validate(
            {"kind": "slurm", "environment": {"kind": "pyxis", "file": "/shared/it.sqsh"}, "interactive": True}
        )
