"""Slurm as a platform, by its commands: here, or on a login node through `ssh`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

import psutil

from launcher.errors import LauncherError, LoginProblem, NotInstalled, PlatformRefused, PlatformUnreachable, finding_of
from launcher.job import UNBUILT, Job, JobId, JobState, JobStatus, LogPage, Submission
from launcher.platforms.log_files import page_of
from launcher.platforms.slurm.render import SlurmJob, render
from launcher.platforms.slurm.settings import SlurmPlatformConfig, seconds_of
from launcher.runs.diagnosis import exit_codes
from litgpt_demo.errors import EXIT_CODES, Fault, Finding
from litgpt_demo.storage import is_remote, open_storage
from litgpt_demo.storage.private import make_private

SUBMITTED, CANCELLED = "submission.json", "cancelled.json"
"""The files in the attempt's folder that say what Slurm forgets, soon after a job's end where there are no accounts."""

_WORDS = {
    JobState.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
    JobState.RUNNING: "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING RESIZING STAGE_OUT",
    JobState.SUCCEEDED: "COMPLETED",
    JobState.FAILED: "FAILED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY BOOT_FAIL DEADLINE REVOKED",
    JobState.CANCELLED: "CANCELLED",
}
"""Slurm's words (https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES). Another one is UNKNOWN."""
_STATES = {word: state for state, words in _WORDS.items() for word in words.split()}

_MEANS = {
    "TIMEOUT": Fault.PREEMPTED, "PREEMPTED": Fault.PREEMPTED, "NODE_FAIL": Fault.NODE, "BOOT_FAIL": Fault.NODE,
    "OUT_OF_MEMORY": Fault.OUT_OF_MEMORY,
}  # fmt: skip
"""The class of an end that Slurm brought about, for nodes that could not say it themselves."""

# https://slurm.schedmd.com/job_reason_codes.html; those that are not here are shown as they are.
_REASONS = {
    "Priority": ("jobs of a higher priority come first", "wait, or take another partition or qos"),
    "Resources": ("the nodes that it needs are in use", "wait, or ask for fewer nodes or less time"),
    "ReqNodeNotAvail": ("nodes that it needs are down, drained or reserved", "see `sinfo -R`, or exclude fewer nodes"),
    "PartitionTimeLimit": ("platform.time is longer than the partition allows", "shorten it: see `sinfo -o '%P %l'`"),
    "PartitionNodeLimit": ("the partition allows fewer nodes", "lower platform.nodes, or take another partition"),
    "PartitionDown": ("the partition is down", "take another one: see `sinfo`"),
    "PartitionInactive": ("the partition is inactive", "take another one: see `sinfo`"),
    "BadConstraints": ("no nodes have what platform.constraint asks for", "see `sinfo -o '%P %f'`"),
    "JobHeldUser": ("you hold it", "scontrol release it"),
    "JobHeldAdmin": ("an administrator holds it", "ask them"),
    "BeginTime": ("its time to begin has not come", "wait: a requeued job is held back for two minutes"),
    "InvalidAccount": ("platform.account is not valid", "see `sacctmgr show associations user=$USER`"),
    "InvalidQOS": ("platform.qos is not valid", "see `sacctmgr show associations user=$USER format=qos`"),
    "Licenses": ("it waits for a licence", "wait"),
    "Reservation": ("its reservation has not begun", "wait, or leave platform.reservation out"),
}
_LIMIT = re.compile(r"(Assoc|QOS)(?P<who>Max|Grp|)(?P<what>.*)")

# What slurmctld, munge or the way to them say when they are away for a while (src/common/slurm_errno.c), and ssh.
_AWAY = re.compile(
    r"Unable to contact slurm controller|Connection (?:refused|reset)|Zero Bytes"
    r"|temporarily unable|Resource temporarily unavailable|communication connection failure|Munge|authentication"
    r"|slurmdbd|config source|DNS SRV|Could not resolve|kex_exchange|Connection closed|timed out|No route to host",
    re.IGNORECASE,
)
_OVER = re.compile(r"Invalid job id|already completing or completed", re.IGNORECASE)
_NO_ACCOUNTS = re.compile("accounting storage is disabled", re.IGNORECASE)
_PATIENCE = 60.0
"""Seconds that one command may take."""
_FRESH = 2.0
"""Seconds for which one list of the queue answers for all jobs that are looked at."""
_FORMAT = "%i|%T|%r|%S|%N|%j"
"""Fields of squeue that releases from 20.02 on have: number, state, reason, start, nodes, name."""
_IN_SECONDS = {"SLURM_TIME_FORMAT": "%s"}
"""squeue and sacct print times of the cluster's zone, which may be another one; with this, seconds since 1970."""
_LOCAL_DISKS = {"ext4", "ext3", "xfs", "btrfs", "tmpfs", "overlay", "apfs"}


class _Row(NamedTuple):
    number: int
    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""


class SlurmPlatform:
    """Runs the nodes of a job as the tasks of one step, a node each; the job's name is its attempt's.

    Args:
        settle: seconds that nodes' reports may take to be seen here once the job has ended.
    """

    name: ClassVar[str] = "slurm"
    anywhere: ClassVar[bool] = True
    poll_seconds: ClassVar[float] = 10.0

    def __init__(self, settings: SlurmPlatformConfig, *, settle: float = 20.0) -> None:
        self._settings, self._settle = settings, settle
        self._user, self._queue = "", dict[str, list[_Row]]()
        self._asked, self._lock = -_FRESH, threading.Lock()
        self._settled: set[JobId] = set()

    def render(self, job: Job) -> Submission:
        return render(job, self._settings)

    def check(self, submission: Submission) -> Iterator[Finding]:
        settings, directory = self._settings, SlurmJob.of(submission.job_id).directory
        yield from settings.fabric.problems
        if not is_remote(directory):
            disks = [disk for disk in psutil.disk_partitions(all=True) if directory.startswith(disk.mountpoint)]
            kind = max(disks, key=lambda disk: len(disk.mountpoint)).fstype if disks else ""
            if kind in _LOCAL_DISKS:
                what = f"the run's folder {directory} is on a disk of this machine ({kind}), which nodes may not see"
                yield Finding("warning", "slurm.root", what, "take a root on a file system that all nodes mount")
        table = ""
        try:
            table = self._run("sinfo", "-h", "-o", "%P %a %l %D %G")
            for name, _, limit, *_ in map(str.split, table.splitlines()):
                most, wanted = seconds_of(limit), seconds_of(settings.time or "")
                chosen = name.rstrip("*") == settings.partition if settings.partition else name.endswith("*")
                if chosen and most and wanted and wanted > most:  # Slurm takes such a job, and never starts it
                    what = f"platform.time={settings.time}, and the partition {name.rstrip('*')} allows {limit}"
                    yield Finding("error", "slurm.time", what, "shorten it: the next attempt goes on where one ends")
            # The controller itself says whether the partition, account, qos and nodes are to be had; nothing is made.
            self._run("sbatch", "--test-only", given=submission.body["script"])
        except PlatformRefused as error:
            there = "; ".join(table.splitlines())
            fix = f"take what the cluster has (partition, its state and time limit, nodes, their GPUs): {there}"
            yield Finding("error", "slurm.refused", error.what, fix)
        except LauncherError as error:
            codes = {NotInstalled: "commands", LoginProblem: "login"}
            yield finding_of(error, f"slurm.{codes.get(type(error), 'controller')}")

    def avoidable(self, job: Job) -> tuple[int | None, str]:
        return None, "ask the cluster's administrator to drain the node"

    def check_access(self) -> str:
        where = f" on {self._settings.host}" if self._settings.host else ""
        self._run("sinfo", "-h", "-o", "%P")
        return f"Slurm answers{where}: {self._run('sinfo', '--version').strip()}"

    def submit(self, submission: Submission) -> JobId:
        job, script = SlurmJob.of(submission.job_id), submission.body["script"]
        if UNBUILT in script:
            raise PlatformRefused("the image is not known yet", fix="run the image step first, or name a prebuilt one")
        attempt = open_storage(job.directory)
        if self._rows(job.name, fresh=True) or attempt.exists(SUBMITTED):
            return submission.job_id
        if not is_remote(job.directory):  # Slurm does not make the folder of its output
            make_private(Path(job.directory))
        number = int(self._run("sbatch", "--parsable", given=script).partition(";")[0])
        # Of two that submit at once the first stays.
        if others := [row for row in self._rows(job.name, fresh=True) if row.number < number]:
            self._run("scancel", str(number))
            number = min(row.number for row in others)
        attempt.write(SUBMITTED, json.dumps({"job_id": submission.job_id, "number": number}).encode())
        return submission.job_id

    def gave(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        job = SlurmJob.of(job_id)
        return (job.place, job.name, job.directory) == (self._settings.host or "", attempt_name, directory)

    def status(self, job_id: JobId) -> JobStatus:
        """Return what the queue says, else the accounts, else what the nodes have left in the run's folder."""
        job = SlurmJob.of(job_id)
        row, attempt = self._row(job.name), open_storage(job.directory)
        word = row.state if row else ""
        state, started = _STATES.get(word, JobState.UNKNOWN), _moment(row.start) if row else None
        if row and state.live:
            reasons = (_reason(row),) if state is JobState.PENDING and row.reason not in {"None", ""} else ()
            begun = started if state is JobState.RUNNING else None
            # Where Slurm's list has one name each; a range such as n[0-3] is left to the reports.
            hosts = dict(enumerate(row.nodes.split(","))) if row.nodes and "[" not in row.nodes else {}
            return JobStatus(
                state=state, native=word, reasons=reasons, scheduled=begun, started=begun, pulled=begun, hosts=hosts
            )
        patience = self._settle if row and job_id not in self._settled else 0.0
        codes = exit_codes(attempt, nodes=job.nodes, patience=patience)
        self._settled.add(job_id)
        if attempt.exists(CANCELLED):
            state = JobState.CANCELLED
        elif row is None and not attempt.exists(SUBMITTED):
            return JobStatus(state=JobState.ABSENT, native="absent")
        elif row is None or (state is JobState.SUCCEEDED and any(codes.values())):
            done = len(codes) == job.nodes and not any(codes.values())
            state = JobState.SUCCEEDED if done else JobState.FAILED
        if word in _MEANS:
            codes = dict.fromkeys(range(job.nodes), EXIT_CODES[_MEANS[word]]) | codes
        native = word or "no longer known to Slurm"
        return JobStatus(state=state, native=native, exit_codes=codes, started=started, scheduled=started)

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        job = SlurmJob.of(job_id)
        row = self._row(job.name)  # asked before reading: what an ended job leaves unfinished is a line too
        ended = row is None or _STATES.get(row.state, JobState.UNKNOWN).final
        return page_of(open_storage(job.directory), job.nodes, position, ended=ended)

    def cancel(self, job_id: JobId) -> None:
        """Let the nodes save, then end the job; what is left is asked for until nothing is."""
        job = SlurmJob.of(job_id)
        rows = self._live(job.name)
        if rows:
            open_storage(job.directory).write(CANCELLED, json.dumps({"cancelled": time.time()}).encode())
        for row in rows:
            if row.state == "RUNNING":
                self._run("scancel", "--signal=TERM", str(row.number), unless=_OVER)
        save, deadline = time.monotonic() + self._settings.grace, time.monotonic() + self._settings.grace + 120
        while rows := self._live(job.name):
            if not any(row.state == "RUNNING" for row in rows) or time.monotonic() > save:
                for row in rows:
                    self._run("scancel", str(row.number), unless=_OVER)
            if time.monotonic() > deadline:
                what = f"{job.name} is still {rows[0].state} after it was cancelled"
                raise PlatformUnreachable(what, fix=f"see `scontrol show job {rows[0].number}`, and cancel it again")
            time.sleep(1.0)

    def left(self, job_id: JobId) -> tuple[str, ...]:
        return tuple(f"job {row.number} ({row.state})" for row in self._live(SlurmJob.of(job_id).name))

    def _live(self, name: str) -> list[_Row]:
        rows = self._rows(name, fresh=True)
        return [row for row in rows if not _STATES.get(row.state, JobState.UNKNOWN).final]

    def _row(self, name: str) -> _Row | None:
        if rows := self._rows(name):
            return min(rows)
        since = datetime.fromtimestamp(time.time() - 90 * 86_400).strftime("%Y-%m-%d")
        words = ("sacct", "-n", "-X", "-P", "-S", since, f"--name={name}", "-o", "JobIDRaw,State,Start,NodeList")
        told = [line.split("|") for line in self._run(*words, unless=_NO_ACCOUNTS).splitlines()]
        rows = [_Row(int(number), state.split()[0], "", start, nodes) for number, state, start, nodes in told]
        return min(rows, default=None)

    def _rows(self, name: str, *, fresh: bool = False) -> list[_Row]:
        """Return the jobs of that name in the queue, which one command lists for all that look at the same time."""
        with self._lock:
            if fresh or time.monotonic() > self._asked + _FRESH:
                self._user = self._user or self._run("id", "-un").strip()
                self._queue = {}
                for line in self._run("squeue", "-h", "-t", "all", "-u", self._user, "-o", _FORMAT).splitlines():
                    number, state, reason, start, nodes, known = line.split("|", 5)
                    if number.isdecimal():  # the tasks of an array are none of ours
                        row = _Row(int(number), state, reason, start, nodes)
                        self._queue.setdefault(known, []).append(row)
                self._asked = time.monotonic()
            return self._queue.get(name, [])

    def _run(self, *words: str, given: str = "", unless: re.Pattern[str] | None = None) -> str:
        """Return what a command prints; `unless` has words of a no that is none."""
        host = self._settings.host
        env = _IN_SECONDS if words[0] in {"squeue", "sacct"} else {}
        command = [*words]
        if host is not None:
            prefix = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
            command = ["ssh", "-o", "BatchMode=yes", "--", host, shlex.join([*prefix, *words])]
        if shutil.which(command[0]) is None:
            fix = "run it on a login node of the cluster, or name one: platform.host"
            raise NotInstalled(f"platform.kind=slurm needs `{command[0]}`, which is not on PATH", fix=fix)
        try:
            done = subprocess.run(
                command, input=given, text=True, capture_output=True, timeout=_PATIENCE, check=False, errors="replace",
                env={**os.environ, **env},
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise PlatformUnreachable(f"`{shlex.join(words)}` did not end within {_PATIENCE:.0f} s") from error
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if done.returncode == 0 or (unless is not None and unless.search(said)):
            return done.stdout
        what = f"`{words[0]}` says: {said[:1000]}"
        if host is not None and done.returncode == 255:
            if "Permission denied" in said or "Host key verification" in said:
                raise LoginProblem(f"ssh {host}: {said[:1000]}", fix=f"see that `ssh {host} true` asks nothing")
            raise PlatformUnreachable(what)
        if done.returncode == 127:
            raise NotInstalled(f"{host} has no `{words[0]}` on PATH", fix="name a login node of the cluster")
        if _AWAY.search(said):
            raise PlatformUnreachable(what)
        raise PlatformRefused(what, fix="fix what it names in the `platform` section: `sinfo` and `sacctmgr` list it")


def _reason(row: _Row) -> Finding:
    reason = row.reason.strip("()").partition(",")[0]
    what, fix = _REASONS.get(reason, (f"Slurm says {reason}", "see `man squeue`, JOB REASON CODES"))
    if limit := _LIMIT.fullmatch(reason):
        whose = "the account's or user's" if reason.startswith("Assoc") else "the quality of service's"
        kind = "limit on all of its jobs together" if limit["who"] == "Grp" else "limit"
        what, fix = f"{whose} {kind} is reached ({reason})", "wait for other jobs to end, or ask for less"
    start = _moment(row.start)
    expected = (
        f"; Slurm expects it to start at {datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M} UTC" if start else ""
    )
    return Finding("warning", f"slurm.{reason}", f"{what}{expected}", fix)


def _moment(text: str) -> float | None:
    """Return the seconds since 1970 that Slurm printed; None for its words for a time that is not known."""
    return float(text) if text.isdecimal() else None
