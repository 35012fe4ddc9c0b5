"""Slurm as a platform: a job is one batch job of one script, whose step has one task on each node."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from launcher.errors import ConfigProblem, PlatformRefused, PlatformUnreachable
from launcher.job import UNBUILT, Job, JobId, JobState, JobStatus, LogPage, Submission
from launcher.platforms.base import Avoidable, Blow, Capability, Entrance
from launcher.platforms.slurm import preflight, states
from launcher.platforms.slurm import render as rendering
from launcher.platforms.slurm.commands import Slurm, slurm_of, until
from launcher.platforms.slurm.environments import check_environment
from launcher.platforms.slurm.logs import node_logs
from launcher.platforms.slurm.render import CANCELLED, EXIT, JOB, WAITS, JobReference, work_of
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from launcher.platforms.slurm.states import QueuedJob
from litgpt_demo.errors import words_of
from litgpt_demo.findings import Finding
from litgpt_demo.storage import is_remote
from litgpt_demo.storage.private import make_private

_BEGUN = "begun"
_RECORDS = f'cd "$1" 2> /dev/null && {{ grep -Hs "" {JOB} {EXIT}*; test ! -e node-0.log || echo {_BEGUN}:1; }}; true'
_RECORD = re.compile(rf"([^:\n]+):({states.NUMBER})")
_MAKE = 'umask 077; mkdir -p "$1"'
_SEEN = 'for _ in 1 2 3 4 5 6 7 8 9 10; do test -d "$1" && exit 0; sleep 1; done; exit 1'
_CLAIM = f'cd "$1" && (set -C; umask 077; echo "$2" > {JOB}) 2> /dev/null; cat "$1/{JOB}"'
_BLOWS: Mapping[Blow, tuple[str, ...]] = {
    Blow.CANCEL: (), Blow.KILL: ("--signal=KILL",), Blow.NOTICE: ("--batch", "--signal=TERM"),
}  # fmt: skip
# The environment is read from the process: a file with it would keep the job's secrets. Shell functions are left out.
_ENTER = """\
process=$(cat "$1" 2> /dev/null) && test -r "/proc/$process/environ" || {
  echo "the node does not wait yet; its log says what it does" >&2
  exit 1
}
while IFS= read -r -d '' one; do export "$one" 2> /dev/null; done < "/proc/$process/environ"
cd "$(readlink "/proc/$process/cwd")" && exec bash
"""
_NO_OUTPUT = "0:53"
"""The exit code of a job whose output file could not be opened (slurmd's SLURMSTEPD_… 53 as a signal)."""


class SlurmPlatform:
    """Runs the nodes of a job as the tasks of one step. A job's id has its name and its folder, not its number.

    Args:
        settle: seconds that a shared file system may take to show what an ended job has left.
        patience: seconds that a cancelled job may take to end, besides what its ranks have to save.
        clock: seconds since the epoch.
    """

    name: ClassVar[str] = rendering.PLATFORM
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.ANYWHERE})
    poll_seconds: ClassVar[float] = 10.0

    def __init__(
        self,
        settings: SlurmPlatformConfig,
        *,
        settle: float = 10.0,
        patience: float = 120.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._settle, self._patience, self._clock = settle, patience, clock

    @property
    def _slurm(self) -> Slurm:
        return slurm_of(self._settings.host)

    def render(self, job: Job) -> Submission:
        """The script that sbatch is given.

        Raises:
            ConfigProblem: variables clash, there is no folder for logs, or environment and image do not agree.
        """
        return rendering.render(job, self._settings)

    def check(self, submission: Submission) -> Iterator[Finding]:
        """Yield what the submission itself shows to be wrong, then what the cluster lacks for it."""
        yield from preflight.findings(self._slurm, self._settings, submission)

    def check_access(self) -> str:
        """Prove that Slurm's commands are there, and that its controller answers them.

        Raises:
            NotInstalled: they are not.
            LoginProblem: the login node lets nobody in without a question.
            PlatformUnreachable: no answer.
        """
        version = self._slurm.answer("squeue", "--version").out.strip()
        self._slurm.jobs()
        return f"{version} answers on {self._slurm.shell.where}"

    def avoidable(self, job: Job) -> Avoidable:
        """Return that any node can be avoided: `--exclude` takes their names."""
        return Avoidable(None, "ask the cluster's administrators to drain the node")

    # --- submit -------------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> JobId:
        """Submit the script, unless the attempt has a job: one that lives, or that has ended.

        Raises:
            PlatformRefused: the image is not known yet, or Slurm said no.
            PlatformUnreachable: no answer; submitting again is safe.
        """
        reference = self._submittable(submission)
        number = self._number(reference, self._queued(reference))
        if number is None:
            self._make_folder(reference)
            self._require_environment()
            number = self._slurm.submit(submission.body["script"])
        self._claim(reference, number)
        return submission.job_id

    def submit_together(self, submissions: Sequence[Submission], *, name: str, parallel: int) -> None:
        """Submit the jobs that are not there yet as the tasks of an array, for each set of directives one.

        Raises:
            PlatformRefused: an image is not known yet, or Slurm said no.
            PlatformUnreachable: no answer; submitting again is safe.
        """
        self._slurm.jobs()  # one look for all of them
        alike: dict[tuple[str, ...], list[Submission]] = {}
        for one in submissions:
            reference = self._submittable(one)
            number = self._number(reference, self._queued(reference, age=self.poll_seconds))
            if number is None:
                alike.setdefault(rendering.shared(one.body["script"]), []).append(one)
            else:
                self._claim(reference, number)
        for those in alike.values():
            if len(those) == 1:
                self.submit(those[0])
            else:
                self._submit_array(those, name=name, parallel=parallel)

    def _submit_array(self, submissions: Sequence[Submission], *, name: str, parallel: int) -> None:
        references = [JobReference.of(one.job_id) for one in submissions]
        works = [work_of(reference, self._settings) for reference in references]
        folder = rendering.array_folder(references[0], self._settings, name)
        for reference in references:
            self._make_folder(reference)
        self._make_there(folder)
        self._require_environment()
        script = rendering.array_script(
            dict(zip(works, (one.body["script"] for one in submissions), strict=True)),
            name=name, folder=folder, mark=references[0].array_mark, parallel=parallel,
        )  # fmt: skip
        number = self._slurm.submit(script)
        for index, reference in enumerate(references):
            self._claim(reference, f"{number}_{index}")

    def _submittable(self, submission: Submission) -> JobReference:
        """Return what names the job.

        Raises:
            PlatformRefused: its image is not known yet.
        """
        reference = JobReference.of(submission.job_id)
        if self._settings.takes_image and UNBUILT in submission.body["script"]:
            raise PlatformRefused(f"{reference.name} has no image; build one (image: {{kind: docker, …}}) first")
        return reference

    def _claim(self, reference: JobReference, number: str) -> None:
        self._slurm.shell.run(("sh", "-c", _CLAIM, "sh", work_of(reference, self._settings), number))

    def _require_environment(self) -> None:
        """Start the nodes' environment here: it is the config's choice what runs then, so that a plan does not.

        Raises:
            PlatformRefused: it does not start, or lacks something.
        """
        found = check_environment(self._slurm.shell, self._settings.environment)
        if wrong := [finding.message for finding in found if finding.severity == "error"]:
            raise PlatformRefused("; ".join(wrong))

    def _make_folder(self, reference: JobReference) -> None:
        """Make the folder of the attempt's logs, which nobody else can enter.

        Raises:
            PlatformRefused: it cannot be made.
        """
        work = work_of(reference, self._settings)
        try:
            if not is_remote(reference.directory):
                make_private(Path(work))
                self._require_shared(work)
                return
        except OSError as error:
            raise PlatformRefused(f"{work} cannot hold a job: {error}; choose another root") from error
        self._make_there(work)

    def _make_there(self, folder: str) -> None:
        """Make a folder on the cluster.

        Raises:
            PlatformRefused: it cannot be made.
        """
        done = self._slurm.shell.run(("sh", "-c", _MAKE, "sh", folder))
        if done.code != 0:
            raise PlatformRefused(
                f"{folder} cannot be made on {self._slurm.shell.where}: {words_of(done.err)}; choose another "
                "platform.folder or root"
            )

    def _require_shared(self, work: str) -> None:
        """Refuse a folder of this machine that the login node does not see: what is written here is read there.

        Raises:
            PlatformRefused: it is not there, however long a network file system may take to show it.
        """
        shell = self._slurm.shell
        if shell.host is not None and shell.run(("sh", "-c", _SEEN, "sh", work)).code != 0:
            raise PlatformRefused(
                f"{work} was made on this machine, and {shell.host} has no such folder; {preflight.NOT_SEEN}"
            )

    def gave(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        """The id names the job, and the folder by which it is told from others of that name."""
        named = JobReference.of(job_id)
        return (named.name, named.directory) == (attempt_name, directory)

    # --- status -------------------------------------------------------------------------------------------------------

    def status(self, job_id: JobId) -> JobStatus:
        """Return what the queue shows, then what accounting or the job's own records tell.

        Raises:
            PlatformUnreachable: no answer.
        """
        reference = JobReference.of(job_id)
        job = self._chosen(jobs := self._queued(reference, age=self.poll_seconds / 2))
        if job is not None and job.live:
            return self._live(job)
        records = self._records(reference)
        if job is None and JOB not in records:
            return JobStatus(state=JobState.ABSENT, native="absent")
        # It may have been submitted after the look that others share; and of two, the other one has left it alone.
        there = self._queued(reference) if job is None else jobs
        own = [one for one in there if one.number == records.get(JOB)]
        job = self._chosen(own or there)
        return self._live(job) if job is not None and job.live else self._ended(reference, job, records)

    def _live(self, job: QueuedJob) -> JobStatus:
        state = states.job_state(job.state)
        reason = states.pending(job) if state is JobState.PENDING else None
        refused = reason if reason is not None and states.is_refused(job.reason) else None
        # A second question, only where Slurm may answer a loss by itself.
        again = self._slurm.restarts(job.number) if self._settings.restart == "platform" else 0
        begun = job.start if state is JobState.RUNNING else None
        return JobStatus(
            state=state,
            native=job.native,
            hosts=dict(enumerate(job.nodes)),
            scheduled=begun,
            pulled=begun,
            started=begun,
            restarts=again,
            reasons=() if reason is None else (reason,),
            refused=refused,
        )

    def _ended(self, reference: JobReference, job: QueuedJob | None, records: dict[str, str]) -> JobStatus:
        """Return how a job ended: in Slurm's words while it knows them, and in the job's own."""
        codes = {node: states.node_code(int(records[f"{EXIT}{node}"]))
                 for node in range(reference.nodes) if f"{EXIT}{node}" in records}  # fmt: skip
        job = job or self._forgotten(records)
        state = states.job_state(job.state)
        script = int(records[f"{EXIT}job"]) if f"{EXIT}job" in records else None
        if script == CANCELLED:
            state = JobState.CANCELLED
        missing = len(codes) < reference.nodes and state is not JobState.CANCELLED
        if missing and job.end is not None and self._clock() < job.end + self._settle:
            return JobStatus(state=JobState.RUNNING, native=f"{job.native}; its last files are on their way")
        on = dict(enumerate(job.nodes))
        down = self._slurm.out_of_service(job.nodes) if states.is_loss(job.state) else set()
        known, told = states.endings(job.state, codes, reference.nodes, script=script, on=on, down=down)
        return JobStatus(
            state=state,
            native=self._told(job, work_of(reference, self._settings)),
            exit_codes=known,
            evictions=told,
            hosts=on,
            scheduled=job.start,
            pulled=job.start,
            started=job.start,
            ended=job.end,
        )

    def _forgotten(self, records: dict[str, str]) -> QueuedJob:
        """Return a job that the controller has forgotten as accounting knows it, or as its script has told its end.

        Accounting that was away when a job ended calls it RUNNING ever after, until an administrator mends that
        (https://slurm.schedmd.com/sacctmgr.html, RunawayJobs). The script's own word of its end outweighs that.
        """
        number, code = records[JOB], records.get(f"{EXIT}job")
        told, start, end, nodes = self._slurm.accounted(number) or ("", None, None, "")
        told, on = told.split(" ")[0], tuple(states.hosts(nodes))
        if told and (code is None or not states.job_state(told).live):
            return QueuedJob(
                number=number, name="", state=told, reason="", start=start, end=end, nodes=on, comment=""
            )  # fmt: skip
        state, reason = "COMPLETED" if code == "0" else "FAILED", "Slurm has forgotten it"
        reason += f", and accounting still calls it {told}" if told else ""
        reason += "; its script was killed" if code is None else f"; it ended with {code}"
        if "_" in number and _BEGUN not in records:  # a task that is cancelled before it begins vanishes from its array
            state, reason = "CANCELLED", "before it began"
        return QueuedJob(
            number=number, name="", state=state, reason=reason, start=start, end=None, nodes=on, comment=""
        )  # fmt: skip

    def _told(self, job: QueuedJob, work: str) -> str:
        if states.job_state(job.state) is JobState.FAILED and self._slurm.last_words(job.number) == _NO_OUTPUT:
            return f"{job.native}: its log could not be opened; is {work} on the nodes, and writable there?"
        return job.native

    def _records(self, reference: JobReference) -> dict[str, str]:
        """Return the numbers that the job left in its folder, by file: its own, and exit codes."""
        done = self._slurm.shell.run(("sh", "-c", _RECORDS, "sh", work_of(reference, self._settings)))
        return {found[1]: found[2] for line in done.out.splitlines() if (found := _RECORD.fullmatch(line))}

    # --- the queue ----------------------------------------------------------------------------------------------------

    def _queued(self, reference: JobReference, *, age: float = 0.0) -> list[QueuedJob]:
        """Return the attempt's jobs in the queue, live or just ended; more than one only after a lost answer."""
        return [job for job in self._slurm.jobs(age=age) if self._is(job, reference)]

    def _is(self, job: QueuedJob, reference: JobReference) -> bool:
        """Return whether a job is the attempt's: by its own name and comment, or as a task of its root's arrays."""
        if not job.task:
            return job.name == reference.name and job.comment.endswith(reference.mark)
        if not job.comment.endswith(reference.array_mark):
            return False
        return self._slurm.tasks(job).get(work_of(reference, self._settings)) == job.task

    @staticmethod
    def _chosen(jobs: list[QueuedJob]) -> QueuedJob | None:
        """Return the attempt's job: the first of several, for the others leave it alone."""
        live = [job for job in jobs if job.live]
        return min(live or jobs, key=lambda job: job.order, default=None)

    def _number(self, reference: JobReference, jobs: list[QueuedJob]) -> str | None:
        """Return the number of the attempt's job, None where it has none."""
        job = self._chosen(jobs)
        if job is not None:
            return job.number
        return self._records(reference).get(JOB)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        """Return what the nodes' logs have gained since `position`, node by node."""
        reference = JobReference.of(job_id)
        # Asked before reading: what an ended job leaves unfinished is a line too.
        job = self._chosen(self._queued(reference, age=self.poll_seconds / 2))
        ended = job is None or not job.live
        here = self._settings.host is None or not is_remote(reference.directory)
        work = work_of(reference, self._settings)
        return node_logs(self._slurm.shell, work, reference.nodes, position, here=here, ended=ended)

    # --- by hand ------------------------------------------------------------------------------------------------------

    def entrance(self, job_id: JobId, node: int, *, terminal: bool) -> Entrance:
        """Return a step of the job's own on a node, through ssh where the queue is elsewhere.

        `--overlap` shares what the job's step has (https://slurm.schedmd.com/srun.html#OPT_overlap). It is a shell of
        the machine, also where the job's step is in a container. A node that waits is entered with the environment
        and in the folder of its own command.
        """
        reference = JobReference.of(job_id)
        job = self._chosen(self._queued(reference))
        if job is None or node >= len(job.nodes):
            running = 0 if job is None else len(job.nodes)
            raise ConfigProblem(f"{job_id} has no node {node} that runs; there are {running}")
        where = (f"--jobid={job.number}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={job.nodes[node]}")
        words = ("srun", *where, "--cpu-bind=none", *(("--pty",) if terminal else ()), "bash")
        if self._settings.interactive:
            words = (*words, "-c", _ENTER, "bash", f"{work_of(reference, self._settings)}/{WAITS}{node}")
        ssh = self._slurm.shell.ssh
        if not ssh:
            return Entrance(words)
        return Entrance((*ssh[:-2], *(("-t",) if terminal else ()), *ssh[-2:], shlex.join(words)))

    # --- cancel -------------------------------------------------------------------------------------------------------

    def cancel(self, job_id: JobId) -> None:
        """Let running ranks save and leave, then have Slurm end what is left; return when the queue shows it gone.

        Raises:
            PlatformUnreachable: no answer, or it does not end.
        """
        reference = JobReference.of(job_id)

        def live() -> list[QueuedJob]:
            return [job for job in self._queued(reference) if job.live]

        def gone() -> bool:
            return not live()

        if not (there := live()):
            return
        asked = [job for job in there if job.state == "RUNNING"]
        for job in asked:
            self._slurm.cancel(job.number, "--batch", "--signal=USR1")
        if asked and until(gone, seconds=self._settings.grace + 10):
            return
        for job in live():
            self._slurm.cancel(job.number)
        if not until(gone, seconds=self._patience):
            left = ", ".join(f"job {job.number} ({job.native})" for job in live())
            raise PlatformUnreachable(f"{left} is not gone {self._patience:.0f} s after scancel; cancel it again")

    def hit(self, job_id: JobId, blow: Blow) -> None:
        """Hit the attempt's jobs by scancel.

        Raises:
            PlatformUnreachable: no answer.
        """
        for job in self._queued(JobReference.of(job_id)):
            if job.live:
                self._slurm.cancel(job.number, *_BLOWS[blow])

    def left(self, job_id: JobId) -> tuple[str, ...]:
        """Return the attempt's jobs that the queue shows as not ended."""
        reference = JobReference.of(job_id)
        return tuple(f"job {job.number} ({job.native})" for job in self._queued(reference) if job.live)


class ContainerSlurmPlatform(SlurmPlatform):
    """Slurm whose nodes run the image of the image step."""

    capabilities: ClassVar[frozenset[Capability]] = SlurmPlatform.capabilities | {Capability.IMAGES}
