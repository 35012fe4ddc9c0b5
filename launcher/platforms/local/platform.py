"""This machine as a platform: every node is a process, under a supervisor process that outlives the command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import psutil
from pydantic import BaseModel, Field

from launcher.environment import Entry, as_rows, combined
from launcher.errors import PlatformRefused, PlatformUnreachable, rival
from launcher.job import Job, JobId, JobState, JobStatus, LogPage, Moment, Submission
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.platforms.local.supervisor import JOB_TAG, LOCK, MASTER, RESULT, SUBMISSION, SUPERVISOR
from launcher.platforms.log_files import page_of
from litgpt_demo import PYTHON
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import Finding
from litgpt_demo.node.agent import kill_by_env_marker, processes_with_env
from litgpt_demo.node.checks import port_is_free, usable_cores
from litgpt_demo.runs import ExitCode, NodeNumber
from litgpt_demo.storage import is_remote, open_storage
from litgpt_demo.storage.local import atomic_write_json, preallocate, translate_os_errors
from litgpt_demo.storage.private import make_private

T = TypeVar("T")

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_LAUNCHERS_KEYS = {
    "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_SERVER_API_AUTH_STRING", "TRAIN_LITGPT_KEY_PASSWORD",
}  # fmt: skip
"""Variables of a worker or a user's shell whose reader can start programs through Prefect's server, or sign."""


class LocalPlatform:
    """Runs the nodes of a job as processes of this machine. A job's id is its directory, for a run in a bucket one of
    `jobs` in $TRAIN_LITGPT_HOME."""

    name: ClassVar[str] = "local"
    is_remote_service: ClassVar[bool] = False
    poll_seconds: ClassVar[float] = 0.2  # a query costs two file reads, and a person waits for the end

    def __init__(self, settings: LocalPlatformConfig) -> None:
        home = Path(os.environ.get("TRAIN_LITGPT_HOME") or Path.home() / ".train-litgpt")
        self._state = (home / "jobs").absolute()
        self._port, self._grace = settings.port, settings.grace_period
        self._cores = usable_cores()
        self._working_directory = Path.cwd()

    def render(self, job: Job) -> Submission:
        directory = os.path.normpath(self._working_directory / job.directory)
        if is_remote(job.directory):
            directory = os.path.normpath(self._state / job.attempt_name)
        # All nodes are on this machine. Gloo must not look for an address that the host name may not have, and other
        # machines must not reach the ports of gloo and NCCL.
        variables = {
            JOB_TAG: directory,
            "GLOO_SOCKET_IFNAME": _LOOPBACK,
            "NCCL_SOCKET_IFNAME": _LOOPBACK,
            "OMP_NUM_THREADS": str(max(1, self._cores // max(1, job.world_size))),
            "PYTHONUNBUFFERED": "1",
        }
        if "NCCL_SOCKET_IFNAME" in job.env:
            del variables["NCCL_SOCKET_IFNAME"]
        why = "for ranks on this machine"
        own = [Entry(name=name, value=value, origin="platform", why=why) for name, value in variables.items()]
        entries = combined(own, job.env, {}, None)
        master = f"env:{MASTER}" if self._port is None else f"127.0.0.1:{self._port}"
        env = {entry.name: entry.value for entry in entries}
        nodes = []
        for number in range(job.nodes):
            command = job.node_command(node_rank=str(number), master=master, directory=directory, grace=self._grace)
            nodes.append({"node": number, "argv": [*PYTHON, *command], "env": dict(env)})
        body = {
            "directory": directory,
            "working_directory": str(self._working_directory),
            "port": self._port,
            "ranks": job.world_size,
            "grace": self._grace,
            "labels": dict(job.labels),
            "run": job.run_name if job.root else "",
            "secrets": list(job.secrets),  # names; ranks inherit the values from the submitting process
            "nodes": nodes,
        }
        return Submission(platform=self.name, job_id=JobId(directory), body=body, environment=as_rows(entries))

    def check(self, submission: Submission) -> Iterator[Finding]:
        body = submission.body
        problem = _port_problem(body["port"], Path(submission.job_id))
        if problem:
            yield Finding("error", "local.port", *problem)
        if body["ranks"] > self._cores:
            what = f"{body['ranks']} processes share {self._cores} cores"
            yield Finding("warning", "local.cores", what, "fewer processes are not slower")

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        return 0, "this machine is the only one"

    def check_access(self) -> str:
        return "this machine runs the nodes"

    def submit(self, submission: Submission) -> JobId:
        """Start the job under its own supervisor, unless it has been started before."""
        directory = Path(submission.job_id)
        # A submitter may have died after it recorded the job: then the job may be started.
        if _live(directory) or (directory / SUPERVISOR).exists():
            return submission.job_id
        missing = [name for name in submission.body["secrets"] if not os.environ.get(name)]
        if missing:
            what = f"the job needs {', '.join(missing)} in the environment it is submitted from"
            raise PlatformRefused(what, fix="export them before the submission")
        problem = _port_problem(submission.body["port"], directory)
        if problem:
            raise PlatformRefused(" -> ".join(problem))
        try:
            make_private(directory)
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                while not _locked(lock, fcntl.LOCK_EX):
                    if _live(directory):  # the supervisor of the job holds the lock
                        return submission.job_id
                    time.sleep(0.01)  # a query holds the lock for a moment, see _live
                if not (directory / SUPERVISOR).exists():
                    running = processes_with_env(JOB_TAG, submission.job_id)
                    if running:
                        pids = ", ".join(str(process.pid) for process in running)
                        what = f"{directory} was deleted while a job ran in it, whose processes still run: {pids}"
                        raise PlatformRefused(what, fix="end them, and run again")
                    _refuse_rivals(submission.body["run"], directory)
                    _start(submission, directory, lock)
            finally:
                os.close(lock)
        except OSError as error:
            raise PlatformRefused(f"{directory} cannot hold a job: {error}; choose another root for the run") from error
        return submission.job_id

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        """Compare the folder with the id. For a run in a bucket, only the folder's name is compared."""
        if is_remote(directory):
            return Path(job_id).is_absolute() and Path(job_id).name == attempt_name
        return not is_remote(job_id) and os.path.realpath(job_id) == os.path.realpath(directory)

    def status(self, job_id: JobId) -> JobStatus:
        directory = Path(job_id)
        with translate_os_errors(job_id):  # the job may be another user's
            if not (directory / SUBMISSION).exists():
                return JobStatus(state=JobState.ABSENT, native="absent")
        status = partial(JobStatus, scheduled=0.0, pulled=0.0)  # nothing queues here, and no image is pulled
        # In this order: the result is written before the lock is released.
        if _live(directory):
            return status(state=JobState.RUNNING, native="running", started=_supervisor(directory).started)
        result = _read(directory / RESULT, _Result)
        if result is None:
            return JobStatus(state=JobState.FAILED, native=f"supervisor lost{_last_words(directory)}")
        return status(**dict(result))

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        directory = Path(job_id)
        ended = not _live(directory)  # before reading: the last line of an ended job counts without a line break
        nodes = _submitted(directory).body.nodes
        return page_of(open_storage(job_id), len(nodes), position, ended=ended)

    def cancel(self, job_id: JobId) -> None:
        """Terminate the supervisor, which ends the job. Then kill all processes with the job's mark."""
        directory = Path(job_id)
        deadline = time.monotonic() + self._grace + 10
        is_terminated = False
        while _live(directory) and time.monotonic() < deadline:
            # Another process may have the supervisor's pid by now, so that the process must have the job's mark too.
            pid = _supervisor(directory).pid
            marked = [] if is_terminated else processes_with_env(JOB_TAG, _mark(directory))  # reads all processes
            for process in marked:
                if process.pid == pid:
                    is_terminated = True
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()
            time.sleep(0.05)
        remaining = kill_by_env_marker(JOB_TAG, _mark(directory), grace=5)
        if remaining:
            pids = ", ".join(str(process.pid) for process in remaining)
            raise PlatformUnreachable(f"job {job_id} still has processes that do not end: {pids}; cancel it again")
        if (directory / SUBMISSION).exists() and not (directory / RESULT).exists():
            started = _supervisor(directory).started
            native = "cancelled" if is_terminated else "swept, its supervisor was lost"
            last: dict[str, Any] = {"state": JobState.CANCELLED, "native": native, "exit_codes": {}}
            atomic_write_json(directory / RESULT, {**last, "started": started, "ended": time.time()})

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        return tuple(f"process {process.pid}" for process in processes_with_env(JOB_TAG, _mark(Path(job_id))))


def _refuse_rivals(run: str, directory: Path) -> None:
    if not run:
        return
    for folder in directory.parent.iterdir():
        if folder != directory and _live(folder) and _submitted(folder).body.run == run:
            pids = " ".join(str(process.pid) for process in processes_with_env(JOB_TAG, _mark(folder)))
            raise rival(f"the job in {folder}", run, end=f"kill {pids}")


def _port_problem(port: int | None, directory: Path) -> tuple[str, str] | None:
    if port is None or port_is_free(port) or _live(directory):
        return None
    owner = "a process of another user"
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                owner = f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return f"port {port} is in use by {owner}", "end it, or leave platform.port out to get a free one"


class _Body(BaseModel):
    run: str = ""
    nodes: Annotated[tuple[Any, ...], Field(max_length=64)] = ()


class _Submitted(BaseModel):
    """The fields that are read from the stored submission, which nodes may have overwritten."""

    job_id: str = ""
    body: _Body = _Body()


class _Supervisor(BaseModel):
    pid: int | None = None
    started: Moment | None = None


class _Result(BaseModel):
    state: JobState
    native: str
    exit_codes: dict[NodeNumber, ExitCode] = {}
    started: Moment | None = None
    ended: Moment | None = None


def _read(path: Path, kind: type[T]) -> T | None:
    with contextlib.suppress(FileNotFoundError):
        fix = f"check that no process of the job runs, then remove {path.parent}"
        return parse_json(path.read_bytes(), kind, where=str(path), fix=fix)
    return None


def _submitted(directory: Path) -> _Submitted:
    return _read(directory / SUBMISSION, _Submitted) or _Submitted()


def _supervisor(directory: Path) -> _Supervisor:
    return _read(directory / SUPERVISOR, _Supervisor) or _Supervisor()


def _live(directory: Path) -> bool:
    # A supervisor, or a submitter that starts one, holds the lock. A query takes a shared lock for a moment.
    try:
        with (directory / LOCK).open("rb") as lock:
            return not _locked(lock.fileno(), fcntl.LOCK_SH)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _locked(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(submission: Submission, directory: Path, lock: int) -> None:
    """Store the submission and start its supervisor, which keeps the lock after this process has closed it."""
    content = {"platform": submission.platform, "job_id": submission.job_id, "body": dict(submission.body)}
    for name in (SUPERVISOR, RESULT):  # which the supervisor writes, perhaps when its job has filled the disk
        preallocate(directory / name)
    atomic_write_json(directory / SUBMISSION, content)
    # Ranks get these keys only if the job requests them.
    withheld = _LAUNCHERS_KEYS - {*submission.body["secrets"]}
    inherited = {name: value for name, value in os.environ.items() if name not in withheld}
    with (directory / "supervisor.log").open("ab") as log:
        # Returns at once: the supervisor forks.
        started = subprocess.run(
            [*PYTHON, "-m", "launcher.platforms.local.supervisor", str(directory)],
            env={**inherited, JOB_TAG: submission.job_id},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
            check=False,
        )
    if started.returncode != 0:
        (directory / SUBMISSION).unlink()
        what = f"the supervisor of {submission.job_id} did not start{_last_words(directory)}"
        raise PlatformRefused(what, fix="fix this installation")


def _last_words(directory: Path) -> str:
    # A supervisor that was killed has printed nothing.
    log = directory / "supervisor.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f": {lines[-1].strip()}" if lines else ""


def _mark(directory: Path) -> str:
    """Return the mark of the job's processes: the job's id at its submission, before its root was moved."""
    return _submitted(directory).job_id or str(directory)
