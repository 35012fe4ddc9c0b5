"""Rendering of a job as a Batch job. Pure: no cloud, no clock, no disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from launcher.environment import Entry, as_rows, combined
from launcher.errors import ConfigProblem
from launcher.job import UNBUILT, Job, JobId, Object, Submission
from launcher.networks import DEFAULT, open_network
from launcher.networks.profile import Choice, Network
from launcher.platforms.batch import scripts
from launcher.platforms.batch.settings import BatchPlatformConfig
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.node.network import NETWORK

_Object = dict[str, Any]

PLATFORM = "batch"
PORT = 29500
DIRECTORY = "/run/litgpt"
"""The folder in the container for the node's own logs, error files and staged data."""
JOB_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""The form of a job id in google.cloud.batch_v1: at most 63 lower-case letters, digits and dashes, a letter first."""

_CONFINED = ("--cap-drop=ALL", "--security-opt=no-new-privileges")
"""Options of a container that is not privileged: a training needs no capability, as root or as any other user."""

_MIB = 2**20
_UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "M": 10**6, "G": 10**9, "T": 10**12}

# Codes of ours that a restart would not fix, 1 and 2 of Python's own, and 50005: the job's time is over. The texts on
# lifecycle policies disagree on codes that are not listed (TaskSpec: the default, which is to try again;
# LifecyclePolicy.Action: the other action). For FAIL_TASK both mean the same.
STOPS = (
    EXIT_CODES[Fault.UNKNOWN], 2,
    EXIT_CODES[Fault.USER], EXIT_CODES[Fault.DATA], EXIT_CODES[Fault.OUT_OF_MEMORY], EXIT_CODES[Fault.DISK_FULL],
    50005,
)  # fmt: skip


def render(job: Job, settings: BatchPlatformConfig) -> Submission:
    """The submission: what is created, and under which id. `job` in it is what `gcloud batch jobs submit` takes.

    Raises:
        ConfigProblem: Batch would not take the name, or variables clash.
    """
    if not JOB_ID.fullmatch(job.attempt_name):
        raise ConfigProblem(
            f"{job.attempt_name!r} cannot be the name of a Batch job: at most 63 lower-case letters, digits and "
            "dashes, which begin with a letter and do not end with a dash; choose another `name`"
        )
    network = open_network(DEFAULT, Choice(machine=settings.machine_type))
    environment = _environment(job, settings, network)
    body = {
        "parent": settings.parent,
        "jobId": job.attempt_name,
        "job": {
            "priority": settings.priority,
            "taskGroups": [_task_group(job, settings, network, environment)],
            "allocationPolicy": _allocation(job, settings),
            "labels": labels_of(job),
            "logsPolicy": {"destination": "CLOUD_LOGGING"},
        },
    }
    if not settings.priority:
        del body["job"]["priority"]  # type: ignore[attr-defined]
    return Submission(
        platform=PLATFORM,
        job_id=job_id_of(settings, job.attempt_name),
        body=body,
        environment=tuple(as_rows(environment)),
    )


def group_of(body: Object) -> Object:
    """The one task group of a submission's job."""
    group: Object = body["job"]["taskGroups"][0]
    return group


def container_of(body: Object) -> Object:
    """The container that trains."""
    runnables = group_of(body)["taskSpec"]["runnables"]
    container: Object = next(one["container"] for one in runnables if "container" in one)
    return container


def job_id_of(settings: BatchPlatformConfig, attempt_name: str) -> JobId:
    """Return the id of the job that the attempt of this name is."""
    return JobId(f"{settings.parent}/jobs/{attempt_name}")


def labels_of(job: Job) -> dict[str, str]:
    """Return the labels that find everything of one attempt; Batch takes no dots, slashes and capitals in them."""
    given = {"train-litgpt-run": job.name, "train-litgpt-attempt": str(job.attempt), **job.labels}
    return {_label(key): _label(value) for key, value in given.items()}


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63]


# --- the task group ---------------------------------------------------------------------------------------------------


def _task_group(job: Job, settings: BatchPlatformConfig, network: Network, environment: list[Entry]) -> _Object:
    """One task per VM, all at once: with less parallelism the first would wait at the barrier forever."""
    group: _Object = {
        "taskSpec": {
            "runnables": list(_runnables(job, settings, network)),
            **_resources(settings),
            **_retries(job, settings),
            **({"maxRunDuration": f"{settings.max_seconds}s"} if settings.max_seconds else {}),
            **({"volumes": [_nfs(settings)]} if settings.nfs else {}),
            "environment": {
                "variables": {one.name: one.value for one in environment},
                **({"secretVariables": dict(settings.secrets)} if settings.secrets else {}),
            },
        },
        "taskCount": job.nodes,
        "parallelism": job.nodes,
        "taskCountPerNode": 1,
        "schedulingPolicy": "AS_SOON_AS_POSSIBLE",
    }
    if job.nodes > 1:
        group |= {"requireHostsFile": True}
    return group


def _runnables(job: Job, settings: BatchPlatformConfig, network: Network) -> Iterator[_Object]:
    """The runnables in the order of their start, on every VM."""
    if settings.node_gpus:
        yield _script("gpus", scripts.debian_gpus() if settings.os == "debian" else scripts.cos_gpus())
    if job.nodes > 1:
        # All VMs are there behind it, and so is the list of them.
        yield {"displayName": "all-up", "barrier": {"name": "all-up"}, "timeout": f"{settings.gather}s"}
        if settings.os == "cos":
            yield _script("firewall", scripts.cos_firewall())
    yield _script("node", scripts.node_variables(job.attempt_name, nodes=job.nodes, port=PORT))
    yield {"displayName": "train", "container": _container(job, settings, network)}
    if job.nodes > 1:
        # The VM of a node that is done would be taken away, and with it node 0's store, which others may still need.
        # Who is not there within ten minutes has failed, which is told elsewhere.
        yield {
            "displayName": "all-done",
            "barrier": {"name": "all-done"},
            "timeout": "600s",
            "ignoreExitStatus": True,
        }


def _script(name: str, text: str) -> _Object:
    return {"displayName": name, "script": {"text": text}}


def _container(job: Job, settings: BatchPlatformConfig, network: Network) -> _Object:
    volumes = [f"{scripts.HOME}:{DIRECTORY}"]
    if settings.nfs:
        volumes.append(f"{settings.nfs_path}:{settings.nfs_path}")
    options = [
        # Nodes find each other by the VMs' addresses and listen on any free port; one node alone has nobody to talk to.
        *(["--network=host"] if job.nodes > 1 else []),
        f"--shm-size={shm_bytes(settings, network)}",
        "--ulimit=memlock=-1",
        f"--stop-timeout={settings.grace + 20}",
        f"--env-file={scripts.VARIABLES}",
    ]
    if settings.node_gpus and settings.os == "debian":
        options += [*_CONFINED, "--runtime=nvidia", "--gpus=all"]
    elif not settings.node_gpus:
        options += _CONFINED
    else:
        # No toolkit there: the driver's files are mounted, and its devices come with --privileged
        # (https://cloud.google.com/batch/docs/create-run-job-gpus).
        options.append("--privileged")
        volumes += [f"{scripts.NVIDIA}/{part}:/usr/local/nvidia/{part}:ro" for part in ("lib64", "bin")]
    return {
        "imageUri": job.image or UNBUILT,
        "entrypoint": "python",
        "commands": node_arguments(job, settings),
        "options": " ".join(options),
        "volumes": volumes,
        **_login(settings),
    }


def _login(settings: BatchPlatformConfig) -> _Object:
    """Names of secrets, which Batch reads as the job's service account.

    https://cloud.google.com/batch/docs/reference/rest/v1/projects.locations.jobs#Container
    """
    if settings.registry_username is None:
        return {}
    return {"username": settings.registry_username, "password": settings.registry_password}


def node_arguments(job: Job, settings: BatchPlatformConfig) -> list[str]:
    """Behind `python`; the same on all nodes. Batch keeps the words apart: no quoting."""
    return job.node_command(
        node_rank="env:LITGPT_NODE_RANK",
        master="env:LITGPT_MASTER",
        run_id="env:LITGPT_ATTEMPT",
        directory=DIRECTORY,
        log_flags=("--log-uri", job.directory),
        grace=settings.grace,
    )


def shm_bytes(settings: BatchPlatformConfig, network: Network) -> int:
    """Size of /dev/shm."""
    if settings.shm is None:
        return network.shm_bytes
    number, unit = re.fullmatch(r"(\d+)(\w+)", settings.shm).groups()  # type: ignore[union-attr]  # its pattern is SIZE
    return int(number) * _UNITS[unit]


def _resources(settings: BatchPlatformConfig) -> _Object:
    """The task has the VM to itself. Of a machine that we do not know Batch assumes 2 cores and 2,000 MiB, which
    only decides how many tasks it would put on one VM, and that is said elsewhere."""
    machine = settings.machine_type
    if machine is None:
        return {}
    # What the VM's own system and Batch's agent take is left to them (a tenth, at least 2 GiB).
    memory = machine.memory_gib * 1024 - max(2048, machine.memory_gib * 1024 // 10)
    return {"computeResource": {"cpuMilli": machine.cpus * 1000, "memoryMib": memory}}


def _retries(job: Job, settings: BatchPlatformConfig) -> _Object:
    """Batch restarts single tasks, and one node of several cannot join its peers again: those are a new attempt."""
    if job.nodes > 1 or not settings.restarts:
        return {"maxRetryCount": 0}
    policy = {"action": "FAIL_TASK", "actionCondition": {"exitCodes": list(STOPS)}}
    return {"maxRetryCount": settings.restarts, "lifecyclePolicies": [policy]}


def _nfs(settings: BatchPlatformConfig) -> _Object:
    server, _, path = str(settings.nfs).partition(":")
    return {"nfs": {"server": server, "remotePath": path}, "mountPath": settings.nfs_path}


# --- the VMs ----------------------------------------------------------------------------------------------------------


def _allocation(job: Job, settings: BatchPlatformConfig) -> _Object:
    places = [f"zones/{zone}" for zone in settings.zones] or [f"regions/{settings.location}"]
    network = {
        **({"network": settings.vpc} if settings.vpc else {}),
        **({"subnetwork": settings.subnetwork} if settings.subnetwork else {}),
        **({} if settings.external_ip else {"noExternalIpAddress": True}),
        **({"nicType": "GVNIC"} if settings.gvnic else {}),
    }
    instance = {"policy": _machine(settings), **({"installGpuDrivers": True} if settings.node_gpus else {})}
    return {
        "location": {"allowedLocations": places},
        "instances": [instance],
        **({"serviceAccount": {"email": settings.service_account}} if settings.service_account else {}),
        **({"network": {"networkInterfaces": [network]}} if network else {}),
        **({"placement": {"collocation": "COLLOCATED"}} if settings.compact else {}),
        **({"tags": list(settings.tags)} if settings.tags else {}),
        "labels": labels_of(job),
    }


def _machine(settings: BatchPlatformConfig) -> _Object:
    image = settings.boot_image or f"batch-{settings.os}"
    policy: _Object = {
        "machineType": machine_name(settings.machine),
        "provisioningModel": _provisioning(settings),
        "bootDisk": {"image": image, "sizeGb": settings.boot_disk_gb, "type": settings.boot_disk_type},
    }
    machine = settings.machine_type
    # Machines of newer families have their GPUs; for N1 they are attached. A driver's version belongs to them too.
    if machine is not None and (machine.name.startswith("n1-") or settings.gpu_driver):
        driver = {"driverVersion": settings.gpu_driver} if settings.gpu_driver else {}
        policy["accelerators"] = [{"type": machine.gpu.label, "count": machine.gpus, **driver}]
    if settings.reservation:
        policy["reservation"] = settings.reservation
    return policy


def machine_name(name: str) -> str:
    """Google's: an N1 with GPUs is called after both in our table (`n1-standard-8-t4`)."""
    return re.sub(r"^(n1-\w+-\d+)-\w+$", r"\1", name)


def _provisioning(settings: BatchPlatformConfig) -> str:
    if settings.spot:
        return "SPOT"
    if settings.flex_start:
        return "FLEX_START"
    return "STANDARD"


# --- environment ------------------------------------------------------------------------------------------------------


def _environment(job: Job, settings: BatchPlatformConfig, network: Network) -> list[Entry]:
    cos_gpus = settings.node_gpus and settings.os == "cos"
    node = network.node.model_copy(
        update={
            "gpus": settings.node_gpus,
            "shm_bytes": min(network.node.shm_bytes, shm_bytes(settings, network)),
            "library_paths": ("/usr/local/nvidia/lib64",) if cos_gpus else (),
            "overrides": dict(settings.overrides),
            "gate_seconds": 0,  # plain TCP has no figure that it could be held to
        }
    )

    def entry(name: str, value: str, why: str) -> Entry:
        return Entry(name=name, value=value, origin="platform", why=why)

    own = [
        entry(NETWORK, node.model_dump_json(exclude_defaults=True), "what the node has to know of its network"),
        entry("PYTHONUNBUFFERED", "1", "log lines appear when they are printed"),
    ]
    if cos_gpus:
        # The linker's cache does not know the mounted driver (https://github.com/triton-lang/triton/issues/2507), nor
        # does gcc (https://github.com/vllm-project/vllm/pull/39161).
        why = "where the driver is mounted; the linker's cache does not know it"
        own += [entry(name, "/usr/local/nvidia/lib64", why) for name in ("TRITON_LIBCUDA_PATH", "LIBRARY_PATH")]
    return combined(own, profile=network.environment, scripted=(), overrides=settings.overrides, job=job.env)
