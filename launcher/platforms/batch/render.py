"""Rendering of a job as a Batch job. Pure: no cloud, no clock, no disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from launcher.environment import Entry, as_rows, combined
from launcher.errors import ConfigProblem
from launcher.job import UNBUILT, Job, JobId, Object, Submission
from launcher.networks import DEFAULT, open_network
from launcher.networks.profile import Choice
from launcher.platforms.batch import scripts
from launcher.platforms.batch.settings import BatchPlatformConfig
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.node.network import NETWORK

PORT = 29500
DIRECTORY = "/run/litgpt"
"""The folder in the container for the node's own logs, error files and staged data."""

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
    """The submission: what is created, and under which id. `job` in it is what `gcloud batch jobs submit` takes."""
    # The form of a job id in google.cloud.batch_v1.
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", job.attempt_name):
        raise ConfigProblem(
            f"{job.attempt_name!r} cannot be the name of a Batch job: at most 63 lower-case letters, digits and "
            "dashes, which begin with a letter and do not end with a dash; choose another `name`"
        )
    shm, environment = _shm_and_environment(job, settings)
    body = {
        "parent": settings.parent,
        "jobId": job.attempt_name,
        "job": {
            **_given(priority=settings.priority),
            "taskGroups": [_task_group(job, settings, shm, environment)],
            "allocationPolicy": _allocation(job, settings),
            "labels": labels_of(job),
            "logsPolicy": {"destination": "CLOUD_LOGGING"},
        },
    }
    return Submission(
        platform=settings.kind,
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

    def fit(text: str) -> str:
        return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63]

    return {fit(key): fit(value) for key, value in given.items()}


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that ask for something: what is left out is Batch's own default."""
    return {name: value for name, value in fields.items() if value}


def _task_group(job: Job, settings: BatchPlatformConfig, shm: int, environment: list[Entry]) -> dict[str, Any]:
    """One task per VM, all at once: with less parallelism the first would wait at the barrier forever."""
    machine, resources, lifecycle = settings.machine_type, None, None
    # The task has the VM to itself. Of a machine that we do not know Batch assumes 2 cores and 2,000 MiB, which only
    # decides how many tasks it would put on one VM, and that is said elsewhere.
    if machine is not None:
        # What the VM's own system and Batch's agent take is left to them (a tenth, at least 2 GiB).
        memory = machine.memory_gib * 1024 - max(2048, machine.memory_gib * 1024 // 10)
        resources = {"cpuMilli": machine.cpus * 1000, "memoryMib": memory}
    # Batch restarts single tasks, and one node of several cannot join its peers again: those are a new attempt.
    restarts = settings.restarts if job.nodes == 1 else 0
    if restarts:
        lifecycle = [{"action": "FAIL_TASK", "actionCondition": {"exitCodes": list(STOPS)}}]
    server, _, path = (settings.nfs or "").partition(":")
    nfs = {"nfs": {"server": server, "remotePath": path}, "mountPath": settings.nfs_path}
    return {
        "taskSpec": {
            "runnables": list(_runnables(job, settings, shm)),
            **_given(computeResource=resources),
            "maxRetryCount": restarts,
            **_given(
                lifecyclePolicies=lifecycle,
                maxRunDuration=settings.max_seconds and f"{settings.max_seconds}s",
                volumes=settings.nfs and [nfs],
            ),
            "environment": {
                "variables": {one.name: one.value for one in environment},
                **_given(secretVariables=dict(settings.secrets)),
            },
        },
        "taskCount": job.nodes,
        "parallelism": job.nodes,
        "taskCountPerNode": 1,
        "schedulingPolicy": "AS_SOON_AS_POSSIBLE",
        **_given(requireHostsFile=job.nodes > 1),
    }


def _runnables(job: Job, settings: BatchPlatformConfig, shm: int) -> Iterator[dict[str, Any]]:
    """The runnables in the order of their start, on every VM."""

    def script(name: str, text: str) -> dict[str, Any]:
        return {"displayName": name, "script": {"text": text}}

    if settings.node_gpus:
        yield script("gpus", scripts.debian_gpus() if settings.os == "debian" else scripts.cos_gpus())
    if job.nodes > 1:
        # All VMs are there behind it, and so is the list of them.
        yield {"displayName": "all-up", "barrier": {"name": "all-up"}, "timeout": f"{settings.gather}s"}
        if settings.os == "cos":
            yield script("firewall", scripts.cos_firewall())
    yield script("node", scripts.node_variables(job.attempt_name, nodes=job.nodes, port=PORT))
    yield {"displayName": "train", "container": _container(job, settings, shm)}
    if job.nodes > 1:
        # The VM of a node that is done would be taken away, and with it node 0's store, which others may still need.
        # Who is not there within ten minutes has failed, which is told elsewhere.
        barrier = {"displayName": "all-done", "barrier": {"name": "all-done"}}
        yield {**barrier, "timeout": "600s", "ignoreExitStatus": True}


def _container(job: Job, settings: BatchPlatformConfig, shm: int) -> dict[str, Any]:
    volumes = [f"{scripts.HOME}:{DIRECTORY}"]
    if settings.nfs:
        volumes.append(f"{settings.nfs_path}:{settings.nfs_path}")
    options = [
        # Nodes find each other by the VMs' addresses and listen on any free port; one node alone has nobody to talk to.
        *(["--network=host"] if job.nodes > 1 else []),
        f"--shm-size={shm}",
        "--ulimit=memlock=-1",
        f"--stop-timeout={settings.grace + 20}",
        f"--env-file={scripts.VARIABLES}",
    ]
    if settings.node_gpus and settings.os == "cos":
        # No toolkit there: the driver's files are mounted, and its devices come with --privileged
        # (https://cloud.google.com/batch/docs/create-run-job-gpus).
        options.append("--privileged")
        volumes += [f"{scripts.NVIDIA}/{part}:/usr/local/nvidia/{part}:ro" for part in ("lib64", "bin")]
    else:  # a training needs no capability, as root or as any other user
        options += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
        options += ["--runtime=nvidia", "--gpus=all"] if settings.node_gpus else []
    return {
        "imageUri": job.image or UNBUILT,
        "entrypoint": "python",
        # The same on all nodes. Batch keeps the words apart: no quoting.
        "commands": job.node_command(
            node_rank="env:LITGPT_NODE_RANK",
            master="env:LITGPT_MASTER",
            run_id="env:LITGPT_ATTEMPT",
            directory=DIRECTORY,
            log_flags=("--log-uri", job.directory),
            grace=settings.grace,
        ),
        "options": " ".join(options),
        "volumes": volumes,
        # Names of secrets, which Batch reads as the job's service account
        # (https://cloud.google.com/batch/docs/reference/rest/v1/projects.locations.jobs#Container).
        **_given(username=settings.registry_username, password=settings.registry_password),
    }


def _allocation(job: Job, settings: BatchPlatformConfig) -> dict[str, Any]:
    """The VMs."""
    machine, image = settings.machine_type, settings.boot_image or f"batch-{settings.os}"
    accelerators = None
    # Machines of newer families have their GPUs; for N1 they are attached. A driver's version belongs to them too.
    if machine is not None and (machine.name.startswith("n1-") or settings.gpu_driver):
        driver = _given(driverVersion=settings.gpu_driver)
        accelerators = [{"type": machine.gpu, "count": machine.gpus, **driver}]
    policy = _given(
        # Google's name: an N1 with GPUs is called after both in our table (`n1-standard-8-t4`).
        machineType=re.sub(r"^(n1-\w+-\d+)-\w+$", r"\1", settings.machine),
        provisioningModel="SPOT" if settings.spot else "FLEX_START" if settings.flex_start else "STANDARD",
        bootDisk={"image": image, "sizeGb": settings.boot_disk_gb, "type": settings.boot_disk_type},
        accelerators=accelerators,
        reservation=settings.reservation,
    )
    network = _given(
        network=settings.vpc,
        subnetwork=settings.subnetwork,
        noExternalIpAddress=not settings.external_ip,
        nicType=settings.gvnic and "GVNIC",
    )
    places = [f"zones/{zone}" for zone in settings.zones] or [f"regions/{settings.location}"]
    return _given(
        location={"allowedLocations": places},
        instances=[_given(policy=policy, installGpuDrivers=settings.node_gpus > 0)],
        serviceAccount=_given(email=settings.service_account),
        network=network and {"networkInterfaces": [network]},
        placement=settings.compact and {"collocation": "COLLOCATED"},
        tags=list(settings.tags),
        labels=labels_of(job),
    )


def _shm_and_environment(job: Job, settings: BatchPlatformConfig) -> tuple[int, list[Entry]]:
    """The size of /dev/shm in bytes, and the variables of every container."""
    network = open_network(DEFAULT, Choice(machine=settings.machine_type))
    shm = network.shm_bytes
    if settings.shm is not None:
        number, unit = re.fullmatch(r"(\d+)(\w+)", settings.shm).groups()  # type: ignore[union-attr]  # as its pattern says
        shm = int(number) * _UNITS[unit]
    cos_gpus = settings.node_gpus and settings.os == "cos"
    node = network.node.model_copy(
        update={
            "gpus": settings.node_gpus,
            "shm_bytes": min(network.node.shm_bytes, shm),
            "library_paths": ("/usr/local/nvidia/lib64",) if cos_gpus else (),
            "overrides": dict(settings.overrides),
            "gate_seconds": 0,  # plain TCP has no figure that it could be held to
        }
    )
    own = [
        (NETWORK, node.model_dump_json(exclude_defaults=True), "what the node has to know of its network"),
        ("PYTHONUNBUFFERED", "1", "log lines appear when they are printed"),
    ]
    if cos_gpus:
        # The linker's cache does not know the mounted driver (https://github.com/triton-lang/triton/issues/2507), nor
        # does gcc (https://github.com/vllm-project/vllm/pull/39161).
        why = "where the driver is mounted; the linker's cache does not know it"
        own += [(name, "/usr/local/nvidia/lib64", why) for name in ("TRITON_LIBCUDA_PATH", "LIBRARY_PATH")]
    return shm, combined(
        [Entry(name=name, value=value, origin="platform", why=why) for name, value, why in own],
        profile=network.environment, scripted=(), overrides=settings.overrides, job=job.env,
    )  # fmt: skip
