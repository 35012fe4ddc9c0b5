"""What Batch refuses when a job is created: rules of google.cloud.batch_v1's types and of its documentation."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from datetime import timedelta

import grpc
from google.cloud.batch_v1 import types

# The fake has its own list of what exists: two lists that agree by being one would prove nothing.
REGIONS = frozenset({"us-central1", "us-east4", "us-west1", "europe-west4", "asia-northeast1"})
ZONES = "abcf"
MACHINES: Mapping[str, tuple[int, int, int]] = {
    # cores, GiB, GPUs
    "n2-standard-8": (8, 32, 0),
    "e2-standard-4": (4, 16, 0),
    "n1-standard-8": (8, 30, 0),
    "g2-standard-4": (4, 16, 1),
    "g2-standard-24": (24, 96, 2),
    "g2-standard-48": (48, 192, 4),
    "a2-highgpu-1g": (12, 85, 1),
    "a2-highgpu-8g": (96, 680, 8),
    "a3-highgpu-8g": (208, 1872, 8),
}
ABSENT = frozenset({("a2-highgpu-1g", "us-east4"), ("a2-highgpu-8g", "us-east4"), ("g2-standard-4", "us-west1")})
"""Machine types that a region has not got."""
ATTACHABLE = frozenset({"nvidia-tesla-t4", "nvidia-tesla-v100"})
DISKS = frozenset({"pd-balanced", "pd-ssd", "pd-standard", "hyperdisk-balanced"})
IMAGES = frozenset({"batch-debian", "batch-cos", "batch-hpc-rocky"})

LONGEST = timedelta(days=14)
"""A job may run no longer. Stricter than the real thing, which takes more and ends the job there: a duration of ours
that is cut in silence is a fault of ours."""
LONGEST_FLEX_START = timedelta(days=7)

_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"projects/[^/]+/global/images/(family/)?[^/]+")
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
    place = re.fullmatch(r"projects/([^/]+)/locations/([^/]+)", request.parent)
    _require(place, f"parent {request.parent!r} is invalid")
    assert place is not None
    if place[1] != project:
        raise RefusedCallError(
            grpc.StatusCode.PERMISSION_DENIED, f"Permission 'batch.jobs.create' denied on '{request.parent}'"
        )
    if place[2] not in REGIONS:
        raise RefusedCallError(
            grpc.StatusCode.NOT_FOUND, f"Location {place[2]} is not found or access is unauthorized."
        )
    _require(
        _ID.fullmatch(request.job_id), f"Job ID {request.job_id!r} does not match ^[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?$"
    )
    if request.request_id:
        admit_request_id(request.request_id)
    job = request.job
    output = [name for name in ("name", "uid") if getattr(job, name)] + ["status"] * bool(job.status.status_events)
    _require(not output, f"{output} are output only")
    _require(0 <= job.priority < 100, f"priority {job.priority} is not in [0, 100)")
    _require(len(job.task_groups) == 1, f"{len(job.task_groups)} task groups; exactly one is supported")
    _labels(job.labels)
    _labels(job.allocation_policy.labels)
    _task_group(job.task_groups[0])
    _allocation(job.allocation_policy, place[2])
    _fits(job)
    _bought(job)
    _require(job.logs_policy.destination, "logs_policy.destination is not specified")


def admit_request_id(text: str) -> None:
    try:
        known = uuid.UUID(text)
    except ValueError:
        known = uuid.UUID(int=0)
    _require(known.int, f"request_id {text!r} is not a valid UUID")


def _labels(labels: Mapping[str, str]) -> None:
    _require(len(labels) <= 64, "more than 64 labels")
    for key, value in labels.items():
        _require(not key.startswith(("goog-", "google-")), f"label {key} has a reserved prefix")
        _require(_LABEL.fullmatch(key) and _VALUE.fullmatch(value), f"label {key}={value} is invalid")


def _task_group(group: types.TaskGroup) -> None:
    spec = group.task_spec
    _require(not group.task_environments or not group.task_count, "task_count with task_environments")
    _require(1 <= group.task_count <= 10_000, f"task_count {group.task_count}")
    _require(0 <= group.parallelism <= group.task_count, f"parallelism {group.parallelism} of {group.task_count} tasks")
    in_order = group.scheduling_policy == types.TaskGroup.SchedulingPolicy.IN_ORDER
    _require(not in_order or group.parallelism == 1, "IN_ORDER needs parallelism 1")
    _require(not group.require_hosts_file or group.task_count <= 1000, "a hosts file has 1000 VMs at most")
    _require(spec.runnables, "task_spec has no runnables")
    _require(any(not one.barrier for one in spec.runnables), "all runnables are barriers")
    for number, runnable in enumerate(spec.runnables):
        _runnable(runnable, f"runnables[{number}]")
    barriers = [one.barrier.name for one in spec.runnables if one.barrier]
    _require(len(set(barriers)) == len(barriers), f"barriers {barriers} share a name")
    _require(spec.max_run_duration <= LONGEST, f"max_run_duration {spec.max_run_duration} is longer than {LONGEST}")
    _require(0 <= spec.max_retry_count <= 10, f"max_retry_count {spec.max_retry_count} is not in [0, 10]")
    _require(len(spec.lifecycle_policies) <= 1, "only one lifecycle policy is supported")
    for policy in spec.lifecycle_policies:
        _require(policy.action and policy.action_condition.exit_codes, "a lifecycle policy needs action and exit codes")
    for volume in spec.volumes:
        _require(volume.mount_path.startswith("/"), f"mount_path {volume.mount_path!r} is not absolute")
        sources = [one for one in ("nfs", "gcs", "device_name") if one in volume]
        _require(len(sources) == 1, f"a volume has sources {sources}")
        if sources == ["nfs"]:
            _require(volume.nfs.server and volume.nfs.remote_path.startswith("/"), "nfs needs server and remote_path")
    _variables(spec.environment)


def _runnable(runnable: types.Runnable, where: str) -> None:
    kinds = [kind for kind in ("container", "script", "barrier") if kind in runnable]
    _require(len(kinds) == 1, f"{where} has {kinds}; exactly one executable is needed")
    _require(not runnable.timeout or runnable.timeout.total_seconds() > 0, f"{where}.timeout is not positive")
    _require(runnable.timeout <= LONGEST, f"{where}.timeout {runnable.timeout} is longer than {LONGEST}")
    _variables(runnable.environment)
    _labels(runnable.labels)
    if kinds == ["container"]:
        container = runnable.container
        _require(container.image_uri, f"{where}.container has no image_uri")
        _require(not re.search(r"\s", container.image_uri), f"{where}.container.image_uri is invalid")
        own_network = re.search(r"--net(work)?\b", container.options)
        _require(not (container.block_external_network and own_network), f"{where}: network in options is blocked")
        _login(container)
        for volume in container.volumes:
            parts = volume.split(":")
            _require(len(parts) in (2, 3) and parts[0].startswith("/") and parts[1].startswith("/"), f"volume {volume}")
    if kinds == ["script"]:
        _require(bool(runnable.script.path) != bool(runnable.script.text), f"{where}.script needs either path or text")


def _variables(environment: types.Environment) -> None:
    for name in (*environment.variables, *environment.secret_variables):
        _require(_VARIABLE.fullmatch(name), f"environment variable {name!r} is invalid")
    for secret in environment.secret_variables.values():
        _require(_SECRET.fullmatch(secret), f"secret {secret!r} is invalid")
    both = set(environment.variables) & set(environment.secret_variables)
    _require(not both, f"{sorted(both)} are both variables and secrets")


def _login(container: types.Runnable.Container) -> None:
    """Stricter than the real one, which takes plain text: a password that anybody can read in the job is a fault of
    ours."""
    _require(bool(container.username) == bool(container.password), "username and password must be set together")
    for secret in filter(None, (container.username, container.password)):
        _require(_SECRET.fullmatch(secret), f"secret {secret!r} is invalid")


def _allocation(policy: types.AllocationPolicy, region: str) -> None:
    _require(len(policy.instances) == 1, f"{len(policy.instances)} instance policies; exactly one is supported")
    _require(len(policy.network.network_interfaces) <= 1, "one network interface is supported")
    instance = policy.instances[0]
    machine = instance.policy
    _require(machine.machine_type, "machine_type is not specified")
    _require(machine.machine_type in MACHINES, f"machine type {machine.machine_type} does not exist")
    _places(policy.location.allowed_locations, region, machine.machine_type)
    disk = machine.boot_disk
    _require(disk.image in IMAGES or _IMAGE.fullmatch(disk.image), f"boot disk image {disk.image!r} is invalid")
    _require(not disk.type_ or disk.type_ in DISKS, f"disk type {disk.type_!r} does not exist")
    _require(disk.size_gb >= 30, f"boot disk size {disk.size_gb} GB is smaller than the image")
    for accelerator in machine.accelerators:
        attached = machine.machine_type.startswith("n1-")
        _require(accelerator.count > 0, "accelerator count is not positive")
        if attached:
            _require(accelerator.type_ in ATTACHABLE, f"accelerator {accelerator.type_} cannot be attached to N1")
        else:
            right = MACHINES[machine.machine_type][2]
            _require(accelerator.count == right, f"{machine.machine_type} has {right} GPUs, not {accelerator.count}")
    gpus = MACHINES[machine.machine_type][2] or sum(one.count for one in machine.accelerators)
    _require(gpus or not instance.install_gpu_drivers, "install_gpu_drivers without GPUs")
    if machine.provisioning_model.name == "FLEX_START":
        _require(gpus, "FLEX_START is for GPUs")
    for tag in policy.tags:
        _require(_ID.fullmatch(tag), f"tag {tag!r} is invalid")


def _places(places: Iterable[str], region: str, machine: str) -> None:
    regions = []
    for place in places:
        match = re.fullmatch(r"(regions|zones)/([a-z]+-[a-z]+\d+)(-[a-z])?", place)
        _require(match is not None and (match[1] == "zones") == bool(match[3]), f"location {place!r} is invalid")
        assert match is not None
        _require(match[2] == region, f"location {place} is not in the job's location {region}")
        _require(not match[3] or match[3][1] in ZONES, f"zone {place} does not exist")
        regions += [place] if match[1] == "regions" else []
    _require(len(regions) <= 1, "more than one region")
    _require((machine, region) not in ABSENT, f"machine type {machine} is not available in the allowed locations")


def _bought(job: types.Job) -> None:
    """Machines of the Dynamic Workload Scheduler are given for a time that is known beforehand."""
    if job.allocation_policy.instances[0].policy.provisioning_model.name == "FLEX_START":
        asked = job.task_groups[0].task_spec.max_run_duration
        _require(asked, "FLEX_START needs max_run_duration")
        _require(asked <= LONGEST_FLEX_START, f"max_run_duration {asked} is longer than {LONGEST_FLEX_START}")


def _fits(job: types.Job) -> None:
    cores, memory, _ = MACHINES[job.allocation_policy.instances[0].policy.machine_type]
    asked = job.task_groups[0].task_spec.compute_resource
    fits = asked.cpu_milli <= cores * 1000 and asked.memory_mib <= memory * 1024
    _require(
        fits, f"compute_resource {asked.cpu_milli} milli cores, {asked.memory_mib} MiB do not fit the machine type"
    )
