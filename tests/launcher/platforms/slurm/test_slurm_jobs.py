"""Slurm by what its commands printed on real daemons (Slurm 22.05): a program in their place prints it again.

The daemons themselves are in tests/real/slurm.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from golden_files import require_golden
from job_handles import handle_of
from pydantic import ValidationError
from slurm_commands import SlurmCommands, slurm_commands
from slurm_node import SlurmNode

from launcher.config import ScriptConfig
from launcher.errors import ConfigProblem, LoginProblem, NotInstalled, PlatformRefused, PlatformUnreachable
from launcher.job import Job, JobId, JobState
from launcher.platforms.slurm.platform import CANCELLED, SUBMITTED, SlurmPlatform
from launcher.platforms.slurm.render import render
from launcher.platforms.slurm.settings import SlurmPlatformConfig, seconds_of
from launcher.runs.attempts import Attempts, platform_opener
from launcher.runs.diagnosis import Action, diagnose
from launcher.runs.index import Index
from litgpt_demo.errors import EXIT_CODES, FailureClass, is_marked_no_retry

FAULTS = {code: fault for fault, code in EXIT_CODES.items()}
NO_ACCOUNTS = "Slurm accounting storage is disabled"
CLUSTER = timezone(timedelta(hours=9))
"""The cluster's time zone, in which Slurm prints times unless it is asked for seconds."""
TAKEN = """
--array=1-3 --job-name=other --job-nam=other --signal=KILL --wrap=true --requeue --export=ALL --output=/tmp/log
--error=/tmp/log --comment=x --nodes=1 --test-only --parsable --clusters=other --cluster=other --wait --help --mem=1G
--gpus=1 --time=5 --ntasks=4 --qui
"""
"""Options of sbatch, some of them shortened, that a config may not have."""
START = int(datetime(2026, 11, 28, 11, 3, 48, tzinfo=UTC).timestamp())


def settings_of(**changes: Any) -> SlurmPlatformConfig:
    return SlurmPlatformConfig.model_validate({"kind": "slurm", "nodes": 2, "network_test": 0, **changes})


def job_of(folder: Path | str, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "name": "owt-1a2b", "attempt": 1, "nodes": 2, "processes": 1, "program": ("-m", "litgpt_demo", "train"),
        "directory": f"{folder}/attempts/1",
    }  # fmt: skip
    return Job(**{**fields, **changes})


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """What each command answers: a text, or a text and an exit code. Returns the commands that were run."""

    def answering(**answers: str | tuple[str, int]) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            program = command
            if command[0] == "ssh" and "ssh" not in answers:  # what the login node's shell does
                program = shlex.split(command[-1])
            in_seconds = len(program) > 2 and "SLURM_TIME_FORMAT=%s" in program[2]
            commands.append(program := program[4:] if program[0] == "sh" else program)
            answer = {"id": "me\n", "sacct": (NO_ACCOUNTS, 1), **answers}.get(program[0], "")
            text, code = (answer, 0) if isinstance(answer, str) else answer
            if not in_seconds:
                text = text.replace(str(START), datetime.fromtimestamp(START, CLUSTER).strftime("%Y-%m-%dT%H:%M:%S"))
            return subprocess.CompletedProcess(command, code, text if code == 0 else "", text if code else "")

        monkeypatch.setattr("launcher.platforms.slurm.platform.subprocess.run", run)
        monkeypatch.setattr("launcher.platforms.slurm.platform.shutil.which", lambda name: f"/usr/bin/{name}")
        return commands

    return answering


def row(state: str, reason: str = "None", start: str = str(START), nodes: str = "n0,n1") -> str:
    others = "13|PENDING|BeginTime|N/A||you|another|(null)\nWelcome to the login node\n"
    return f"9|{state}|{reason}|{start}|{nodes}|me|owt-1a2b-1-000000|(null)\n{others}"


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "root", "changes"),
    [
        ("plain", "/shared/runs/owt", {"venv": "/shared/venv"}),
        (
            "ib",
            "gs://bucket/runs/owt",
            {
                "account": "lab", "partition": "gpu", "qos": "long", "constraint": "h100&ib", "exclude": ["n7"],
                "gpus": 8, "gpu_type": "h100", "cpus": 96, "memory": "0", "time": "24:00:00", "exclusive": True,
                "network": "ib", "modules": ["cuda/12.8"], "options": ["--licenses=lustre"], "network_test": 60,
                "secrets": {"WANDB_API_KEY": "~/.wandb"},
            },
        ),
        ("pyxis", "/shared/runs/owt", {"gres": "gpu:8", "gpus": 8, "container": "pyxis", "mounts": ["/scratch"]}),
        ("apptainer", "/shared/runs/owt", {"gpus": 1, "container": "apptainer", "container_image": "/shared/a.sif"}),
    ],
)  # fmt: skip
def test_batch_script_is_golden(name: str, root: str, changes: dict[str, Any]) -> None:
    settings = settings_of(**changes)
    image = f"registry.example/litgpt@sha256:{'0' * 64}" if name == "pyxis" else None
    job = job_of(root, processes=settings.processes_per_node, secrets=tuple(settings.secrets), image=image,
                 exclude_nodes=("n3",) if name == "ib" else ())  # fmt: skip
    text = SlurmPlatform(settings).render(job).body["script"]
    require_golden(f"slurm/{name}.sh", text)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("variables", "cores"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),4", "SLURM_CPUS_PER_TASK": "3"}, "3"),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),4"}, "4"),
        ({"SLURM_JOB_CPUS_PER_NODE": "96"}, "96"),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)", "SLURM_CPUS_PER_GPU": "8"}, ""),
    ],
    ids=["asked-for", "smallest-node", "one-node", "by-gpus"],
)
def test_step_takes_the_cores_of_the_job(variables: dict[str, str], cores: str, tmp_path: Path) -> None:
    """`srun` inherits no --cpus-per-task; these lines of the script tell it."""
    script = render(job_of(tmp_path), settings_of()).body["script"]
    lines = [line for line in script.splitlines() if re.search(r"^litgpt_cpus=|SRUN_CPUS_PER_TASK", line)]
    lines.append('echo "$SRUN_CPUS_PER_TASK"')
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cores


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": "a day"}, "is not a time limit"),
        ({"time": "1", "grace_period": 60}, "not longer than platform.grace_period"),
        ({"gpus": 2, "processes_per_node": 4}, "ranks cannot share one"),
        ({"mounts": ["/scratch"]}, "need platform.container; set it too"),
        ({"container": "pyxis", "venv": "/venv"}, "not seen in a container"),
        ({"options": ["licenses"]}, "--name=value"),
        ({"options": ["-Jother"]}, "--name=value"),
        *(({"options": [option]}, "would undo what the launcher sets or finds") for option in TAKEN.split()),
        ({"secrets": {"TOKEN": "secret-value"}}, "is not a path"),
        ({"roce_interface": "eth1"}, "is not a setting of platform.network=tcp"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings_of(**changes)


def test_options_of_the_users_own_are_taken() -> None:
    options = ["--licenses=lustre", "--exclusive=user", "--mem-per-cpu=4G", "--gres-flags=x", "--time-min=5", "--hold"]
    assert settings_of(options=options).options == tuple(options)


def test_a_time_limit_is_read_in_every_form_that_slurm_writes() -> None:
    forms = {
        "90": 5400, "1:30": 90, "1:00": 60, "2:00:00": 7200, "1-12": 129_600, "1-12:30": 131_400,
        "2-00:00:30": 172_830, "infinite": None, "UNLIMITED": None, "n/a": None,
    }  # fmt: skip
    assert {text: seconds_of(text) for text in forms} == forms


def test_percent_of_a_root_is_no_replacement(tmp_path: Path) -> None:
    """Slurm replaces `%n` in the paths of its options, and nowhere else."""
    text = SlurmPlatform(settings_of()).render(job_of("/shared/50%n")).body["script"]
    assert "--output=/shared/50%%n/attempts/1/node-%n.log" in text
    assert ": >> /shared/50%n/attempts/1/node-0.log " in text


@pytest.mark.parametrize("character", ["\\", "\n", "\x1b"])
def test_root_that_slurm_cannot_write_is_refused(character: str) -> None:
    with pytest.raises(ConfigProblem, match="which Slurm cannot write in a path; choose a root without"):
        SlurmPlatform(settings_of()).render(job_of(f"/shared/a{character}b"))


# --- on the first node ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "changes", "programs", "message"),
    [
        ("", {"venv": "/nosuch/venv"}, {}, "[slurm.venv] platform.venv=/nosuch/venv has no python"),
        ("", {}, {"python": "exit 127"}, "[slurm.venv] platform.venv is not set, and PATH has no python"),
        ("", {"modules": ["no/1"]}, {"module": "exit 1"}, "[slurm.module] platform.modules: no/1 cannot be loaded"),
        ("", {"secrets": {"TOKEN": "~/no"}}, {}, "[slurm.secret] the file ~/no of platform.secrets.TOKEN cannot be"),
        ("gs://bucket", {"venv": "/nosuch"}, {"python": "exit 1"}, "[slurm.venv] platform.venv=/nosuch has no python"),
        ("", {"container": "pyxis"}, {"srun": "exit 0"}, "[slurm.container] platform.container=pyxis, but this node"),
        ("", {"container": "apptainer", "container_image": "/no"}, {}, "platform.container_image=/no cannot be read"),
        ("unseen", {}, {}, "/unseen/attempts/1 does not exist on this node, or cannot be written"),
    ],
)
def test_job_that_cannot_start_its_nodes_says_why(
    root: str,
    changes: dict[str, Any],
    programs: dict[str, str],
    message: str,
    slurm: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """It is a user error, which no new attempt follows, wherever the run's folder is."""
    node, platform = SlurmNode(tmp_path / "node", **programs), SlurmPlatform(settings_of(**changes), settle=0)
    (tmp_path / "attempts/1").mkdir(parents=True)
    place = root if "://" in root else tmp_path / root
    assert node.run(platform.render(job_of(place)).body["script"]) == EXIT_CODES[FailureClass.USER]
    if not root:
        assert message in (tmp_path / "attempts/1/node-0.log").read_text()
    slurm(squeue=row("FAILED").replace("(null)", node.comment, 1))
    diagnosis = diagnose(platform.status(job_id_of(tmp_path)), [], [], logs="", nodes=2)
    assert (diagnosis.fault, diagnosis.action) == (FailureClass.USER, Action.STOP)
    assert message in diagnosis.evidence
    assert diagnosis.evidence.endswith("(on n0)")


@pytest.mark.parametrize("name", ["TOKEN", "first", "cpus", "step"])
def test_nodes_have_every_secret(name: str, tmp_path: Path) -> None:
    (tmp_path / "attempts/1").mkdir(parents=True)
    (file := tmp_path / "value").write_text('it\'s "a" $(value)\n')
    node = SlurmNode(tmp_path / "node")
    settings = settings_of(secrets={name: str(file), "HOME_FILE": "~/bin/python"})
    assert node.run(SlurmPlatform(settings).render(job_of(tmp_path)).body["script"]) == 0
    assert node.environment[name] == 'it\'s "a" $(value)'
    assert node.environment["HOME_FILE"] == "#!/bin/sh"


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slurm_state", "state", "codes"),
    [
        ("RUNNING", JobState.RUNNING, {}),
        ("COMPLETING", JobState.RUNNING, {}),
        ("A_STATE_OF_TOMORROW", JobState.UNKNOWN, {}),
        ("FAILED", JobState.FAILED, {}),
        ("CANCELLED", JobState.CANCELLED, {}),
        ("TIMEOUT", JobState.FAILED, {0: 45, 1: 45}),
        ("PREEMPTED", JobState.FAILED, {0: 45, 1: 45}),
        ("NODE_FAIL", JobState.FAILED, {0: 43, 1: 43}),
        ("BOOT_FAIL", JobState.FAILED, {0: 43, 1: 43}),
        ("OUT_OF_MEMORY", JobState.FAILED, {0: 42, 1: 42}),
        ("DEADLINE", JobState.FAILED, {}),
    ],
)
def test_each_state_of_slurm_has_one_meaning(
    slurm_state: str, state: JobState, codes: dict[int, int], slurm: Callable[..., Any], tmp_path: Path
) -> None:
    slurm(squeue=row(slurm_state))
    platform = SlurmPlatform(settings_of(), settle=0)
    seen = platform.status(platform.render(job_of(tmp_path)).job_id)
    assert (seen.state, seen.native, seen.exit_codes) == (state, f"{slurm_state} (job 9)", codes)


def test_end_that_a_node_reports_wins_over_slurms_word(slurm: Callable[..., Any], tmp_path: Path) -> None:
    """A rank ran out of memory, and its peer waited for it until the time was up."""
    slurm(squeue=row("TIMEOUT"))
    (tmp_path / "attempts/1").mkdir(parents=True)
    report_end(tmp_path, 42)
    assert SlurmPlatform(settings_of(), settle=0).status(job_id_of(tmp_path)).exit_codes == {0: 42, 1: 45}


@pytest.mark.parametrize(
    ("word", "codes", "state"),
    [
        ("COMPLETED", (0, 44), JobState.FAILED), ("COMPLETED", (0, 0), JobState.SUCCEEDED),
        ("TIMEOUT", (0, 0), JobState.SUCCEEDED), ("NODE_FAIL", (0, 0), JobState.SUCCEEDED),
        ("TIMEOUT", (0,), JobState.FAILED),
    ],
)  # fmt: skip
def test_job_succeeds_when_all_of_its_nodes_do(
    word: str, codes: tuple[int, ...], state: JobState, slurm: Callable[..., Any], tmp_path: Path
) -> None:
    slurm(squeue=row(word))
    (tmp_path / "attempts/1").mkdir(parents=True)
    report_end(tmp_path, *codes)
    assert SlurmPlatform(settings_of(), settle=0).status(job_id_of(tmp_path)).state is state


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Priority", "job 9: jobs of a higher priority come first"),
        ("AssocGrpGRES", "the account's or user's limit on all of its jobs together is reached"),
        ("QOSMaxJobsPerUserLimit", "the quality of service's limit is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "nodes that it needs are down, drained or reserved"),
        ("AReasonOfTomorrow", "Slurm says AReasonOfTomorrow"),
    ],
)
def test_waiting_job_has_a_reason_and_an_expected_start(
    reason: str, message: str, slurm: Callable[..., Any], tmp_path: Path
) -> None:
    slurm(squeue=row("PENDING", reason, nodes=""))
    platform = SlurmPlatform(settings_of())
    seen = platform.status(platform.render(job_of(tmp_path)).job_id)
    assert seen.state is JobState.PENDING
    assert message in seen.reasons[0].what
    assert seen.native == "PENDING (job 9), which Slurm expects to start at 2026-11-28 11:03 UTC"
    slurm(squeue=row("PENDING", reason, nodes="", start=str(START + 600)))
    assert SlurmPlatform(settings_of()).status(platform.render(job_of(tmp_path)).job_id).reasons == seen.reasons


@pytest.mark.parametrize(
    ("reason", "lasts"),
    [
        ("BadConstraints", True), ("InvalidAccount", True), ("PartitionTimeLimit", True), ("QOSNotAllowed", True),
        ("AssocMaxNodePerJobLimit", True), ("AssocGrpCPUMinutesLimit", True), ("QOSMinGRES", True),
        ("AssocGrpCPURunMinutesLimit", False), ("AssocGrpNodeLimit", False), ("QOSMaxNodePerUserLimit", True),
        ("Priority", False), ("JobHeldUser", False), ("AReasonOfTomorrow", False), ("PartitionNodeLimit", False),
    ],
)  # fmt: skip
def test_job_that_cannot_start_is_refused_in_time(
    reason: str, lasts: bool, slurm: Callable[..., Any], tmp_path: Path
) -> None:
    slurm(squeue=row("PENDING", f"({reason})", nodes=""))
    job_id = job_id_of(tmp_path)
    assert SlurmPlatform(settings_of()).status(job_id).refused is None, "somebody may be mending it"
    refused = SlurmPlatform(settings_of(admission_timeout=0)).status(job_id).refused
    assert (refused is not None) == lasts


@pytest.mark.parametrize("reason", ["QOSMaxNodePerUserLimit", "AssocMaxJobsLimit"])
def test_limit_on_a_users_jobs_passes_while_one_runs(reason: str, slurm: Callable[..., Any], tmp_path: Path) -> None:
    slurm(squeue=row("PENDING", reason, nodes="") + "14|RUNNING|None|N/A|n0|me|another|(null)\n")
    seen = SlurmPlatform(settings_of(admission_timeout=0)).status(job_id_of(tmp_path))
    assert (seen.reasons[0].severity, seen.refused) == ("warning", None)


@pytest.mark.parametrize("host", [None, "me@login"])
def test_a_start_is_read_alike_in_every_time_zone(host: str | None, slurm: Callable[..., Any], tmp_path: Path) -> None:
    slurm(squeue=row("RUNNING"))
    platform = SlurmPlatform(settings_of(host=host), settle=0)
    job_id = platform.render(job_of(tmp_path)).job_id
    assert platform.status(job_id).scheduled == START
    slurm(sacct=f"9|FAILED|{START}|n[0-1]|me|owt-1a2b-1-000000|\n")
    (tmp_path / "attempts/1").mkdir(parents=True)
    record = {"name": "owt-1a2b-1-000000", "user": "me", "cluster": "", "number": 9}
    (tmp_path / "attempts/1" / SUBMITTED).write_text(json.dumps(record))
    platform = SlurmPlatform(settings_of(host=host), settle=0)
    assert platform.status(job_id).scheduled == START
    slurm(squeue=row("PENDING", start="N/A"))
    assert SlurmPlatform(settings_of(host=host), settle=0).status(job_id).scheduled is None


def test_one_look_at_the_queue_answers_for_state_and_logs(slurm: Callable[..., Any], tmp_path: Path) -> None:
    commands = slurm(squeue=row("RUNNING"))
    platform = SlurmPlatform(settings_of())
    job_id = platform.render(job_of(tmp_path)).job_id
    platform.status(job_id)
    platform.logs(job_id)
    assert [command[0] for command in commands].count("squeue") == 1


@pytest.fixture
def cluster() -> Iterator[SlurmCommands]:
    with slurm_commands() as cluster:
        yield cluster


def submitted(folder: Path, **changes: Any) -> tuple[SlurmPlatform, JobId]:
    platform = SlurmPlatform(settings_of(), settle=0)
    return platform, platform.submit(platform.render(job_of(folder, **changes)))


def report_end(folder: Path, *codes: int) -> None:
    for node, code in enumerate(codes):
        fault = FAULTS.get(code)
        report = {"node": node, "exit_code": code, "fault": fault, "message": "", "ended": 1.0}
        (folder / f"attempts/1/node-{node}.json").write_text(json.dumps(report))


def test_forgotten_job_is_judged_by_its_nodes_reports(cluster: SlurmCommands, tmp_path: Path) -> None:
    _, job_id = submitted(tmp_path)
    cluster.forget(77)
    platform = SlurmPlatform(settings_of(), settle=0)
    assert platform.status(job_id).state is JobState.FAILED, "its own user sees every job of theirs"
    report_end(tmp_path, 0, 0)
    assert platform.status(job_id).state is JobState.SUCCEEDED
    (tmp_path / "attempts/1" / CANCELLED).write_text("{}")
    assert platform.status(job_id).state is JobState.CANCELLED


def test_forgotten_job_is_found_in_the_accounts(cluster: SlurmCommands, tmp_path: Path) -> None:
    cluster.keeps_accounts = True
    _, job_id = submitted(tmp_path)
    cluster.jobs[77].state = "NODE_FAIL"
    cluster.forget(77)
    cluster.user = "bob"
    seen = SlurmPlatform(settings_of(), settle=0).status(job_id)
    assert (seen.state, seen.native, seen.exit_codes) == (JobState.FAILED, "NODE_FAIL (job 77)", {0: 43, 1: 43})


def test_second_user_sees_a_running_job(cluster: SlurmCommands, tmp_path: Path) -> None:
    _, job_id = submitted(tmp_path)
    cluster.user = "bob"
    platform = SlurmPlatform(settings_of(), settle=0)
    assert platform.status(job_id).state is JobState.RUNNING
    assert platform.remaining_resources(job_id) == ("job 77 (RUNNING)",)
    with pytest.raises(PlatformRefused, match=r"job 77 is alice's, and Slurm does not let bob end.*have alice cancel"):
        platform.cancel(job_id)
    assert not (tmp_path / "attempts/1" / CANCELLED).exists(), "the job goes on, and must not look cancelled later"
    assert platform.submit(platform.render(job_of(tmp_path))) == job_id
    assert len(cluster.live()) == 1


def test_second_user_of_hidden_jobs_is_referred_to_the_first(cluster: SlurmCommands, tmp_path: Path) -> None:
    cluster.hides_jobs = True
    _, job_id = submitted(tmp_path)
    cluster.user = "bob"
    platform = SlurmPlatform(settings_of(), settle=0)
    for verb in (platform.status, platform.cancel, platform.remaining_resources):
        with pytest.raises(
            PlatformUnreachable, match=r"submitted by alice on.*it may be running.*run this as alice"
        ) as no:
            verb(job_id)
        assert is_marked_no_retry(no.value), "asking again does not help"
    report_end(tmp_path, 0, 0)
    assert platform.status(job_id).state is JobState.SUCCEEDED


def test_second_user_asks_again_while_the_first_submits(cluster: SlurmCommands, tmp_path: Path) -> None:
    """The submitter is written down and sbatch has not answered: the job is no longer unknown in a moment."""
    _, job_id = submitted(tmp_path)
    written = tmp_path / "attempts/1" / SUBMITTED
    written.write_text(json.dumps({**json.loads(written.read_text()), "number": None}))
    job, cluster.user = cluster.jobs.pop(77), "bob"
    platform = SlurmPlatform(settings_of(), settle=0)
    with pytest.raises(PlatformUnreachable, match="it may be running") as no:
        platform.status(job_id)
    assert not is_marked_no_retry(no.value)
    cluster.jobs[77] = job
    assert SlurmPlatform(settings_of(), settle=0).status(job_id).state is JobState.RUNNING


def test_greeting_of_a_login_shell_is_no_partition(
    cluster: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = cluster._sinfo
    monkeypatch.setattr(cluster, "_sinfo", lambda *arguments: (0, f"Welcome!\n\n{answer(*arguments)[1]}"))
    platform = SlurmPlatform(settings_of(), settle=0)
    assert not [finding for finding in platform.check(platform.render(job_of(tmp_path))) if finding.severity == "error"]


def test_number_that_names_another_job_is_not_believed(cluster: SlurmCommands, tmp_path: Path) -> None:
    platform, job_id = submitted(tmp_path)
    cluster.jobs[77].name = "somebody-elses"
    assert not SlurmPlatform(settings_of(), settle=0).status(job_id).state.is_live
    platform.cancel(job_id)
    assert cluster.jobs[77].state == "RUNNING"


def test_old_job_of_a_deleted_root_is_not_the_new_job(cluster: SlurmCommands, tmp_path: Path) -> None:
    cluster.keeps_accounts = True
    submitted(tmp_path / "old", nonce="aaaaaa", root="/root")
    cluster.jobs[77].state = "COMPLETED"
    platform, job_id = SlurmPlatform(settings_of(), settle=0), job_id_of(tmp_path, nonce="bbbbbb", root="/root")
    assert platform.status(job_id).state is JobState.ABSENT
    assert submitted(tmp_path, nonce="bbbbbb", root="/root")[1] == job_id
    assert [job.number for job in cluster.live()] == [78]


BANNER = "Welcome to the cluster\n2026\n"


@pytest.mark.parametrize(
    "output",
    [(0, f"{BANNER}77\n"), (0, f"{BANNER}77;cluster\n"), (0, "Your job was handed in.\n"), (1, "sbatch: error: new")],
    ids=["number", "cluster", "no number", "refusal"],
)
def test_submitted_job_is_found_whatever_sbatch_prints(
    output: tuple[int, str], cluster: SlurmCommands, tmp_path: Path
) -> None:
    cluster.answer = output
    platform, job_id = submitted(tmp_path)
    assert platform.status(job_id).native == "RUNNING (job 77)"
    assert json.loads((tmp_path / "attempts/1" / SUBMITTED).read_text())["number"] == 77
    assert [job.number for job in cluster.live()] == [77]


@pytest.mark.parametrize("code", [-9, 137], ids=["here", "by a shell"])
def test_job_of_a_killed_sbatch_is_not_doubled(code: int, cluster: SlurmCommands, tmp_path: Path) -> None:
    cluster.answer = (code, "")
    with pytest.raises(PlatformUnreachable):
        submitted(tmp_path)
    submitted(tmp_path)
    assert [job.number for job in cluster.live()] == [77]


def test_sbatch_without_a_job_is_no_answer(slurm: Callable[..., Any], tmp_path: Path) -> None:
    slurm(sbatch=BANNER.replace("2026", "Try again"))
    with pytest.raises(PlatformUnreachable, match="`sbatch` did not print the number of a job, but 'Welcome"):
        submitted(tmp_path)


def test_greetings_are_no_part_of_an_answer(slurm: Callable[..., Any]) -> None:
    slurm(sinfo=f"{BANNER}slurm-wlm 22.05.8\n", id=f"{BANNER}\nalice\n")
    platform = SlurmPlatform(settings_of(host="me@login"))
    assert platform.check_access() == "Slurm answers on me@login: slurm-wlm 22.05.8"
    assert platform._whoami == ("alice", "")
    slurm(sinfo=BANNER)
    with pytest.raises(PlatformUnreachable, match="`sinfo --version` printed 'Welcome"):
        platform.check_access()


def test_job_that_left_the_queue_is_not_submitted_again(cluster: SlurmCommands, tmp_path: Path) -> None:
    _, job_id = submitted(tmp_path)
    cluster.forget(77)
    assert submitted(tmp_path)[1] == job_id
    assert cluster.live() == []


def test_cancel_leaves_nodes_the_time_to_save(cluster: SlurmCommands, tmp_path: Path) -> None:
    platform, job_id = submitted(tmp_path)
    platform.cancel(job_id)
    assert [call for call in cluster.calls if call[0] == "scancel"] == [["scancel", "--signal=TERM", "77"]]
    assert platform.status(job_id).state is JobState.CANCELLED


def test_record_of_a_submission_is_read_once(
    cluster: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is looked at every ten seconds, for days."""
    platform, job_id = submitted(tmp_path)
    platform.status(job_id)
    (tmp_path / "attempts/1" / SUBMITTED).unlink()
    cluster.forget(77)
    monkeypatch.setattr("launcher.platforms.slurm.platform._FRESH", 0.0)
    assert platform.status(job_id).state is JobState.FAILED


@pytest.mark.parametrize("host", [None, "me@login"])
def test_variables_of_slurm_change_no_command(
    host: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a profile's, or those of an allocation in which the launcher runs."""
    (folder := tmp_path / "bin").mkdir()
    for name in ("sinfo", "sbatch"):
        (folder / name).write_text("#!/bin/sh\nenv | grep -E '^(S[A-Z_]+|OTHER)=(a b|%s)' | sort\n")
    (folder / "ssh").write_text('#!/bin/sh\nfor word; do :; done; exec sh -c "$word"\n')
    for file in folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("SBATCH_PARTITION", "SBATCH_JOB_NAME", "SLURM_JOB_ID", "SQUEUE_PARTITION", "SLURM_CONF", "OTHER"):
        monkeypatch.setenv(name, "a b")
    run = SlurmPlatform(settings_of(host=host))._run
    assert run("sbatch") == "OTHER=a b\nSLURM_CONF=a b\n"
    assert run("sinfo") == "OTHER=a b\nSLURM_CONF=a b\nSLURM_TIME_FORMAT=%s\n"


def job_id_of(folder: Path, **changes: Any) -> JobId:
    return SlurmPlatform(settings_of()).render(job_of(folder, **changes)).job_id


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
         PlatformUnreachable),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", PlatformUnreachable),
        ("sbatch: error: invalid partition specified: nope", PlatformRefused),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
         PlatformRefused),
    ],
)  # fmt: skip
def test_refusal_differs_from_no_answer(
    message: str, kind: type[Exception], slurm: Callable[..., Any], tmp_path: Path
) -> None:
    slurm(sbatch=(message, 1))
    platform = SlurmPlatform(settings_of())
    with pytest.raises(kind, match="`sbatch` says"):
        platform.submit(platform.render(job_of(tmp_path)))
    assert (tmp_path / "attempts/1" / SUBMITTED).exists() is (kind is PlatformUnreachable), "it may have been submitted"
    assert platform.status(platform.render(job_of(tmp_path)).job_id).state is JobState.ABSENT


def test_ssh_to_a_login_node_never_prompts(slurm: Callable[..., Any], tmp_path: Path) -> None:
    commands = slurm(ssh=("me@login: Permission denied (publickey).", 255))
    platform = SlurmPlatform(settings_of(host="me@login"))
    with pytest.raises(LoginProblem, match="Permission denied"):
        platform.check_access()
    assert commands[0][:7] == ["ssh", "-o", "BatchMode=yes", "-o", "ForwardAgent=no", "--", "me@login"]
    slurm(ssh=("ssh: connect to host login port 22: Connection refused", 255))
    with pytest.raises(PlatformUnreachable):
        platform.check_access()


def test_login_node_of_a_record_needs_one_the_user_names(
    slurm: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write to the root can have a record name another host."""
    commands, settings = slurm(), settings_of(host="me@evil.example")
    script = {"name": "pi", "root": str(tmp_path), "script": "/pi.py", "platform": settings.model_dump()}
    record = handle_of(ScriptConfig.model_validate(script)).reattach_or_create()
    attempts = Attempts(index=Index.of(str(tmp_path)), run=record.run)
    commands.clear()
    elsewhere = platform_opener(settings_of(host="me@login"))
    for known, opening in (("", attempts.open_platform), ("me@login", attempts.open_platform), ("", elsewhere)):
        monkeypatch.setenv("TRAIN_LITGPT_SLURM_HOST", known)
        with pytest.raises(ConfigProblem, match=r"export TRAIN_LITGPT_SLURM_HOST=me@evil\.example"):
            replace(attempts, open_platform=opening).cancel()
    assert commands == []
    assert replace(attempts, open_platform=platform_opener(settings)).last() is not None
    monkeypatch.setenv("TRAIN_LITGPT_SLURM_HOST", "me@evil.example")
    assert attempts.last() is not None


def test_error_names_a_login_node_when_slurm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.platforms.slurm.platform.shutil.which", lambda _: None)
    with pytest.raises(NotInstalled, match=r"login node.*platform\.host"):
        SlurmPlatform(settings_of()).check_access()


def test_check_finds_jobs_that_slurm_refuses_or_never_starts(slurm: Callable[..., Any], tmp_path: Path) -> None:
    table = "main* up 2:00:00 3 (null)\nshort up 1:00 3 (null)\n"
    slurm(sinfo=table, sbatch=("allocation failure: Requested node configuration is not available", 1))
    platform = SlurmPlatform(settings_of(time="3:00:00"))
    found = {finding.code: finding for finding in platform.check(platform.render(job_of(tmp_path)))}
    assert "platform.time=3:00:00, but the partition main allows 2:00:00" in found["slurm.time"].what
    assert "main* up 2:00:00 3 (null); short up 1:00 3 (null)" in found["slurm.refused"].fix
