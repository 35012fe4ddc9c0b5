"""Jobs that are submitted and followed through ssh: Slurm's own daemons behind a real sshd."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from services.login_node import LoginNode
from services.slurm_cluster import SlurmCluster
from waiting import until

from launcher.errors import LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import Job, JobId, JobState
from launcher.platforms.slurm.commands import slurm_of
from launcher.platforms.slurm.platform import SlurmPlatform

COUNT = 'n=0; while [ $n -lt 40 ]; do n=$((n+1)); echo "node $SLURM_NODEID counts $n"; sleep 0.5; done'


def state(platform: SlurmPlatform, job_id: JobId) -> JobState | None:
    """Return a job's state as far as it is known: an answer may be some seconds old, and so may its failure."""
    with suppress(PlatformUnreachable):
        return platform.status(job_id).state
    return None


def test_a_job_is_submitted_followed_and_cancelled_through_ssh(
    slurm_login: LoginNode, slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(host="login")
    assert platform.check_access().endswith("answers on login")
    job_id = platform.submit(platform.render(job_of(COUNT)))
    assert platform.submit(platform.render(job_of(COUNT))) == job_id
    until(lambda: any("counts 2" in line.text for line in platform.logs(job_id).lines))
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    assert len(slurm.run("squeue", "--noheader").splitlines()) == 1
    platform.cancel(job_id)
    assert platform.left(job_id) == ()
    assert slurm.run("squeue", "--noheader") == ""
    assert platform.status(job_id).state is JobState.CANCELLED


@pytest.mark.parametrize("root", ["a folder that both see", "a bucket"])
def test_while_the_login_node_is_away_the_job_goes_on_and_its_log_has_no_gap(
    slurm_login: LoginNode,
    platform_of: Callable[..., SlurmPlatform],
    job_of: Callable[..., Job],
    tmp_path: Path,
    root: str,
) -> None:
    """The logs of a run in a bucket are in a folder of the cluster, which this machine need not see."""
    kept = {"directory": "gs://bucket/runs/owt-1a2b/attempts/1"} if root == "a bucket" else {}
    platform, seen, position = platform_of(host="login", folder=str(tmp_path / "cluster")), [], ""
    job_id = platform.submit(platform.render(job_of(COUNT, **kept)))

    def look() -> None:
        nonlocal position
        with suppress(PlatformUnreachable):
            page = platform.logs(job_id, position)
            position = page.position
            seen.extend(line for line in page.lines if " counts " in line.text)

    def saw(count: int) -> bool:
        look()
        return {line.node for line in seen if line.text.endswith(f"counts {count}")} == {0, 1}

    until(lambda: saw(3))
    slurm_login.stop()
    with pytest.raises(PlatformUnreachable, match=r"login cannot be reached by ssh|the connection to login was cut"):
        slurm_of("login").jobs()
    with pytest.raises(PlatformUnreachable):
        platform.cancel(job_id)
    slurm_login.start()
    until(lambda: state(platform, job_id) is JobState.SUCCEEDED, seconds=90)
    look()
    for node in (0, 1):
        told = [line.text for line in seen if line.node == node]
        assert told == [f"node {node} counts {number}" for number in range(1, 41)]


def test_an_answer_of_sbatch_that_is_lost_on_its_way_makes_no_second_job(
    slurm_login: LoginNode, slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job],
    tmp_path: Path,
) -> None:  # fmt: skip
    """sshd holds back what the first sbatch has said until the connection is cut."""
    held = tmp_path / "held"
    (tmp_path / "holds").write_text(
        f'case "$SSH_ORIGINAL_COMMAND" in *--parsable*) test -e {held} || {{ sh -c "$SSH_ORIGINAL_COMMAND" > {held}; '
        'sleep 60; }; esac\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    slurm_login.stop()
    slurm_login.server = {"ForceCommand": f"sh {tmp_path / 'holds'}"}
    slurm_login.start()
    platform, submission = platform_of(host="login"), platform_of(host="login").render(job_of("sleep 100"))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(platform.submit, submission)
        until(lambda: held.exists() and held.read_text())
        slurm_login.stop()
        with pytest.raises(PlatformUnreachable):
            first.result(60)
    slurm_login.start()
    job_id = platform.submit(submission)
    assert platform.submit(submission) == job_id
    assert len(slurm.run("squeue", "--noheader").splitlines()) == 1
    platform.cancel(job_id)


def test_a_login_that_is_refused_is_no_job(
    slurm_login: LoginNode, slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(host="login")
    slurm_login.configure(IdentityFile=str(slurm_login.folder / "host_key"))
    with pytest.raises(LoginProblem, match="it takes none of your keys"):
        platform.submit(platform.render(job_of("true")))
    slurm_login.configure(UserKnownHostsFile="/dev/null")
    (finding,) = platform.check(platform.render(job_of("true")))
    assert (finding.severity, finding.code) == ("error", "slurm.cluster")
    assert "its key is not known here" in finding.what
    assert slurm.run("squeue", "--noheader") == ""


def test_a_root_that_the_login_node_does_not_see_is_refused(
    slurm_login: LoginNode, slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job],
    tmp_path: Path,
) -> None:  # fmt: skip
    slurm_login.stop()
    slurm_login.hidden = tmp_path
    slurm_login.start()
    platform, submission = platform_of(host="login"), platform_of(host="login").render(job_of("true"))
    told = [str(finding) for finding in platform.check(submission) if finding.code == "slurm.root"]
    assert f"root={tmp_path} is a folder of this machine, and login does not see what is in it" in told[0]
    with pytest.raises(PlatformRefused, match=r"login has no such folder; take a root that both see under one path"):
        platform.submit(submission)
    assert slurm.run("squeue", "--noheader") == ""


def test_a_root_that_both_see_is_found_in_order(
    slurm_login: LoginNode, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job], tmp_path: Path
) -> None:
    platform = platform_of(host="login")
    errors = [finding for finding in platform.check(platform.render(job_of("true"))) if finding.severity == "error"]
    assert errors == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
