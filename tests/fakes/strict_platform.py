"""A platform in memory: it holds jobs as a real one does, lets a test be their fate, and refuses whoever misuses it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from launcher.errors import LauncherError, PlatformRefused, PlatformUnreachable
from launcher.job import Job, JobId, JobState, JobStatus, LogLine, LogPage, Submission
from litgpt_demo.errors import Finding
from litgpt_demo.storage import open_storage


@dataclass
class _Life:
    """What became of one submission."""

    submission: Submission
    state: JobState = JobState.PENDING
    native: str = "queued"
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    lines: list[LogLine] = field(default_factory=list)
    litter: bool = False


class StrictPlatform:
    """Five verbs for the product, and five for the test: start, say, end, remove, silence."""

    name: ClassVar[str] = "strict"
    is_remote_service: ClassVar[bool] = True
    poll_seconds: ClassVar[float] = 15.0

    def __init__(self, *, spare: int | None = 0) -> None:
        self.spare = spare
        """Machines that a job can avoid; None is any number."""
        self.followed: dict[JobId, JobState] = {}
        """How jobs end once somebody reads their logs."""
        self._lives: dict[JobId, _Life] = {}
        self._silent, self._error = False, LauncherError()

    # --- what every platform has ---

    def render(self, job: Job) -> Submission:
        body = {"run": job.run_name, "directory": job.directory, "program": list(job.program), "nodes": job.nodes}
        body |= {"exclude": list(job.exclude_nodes), "env": dict(job.env), "flags": f"--code {job.code}"}
        return Submission(platform=self.name, job_id=JobId(f"strict/{job.attempt_name}"), body=body)

    def check(self, submission: Submission) -> Iterator[Finding]:
        yield from ()

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        return self.spare, "add machines"

    def check_access(self) -> str:
        self._answer()
        return "the strict platform answers"

    def submit(self, submission: Submission) -> JobId:
        self._answer()
        if submission.platform != self.name:
            raise PlatformRefused(f"this was rendered for {submission.platform}; render it for {self.name}")
        if (existing := self._lives.get(submission.job_id)) is not None:
            if existing.submission.body != submission.body:
                raise PlatformRefused(f"{submission.job_id} is there with another body; give it another name")
            return submission.job_id
        for rival in self.live():
            if self._lives[rival].submission.body["run"] == submission.body["run"]:
                raise PlatformRefused(f"{rival} of the same run lives: two attempts would write over each other")
        self._lives[submission.job_id] = _Life(submission)
        open_storage(submission.body["directory"]).write("submission.json", b"{}")
        return submission.job_id

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        return job_id == f"strict/{attempt_name}"

    def status(self, job_id: JobId) -> JobStatus:
        life = self._life(job_id)
        if life is None:
            return JobStatus(state=JobState.ABSENT, native="not found")
        return JobStatus(state=life.state, native=life.native, exit_codes=life.exit_codes, hosts=life.hosts)

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        if job_id in self.followed:
            self.end(job_id, self.followed.pop(job_id))
        lines = life.lines if (life := self._life(job_id)) else []
        owner, _, number = position.rpartition("@")
        if position and owner != job_id:
            raise ValueError(f"position {position!r} was never given out for {job_id}")
        return LogPage(tuple(lines[int(number or 0) :]), f"{job_id}@{len(lines)}")

    def cancel(self, job_id: JobId) -> None:
        life = self._life(job_id)
        if life is not None and life.state.is_live:
            life.state, life.native = JobState.CANCELLED, "cancelled"
        if life is not None:
            life.litter = False

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        life = self._life(job_id)
        return (f"job {job_id} ({life.native})",) if life is not None and (life.state.is_live or life.litter) else ()

    # --- what the test decides ---

    def start(self, job_id: JobId) -> None:
        life = self._lives[job_id]
        assert life.state is JobState.PENDING, f"{job_id} is {life.state} and cannot start"
        life.state, life.native = JobState.RUNNING, "running"

    def place(self, job_id: JobId, hosts: Mapping[int, str]) -> None:
        """Tell which machine each node is on."""
        life = self._lives[job_id]
        assert not {*hosts.values()} & {*life.submission.body["exclude"]}, f"{job_id} avoids {hosts}"
        life.hosts = hosts

    def say(self, job_id: JobId, *texts: str, node: int = 0) -> None:
        life = self._lives[job_id]
        assert life.state is JobState.RUNNING, f"{job_id} is {life.state} and says nothing"
        life.lines += (LogLine(node, text) for text in texts)

    def end(self, job_id: JobId, state: JobState, exit_codes: Mapping[int, int] | None = None) -> None:
        life = self._lives[job_id]
        assert life.state.is_live, f"{job_id} has ended already"
        assert state.is_final, f"{state} is no end"
        life.state, life.native, life.exit_codes = state, f"ended: {state.value}", exit_codes or {}

    def litter(self, job_id: JobId) -> None:
        """Something of the job stays although it has ended."""
        self._lives[job_id].litter = True

    def remove(self, job_id: JobId) -> None:
        del self._lives[job_id]

    def silence(self, silent: bool, error: LauncherError | None = None) -> None:
        """From now on every question is answered with the error; by default there is no answer at all."""
        self._silent = silent
        self._error = error or PlatformUnreachable("connection timed out")

    def run_of(self, job_id: JobId) -> str:
        """Return the run and root that a job is of."""
        return str(self._lives[job_id].submission.body["run"])

    def live(self) -> list[JobId]:
        return [job_id for job_id, life in self._lives.items() if life.state.is_live]

    def _answer(self) -> None:
        if self._silent:
            raise self._error

    def _life(self, job_id: JobId) -> _Life | None:
        self._answer()
        if not job_id.startswith("strict/"):
            raise ValueError(f"{job_id!r} is not an id that this platform gives")
        return self._lives.get(job_id)
