"""Run:ai as a platform.

The output and the ends of pods are read from the run's directory, which outlives them. The REST API has neither, and
the command line forgets them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypeAlias

from launcher import errors
from launcher.environment import as_rows
from launcher.errors import PlatformRefused, PlatformUnreachable, finding_of
from launcher.job import UNBUILT, Job, JobId, JobState, JobStatus, LogPage, Submission
from launcher.platforms.log_files import exit_codes, page_of
from launcher.platforms.runai.cli import Cli
from launcher.platforms.runai.render import WorkloadReference, workload
from launcher.platforms.runai.rest import Rest
from launcher.platforms.runai.settings import RunaiPlatformConfig
from litgpt_demo.errors import Finding
from litgpt_demo.storage import is_remote, open_storage

SUBMITTED = "submission.json"
CANCELLED = "cancelled.json"
"""The file in the attempt's directory with what Run:ai forgets when the workload is deleted."""
_LEAVE = 180.0  # seconds that pods have to go when a job is cancelled

# REST and CLI v2: phases of the API (docs.nvidia.com/run-ai, workloads). CLI v1: the STATUS column, which shows what a
# pod waits for as well (https://docs.run.ai/developer/researcher-rest-api/rest-list-jobs/).
_PHASES = {
    JobState.PENDING: "Creating Initializing Resuming Pending ContainerCreating ImagePullBackOff ErrImagePull",
    # Degraded: some pods fail, and the operator has not ended the others yet.
    JobState.RUNNING: "Running Updating Degraded Stopping Deleting Terminating",
    JobState.SUCCEEDED: "Completed Succeeded",
    JobState.FAILED: "Failed",
    # By a user: it could be resumed there; here the next run of the same command is a new attempt.
    JobState.CANCELLED: "Stopped",
    JobState.ABSENT: "Deleted",
}
_STATES = {phase: state for state, phases in _PHASES.items() for phase in phases.split()}


def state_of(phase: str | None) -> JobState:
    """Return the state of a workload by its phase. An undocumented phase is UNKNOWN, which stops nothing."""
    if phase is None:
        return JobState.ABSENT
    return _STATES.get(phase, JobState.UNKNOWN)


Api: TypeAlias = Cli | Rest
"""A client of Run:ai. `submit` sends one request, and leaves an existing workload of that name unchanged. It raises
PlatformRefused if no workload was made, and PlatformUnreachable if that is not known. `phase` returns Run:ai's word, or
None without such a workload. `delete` succeeds if the workload is already gone. `error_code` is the code of a finding
that is made of an error."""


class RunaiPlatform:
    """Runs the nodes of a job as a PyTorch training: one master and workers.

    A job's id is a URL: `runai://project/name?nodes=…&kept=…`, the last being where logs and reports are kept.
    """

    name: ClassVar[str] = "runai"
    is_remote_service: ClassVar[bool] = True
    poll_seconds: ClassVar[float] = 15.0

    def __init__(self, settings: RunaiPlatformConfig, api: Api | None = None) -> None:
        self._settings = settings
        self._api: Api = api or (Rest(settings, os.environ) if settings.uses_rest(os.environ) else Cli(settings))
        self._settled: set[JobId] = set()
        self.settle = 20.0
        """Seconds that pods have to leave their reports and logs once the job as a whole has ended."""
        self.pauses: Sequence[float] = (2.0, 5.0, 10.0, 20.0)
        """Seconds to wait after each submission that was not answered, before a look at what became of it."""
        self.give_up_after = 60.0
        """Seconds after which nothing is submitted again, however long each answer was waited for."""

    def render(self, job: Job) -> Submission:
        work = workload(job, self._settings)
        reference = WorkloadReference(self._settings.project, job.attempt_name, job.nodes, job.directory)
        return Submission(
            platform=self.name,
            job_id=reference.job_id,
            body={"by": self._api.name, "sent": dict(self._api.render(work)), "node": dict(work.node)},
            environment=as_rows(work.environment),
            unknown=self._api.unknown,
        )

    def check(self, submission: Submission) -> Iterator[Finding]:
        directory = WorkloadReference.of(submission.job_id).directory
        volumes = [pvc.path for pvc in self._settings.pvcs]
        if not is_remote(directory) and not any(map(PurePosixPath(directory).is_relative_to, volumes)):
            what = f"the root's folder {directory} is on no volume that pods mount (platform.pvcs: {volumes})"
            fix = "take a root of gs://bucket/prefix, or name the volume's PVC and mount it where it is mounted here"
            yield Finding("error", "runai.root", what, fix)
        yield from self._settings.fabric.problems
        if self._settings.interactive:
            what = "platform.interactive: the pods only wait, and hold their GPUs until the job is cancelled"
            fix = f"run this in each of them: {submission.body['node']['by_hand']}"
            yield Finding("warning", "runai.interactive", what, fix)
        try:
            self._api.check_access(submission.body["sent"])
        except errors.LauncherError as error:
            code = self._api.error_code
            if isinstance(error, errors.NotInstalled):
                code = "runai.no-cli"
            elif isinstance(error, errors.LoginProblem):
                code = "runai.login"
            elif isinstance(error, errors.ConfigProblem):
                code = "runai.project"
            yield finding_of(error, code)

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        if self._api.excludes:
            return None, "have the cluster's administrator repair the machine or cordon it off"
        instead = "install a newer one, submit by REST (platform.url), or take other platform.node_pools"
        return 0, f"`{self._settings.cli}` has no --exclude-node: {instead}"

    def check_access(self) -> str:
        self._api.check_access()
        return f"Run:ai answers for the project {self._settings.project}"

    def submit(self, submission: Submission) -> JobId:
        reference = WorkloadReference.of(submission.job_id)
        if submission.body["node"]["image"] == UNBUILT:
            raise PlatformRefused("the submission has no image", fix="build it, or set image.kind=prebuilt")
        if self._api.phase(reference.name) is None:
            self._launch(reference.name, submission.body["sent"])
        attempt = open_storage(reference.directory)
        if not attempt.exists(SUBMITTED):
            attempt.write(SUBMITTED, json.dumps({"job_id": submission.job_id, "submitted": time.time()}).encode())
        return submission.job_id

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        """The id names the workload, and the folder that is read where Run:ai has forgotten it."""
        settings = self._settings
        return job_id == WorkloadReference(settings.project, attempt_name, settings.nodes, directory).job_id

    def _launch(self, name: str, sent: Mapping[str, Any]) -> None:
        """Run:ai accepts a name only once, so that a workload which is not listed yet is not made twice."""
        unanswered: PlatformUnreachable | None = None
        give_up_at = time.monotonic() + self.give_up_after
        for pause in self.pauses:
            try:
                if unanswered is not None and self._api.phase(name) is not None:
                    return
                self._api.submit(sent)
                return
            except PlatformUnreachable as error:
                unanswered = error
                if time.monotonic() + pause > give_up_at:
                    break
                time.sleep(pause)
            except PlatformRefused:  # perhaps only because the unanswered submission has taken the name or the quota
                if self._api.phase(name) is None:
                    raise
                return
        if self._api.phase(name) is None:
            what = f"{unanswered}; it is not known whether {name} exists"
            raise PlatformUnreachable(f"{what}. The same command reattaches to it, or submits it again") from unanswered

    def status(self, job_id: JobId) -> JobStatus:
        """Return Run:ai's state of the job; for a workload that it has forgotten, the run's directory has the end. When
        a training ends, the other pods get a moment, once, to leave the reports that explain the end."""
        reference = WorkloadReference.of(job_id)
        phase = self._api.phase(reference.name)
        state, native = state_of(phase), str(phase)
        if state.is_live:
            return JobStatus(state=state, native=native)
        attempt = open_storage(reference.directory)
        patience = 0.0 if state is JobState.ABSENT or job_id in self._settled else self.settle
        codes = exit_codes(attempt, nodes=reference.nodes, patience=patience)
        if state is not JobState.ABSENT:
            self._settled.add(job_id)
        # The workload was cancelled by us, was deleted after its end, or has never existed.
        elif attempt.exists(CANCELLED):
            state, native = JobState.CANCELLED, "deleted"
        elif len(codes) < reference.nodes:
            native = "absent"
        else:
            state = JobState.FAILED if any(codes.values()) else JobState.SUCCEEDED
            native = "deleted after its end"
        return JobStatus(state=state, native=native, exit_codes=codes)

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        reference = WorkloadReference.of(job_id)
        # Before reading: the last line of an ended job counts without a line break.
        ended = not state_of(self._api.phase(reference.name)).is_live
        return page_of(open_storage(reference.directory), reference.nodes, position, ended=ended)

    def cancel(self, job_id: JobId) -> None:
        reference = WorkloadReference.of(job_id)
        if state_of(self._api.phase(reference.name)).is_live:
            open_storage(reference.directory).write(CANCELLED, json.dumps({"cancelled": time.time()}).encode())
        deadline = time.monotonic() + _LEAVE
        self._api.delete(reference.name)
        while (phase := self._api.phase(reference.name)) is not None:
            if time.monotonic() > deadline:
                what = f"{reference.name} is still {phase} {_LEAVE:.0f} s after it was deleted"
                raise PlatformUnreachable(what, fix="cancel it again")
            time.sleep(1.0)

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        name = WorkloadReference.of(job_id).name
        phase = self._api.phase(name)
        if phase is None:
            return ()
        return (f"workload {name} ({phase})",)
