"""GCP Batch as a platform: every node of a job is a task on a VM of its own."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from launcher import google
from launcher.errors import LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.google import google_errors
from launcher.job import UNBUILT, Job, JobId, JobState, JobStatus, LogPage, Submission
from launcher.platforms.base import Avoidable, Capability
from launcher.platforms.batch import lint, logs, states
from launcher.platforms.batch import render as rendering
from launcher.platforms.batch.settings import BatchPlatformConfig
from litgpt_demo.errors import words_of
from litgpt_demo.findings import Finding

if TYPE_CHECKING:
    from google.cloud import batch_v1
    from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

# Roles of the submitter: https://cloud.google.com/batch/docs/get-started
BATCH = google.Service(
    extra="batch", settings="platform's", refused=PlatformRefused, away=PlatformUnreachable,
    emulator="BATCH_EMULATOR_HOST",
    roles="enable the Batch API in the project and give yourself roles/batch.jobsEditor and roles/logging.viewer, and "
    "roles/iam.serviceAccountUser on the VMs' service account",
)  # fmt: skip
LOGGING = replace(BATCH, emulator="LOGGING_EMULATOR_HOST")

_LIMIT = 30.0
"""Seconds that one call may take."""


class BatchPlatform:
    """Runs the nodes of a job as the tasks of a Batch job, whose full name is the job's id.

    Args:
        grace: seconds that the peers of a failed node have to end by themselves.
        settle: seconds that the last lines may take to Cloud Logging.
        patience: seconds that a cancelled job may take to end.
    """

    name: ClassVar[str] = "batch"
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.IMAGES, Capability.ANYWHERE})
    poll_seconds: ClassVar[float] = 15.0

    def __init__(
        self,
        settings: BatchPlatformConfig,
        *,
        grace: float = 20.0,
        settle: float = 10.0,
        patience: float = 300.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._grace, self._settle, self._patience, self._clock = grace, settle, patience, clock

    @cached_property
    def _batch(self) -> batch_v1.BatchServiceClient:
        with google_errors(BATCH, "signing in"):
            from google.cloud.batch_v1 import BatchServiceClient

            return BatchServiceClient(transport=BATCH.transport(BatchServiceClient))

    @cached_property
    def _logging(self) -> LoggingServiceV2Client:
        with google_errors(BATCH, "signing in"):
            from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

            return LoggingServiceV2Client(transport=LOGGING.transport(LoggingServiceV2Client))

    def render(self, job: Job) -> Submission:
        """The Batch job that would be created."""
        return rendering.render(job, self._settings)

    def check(self, submission: Submission) -> Iterator[Finding]:
        """Yield the mistakes that the submission itself shows."""
        yield from lint.lint(submission, self._settings)

    def avoidable(self, job: Job) -> Avoidable:
        """No machine: an AllocationPolicy has no field for it, and each attempt gets VMs of new names anyway.

        https://cloud.google.com/batch/docs/reference/rest/v1/projects.locations.jobs#AllocationPolicy
        """
        return Avoidable(
            0,
            "Batch makes new VMs for each attempt, and cannot keep them off hardware that failed; take another zone "
            "(platform.zones) or reservation, and report the VM to Google",
        )

    def check_access(self) -> str:
        """Prove that Batch answers for the project, and lets us see its jobs."""
        where = self._settings.parent
        with google_errors(BATCH, f"asking for the jobs of {where}"):
            from google.api_core import exceptions
            from google.cloud import batch_v1

            try:
                self._batch.list_jobs(batch_v1.ListJobsRequest(parent=where, page_size=1), timeout=_LIMIT)
            except exceptions.PermissionDenied as error:
                raise LoginProblem(f"{where}: {words_of(error.message)}", fix=BATCH.roles) from None
        return f"Batch answers for {where}"

    def submit(self, submission: Submission) -> JobId:
        """Create the job; one that is there, in whatever state, is left as it is."""
        image = rendering.container_of(submission.body)["imageUri"]
        if image == UNBUILT:
            raise PlatformRefused(f"{submission.job_id} has no image; build one (image: {{kind: docker, …}}) first")
        if self._job(submission.job_id) is not None:
            return submission.job_id
        with google_errors(BATCH, f"submitting {submission.job_id}"):
            from google.api_core import exceptions, retry
            from google.cloud import batch_v1

            request = batch_v1.CreateJobRequest(
                parent=submission.body["parent"],
                job_id=submission.body["jobId"],
                job=batch_v1.Job.from_json(json.dumps(submission.body["job"])),
                # The client does not repeat what creates; with an id, Batch knows a repeated call for the same.
                request_id=str(uuid.uuid4()),
            )
            again = retry.Retry(
                predicate=retry.if_exception_type(exceptions.ServiceUnavailable, exceptions.DeadlineExceeded),
                timeout=_LIMIT,
            )
            try:
                self._batch.create_job(request, retry=again, timeout=_LIMIT)
            except exceptions.AlreadyExists:
                return submission.job_id  # somebody was quicker: adopted
        return submission.job_id

    def gave(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        """The id is the job's resource name."""
        return job_id == rendering.job_id_of(self._settings, attempt_name)

    def status(self, job_id: JobId) -> JobStatus:
        """Return the state that Batch reports. A job has failed when one of its tasks has; the others then linger."""
        job = self._job(job_id)
        if job is None:
            return JobStatus(state=JobState.ABSENT, native="absent")
        pending = states.STATES.get(job.status.state.name) is JobState.PENDING
        tasks = [] if pending else self._tasks(job_id)
        return states.status_of(job, tasks, now=self._clock(), grace=self._grace, settle=self._settle)

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        """The lines of all tasks that Cloud Logging has after `position`."""
        job = self._job(job_id)
        if job is None:
            return LogPage((), position)
        with google_errors(BATCH, f"reading the log of {job_id}"):
            project, created = job_id.split("/")[1], job.create_time
            return logs.read(self._logging, project=project, uid=job.uid, created=created, position=position)

    def cancel(self, job_id: JobId) -> None:
        """Let Batch stop the job, and return when it and all of its tasks have ended."""
        give_up = self._clock() + self._patience
        asked = False
        while (job := self._job(job_id)) is not None:
            native = job.status.state.name
            ended = states.STATES.get(native, JobState.UNKNOWN).final
            left = self._running(job) if ended else []
            if ended and not left:
                return
            if not (asked or ended or native == "CANCELLATION_IN_PROGRESS"):
                asked = True
                with google_errors(BATCH, f"cancelling {job_id}"):
                    from google.api_core import exceptions
                    from google.cloud import batch_v1

                    request = batch_v1.CancelJobRequest(name=job_id, request_id=str(uuid.uuid4()))
                    # It has ended, or is gone, in the meantime: the next look tells.
                    with suppress(exceptions.NotFound, exceptions.FailedPrecondition):
                        self._batch.cancel_job(request, timeout=_LIMIT)
            if self._clock() > give_up:
                there = "".join(f", task {node}" for node in left)
                raise PlatformUnreachable(
                    f"{job_id} is {native}{there} {self._patience:.0f} s after it was cancelled; cancel it again"
                )
            time.sleep(min(2.0, max(0.1, self._patience / 100)))

    def left(self, job_id: JobId) -> tuple[str, ...]:
        """Return the job, unless it has ended with all of its tasks: what is kept of it then holds no machine."""
        if (job := self._job(job_id)) is None:
            return ()
        state, tasks = job.status.state.name, tuple(f"task {node}" for node in self._running(job))
        ended = states.STATES.get(state, JobState.UNKNOWN).final
        return tasks if ended else (f"job {job_id} ({state})", *tasks)

    def _job(self, job_id: JobId) -> batch_v1.Job | None:
        """None where there is none."""
        with google_errors(BATCH, f"asking for {job_id}"):
            from google.api_core import exceptions

            try:
                return self._batch.get_job(name=job_id, timeout=_LIMIT)
            except exceptions.NotFound:
                return None

    def _tasks(self, job_id: JobId) -> list[batch_v1.Task]:
        with google_errors(BATCH, f"asking for the tasks of {job_id}"):
            from google.api_core import exceptions

            try:
                return list(self._batch.list_tasks(parent=f"{job_id}/taskGroups/group0", timeout=_LIMIT))
            except exceptions.NotFound:  # deleted since we asked for the job
                return []

    def _running(self, job: batch_v1.Job) -> list[int]:
        """Nodes whose tasks have not ended."""
        tasks = self._tasks(JobId(job.name))
        over = {one.node for one in states.ended(job, tasks)}
        return [node for task in tasks if (node := states.node_of(task.name)) not in over]
