"""Several users, accounts and limits on real Slurm daemons: what each sees of the jobs of others."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_daemons import GROUP, USERS, Cluster, acting_as, slurm_cluster
from waiting import until

from launcher.errors import PlatformUnreachable
from launcher.job import Job, JobId, JobState
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from litgpt_demo import PYTHON

VENV = Path(PYTHON[0]).parents[1]
CHECKOUT = Path(__file__).parents[3]
WAITS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(45))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    (folder := tmp_path_factory.mktemp("users")).chmod(0o755)
    with slurm_cluster(folder / "cluster", accounting=True) as cluster:
        yield cluster


@pytest.fixture
def shared(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    prefect_home: Callable[[], Path],
) -> Path:
    """A folder of the group, as a centre makes one for a project: both can enter it, and write to it."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    folder = tmp_path_factory.mktemp("project")
    folder.chmod(0o2770)
    with acting_as(0, 0):
        for user, uid in USERS.items():
            home = shutil.copytree(prefect_home(), folder.parent / f"home-{user}", dirs_exist_ok=True)
            subprocess.run(["chown", "-R", f"{uid}:{GROUP}", home], check=True)
    (folder / "waits.py").write_text(WAITS)
    (folder / "quick.py").write_text("print('done')")
    return folder


def started(user: str, folder: Path, verb: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the command line as that user, in a shell of its own."""
    home = str(folder.parent / f"home-{user}")
    environment = {**os.environ, "PREFECT_HOME": home, "TRAIN_LITGPT_HOME": home, "HOME": home, "USER": user}
    command = [str(Path(sys.executable).with_name("train-litgpt")), verb, *arguments]
    with acting_as(0, 0):
        return subprocess.Popen(
            command, user=USERS[user], group=GROUP, extra_groups=[], umask=0o002, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=CHECKOUT,
        )  # fmt: skip


def printed(user: str, folder: Path, verb: str, *arguments: str) -> tuple[int, str]:
    with started(user, folder, verb, *arguments) as process:
        text = process.stdout.read() if process.stdout else ""
    return process.returncode, " ".join(text.split())


def config(folder: Path, script: str, *changes: str) -> list[str]:
    arguments = ["deployments/configs/pi.yaml", "--platform", "deployments/configs/platforms/slurm.yaml"]
    arguments += [f"root={folder}/root", f"script={folder}/{script}.py", f'args=["{folder}/begun"]', "platform.nodes=2"]
    return [
        *arguments,
        f"platform.venv={VENV}",
        "platform.grace_period=2",
        "platform.network_test=0",
        "platform.account=lab",
        *changes,
    ]


def test_second_user_of_a_shared_root_follows_the_run(cluster: Cluster, shared: Path) -> None:
    """Only its user can cancel a job, and the same command of another user starts none."""
    arguments = config(shared, "waits")
    with started("alice", shared, "run", *arguments) as alice:
        until((shared / "begun").exists)
        [job] = cluster.live()
        for verb, target in (("runs", [f"{shared}/root"]), ("status", arguments)):
            code, text = printed("bob", shared, verb, *target)
            assert (code, "running" in text) == (0, True), text
        code, text = printed("bob", shared, "cancel", *arguments)
        assert (code, "is alice's, and Slurm does not let bob end it" in text) == (55, True), text
        with started("bob", shared, "run", *arguments) as bob:
            assert bob.stdout is not None
            seen = next(line for line in bob.stdout if "leads" in line or "submitted" in line)
            assert "alice on" in seen
            assert cluster.live() == [job]
            code, text = printed("alice", shared, "cancel", *arguments)
            assert (code, "no resources remain" in text) == (0, True), text
            text = bob.stdout.read()
        assert "cancelled" in text, text
        assert cluster.live() == []
        assert alice.stdout is not None
        alice.stdout.read()


@contextlib.contextmanager
def waiting(folder: Path, user: str = "alice", **changes: Any) -> Iterator[tuple[SlurmPlatform, JobId]]:
    """A job that waits or runs, and is cancelled afterwards."""
    section = {
        "kind": "slurm",
        "nodes": 2,
        "network_test": 0,
        "grace_period": 2,
        "venv": str(VENV),
        "account": "lab",
        **changes,
    }
    platform = SlurmPlatform(SlurmPlatformConfig.model_validate(section), settle=0)
    nodes, program = int(section["nodes"]), (str(folder / "waits.py"), str(folder / f"begun-{user}"))
    with acting_as(USERS[user], GROUP):
        directory = tempfile.mkdtemp(dir=folder)
        Path(directory).chmod(0o2770)
        name = Path(directory).name.lower().replace("_", "-")
        job = Job(name=name, attempt=1, nodes=nodes, processes=1, program=program, directory=f"{directory}/attempts/1")
        job_id = platform.submit(platform.render(job))
        try:
            yield platform, job_id
        finally:
            SlurmPlatform(SlurmPlatformConfig.model_validate(section), settle=0).cancel(job_id)


def reasons_of(platform: SlurmPlatform, job_id: JobId) -> tuple[str, str]:
    [reason] = until(lambda: platform.status(job_id).reasons)
    return reason.severity, f"{reason.code}: {reason.what}"


@pytest.mark.parametrize(
    ("limit", "severity", "reason", "changes"),
    [
        ("MaxTRESPerJob=node=1", "error", "QOSMaxNodePerJobLimit", {}),
        ("MaxTRESPerUser=node=1", "error", "QOSMaxNodePerUserLimit", {}),
        ("MaxWall=1", "error", "QOSMaxWallDurationPerJobLimit", {"time": "5"}),
        ("GrpTRES=node=1", "warning", "QOSGrpNodeLimit", {}),
    ],
    ids=["node-per-job", "node-per-user", "wall", "group"],
)
def test_limit_that_one_job_exceeds_is_said_with_the_reason(
    limit: str, severity: str, reason: str, changes: dict[str, str], cluster: Cluster, shared: Path
) -> None:
    cluster.by_root("sacctmgr", "-i", "add", "qos", "small")
    try:
        cluster.by_root("sacctmgr", "-i", "modify", "qos", "small", "set", limit)
        cluster.by_root("sacctmgr", "-i", "modify", "user", "alice", "set", "qos+=small")
        with waiting(shared, qos="small", **changes) as (platform, job_id):
            found, text = reasons_of(platform, job_id)
            assert text.startswith("slurm.pending.limit: ")
            assert f"({reason})" in text
            assert found == severity
    finally:
        cluster.by_root("sacctmgr", "-i", "delete", "qos", "small")


def test_limit_that_others_jobs_exceed_is_waited_for(cluster: Cluster, shared: Path) -> None:
    cluster.by_root("sacctmgr", "-i", "modify", "user", "alice", "set", "MaxJobs=1")
    try:
        with waiting(shared) as (platform, first):
            until(lambda: platform.status(first).state is JobState.RUNNING)
            with waiting(shared, nodes=1) as (platform, second):
                severity, text = reasons_of(platform, second)
                assert (severity, "AssocMaxJobsLimit" in text) == ("warning", True)
                with waiting(shared, "bob", nodes=1) as (platform, of_bob):
                    until(lambda: platform.status(of_bob).state is JobState.PENDING)
    finally:
        cluster.by_root("sacctmgr", "-i", "modify", "user", "alice", "set", "MaxJobs=-1")


def test_account_of_others_is_refused_before_anything_is_made(cluster: Cluster, shared: Path) -> None:
    cluster.by_root("sacctmgr", "-i", "add", "account", "secret", "Cluster=test")
    for changes in ({"account": "secret"}, {"account": "nosuch"}, {"qos": "nosuch"}):
        code, text = printed(
            "alice", shared, "run", *config(shared, "quick", *(f"platform.{a}={b}" for a, b in changes.items()))
        )
        assert (code, "Invalid" in text) == (40, True), text
    assert cluster.live() == []


def test_end_of_a_job_is_known_after_the_controller_forgot_it(cluster: Cluster, shared: Path) -> None:
    with waiting(shared) as (platform, cancelled):
        until((shared / "begun-alice").exists)
        cluster.call("scancel", "--user=alice")
        until(lambda: cluster.call("squeue", "-h", "-t", "all") == "")
        assert platform.status(cancelled).state is JobState.CANCELLED


def test_second_user_of_hidden_jobs_is_referred_to_the_first(
    shared: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path_factory.mktemp("private")).chmod(0o755)
    with slurm_cluster(folder / "cluster", lines_of_conf="PrivateData=jobs\n") as private:
        monkeypatch.setenv("SLURM_CONF", private.environment["SLURM_CONF"])
        with waiting(shared) as (platform, job_id):
            until(lambda: platform.status(job_id).state is JobState.RUNNING)
            for verb in ("status", "remaining_resources", "cancel"):
                with acting_as(USERS["bob"], GROUP), pytest.raises(PlatformUnreachable, match="run this as alice"):
                    getattr(SlurmPlatform(SlurmPlatformConfig(kind="slurm"), settle=0), verb)(job_id)
            assert len(private.live()) == 1
