"""Jobs from submission to their end, on Slurm's own daemons."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from services.slurm_cluster import SlurmCluster
from waiting import until

from launcher.errors import PlatformRefused, PlatformUnreachable
from launcher.job import Job, JobId, JobState, JobStatus
from launcher.platforms.slurm.commands import slurm_of
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.render import JobReference
from launcher.runs.diagnosis import diagnose
from litgpt_demo.errors import Fault

SLEEP = "sleep 300"


def begun(platform: SlurmPlatform, job_id: JobId, nodes: int = 2) -> None:
    """Wait until all nodes have said their first line."""
    until(lambda: sum("begins" in str(line) for line in platform.logs(job_id).lines) >= nodes)


def ended(platform: SlurmPlatform, job_id: JobId, seconds: float = 120) -> JobStatus:
    until(lambda: not platform.status(job_id).state.live, seconds=seconds)
    return platform.status(job_id)


def number(platform: SlurmPlatform, job: Job) -> str:
    return (Path(job.directory) / "slurm-job").read_text().strip()


def fault(status: JobStatus) -> Fault:
    """Return the class of an end whose nodes have left no report, as its verdict has it."""
    return diagnose(status, (), (), logs="", nodes=2).fault


# --- submit -----------------------------------------------------------------------------------------------------------


def test_nodes_learn_who_they_are_and_leave_what_they_ended_with(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform, job = platform_of(), job_of("exit 0")
    job_id = platform.submit(platform.render(job))
    done = ended(platform, job_id)
    assert (done.state, done.native, done.exit_codes) == (JobState.SUCCEEDED, "COMPLETED", {0: 0, 1: 0})
    assert sorted(done.hosts.values()) == [done.hosts[0], done.hosts[1]]
    assert done.started is not None
    assert done.ended is not None
    assert done.started <= done.ended
    told = sorted(line.text for line in platform.logs(job_id).lines if "begins" in line.text)
    port = 20_000 + int(number(platform, job)) % 10_000
    assert told == [f"node {one} begins on {done.hosts[one]}, node 0 is at 127.0.0.1:{port}, life 0" for one in (0, 1)]


def test_a_job_that_was_submitted_elsewhere_is_adopted_and_one_that_has_ended_is_not_started_again(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    submission = platform_of().render(job_of("sleep 3"))
    job_id = platform_of().submit(submission)
    assert platform_of().submit(submission) == job_id
    assert len(slurm.run("squeue", "--noheader").splitlines()) == 1
    ended(platform_of(), job_id)
    platform_of().submit(submission)
    assert slurm.run("squeue", "--noheader") == ""


def test_runs_of_the_same_name_under_two_roots_are_two_jobs(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job], tmp_path: Path
) -> None:
    platform, job = platform_of(nodes=1), job_of(SLEEP, nodes=1)
    other = replace(job, directory=str(tmp_path / "other" / "runs" / "owt-1a2b" / "attempts" / "1"))
    first, second = (platform.submit(platform.render(one)) for one in (job, other))
    assert len(slurm.run("squeue", "--noheader").splitlines()) == 2
    platform.cancel(first)
    assert platform.status(second).state.live


def test_where_an_answer_of_sbatch_was_lost_the_second_job_leaves_the_first_alone(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform, job = platform_of(nodes=1), job_of(SLEEP, nodes=1)
    submission = platform.render(job)
    job_id = platform.submit(submission)
    begun(platform, job_id, nodes=1)
    first = number(platform, job)
    script = Path(job.directory).parent / "again.sh"
    script.write_text(submission.body["script"])
    second = slurm.run("sbatch", "--parsable", str(script))
    until(lambda: slurm.state(second) == "FAILED")
    assert platform.status(job_id).state is JobState.RUNNING
    assert number(platform, job) == first
    assert f"job {second} leaves it alone" in (Path(job.directory) / "node-0.log").read_text()


def test_what_slurm_refuses_leaves_nothing_behind(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform, job = platform_of(partition="nowhere"), job_of(SLEEP)
    submission = platform.render(job)
    with pytest.raises(PlatformRefused, match="invalid partition specified: nowhere"):
        platform.submit(submission)
    assert list(Path(job.directory).iterdir()) == []
    assert platform.status(submission.job_id).state is JobState.ABSENT


def test_the_environment_of_the_submitter_reaches_neither_sbatch_nor_the_nodes(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in {"SBATCH_PARTITION": "closed", "SLURM_JOB_ID": "7", "LEAKED": "planted"}.items():
        monkeypatch.setenv(name, value)
    platform, job = platform_of(), job_of("env | grep -c LEAKED")
    job_id = platform.submit(platform.render(job))
    assert ended(platform, job_id).exit_codes == {0: 1, 1: 1}, "grep finds none"


def test_a_secret_reaches_the_ranks_from_its_file_and_nothing_else_has_it(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job], tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("planted-secret\n")
    file.chmod(0o600)
    platform = platform_of(secrets={"WANDB_API_KEY": str(file)})
    job = job_of('test "$WANDB_API_KEY" = "$(cat ' + str(file) + ')" && sleep 5', secrets=("WANDB_API_KEY",))
    submission = platform.render(job)
    job_id = platform.submit(submission)
    begun(platform, job_id)
    shown = slurm.run("scontrol", "show", "job", "--details", number(platform, job))
    kept = slurm.run("scontrol", "write", "batch_script", number(platform, job), "-")
    ran = slurm.run("ps", "-eo", "args")
    assert ended(platform, job_id).state is JobState.SUCCEEDED
    written = "".join(path.read_text() for path in Path(job.directory).rglob("*") if path.is_file())
    for told in (shown, kept, ran, written, str(submission), submission.job_id):
        assert "planted-secret" not in told
    assert stat.S_IMODE(Path(job.directory).stat().st_mode) == 0o700


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_the_peers_of_a_failed_node_have_some_seconds_and_then_end(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of()
    job_id = platform.submit(platform.render(job_of('[ "$SLURM_NODEID" = 0 ] && sleep 300; exit 41')))
    done = ended(platform, job_id)
    assert done.state is JobState.FAILED
    assert done.exit_codes == {0: 45, 1: 41}


def test_cancelling_lets_ranks_save_and_proves_that_they_are_gone(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of()
    job_id = platform.submit(platform.render(job_of(SLEEP)))
    begun(platform, job_id)
    assert re.fullmatch(r"job \d+ \(RUNNING\)", platform.left(job_id)[0])
    platform.cancel(job_id)
    assert platform.left(job_id) == ()
    assert slurm.run("squeue", "--noheader") == ""
    assert platform.status(job_id).state is JobState.CANCELLED
    assert sum("saved" in line.text for line in platform.logs(job_id).lines) == 2


def test_scancel_by_somebody_else_is_a_cancellation_and_ranks_save_before(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform, job = platform_of(), job_of(SLEEP)
    job_id = platform.submit(platform.render(job))
    begun(platform, job_id)
    slurm.run("scancel", number(platform, job))
    assert ended(platform, job_id).state is JobState.CANCELLED
    assert sum("saved" in line.text for line in platform.logs(job_id).lines) == 2


def test_before_its_time_limit_a_job_saves_and_ends_as_preempted(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(partition="short", notice=30)
    job_id = platform.submit(platform.render(job_of(SLEEP)))
    done = ended(platform, job_id)
    assert (done.state, done.native) == (JobState.FAILED, "FAILED (NonZeroExitCode)")
    assert done.exit_codes == {0: 45, 1: 45}
    assert fault(done) is Fault.PREEMPTED
    assert sum("saved" in line.text for line in platform.logs(job_id).lines) == 2


@pytest.mark.long
def test_a_job_that_does_not_leave_in_time_is_preempted_too(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(partition="short", notice=5)
    job_id = platform.submit(platform.render(job_of("# deaf\nsleep 300")))
    done = ended(platform, job_id, seconds=240)
    assert done.native.startswith("TIMEOUT")
    assert fault(done) is Fault.PREEMPTED
    assert "time limit" in diagnose(done, (), (), logs="", nodes=2).evidence


def test_a_job_whose_nodes_go_to_a_more_urgent_one_is_preempted(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(partition="spare", exclusive=True, nodes=3)
    job_id = platform.submit(platform.render(job_of(SLEEP, nodes=3)))
    begun(platform, job_id, nodes=3)
    slurm.run("srun", "--partition=urgent", "--exclusive", "--nodes=3", "true")
    done = ended(platform, job_id)
    assert done.native.startswith("PREEMPTED")
    assert fault(done) is Fault.PREEMPTED


def test_a_job_that_slurm_queues_again_goes_on_as_the_same_one(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform, job = (
        platform_of(partition="requeued", restart="platform", exclusive=True, nodes=3),
        job_of(SLEEP, nodes=3),
    )
    job_id = platform.submit(platform.render(job))
    begun(platform, job_id, nodes=3)
    first = number(platform, job)
    slurm.run("srun", "--partition=urgent", "--exclusive", "--nodes=3", "true")
    until(lambda: platform.status(job_id).restarts == 1)
    assert platform.status(job_id).state.live
    slurm.run("scontrol", "update", f"JobId={first}", "StartTime=now")  # Slurm waits two minutes before it begins again
    until(lambda: any("life 1" in line.text for line in platform.logs(job_id).lines), seconds=180)
    assert number(platform, job) == first
    until(lambda: platform.status(job_id).state is JobState.RUNNING)


def test_a_lost_node_is_named(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of()
    job_id = platform.submit(platform.render(job_of(SLEEP)))
    begun(platform, job_id)
    lost = platform.status(job_id).hosts[1]
    slurm.stop_node(lost)
    done = ended(platform, job_id)
    asked = {
        "node": 0,
        "exit_code": 45,
        "fault": "preempted",
        "message": "",
        "ended": time.time(),
        "asked": time.time(),
    }
    verdict = diagnose(done, [asked], (), logs="", nodes=2)
    assert done.native.startswith("NODE_FAIL")
    assert (verdict.fault, verdict.node, verdict.machine) == (Fault.NODE, 1, lost)


def test_a_script_that_fails_before_its_nodes_begin_is_the_user_s_to_fix(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(secrets={"KEY": "/nowhere/key"})
    job_id = platform.submit(platform.render(job_of(SLEEP)))
    done = ended(platform, job_id)
    assert fault(done) is Fault.USER
    assert any("cannot read /nowhere/key" in line.text for line in platform.logs(job_id).lines)


# --- what Slurm forgets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "state"), [("exit 0", JobState.SUCCEEDED), ("exit 41", JobState.FAILED)])
def test_without_accounting_the_job_s_own_files_tell_how_it_ended(
    slurm_without_accounting: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job],
    line: str, state: JobState,
) -> None:  # fmt: skip
    slurm, platform, job = slurm_without_accounting, platform_of(), job_of(line)
    job_id = platform.submit(platform.render(job))
    until(lambda: "Invalid job id" in slurm.run("squeue", f"--jobs={number(platform, job)}", check=False), seconds=120)
    done = platform.status(job_id)
    assert done.state is state
    assert "Slurm has forgotten it" in done.native
    assert set(done.exit_codes.values()) == {int(line[-2:])}
    platform.cancel(job_id)


def test_accounting_tells_of_what_the_controller_has_forgotten(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform, job = platform_of(), job_of(SLEEP)
    job_id = platform.submit(platform.render(job))
    begun(platform, job_id)
    slurm.run("scancel", "--signal=KILL", "--full", number(platform, job))
    ended(platform, job_id)
    records = {"slurm-job": number(platform, job)}
    known = until(lambda: (told := platform._forgotten(records)).end is not None and told)
    assert known.state in {"FAILED", "CANCELLED"}
    assert known.nodes


@pytest.fixture
def runaway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster whose controller has forgotten every job, and whose accounting calls each of them RUNNING."""
    programs = {"squeue": "true", "sacct": "echo 'RUNNING|1700000000|Unknown|n[0-1]'", "scontrol": "exit 1"}
    (folder := tmp_path / "programs").mkdir()
    for name, line in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    slurm_of.cache_clear()
    yield
    slurm_of.cache_clear()


@pytest.mark.parametrize(("code", "state"), [(0, JobState.SUCCEEDED), (41, JobState.FAILED), (None, JobState.RUNNING)])
def test_a_job_that_accounting_calls_running_ever_after_has_ended_once_its_own_files_say_so(
    runaway: None, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job],
    code: int | None, state: JobState,
) -> None:  # fmt: skip
    platform, job = platform_of(), job_of("true")
    folder = Path(job.directory)
    folder.mkdir(parents=True)
    (folder / "slurm-job").write_text("7\n")
    for name in ("exit-job", "exit-0", "exit-1") if code is not None else ():
        (folder / name).write_text(f"{code}\n")
    told = platform.status(platform.render(job).job_id)
    assert (told.state, set(told.exit_codes.values())) == (state, {code} - {None})
    assert dict(told.hosts) == {0: "n0", 1: "n1"}
    assert "RUNNING" in told.native


# --- looking ----------------------------------------------------------------------------------------------------------


def test_a_job_that_waits_says_why_in_words_and_when_slurm_expects_it(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    slurm.run("sbatch", "--exclusive", "--nodes=3", "--time=10", "--wrap=sleep 300")
    platform = platform_of(time="10m")
    job_id = platform.submit(platform.render(job_of(SLEEP)))
    told = until(lambda: [str(one) for one in platform.status(job_id).reasons if "expects" in one.what])
    assert re.search(r"(enough nodes are free|higher priority).*expects it to start about 20\d\d-", told[0])
    platform.cancel(job_id)
    assert platform.left(job_id) == ()


def test_a_limit_of_the_account_is_told_as_one(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    slurm.run("sbatch", "--account=narrow", "--gpus-per-node=2", "--wrap=sleep 300")
    platform = platform_of(account="narrow", gpus=2, nodes=1)
    job_id = platform.submit(platform.render(job_of(SLEEP, nodes=1)))
    told = until(
        lambda: [one.what for one in platform.status(job_id).reasons if "AssocGrpGRES" in one.what], seconds=60
    )
    assert "all jobs together are at the limit on GPUs or other resources for the account" in told[0]


def test_side_by_side_jobs_are_asked_for_in_one_question(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    jobs = [job_of(SLEEP, nodes=1, attempt=n, directory=str(tmp_path / f"attempts/{n}")) for n in range(1, 6)]
    ids = [platform_of().submit(platform_of().render(one)) for one in jobs]
    asked = tmp_path / "asked"
    spy = tmp_path / "bin" / "squeue"
    spy.parent.mkdir()
    spy.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nexec /usr/bin/squeue "$@"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{spy.parent}:/usr/bin:/bin")
    platform_of().left(ids[0])  # a look that is new, as the one that begins a round
    assert all(platform_of().status(one).state.live for one in ids)
    assert len(asked.read_text().splitlines()) == 1


def test_a_controller_that_is_away_is_no_end(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(nodes=1)
    job_id = platform.submit(platform.render(job_of(SLEEP, nodes=1)))
    begun(platform, job_id, nodes=1)
    slurm.stop_controller()
    with pytest.raises(PlatformUnreachable, match="Unable to contact slurm controller"):
        platform.left(job_id)
    with pytest.raises(PlatformUnreachable):
        platform.submit(platform.render(job_of(SLEEP, nodes=1, attempt=2)))
    slurm.start_controller()
    assert platform.status(job_id).state is JobState.RUNNING


def test_a_forged_id_is_told_from_the_attempt_s_own(platform_of: Callable[..., SlurmPlatform]) -> None:
    own = JobReference(name="owt-1a2b-1", nodes=2, directory="/r/runs/owt-1a2b/attempts/1")
    platform = platform_of()
    assert platform.gave(own.job_id, attempt_name=own.name, directory=own.directory)
    for other in (replace(own, name="owt-1a2b-2"), replace(own, directory="/etc")):
        assert not platform.gave(other.job_id, attempt_name=own.name, directory=own.directory)
