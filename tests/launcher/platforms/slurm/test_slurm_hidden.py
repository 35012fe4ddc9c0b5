"""Partitions with Hidden=YES, as a user who is not root has them: Slurm's commands show nothing of them unasked.

https://slurm.schedmd.com/slurm.conf.html#OPT_Hidden
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from services.slurm_cluster import STRANGER, SlurmCluster

from launcher.job import Job
from launcher.platforms.slurm.commands import Slurm, slurm_of
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig

WAITS = "#!/bin/sh\n#SBATCH --hold --partition=main --job-name=waits --chdir=/tmp --output=/dev/null\ntrue\n"


@pytest.fixture
def hidden(slurm_without_accounting: SlurmCluster, tmp_path: Path) -> Iterator[SlurmCluster]:
    """A cluster whose partitions are all hidden, to which this process speaks as a stranger: root is shown them all."""
    slurm, programs = slurm_without_accounting, tmp_path / "programs"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sinfo"):
        (programs / name).write_text(f'#!/bin/sh\nexec runuser -u {STRANGER} -- /usr/bin/{name} "$@"\n')
        (programs / name).chmod(0o755)
    partitions = slurm.run("sinfo", "--noheader", "--format=%R").split()
    for name in partitions:
        slurm.run("scontrol", "update", f"PartitionName={name}", "Hidden=YES")
    with pytest.MonkeyPatch.context() as patch:  # it ends before the cluster is made idle, which root alone can
        patch.setenv("PATH", str(programs), prepend=os.pathsep)
        yield slurm
    for name in partitions:
        slurm.run("scontrol", "update", f"PartitionName={name}", "Hidden=NO")


def test_a_job_in_a_hidden_partition_is_seen_in_the_queue(hidden: SlurmCluster) -> None:
    slurm = Slurm(slurm_of(None).shell)
    number = slurm.submit(WAITS)
    assert hidden.run("squeue", "--noheader", "--me") == "", "it is hidden"
    assert [(job.number, job.state) for job in slurm.jobs()] == [(number, "PENDING")]


def test_a_lost_node_of_a_hidden_partition_is_known_as_one(hidden: SlurmCluster) -> None:
    hidden.run("/usr/bin/scontrol", "update", "NodeName=n0", "State=DRAIN", "Reason=fan")
    assert Slurm(slurm_of(None).shell).out_of_service(["n0", "n1"]) == {"n0"}


@pytest.mark.parametrize("partition", ["main", ""])
def test_the_limits_of_a_hidden_partition_are_checked_and_it_is_no_unknown_one(
    hidden: SlurmCluster, job_of: Callable[..., Job], partition: str
) -> None:
    settings = {
        "kind": "slurm", "nodes": 2, "gpus": 4, "partition": partition or None, "time": "48h",
        "environment": {"kind": "venv", "path": sys.prefix},
    }  # fmt: skip
    platform = SlurmPlatform(SlurmPlatformConfig.model_validate(settings))
    told = {one.code: one.message for one in platform.check(platform.render(job_of("true"))) if one.severity == "error"}
    assert "0 of the partition's 3 have them" in told["slurm.gpus"]
    assert list(told) == (["slurm.time", "slurm.gpus"] if partition else ["slurm.gpus"])
    assert not partition or "above the partition's MaxTime of 1 day" in told["slurm.time"]
