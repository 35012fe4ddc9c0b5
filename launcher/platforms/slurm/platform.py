"""Slurm as a platform, by its commands on this machine or on a login node through `ssh`."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import Annotated, ClassVar, NamedTuple

import psutil
from pydantic import Field

from launcher.errors import (
    LauncherError,
    LoginProblem,
    NotInstalled,
    PlatformRefused,
    PlatformUnreachable,
    finding_of,
    rival,
)
from launcher.job import RUN_LABEL, UNBUILT, Job, JobId, JobState, JobStatus, LogPage, Submission
from launcher.platforms.log_files import exit_codes, page_of
from launcher.platforms.slurm.render import FAILED, SlurmJob, render
from launcher.platforms.slurm.settings import SlurmPlatformConfig, seconds_of
from litgpt_demo import timeouts
from litgpt_demo.config import Settings
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import EXIT_CODES, FailureClass, Finding, Severity
from litgpt_demo.storage import Storage, is_remote, open_storage
from litgpt_demo.storage.private import make_private

SUBMITTED, CANCELLED = "submission.json", "cancelled.json"
"""Files in the attempt's folder. Without accounting, Slurm forgets a job soon after its end."""

_STATE_CODES = {
    JobState.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
    JobState.RUNNING: "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING RESIZING STAGE_OUT",
    JobState.SUCCEEDED: "COMPLETED",
    JobState.FAILED: "FAILED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY BOOT_FAIL DEADLINE REVOKED",
    JobState.CANCELLED: "CANCELLED",
}
"""Slurm's codes (https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES). Any other code is UNKNOWN."""
_STATES = {code: state for state, codes in _STATE_CODES.items() for code in codes.split()}

_FAILURE_CLASSES = {
    "TIMEOUT": FailureClass.PREEMPTED,
    "PREEMPTED": FailureClass.PREEMPTED,
    "NODE_FAIL": FailureClass.NODE,
    "BOOT_FAIL": FailureClass.NODE,
    "OUT_OF_MEMORY": FailureClass.OUT_OF_MEMORY,
}
"""The class of an end that Slurm brought about, for nodes that could not say it themselves."""

# https://slurm.schedmd.com/job_reason_codes.html; those that are not here are shown as they are.
_REASONS = {
    "Priority": ("jobs of a higher priority come first", "wait, or set another platform.partition or qos"),
    "Resources": ("the nodes that it needs are in use", "wait, or request fewer nodes or less time"),
    "ReqNodeNotAvail": ("nodes that it needs are down, drained or reserved", "see `sinfo -R`, or exclude fewer nodes"),
    "PartitionTimeLimit": ("platform.time is longer than the partition allows", "lower it: see `sinfo -o '%P %l'`"),
    "PartitionNodeLimit": (
        "the partition allows fewer nodes, or nodes of it are down or drained",
        "see `sinfo -R`; wait, lower platform.nodes, or take another partition",
    ),
    "PartitionDown": ("the partition is down", "set another platform.partition: see `sinfo`"),
    "PartitionInactive": ("the partition is inactive", "set another platform.partition: see `sinfo`"),
    "BadConstraints": ("no nodes match platform.constraint", "see `sinfo -o '%P %f'`"),
    "JobHeldUser": ("you hold it", "release it: scontrol release JOB"),
    "JobHeldAdmin": ("an administrator holds it", "contact the administrator"),
    "BeginTime": ("its time to begin has not come", "wait: a requeued job is held back for two minutes"),
    "InvalidAccount": ("platform.account is not valid", "see `sacctmgr show associations user=$USER`"),
    "InvalidQOS": ("platform.qos is not valid", "see `sacctmgr show associations user=$USER format=qos`"),
    "Licenses": ("it waits for a licence", "wait"),
    "Reservation": ("its reservation has not begun", "wait, or leave platform.reservation out"),
}
_LIMIT = re.compile(r"(Assoc|QOS)(?P<who>Max|Grp|)(?P<what>.*)")

# Reasons that no end of another job removes (src/common/job_state_reason.c): the job requests more than it may have,
# or what is used up for months. A hold is a decision, and PartitionNodeLimit may also mean that nodes are down or
# drained (https://slurm.schedmd.com/job_reason_codes.html).
_LASTING = re.compile(
    r"(?:Bad)?Constraints|Partition(?:TimeLimit|Config)|Invalid(?:Account|QOS)|(?:Account|QOS)NotAllowed"
    r"|DependencyNeverSatisfied|Reservation(?:Deleted|Invalid)|DeadLine|MaxMemPerLimit|QOSMin\w+"
    r"|(?:Assoc|QOS)(?:Max\w+Per(?:Job|Node)(?:Limit)?|Grp(?:\w+(?<!Run)Minutes(?:Limit)?|WallLimit))"
)
# Limits on all jobs of one user: if no other job of the user runs, this job itself exceeds the limit.
_OF_ONE_USER = re.compile(r"AssocMax\w+|QOSMax\w+PerUser(?:Limit)?")

# Messages of slurmctld, munge and ssh during an outage (src/common/slurm_errno.c).
_TRANSIENT = re.compile(
    r"Unable to contact slurm controller|Connection (?:refused|reset)|Zero Bytes|Message (?:receive|send) failure"
    r"|temporarily unable|Resource temporarily unavailable|communication connection failure|Munge|authentication"
    r"|slurmdbd|config source|DNS SRV|Could not resolve|kex_exchange|Connection closed|timed out|No route to host",
    re.IGNORECASE,
)
_ALREADY_DONE = re.compile(r"Invalid job id|already completing or completed", re.IGNORECASE)
_NO_ACCOUNTS = re.compile("accounting storage is disabled", re.IGNORECASE)
_FRESH = 2.0
"""Seconds for which one look at a job answers for its state and its logs."""
_FORMAT = "%i|%T|%r|%S|%N|%u|%j|%k"
"""Fields of squeue that releases from 20.02 on have: number, state, reason, start, nodes, user, name, comment."""
_RUN = re.compile(rf"{re.escape(RUN_LABEL)}=([^\s'\"]+)")
"""The run in a job's comment."""
_CLUSTER = re.compile(r"^ClusterName\s*=\s*(\S+)", re.MULTILINE)
# Variables are options of Slurm's commands too, as a profile or an allocation around this process sets them. Those of
# sbatch override the script and reach the job (https://slurm.schedmd.com/sbatch.html, INPUT ENVIRONMENT
# VARIABLES), those of squeue hide jobs. The way to the cluster stays. Times are printed in the cluster's zone, which
# may be another one, unless they are to be seconds since 1970.
_AS_WRITTEN = (
    "for name in $(env | sed -n 's/^\\(S[A-Z]*_[A-Z0-9_]*\\)=.*/\\1/p'); do case $name in"
    " SLURM_CONF | SLURM_CONF_SERVER | SLURM_CLUSTERS | SLURM_JWT | SLURM_SACK_KEY) ;;"
    " SBATCH_* | SCANCEL_* | SCONTROL_* | SACCT_* | SINFO_* | SQUEUE_* | SLURM_*) unset $name ;;"
    ' esac; done; [ "$1" = sbatch ] || export SLURM_TIME_FORMAT=%s; exec "$@"'
)
_LOCAL_DISKS = {"ext4", "ext3", "xfs", "btrfs", "tmpfs", "overlay", "apfs"}


class _Row(NamedTuple):
    number: int
    state: str
    reason: str
    start: str
    nodes: str
    user: str
    name: str
    comment: str

    @property
    def job_state(self) -> JobState:
        return _STATES.get(self.state, JobState.UNKNOWN)

    @property
    def native(self) -> str:
        return f"{self.state} (job {self.number})"

    @property
    def has_ended(self) -> bool:
        return self.job_state.is_final


class SlurmSubmission(Settings):
    """The submitter of a job, recorded before the submission, and the job's number."""

    name: str
    """The job's."""
    user: str
    """The Unix user on the cluster."""
    cluster: str
    number: Annotated[int, Field(ge=0, lt=2**32)] | None = None


class SlurmPlatform:
    """Runs the nodes of a job as the tasks of one step, a node each. The job's name is its attempt's. Reports may take
    `settle` seconds to be seen here once it has ended."""

    name: ClassVar[str] = "slurm"
    is_remote_service: ClassVar[bool] = True
    poll_seconds: ClassVar[float] = 10.0

    def __init__(self, settings: SlurmPlatformConfig, *, settle: float = 20.0) -> None:
        self._settings, self._settle = settings, settle
        self._rows = dict[str, tuple[_Row, float]]()
        self._records = dict[SlurmJob, SlurmSubmission]()
        self._stuck_since = dict[str, float]()
        """Since when a job has waited for a reason that does not pass, by its name."""
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
                yield Finding("warning", "slurm.root", what, "set root to a folder that all nodes mount")
        table = ""
        try:
            printed = self._run("sinfo", "-h", "-o", "%P %a %l %D %G")
            table = "\n".join(re.findall(r"^\S+ (?:up|down|drain|inact) \S+ \d+ \S+$", printed, re.MULTILINE))
            for name, _, limit, *_ in map(str.split, table.splitlines()):
                most, wanted = seconds_of(limit), seconds_of(settings.time or "")
                chosen = name.rstrip("*") == settings.partition if settings.partition else name.endswith("*")
                if chosen and most and wanted and wanted > most:  # Slurm takes such a job, and never starts it
                    what = f"platform.time={settings.time}, but the partition {name.rstrip('*')} allows {limit}"
                    yield Finding("error", "slurm.time", what, "lower it: each attempt continues the last one")
            # The controller itself says whether the partition, account, qos and nodes are to be had; nothing is made.
            self._run("sbatch", "--test-only", stdin=submission.body["script"])
        except PlatformRefused as error:
            fix = "take what the cluster has (partition, its state and time limit, nodes, their GPUs): "
            fix += "; ".join(table.splitlines())
            yield Finding("error", "slurm.refused", error.what, fix)
        except LauncherError as error:
            codes = {NotInstalled: "slurm.commands", LoginProblem: "slurm.login"}
            yield finding_of(error, codes.get(type(error), "slurm.controller"))

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        return None, "have the cluster's administrator drain the node"

    def check_access(self) -> str:
        where = f" on {self._settings.host}" if self._settings.host else ""
        self._run("sinfo", "-h", "-o", "%P")
        return f"Slurm answers{where}: {_answer('^slurm.*', self._run('sinfo', '--version'), 'sinfo --version')}"

    def submit(self, submission: Submission) -> JobId:
        """Submit the script once. The submitter is recorded first: if an orchestrator dies before it has recorded the
        number, the next one finds the job by its name."""
        job, script = SlurmJob.of(submission.job_id), submission.body["script"]
        if UNBUILT in script:
            raise PlatformRefused("the submission has no image", fix="build it, or set image.kind=prebuilt")
        attempt, record = open_storage(job.directory), self._submission_of(job)
        row = self._find(job, record, fresh=True)
        if record is not None and record.number is not None:
            return submission.job_id
        if row is None and record is not None:
            self._require_visibility(job, record)
        if row is None:
            self._refuse_rivals(script)
            if not is_remote(job.directory):  # one that a node made would be on its own disk
                make_private(Path(job.directory))
            user, cluster = self._whoami
            _write(attempt, SlurmSubmission(name=job.name, user=user, cluster=cluster))
            try:
                number, user = self._launch(job, script)
            except PlatformRefused:
                attempt.remove(SUBMITTED)
                raise
        else:
            number, user, cluster = row.number, row.user, self._whoami[1]
        _write(attempt, SlurmSubmission(name=job.name, user=user, cluster=cluster, number=number))
        self._rows.pop(job.name, None)
        return submission.job_id

    def _launch(self, job: SlurmJob, script: str) -> tuple[int, str]:
        """Return the number and the user of the job, which is the first of two made at once. The queue is read whatever
        sbatch prints: a site's wrapper may report an error after a submission that succeeded."""
        refusal: PlatformRefused | None = None
        printed = ""
        try:
            printed = self._run("sbatch", "--parsable", stdin=script)
        except PlatformRefused as error:
            refusal = error
        numbers = [int(number) for number in re.findall(r"^([0-9]+)(?:;\S*)?$", printed, re.MULTILINE)]
        rows = sorted(row for row in self._queue(f"--name={job.name}") if row.name == job.name)
        for later in rows[1:]:
            if later.number in numbers:
                self._run("scancel", str(later.number))
        if rows:
            return rows[0].number, rows[0].user
        if refusal is not None:
            raise refusal
        if not numbers:
            raise PlatformUnreachable(f"`sbatch` did not print the number of a job, but {printed[:200]!r}")
        return numbers[-1], self._whoami[0]

    def _refuse_rivals(self, script: str) -> None:
        run = _RUN.search(script)
        for row in self._queue():
            listed = _RUN.search(row.comment)
            if run and listed and listed[1] == run[1] and not row.has_ended:
                job = f"job {row.number} ({row.state}) of {row.user}"
                raise rival(job, run[1], end=f"scancel {row.number}")

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        settings = self._settings
        return job_id == SlurmJob(settings.host or "", attempt_name, settings.nodes, directory).job_id

    def status(self, job_id: JobId) -> JobStatus:
        """Return the state from the queue, else from the accounts, else from the nodes' reports. A job that is not
        found has failed, but raises PlatformUnreachable for a user who may not see it."""
        job = SlurmJob.of(job_id)
        record = self._submission_of(job)
        row = self._find(job, record)
        if row is None and record is None:
            return JobStatus(state=JobState.ABSENT, native="absent")
        if row is None or row.job_state is not JobState.PENDING:
            self._stuck_since.pop(job.name, None)
        if row is None or row.has_ended:
            return self._ended(job, record, row)
        if row.job_state is JobState.PENDING:
            return self._waiting(row)
        started = _moment(row.start) if row.job_state is JobState.RUNNING else None
        hosts = {}
        if row.nodes and "[" not in row.nodes:  # a range such as n[0-3] is left to the reports
            hosts = dict(enumerate(row.nodes.split(",")))
        return JobStatus(
            state=row.job_state, native=row.native, scheduled=started, started=started, pulled=started, hosts=hosts
        )

    def _ended(self, job: SlurmJob, record: SlurmSubmission | None, row: _Row | None) -> JobStatus:
        attempt = open_storage(job.directory)
        state, native = JobState.FAILED, "no longer known to Slurm"
        blocked, started, patience, evictions = None, None, 0.0, dict[int, str]()
        if row is not None:
            state, native, started = row.job_state, row.native, _moment(row.start)
            blocked = FAILED.fullmatch(row.comment)
            if not blocked and job.job_id not in self._settled:
                patience = self._settle
        codes = exit_codes(attempt, nodes=job.nodes, patience=patience)
        self._settled.add(job.job_id)
        if attempt.exists(CANCELLED):
            state = JobState.CANCELLED
        elif len(codes) == job.nodes and not any(codes.values()):
            state = JobState.SUCCEEDED  # the nodes have done their work, whatever Slurm says of the job's end
        elif row is None and record is not None and len(codes) < job.nodes:
            self._require_visibility(job, record)
            if record.number is None:  # its submitter died before it was submitted
                return JobStatus(state=JobState.ABSENT, native="absent")
        elif state is JobState.SUCCEEDED and any(codes.values()):
            state = JobState.FAILED
        if blocked:
            codes, evictions = {0: EXIT_CODES[FailureClass.USER]} | codes, {0: blocked[1]}
        if row is not None and row.state in _FAILURE_CLASSES:
            codes = dict.fromkeys(range(job.nodes), EXIT_CODES[_FAILURE_CLASSES[row.state]]) | codes
        return JobStatus(
            state=state, native=native, exit_codes=codes, started=started, scheduled=started, evictions=evictions
        )

    def _waiting(self, row: _Row) -> JobStatus:
        code = row.reason.strip("()").partition(",")[0]
        lasts = bool(_LASTING.fullmatch(code))
        if not lasts and _OF_ONE_USER.fullmatch(code):
            lasts = not any(job.job_state is JobState.RUNNING for job in self._queue(f"--user={row.user}"))
        reasons: tuple[Finding, ...] = ()
        if code not in {"None", ""}:
            reasons = (_reason(row, code, lasts=lasts),)
        refused, now = None, time.monotonic()
        if not lasts:
            self._stuck_since.pop(row.name, None)
        elif now >= self._stuck_since.setdefault(row.name, now) + self._settings.admission_timeout:
            refused = reasons[0]
        native, start = row.native, _moment(row.start)
        if start is not None:  # not in the reason, which is reported each time that its text changes
            native += f", which Slurm expects to start at {datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M} UTC"
        return JobStatus(state=JobState.PENDING, native=native, reasons=reasons, refused=refused)

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        job = SlurmJob.of(job_id)
        # Before reading: the last line of an ended job counts without a line break.
        row = self._find(job, self._submission_of(job))
        ended = row is None or row.has_ended
        return page_of(open_storage(job.directory), job.nodes, position, ended=ended)

    def cancel(self, job_id: JobId) -> None:
        cancelled, pause, start = False, 0.1, time.monotonic()
        while (row := self._live(job_id)) is not None:
            if row.state == "RUNNING" and not cancelled:
                self._scancel(row, "--signal=TERM")
            elif row.state != "RUNNING" or time.monotonic() > start + self._settings.grace_period:
                self._scancel(row)
            if not cancelled:
                cancelled = True
                content = json.dumps({"cancelled": time.time()}).encode()
                open_storage(SlurmJob.of(job_id).directory).write(CANCELLED, content)
            if time.monotonic() > start + self._settings.grace_period + 120:
                what = f"job {row.number} is still {row.state} after it was cancelled"
                raise PlatformUnreachable(what, fix=f"see `scontrol show job {row.number}`, and cancel it again")
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        row = self._live(job_id)
        if row is None:
            return ()
        return (f"job {row.number} ({row.state})",)

    def _scancel(self, row: _Row, *flags: str) -> None:
        try:
            self._run("scancel", *flags, str(row.number), ignore_errors=_ALREADY_DONE)
        except PlatformRefused as error:
            if "denied" not in error.what:
                raise
            what = f"job {row.number} is {row.user}'s, and Slurm does not let {self._whoami[0]} end it ({error.what})"
            raise PlatformRefused(what, fix=f"have {row.user} cancel it") from error

    def _live(self, job_id: JobId) -> _Row | None:
        job = SlurmJob.of(job_id)
        row = self._find(job, self._submission_of(job), fresh=True)
        if row is None:
            self.status(job_id)  # raises where the job may run and cannot be seen from here
        if row is None or row.has_ended:
            return None
        return row

    def _submission_of(self, job: SlurmJob) -> SlurmSubmission | None:
        if job in self._records:
            return self._records[job]
        attempt = open_storage(job.directory)
        try:
            content = attempt.read(SUBMITTED, most=1 << 16)
        except FileNotFoundError:
            return None
        fix = f"check with `squeue --name={job.name}` that no such job runs, then remove that file"
        record = parse_json(content, SlurmSubmission, where=attempt.address(SUBMITTED), fix=fix)
        if record.name != job.name:
            return None
        if record.number is not None:  # it is written once, and never changes
            self._records[job] = record
        return record

    def _require_visibility(self, job: SlurmJob, record: SlurmSubmission) -> None:
        user, cluster = self._whoami
        if (record.user, record.cluster) == (user, cluster):
            return
        which = job.name if record.number is None else f"{record.number} ({job.name})"
        what = f"job {which} was submitted by {record.user} on the cluster {record.cluster!r}"
        what = f"{what}, and Slurm does not show it to {user} on {cluster!r}: it may be running"
        file = open_storage(job.directory).address(SUBMITTED)
        fix = f"run this as {record.user} on that cluster; if the job has surely ended, remove {file}"
        # A job without a number may be on its way to Slurm, and be visible to the next query.
        raise PlatformUnreachable(what, fix=fix, no_retry=record.number is not None)

    def _find(self, job: SlurmJob, record: SlurmSubmission | None, *, fresh: bool = False) -> _Row | None:
        """After a new installation of Slurm another job may have the number, so that names are compared too."""
        number = record.number if record else None
        if not fresh and job.name in self._rows:
            row, queried = self._rows[job.name]
            if time.monotonic() < queried + _FRESH:
                return row
        which = f"--name={job.name}" if number is None else f"--jobs={number}"
        rows = self._queue(which)
        if record is not None and not rows:
            since: tuple[str, ...] = ()
            if number is None:  # by name, sacct lists the jobs of today unless it is given a date
                since = ("-S", datetime.fromtimestamp(time.time() - 90 * 86_400).strftime("%Y-%m-%d"))
            columns = "JobIDRaw,State,Start,NodeList,User,JobName,Comment"
            command = ("sacct", "-n", "-X", "-P", "-a", *since, which, "-o", columns)
            for jobid, state, *fields in _fields(self._run(*command, ignore_errors=_NO_ACCOUNTS), 7):
                rows.append(_Row(int(jobid), *(state.partition(" ")[0], "", *fields)))
        found = min((row for row in rows if row.name == job.name), default=None)
        if found is not None:  # a job that does not exist may be submitted at any moment
            self._rows[job.name] = found, time.monotonic()
        return found

    def _queue(self, *which: str) -> list[_Row]:
        text = self._run("squeue", "-h", "-t", "all", *which, "-o", _FORMAT, ignore_errors=_ALREADY_DONE)
        return [_Row(int(number), *fields) for number, *fields in _fields(text, 8)]

    @cached_property
    def _whoami(self) -> tuple[str, str]:
        cluster = _CLUSTER.search(self._run("scontrol", "show", "config"))
        return _answer(r"^\S+$", self._run("id", "-un"), "id -un"), cluster[1] if cluster else ""

    def _run(self, *argv: str, stdin: str = "", ignore_errors: re.Pattern[str] | None = None) -> str:
        host, program = self._settings.host, argv[0]
        command = ["sh", "-c", _AS_WRITTEN, "sh", *argv]
        if host is not None:
            flags = ("-o", "BatchMode=yes", "-o", "ForwardAgent=no")  # the node's root could use the agent's keys
            command, program = ["ssh", *flags, "--", host, shlex.join(command)], "ssh"
        if shutil.which(program) is None:
            fix = "run the command on a login node of the cluster, or set platform.host to one"
            raise NotInstalled(f"platform.kind=slurm needs `{program}`, which is not on PATH", fix=fix)
        try:
            done = subprocess.run(
                command,
                input=stdin,
                text=True,
                capture_output=True,
                timeout=timeouts.SLURM_COMMAND,
                check=False,
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            what = f"`{shlex.join(argv)}` did not end within {timeouts.SLURM_COMMAND:.0f} s"
            raise PlatformUnreachable(what) from error
        code = done.returncode
        message = " ".join(done.stderr.split()) or f"exit code {code}"
        if code == 0 or (ignore_errors is not None and ignore_errors.search(message)):
            return done.stdout
        what = f"`{argv[0]}` says: {message[:1000]}"
        if host is not None and code == 255:
            if "Permission denied" in message or "Host key verification" in message:
                raise LoginProblem(f"ssh {host}: {message[:1000]}", fix=f"make `ssh {host} true` work without a prompt")
            raise PlatformUnreachable(what)
        if code == 127:
            what = f"{host or 'this machine'} has no `{argv[0]}` on PATH"
            raise NotInstalled(what, fix="set platform.host to a login node of the cluster")
        # A command that was killed may have done its work. Slurm's own exit codes go up to 255, as 210 for "denied".
        if _TRANSIENT.search(message) or code < 0 or code - 128 in {SIGHUP, SIGINT, SIGKILL, SIGTERM}:
            raise PlatformUnreachable(what)
        raise PlatformRefused(what, fix="fix what it names in the `platform` section: `sinfo` and `sacctmgr` list it")


def _write(attempt: Storage, record: SlurmSubmission) -> None:
    attempt.write(SUBMITTED, record.model_dump_json(indent=1).encode())


def _answer(pattern: str, text: str, command: str) -> str:
    """Return a command's last line that matches the pattern. A login shell may print other lines."""
    found = re.findall(pattern, text, re.MULTILINE)
    if not found:
        raise PlatformUnreachable(f"`{command}` printed {text[:200]!r} instead of an answer")
    return str(found[-1])


def _fields(text: str, count: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        fields = line.split("|", count - 1)
        if len(fields) == count and fields[0].isdecimal():
            yield fields


def _reason(row: _Row, reason: str, *, lasts: bool) -> Finding:
    code, what, fix = "slurm.pending.other", f"Slurm says {reason}", "see `man squeue`, JOB REASON CODES"
    if reason in _REASONS:
        code = f"slurm.pending.{reason}"
        what, fix = _REASONS[reason]
    limit = _LIMIT.fullmatch(reason)
    if limit:
        code = "slurm.pending.limit"
        whose, kind, fix = "the quality of service's", "limit", "wait for other jobs to end, or request less"
        if reason.startswith("Assoc"):
            whose = "the account's or user's"
        if limit["who"] == "Grp":
            kind = "limit on all of its jobs together"
        if lasts:
            fix = "request less, or a higher limit"
        what = f"{whose} {kind} is reached ({reason})"
    severity: Severity = "error" if lasts else "warning"
    return Finding(severity, code, f"job {row.number}: {what}", fix)


def _moment(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
