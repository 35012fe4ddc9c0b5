"""The contract of every platform, and Slurm's own states, on real Slurm daemons of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_handles import running_job
from waiting import until

from flows.run_torchrun import run_torchrun
from launcher.config import RunConfig, ScriptConfig, validated
from launcher.errors import PlatformUnreachable
from launcher.job import Job, JobId, JobState, JobStatus
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from launcher.runs.run import plan_run
from litgpt_demo import PYTHON
from litgpt_demo.metrics import curve, rows_of

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "launcher" / "platforms")]
from slurm_daemons import Cluster, slurm_cluster, ssh_login
from test_platform_contract import *  # noqa: F403  the same tests, with the place of this file
from test_platform_contract import Place


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=3) as cluster:
        yield cluster


def settings_of(**changes: Any) -> SlurmPlatformConfig:
    section = {
        "kind": "slurm",
        "nodes": 2,
        "grace_period": 2,
        "network_test": 0,
        "venv": str(Path(PYTHON[0]).parents[1]),
    }
    return SlurmPlatformConfig.model_validate({**section, **changes})


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


CHECKOUT = Path(__file__).parents[3]


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


def test_pi_by_the_profile_is_printed_by_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    platform_file = "deployments/configs/platforms/slurm.yaml"
    arguments = ["run", "deployments/configs/pi.yaml", "--platform", platform_file, "--output", f"root={tmp_path}"]
    arguments += [f"platform.venv={Path(PYTHON[0]).parents[1]}"]
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect")}
    program = Path(sys.executable).with_name("train-litgpt")
    done = subprocess.run(
        [program, *arguments], cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3.14159265" in done.stdout
    assert slurm.live() == []


def submitted_job(folder: Path, name: str, text: str, **changes: Any) -> tuple[SlurmPlatform, JobId]:
    (script := folder / f"{name}.py").write_text(text)
    platform = SlurmPlatform(settings_of(**changes), settle=5)
    job = Job(
        name=name, attempt=1, nodes=2, processes=1, program=(str(script),), directory=str(folder / "runs" / name)
    )  # fmt: skip
    return platform, platform.submit(platform.render(job))


def ended(platform: SlurmPlatform, job_id: JobId) -> JobStatus:
    until(lambda: platform.status(job_id).state.is_final)
    return platform.status(job_id)


WAITS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[0]).with_suffix(".saved").touch(), sys.exit(45)))
pathlib.Path(sys.argv[0]).with_suffix(".begun").touch()
time.sleep(600)
"""


def test_time_limit_is_a_preemption_before_which_ranks_save(slurm: Cluster, tmp_path: Path) -> None:
    platform, job_id = submitted_job(tmp_path, "limited", WAITS, time="2", grace_period=70)
    seen = ended(platform, job_id)
    assert (tmp_path / "limited.saved").exists()
    assert (seen.state, set(seen.exit_codes.values())) == (JobState.FAILED, {45})


def test_scancel_from_outside_is_told_as_a_cancellation(slurm: Cluster, tmp_path: Path) -> None:
    platform, job_id = submitted_job(tmp_path, "outside", WAITS)
    until((tmp_path / "outside.begun").exists)
    slurm.call("scancel", "--name=outside-1-000000")
    assert ended(platform, job_id).state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"venv": "/nosuch"}, "[slurm.venv] platform.venv=/nosuch has no python with train-litgpt (on n"),
        ({"modules": ["nosuch/1"]}, "[slurm.module] platform.modules: nosuch/1 cannot be loaded (on n"),
        ({"secrets": {"TOKEN": "/no"}}, "[slurm.secret] the file /no of platform.secrets.TOKEN cannot be read (on n"),
    ],
)
def test_job_that_cannot_start_its_nodes_says_why(
    changes: dict[str, Any], message: str, slurm: Cluster, tmp_path: Path
) -> None:
    platform, job_id = submitted_job(tmp_path, f"broken-{next(iter(changes))}", "", **changes)
    seen = ended(platform, job_id)
    assert (seen.state, seen.exit_codes) == (JobState.FAILED, {0: 40})
    assert message in seen.evictions[0]
    assert any(message.partition(" (on")[0] in line.text for line in platform.logs(job_id).lines)


def test_slurm_refuses_a_requeue_so_the_job_continues(slurm: Cluster, tmp_path: Path) -> None:
    platform, job_id = submitted_job(tmp_path, "requeued", WAITS)
    until((tmp_path / "requeued.begun").exists)
    number = slurm.call("squeue", "-h", "--name=requeued-1-000000", "-o", "%i").strip()
    slurm.call("scontrol", "requeue", number, check=False)
    assert platform.status(job_id).state is JobState.RUNNING
    platform.cancel(job_id)
    assert (tmp_path / "requeued.saved").exists()
    assert platform.remaining_resources(job_id) == ()


def test_job_outlives_a_controller_that_is_away(slurm: Cluster, tmp_path: Path) -> None:
    platform, job_id = submitted_job(tmp_path, "patient", WAITS)
    until((tmp_path / "patient.begun").exists)
    slurm.stop("slurmctld")
    stopped = time.monotonic()
    try:
        with pytest.raises(PlatformUnreachable, match="Unable to contact slurm controller"):
            SlurmPlatform(settings_of()).status(job_id)
        with pytest.raises(PlatformUnreachable):
            SlurmPlatform(settings_of()).cancel(job_id)
        until(lambda: time.monotonic() > stopped + 60)
    finally:
        slurm.start_controller()
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    platform.cancel(job_id)


def test_five_hundred_jobs_of_others_in_the_queue_change_nothing(slurm: Cluster, tmp_path: Path) -> None:
    slurm.call("sbatch", "-H", "-o", "/dev/null", "--array=1-500", "--wrap=true")
    platform, job_id = submitted_job(tmp_path, "among", "print('here')")
    assert ended(platform, job_id).state is JobState.SUCCEEDED
    slurm.call("scancel", "-u", "alice")


def test_a_job_is_submitted_through_a_real_sshd(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    banner = Path(pwd.getpwuid(os.geteuid()).pw_dir, ".bashrc")
    banner.write_text("echo 'Welcome | to | 9 | of | 10 | nodes | up | idle'; echo 4711\n")
    with ssh_login(tmp_path / "ssh", slurm.environment) as folder:
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        platform, job_id = submitted_job(tmp_path, "remote", "print('here')", host="login")
        assert "slurm-wlm" in platform.check_access()
        assert ended(platform, job_id).state is JobState.SUCCEEDED
        assert any("here" in line.text for line in platform.logs(job_id).lines)
    banner.unlink()


def test_job_that_slurm_would_refuse_is_never_submitted(slurm: Cluster, tmp_path: Path) -> None:
    for changes, code in (
        ({"partition": "nope"}, "refused"),
        ({"nodes": 9}, "refused"),
        ({"gpus": 4, "processes_per_node": 4}, "refused"),
        ({"partition": "short", "time": "0:10:00"}, "time"),
    ):
        platform = SlurmPlatform(settings_of(**changes))
        job = Job(
            name="no",
            attempt=1,
            nodes=platform._settings.nodes,
            processes=1,
            program=("a.py",),
            directory=str(tmp_path / "no"),
        )
        found = {finding.code for finding in platform.check(platform.render(job))}
        assert f"slurm.{code}" in found, changes
    assert slurm.live() == []


FOREIGN = {
    "SBATCH_JOB_NAME": "other", "SBATCH_PARTITION": "short", "SBATCH_ARRAY_INX": "1-3", "SBATCH_TIMELIMIT": "1",
    "SBATCH_OUTPUT": "/tmp/%j", "SBATCH_EXPORT": "ALL", "SBATCH_REQUEUE": "1", "SBATCH_CONSTRAINT": "none",
    "SLURM_EXPORT_ENV": "ALL", "SLURM_NTASKS": "7", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_ID": "1",
    "SLURM_HINT": "nomultithread", "SLURM_EXACT": "1", "SQUEUE_USERS": "root", "SQUEUE_STATES": "FAILED",
    "SCANCEL_NAME": "other", "SINFO_PARTITION": "short",
}  # fmt: skip
"""What a profile or an allocation around this process sets; the first seven were seen to win over the script."""


@pytest.mark.parametrize("host", [None, "login"])
def test_job_is_the_configs_in_spite_of_slurms_variables(
    host: str | None, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        if host is None:
            for name, value in {**FOREIGN, "OF_THE_SHELL": "seen"}.items():
                monkeypatch.setenv(name, value)
        else:
            folder = stack.enter_context(ssh_login(tmp_path / "ssh", {**slurm.environment, **FOREIGN}))
            monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        text = "import os; open(__file__ + '.env', 'w').write('\\n'.join(os.environ))" + WAITS
        platform, job_id = submitted_job(tmp_path, name := f"foreign-{host or 'here'}", text, host=host, time="20")
        until((tmp_path / f"{name}.begun").exists)
        seen = slurm.call("squeue", "-h", "-r", "-n", f"{name}-1-000000", "-o", "%P %l %D %i").split()
        assert (seen[:3], seen[3].isdecimal()) == (["main", "20:00", "2"], True)
        assert platform.status(job_id).state is JobState.RUNNING
        names = (tmp_path / f"{name}.py.env").read_text().split()
        assert not {*names} & {"OF_THE_SHELL", "SBATCH_JOB_NAME", "SLURM_HINT", "SLURM_EXACT"}
        platform.cancel(job_id)
        assert slurm.live() == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core of two cannot be told from one of one")
@pytest.mark.parametrize("changes", [{"cpus": 2}, {"exclusive": True}], ids=str)
def test_node_has_the_cores_of_its_job_where_tasks_are_bound(
    changes: dict[str, Any], bound: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", bound.environment["SLURM_CONF"])
    text = "import os; print('cores', len(os.sched_getaffinity(0)))"
    platform, job_id = submitted_job(tmp_path, f"cores-{next(iter(changes))}", text, **changes)
    assert ended(platform, job_id).state is JobState.SUCCEEDED
    assert [line.text[-7:] for line in platform.logs(job_id).lines if "cores" in line.text] == ["cores 2"] * 2


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One that binds tasks to cores: without --cpus-per-task `srun` gives a task one."""
    lines = "TaskPlugin=task/affinity\nTaskPluginParam=autobind=cores\nSelectTypeParameters=CR_Core\n"
    sockets = "2 Sockets=2 CoresPerSocket=1"
    with slurm_cluster(tmp_path_factory.mktemp("bound") / "cluster", cpus=sockets, lines_of_conf=lines) as cluster:
        yield cluster


# --- jobs that cannot start -------------------------------------------------------------------------------------------


def test_root_that_nodes_do_not_see_is_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root := tmp_path_factory.mktemp("root") / "root").mkdir()
    with slurm_cluster(tmp_path_factory.mktemp("blind") / "cluster", hidden=root) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        platform, job_id = submitted_job(root, "unseen", "print('ran')")
        seen = ended(platform, job_id)
        assert (seen.state, seen.exit_codes) == (JobState.FAILED, {0: 40})
        assert "does not exist on this node, or cannot be written" in seen.evictions[0]


def test_node_gets_secrets_below_an_odd_root(slurm: Cluster, tmp_path: Path) -> None:
    (key := tmp_path / "key").touch(mode=0o600)
    key.write_text("it's $HOME")
    (folder := tmp_path / "a %j 'b' $HOME").mkdir()
    text = "import os; print('key', os.environ['KEY'])"
    platform, job_id = submitted_job(folder, "odd", text, secrets={"KEY": str(key)})
    assert ended(platform, job_id).state is JobState.SUCCEEDED
    assert any("key it's $HOME" in line.text for line in platform.logs(job_id).lines)


@pytest.mark.parametrize(
    "wrapper",
    [
        'echo "Welcome to 4711"; echo 4711; /usr/bin/sbatch "$@"; echo "Budget: 17 h"; echo 17',
        '/usr/bin/sbatch "$@" > /dev/null; echo "sbatch: error: Message receive failure" >&2; exit 1',
        '/usr/bin/sbatch "$@" > /dev/null; echo "quota is nearly used up" >&2; exit 1',
        '/usr/bin/sbatch "$@" > /dev/null; kill -KILL $$',
    ],
    ids=["banner", "no-receipt", "refusal", "killed"],
)
def test_job_is_found_whatever_sbatch_prints(
    wrapper: str, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = f"wrapped-{request.node.callspec.id}"
    (program := tmp_path / "sbatch").write_text(f"#!/bin/bash\n{wrapper}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with contextlib.suppress(PlatformUnreachable):  # which the next try finds
        submitted_job(tmp_path, name, WAITS)
    platform, job_id = submitted_job(tmp_path, name, WAITS)
    assert slurm.live() == [f"{name}-1-000000"]
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    platform.cancel(job_id)
    assert slurm.live() == []


@pytest.mark.prefect
def test_run_moves_from_this_machine_to_slurm_or_back(slurm: Cluster, tmp_path: Path) -> None:
    (script := tmp_path / "short.py").write_text("print('done')")
    sections = {"local": {"kind": "local", "nodes": 2}, "slurm": settings_of().model_dump(mode="json")}

    def config_on(kind: str) -> ScriptConfig:
        document = {"root": str(tmp_path / "root"), "script": str(script), "platform": sections[kind]}
        return validated(ScriptConfig, {**document, "launch": {"if_running": "cancel"}}, where="test")

    for old, new in (("local", "slurm"), ("slurm", "local")):
        handle = running_job(config_on(old))
        asyncio.run(run_torchrun(**dict(config_on(new))))
        states = [attempt.status.state for attempt in handle.attempts.all()[-2:]]
        assert (old, states) == (old, [JobState.CANCELLED, JobState.SUCCEEDED])
        assert slurm.live() == []


@pytest.mark.prefect
def test_a_training_goes_on_where_it_was_when_a_node_is_lost(
    slurm: Cluster, tmp_path: Path, tiny: Callable[..., RunConfig], run_again: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def lose_after_a_checkpoint() -> None:
        saved = '"kind":"checkpoint","step":20,'
        until(lambda: any(saved in path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")))
        name = slurm.call("squeue", "-h", "-t", "R", "-o", "%N").strip()  # n[0-1]
        number = int(slurm.call("scontrol", "show", "hostnames", name).split()[-1][1:])
        slurm.stop(f"n{number}", how=signal.SIGKILL)
        for process in psutil.process_iter(["cmdline"]):  # a machine that is lost takes its processes with it
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == f"n{number}":
                    process.kill()

    steps = {"train.max_steps": 80, "train.checkpoint_every": 20, "train.evaluate_every": 40, "train.micro_batch": 2}
    document = tiny(steps).model_dump(mode="json") | {"platform": settings_of().model_dump(mode="json")}
    config = validated(RunConfig, document, where="test")
    monkeypatch.setattr(SlurmPlatform, "poll_seconds", 0.5)
    with ThreadPoolExecutor(1) as aside:
        lost = aside.submit(lose_after_a_checkpoint)
        done = run_again(config)
        lost.result()
    assert done.final.step == 80
    rows = list(rows_of(plan_run(config).storage.read("metrics.jsonl").decode()))
    first, second = [row["step"] for row in rows if row["kind"] == "start"]
    assert (first, second >= 20) == (0, True), (first, second)
    assert sorted(curve(rows, "step", "loss")) == list(range(1, 81))
    assert slurm.live() == []
