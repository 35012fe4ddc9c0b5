"""What Batch refuses when a job is created: rules of google.cloud.batch_v1's types and of its documentation."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from datetime import timedelta

import grpc
from google.cloud.batch_v1 import types

# The fake has its own list of what exists: two lists that agree by being one would prove nothing.
REGIONS = frozenset({"us-central1", "us-east4", "europe-west4"})
MACHINES: Mapping[str, tuple[int, int, int]] = {
    # cores, GiB, GPUs
    "n2-standard-8": (8, 32, 0),
    "g2-standard-24": (24, 96, 2),
    "a2-highgpu-8g": (96, 680, 8),
}
LONGEST = timedelta(days=14)
"""A job may run no longer. Stricter than the real thing, which takes more and ends the job there: a duration of ours
that is cut in silence is a fault of ours."""

_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"projects/[^/]+/secrets/[^/]+/versions/[^/]+")


class RefusedCallError(Exception):
    """A call's end, as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def _require(holds: object, message: str) -> None:
    if not holds:
        raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, message)


def admit(request: types.CreateJobRequest, project: str) -> None:
    """
    Raises:
        RefusedCallError: the job is not one that Batch takes.
    """
    asked, _, region = request.parent.removeprefix("projects/").partition("/locations/")
    if asked != project:
        text = f"Permission 'batch.jobs.create' denied on '{request.parent}'"
        raise RefusedCallError(grpc.StatusCode.PERMISSION_DENIED, text)
    if region not in REGIONS:
        raise RefusedCallError(grpc.StatusCode.NOT_FOUND, f"Location {region} is not found or access is unauthorized.")
    _require(_ID.fullmatch(request.job_id), f"Job ID {request.job_id!r} is invalid")
    admit_request_id(request.request_id)
    job = request.job
    _require(not job.name and not job.uid and not job.status.status_events, "name, uid and status are output only")
    _require(0 <= job.priority < 100, f"priority {job.priority} is not in [0, 100)")
    _require(len(job.task_groups) == 1, f"{len(job.task_groups)} task groups; exactly one is supported")
    for labels in (job.labels, job.allocation_policy.labels):
        for key, value in labels.items():
            _require(not key.startswith(("goog-", "google-")), f"label {key} has a reserved prefix")
            _require(_LABEL.fullmatch(key) and _VALUE.fullmatch(value), f"label {key}={value} is invalid")
    _task_group(job.task_groups[0])
    _allocation(job, region)
    _require(job.logs_policy.destination, "logs_policy.destination is not specified")


def admit_request_id(text: str) -> None:
    try:
        known = uuid.UUID(text or str(uuid.uuid4()))
    except ValueError:
        known = uuid.UUID(int=0)
    _require(known.int, f"request_id {text!r} is not a valid UUID")


def _task_group(group: types.TaskGroup) -> None:
    spec = group.task_spec
    _require(1 <= group.task_count <= 10_000, f"task_count {group.task_count}")
    _require(group.parallelism == group.task_count, "this stand-in runs all tasks at once")
    _require(any(not one.barrier for one in spec.runnables), "task_spec has no runnables but barriers")
    for number, runnable in enumerate(spec.runnables):
        _runnable(runnable, f"runnables[{number}]")
    barriers = [one.barrier.name for one in spec.runnables if one.barrier]
    _require(len(set(barriers)) == len(barriers), f"barriers {barriers} share a name")
    _require(spec.max_run_duration <= LONGEST, f"max_run_duration {spec.max_run_duration} is longer than {LONGEST}")
    _require(0 <= spec.max_retry_count <= 10, f"max_retry_count {spec.max_retry_count} is not in [0, 10]")
    _require(len(spec.lifecycle_policies) <= 1, "only one lifecycle policy is supported")
    for volume in spec.volumes:
        _require(volume.mount_path.startswith("/"), f"mount_path {volume.mount_path!r} is not absolute")
    _variables(spec.environment)


def _runnable(runnable: types.Runnable, where: str) -> None:
    kinds = [kind for kind in ("container", "script", "barrier") if kind in runnable]
    _require(len(kinds) == 1, f"{where} has {kinds}; exactly one executable is needed")
    _require(not runnable.timeout or timedelta() < runnable.timeout <= LONGEST, f"{where}.timeout {runnable.timeout}")
    if kinds == ["container"]:
        container = runnable.container
        _require(re.fullmatch(r"\S+", container.image_uri), f"{where}.container.image_uri is invalid")
        # Stricter than the real one, which takes plain text: a password that anybody can read is a fault of ours.
        _require(bool(container.username) == bool(container.password), "username and password must be set together")
        for secret in filter(None, (container.username, container.password)):
            _require(_SECRET.fullmatch(secret), f"secret {secret!r} is invalid")
        for volume in container.volumes:
            _require(re.fullmatch(r"/[^:]+:/[^:]+(:r[ow])?", volume), f"volume {volume} is invalid")


def _variables(environment: types.Environment) -> None:
    for name in (*environment.variables, *environment.secret_variables):
        _require(_VARIABLE.fullmatch(name), f"environment variable {name!r} is invalid")
    for secret in environment.secret_variables.values():
        _require(_SECRET.fullmatch(secret), f"secret {secret!r} is invalid")


def _allocation(job: types.Job, region: str) -> None:
    policy = job.allocation_policy
    _require(len(policy.instances) == 1, f"{len(policy.instances)} instance policies; exactly one is supported")
    machine = policy.instances[0].policy.machine_type
    _require(machine in MACHINES, f"machine type {machine} does not exist")
    for place in policy.location.allowed_locations:
        match = re.fullmatch(rf"regions/{region}|zones/{region}-[a-f]", place)
        _require(match, f"location {place} is not in the job's location {region}")
    cores, memory, gpus = MACHINES[machine]
    _require(gpus or not policy.instances[0].install_gpu_drivers, "install_gpu_drivers without GPUs")
    asked = job.task_groups[0].task_spec.compute_resource
    fits = asked.cpu_milli <= cores * 1000 and asked.memory_mib <= memory * 1024
    _require(fits, f"{asked.cpu_milli} milli cores, {asked.memory_mib} MiB do not fit the machine type")
