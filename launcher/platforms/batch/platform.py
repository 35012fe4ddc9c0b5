"""GCP Batch as a platform: every node of a job is a task on a VM of its own."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AwareDatetime, Field

from launcher.errors import LoginProblem, PlatformRefused, PlatformUnreachable, rival
from launcher.google import Service, google_errors
from launcher.job import UNBUILT, Job, JobId, JobState, JobStatus, LogLine, LogPage, Submission
from launcher.machines import MACHINES
from launcher.networks import DEFAULT, networks_of
from launcher.platforms.batch import states
from launcher.platforms.batch.render import RUN, container_of, job_id_of, render
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.platforms.log_files import PAGE
from litgpt_demo import timeouts
from litgpt_demo.config import Settings
from litgpt_demo.errors import Finding, Severity
from litgpt_demo.storage import is_remote

if TYPE_CHECKING:
    from google.cloud import batch_v1
    from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

# Roles of the submitter: https://cloud.google.com/batch/docs/get-started
BATCH = Service(
    extra="batch", denied_error=PlatformRefused, unavailable_error=PlatformUnreachable, emulator="BATCH_EMULATOR_HOST",
    roles="enable the Batch API in the project and give yourself roles/batch.jobsEditor and roles/logging.viewer, and "
    "roles/iam.serviceAccountUser on the VMs' service account",
)  # fmt: skip

_LIMIT = 30.0
"""Seconds that one call may take."""
_OVERLAP = timedelta(seconds=60)
"""Entries of logs come late and not in order; each look goes back so far and leaves out what it has seen."""
# `task/<job uid>-group0-<k>/<retries>/0` (https://cloud.google.com/batch/docs/troubleshooting, on 50002)
_TASK = re.compile(r"-([0-9]{1,6})/")


class _Place(Settings):
    """A position of the log as it is stored; a malformed one is a ValueError."""

    uid: str
    """The job's: a position in the log of another job is none."""
    newest: Annotated[AwareDatetime, Field(ge=datetime(2000, 1, 1, tzinfo=UTC))]
    """The time of the newest entry that was read."""
    seen: tuple[str, ...] = ()
    """The ids of the entries that the next look finds again."""


class BatchPlatform:
    """Runs the nodes of a job as the tasks of a Batch job, whose full name is the job's id. Peers of a failed node get
    `grace_period` seconds to end, and the last lines `settle` seconds to reach Cloud Logging."""

    name: ClassVar[str] = "batch"
    is_remote_service: ClassVar[bool] = True
    poll_seconds: ClassVar[float] = 15.0

    def __init__(
        self,
        settings: BatchPlatformConfig,
        *,
        grace_period: float = 20.0,
        settle: float = 10.0,
        patience: float = timeouts.BATCH_CANCELLATION,
    ) -> None:
        self._settings = settings
        self._grace_period, self._settle, self._patience = grace_period, settle, patience

    @cached_property
    def _batch(self) -> batch_v1.BatchServiceClient:
        client: batch_v1.BatchServiceClient = BATCH.client("google.cloud.batch_v1:BatchServiceClient")
        return client

    @cached_property
    def _logging(self) -> LoggingServiceV2Client:
        logs = "google.cloud.logging_v2.services.logging_service_v2:LoggingServiceV2Client"
        client: LoggingServiceV2Client = replace(BATCH, emulator="LOGGING_EMULATOR_HOST").client(logs)
        return client

    def render(self, job: Job) -> Submission:
        return render(job, self._settings)

    def check(self, submission: Submission) -> Iterator[Finding]:
        """Yield the mistakes that the submission itself shows: Batch would refuse it, or run it differently."""
        settings = self._settings

        def found(code: str, what: str, fix: str, severity: Severity = "error") -> Finding:
            return Finding(severity, code, what, fix)

        machine = settings.machine_type
        if machine is None and settings.gpus is None:
            what = f"platform.machine={settings.machine} is not in the table of machines, so that its GPUs are unknown"
            fix = f"take one of {', '.join(MACHINES)}; or set platform.gpus to its number of them (0 trains on CPUs)"
            yield found("batch.machine", what, fix)
        if machine is not None and machine.arch != "amd64":
            what = f"platform.machine={machine.name} is {machine.arch}, for which Batch has no images"
            yield found("batch.machine", what, "set platform.kind=gke")
        if machine is not None and settings.nodes > 1 and networks_of(machine)[0] != DEFAULT:
            best = networks_of(machine)[0]
            what = f"{machine.name} has {best}, which Batch does not set up: its nodes talk over plain TCP"
            yield found("batch.network", what, "set platform.kind=gke for the full speed", "warning")
        hyperdisk_only = settings.machine.startswith(("a4-", "a4x-", "a3-ultragpu"))
        if hyperdisk_only and not settings.boot_disk_type.startswith("hyperdisk"):
            what = f"platform.machine={settings.machine} cannot use platform.boot_disk_type={settings.boot_disk_type}"
            yield found("batch.boot-disk", what, "set it to hyperdisk-balanced")

        image = settings.boot_image or f"batch-{settings.os}"
        cos = image == "batch-cos" or "cos-cloud" in image or "/cos-" in image
        if cos != (settings.os == "cos"):  # which has no nvidia-ctk and a firewall of its own
            what = f"platform.os={settings.os}, but the boot image is {image}"
            yield found("batch.cos", what, f"set platform.os={'cos' if cos else 'debian'}")

        commands = container_of(submission.body)["commands"]
        folder, inside = commands[commands.index("--log-uri") + 1], f"{settings.nfs_path.rstrip('/')}/"
        if not is_remote(folder) and (settings.nfs is None or not folder.startswith(inside)):
            what = f"VMs do not see the run's folder {folder}: platform.nfs={settings.nfs}, platform.nfs_path={inside}"
            yield found(
                "batch.root", what, "set root to gs://bucket/prefix, or to a folder of a file server: platform.nfs"
            )

        where = settings.location
        if settings.subnetwork and f"/regions/{where}/" not in f"/{settings.subnetwork}":
            what = f"platform.subnetwork={settings.subnetwork} is not in platform.location={where}"
            yield found("batch.subnetwork", what, f"name one of {where}: projects/…/regions/{where}/subnetworks/…")
        if not settings.external_ip and not settings.subnetwork:
            what = "VMs without external addresses reach Google's services through Private Google Access only"
            fix = "turn it on for the subnetwork, and name that in platform.subnetwork"
            yield found("batch.external-ip", what, fix, "warning")

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        # https://cloud.google.com/batch/docs/reference/rest/v1/projects.locations.jobs#AllocationPolicy has no field.
        why = "Batch makes new VMs for each attempt, and cannot keep them off hardware that failed; take another zone"
        return 0, f"{why} (platform.zones) or reservation, and report the VM to Google"

    def check_access(self) -> str:
        where = self._settings.parent
        with google_errors(BATCH, f"listing the jobs of {where}", "PermissionDenied"):
            self._batch.list_jobs({"parent": where, "page_size": 1}, timeout=_LIMIT)
            return f"Batch answers for {where}"
        raise LoginProblem(f"you may not list the jobs of {where} (batch.jobs.list)", fix=BATCH.roles)

    def submit(self, submission: Submission) -> JobId:
        if container_of(submission.body)["imageUri"] == UNBUILT:
            raise PlatformRefused(f"{submission.job_id} has no image", fix="build one (image: {kind: docker, …}) first")
        if self._job(submission.job_id) is not None:
            return submission.job_id
        self._refuse_rivals(submission)
        # AlreadyExists: another orchestrator has submitted the job in the meantime.
        with google_errors(BATCH, f"submitting {submission.job_id}", "AlreadyExists"):
            from google.api_core.retry import Retry
            from google.cloud import batch_v1

            request = batch_v1.CreateJobRequest(
                parent=submission.body["parent"],
                job_id=submission.body["jobId"],
                job=batch_v1.Job.from_json(json.dumps(submission.body["job"])),
                # The client does not repeat a creation by default. With this id, Batch recognizes a repeated call.
                request_id=str(uuid.uuid4()),
            )
            self._batch.create_job(request, retry=Retry(timeout=_LIMIT), timeout=_LIMIT)
        return submission.job_id

    def _refuse_rivals(self, submission: Submission) -> None:
        run = submission.body["job"]["labels"].get(RUN)
        with google_errors(BATCH, f"listing other jobs of {run}"):
            for job in self._batch.list_jobs({"parent": submission.body["parent"]}, timeout=_LIMIT):
                if job.labels.get(RUN) == run and job.name != submission.job_id and not states.state_of(job).is_final:
                    name = f"job {job.name} ({job.status.state.name})"
                    raise rival(name, str(run), end=f"gcloud batch jobs delete {job.name}")

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        return job_id == job_id_of(self._settings, attempt_name)

    def status(self, job_id: JobId) -> JobStatus:
        """Return Batch's state of the job. A job has failed when one of its tasks has, though other tasks still run."""
        job = self._job(job_id)
        if job is None:
            return JobStatus(state=JobState.ABSENT, native="absent")
        tasks = [] if states.state_of(job) is JobState.PENDING else self._tasks(job_id)
        return states.status_of(job, tasks, now=time.time(), grace_period=self._grace_period, settle=self._settle)

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        job = self._job(job_id)
        if job is None:
            return LogPage((), position)
        place = _Place.model_validate_json(position) if position else None
        if place is None or place.uid != job.uid:
            place = _Place(uid=job.uid, newest=job.create_time)
        since = place.newest - _OVERLAP
        project = job_id.split("/")[1]
        request = {
            "resource_names": [f"projects/{project}"],
            # The agent's own log is another one: batch_agent_logs.
            "filter": f'logName="projects/{project}/logs/batch_task_logs" AND labels.job_uid="{job.uid}" '
            f'AND timestamp>="{since.astimezone(UTC).isoformat()}"',
            "order_by": "timestamp asc",
            "page_size": 1000,  # entries that an answer of Cloud Logging holds
        }
        known, size, more, times, lines = set(place.seen), 0, False, dict[str, datetime](), list[LogLine]()
        with google_errors(BATCH, f"reading the log of {job_id}"):
            for entry in self._logging.list_log_entries(request=request):
                if more := size > PAGE:
                    break
                times[entry.insert_id] = entry.timestamp
                task = _TASK.search(entry.labels.get("task_id", ""))
                if entry.insert_id in known or task is None:
                    continue
                text, payload = str(entry.text_payload), entry.json_payload
                if not text and payload:  # a line that is JSON arrives as its fields
                    text = str(payload["message"]) if set(payload) == {"message"} else json.dumps(_plain(payload))
                size += len(text)
                lines += [LogLine(int(task[1]), line, entry.timestamp.timestamp()) for line in text.splitlines()]
        if times:
            newest = max(times.values())
            seen = tuple(name for name, moment in times.items() if moment >= newest - _OVERLAP)
            place = _Place(uid=job.uid, newest=newest, seen=seen)
        return LogPage(tuple(lines), place.model_dump_json(), more)

    def cancel(self, job_id: JobId) -> None:
        give_up_at, job = time.monotonic() + self._patience, self._job(job_id)
        if job is not None and not states.state_of(job).is_final:
            # If the job has ended or is gone in the meantime, the next query shows it.
            with google_errors(BATCH, f"cancelling {job_id}", "NotFound", "FailedPrecondition"):
                self._batch.cancel_job({"name": job_id, "request_id": str(uuid.uuid4())}, timeout=_LIMIT)
        while remaining := self.remaining_resources(job_id):
            if time.monotonic() > give_up_at:
                what = f"{', '.join(remaining)}: still exists {self._patience:.0f} s after {job_id} was cancelled"
                raise PlatformUnreachable(what, fix="cancel it again")
            time.sleep(min(2.0, max(0.1, self._patience / 100)))

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        """Return the job, unless it has ended with all of its tasks and therefore holds no machine."""
        job = self._job(job_id)
        if job is None:
            return ()
        running = (task for task in self._tasks(job_id) if task.status.state.name not in states.OVER)
        tasks = tuple(f"task {task.name.rpartition('/')[2]}" for task in running)
        if states.state_of(job).is_final:
            return tasks
        return (f"job {job_id} ({job.status.state.name})", *tasks)

    def _job(self, job_id: JobId) -> batch_v1.Job | None:
        with google_errors(BATCH, f"querying {job_id}", "NotFound"):
            return self._batch.get_job(name=job_id, timeout=_LIMIT)
        return None

    def _tasks(self, job_id: JobId) -> list[batch_v1.Task]:
        # NotFound: deleted since we queried the job.
        with google_errors(BATCH, f"listing the tasks of {job_id}", "NotFound"):
            return list(self._batch.list_tasks(parent=f"{job_id}/taskGroups/group0", timeout=_LIMIT))
        return []


def _plain(value: Any) -> Any:
    """Cloud Logging keeps numbers as floats; whole ones were whole."""
    if hasattr(value, "items"):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str | bool | float) or value is None:
        return value
    return [_plain(item) for item in value]
