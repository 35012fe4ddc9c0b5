"""Rendering of a job as a Batch job, and the scripts that run on a VM before its container.

Rendering is pure: no cloud, no clock, no disk. Scripts are POSIX sh and run as root, one runnable each. They end with
the exit code of a node fault if the VM is unfit, so that another VM is tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ByteSize, TypeAdapter

from launcher.environment import Entry, as_rows, node_environment
from launcher.job import RUN_LABEL, UNBUILT, Job, JobId, Object, Submission, drop_empty
from launcher.networks import tcp
from launcher.networks.profile import LIBRARIES, NetworkContext
from launcher.platforms.batch.settings import BatchPlatformConfig
from litgpt_demo.errors import EXIT_CODES, FailureClass

PORT = 29500
DIRECTORY = "/run/litgpt"
"""The folder in the container for the node's own logs, error files and staged data."""
HOME = "/var/lib/litgpt"
"""The node's folder on the VM. /run is memory, and on COS only /var, /tmp and /home can be written."""
VARIABLES = f"{HOME}/node.env"
"""The file with the variables that only the VM can set, for `docker run --env-file`."""
NVIDIA = "/var/lib/nvidia"
"""The folder in which Batch puts the driver on COS."""
HOSTS = "/etc/cloudbatch-taskgroup-hosts"
"""The file in which Batch lists the VMs, unless BATCH_HOSTS_FILE says otherwise."""

# Our exit codes that a restart would not fix, 1 and 2 of Python's own, and 50005: the job's time is over. The texts on
# lifecycle policies disagree on codes that are not listed (TaskSpec: the default, which is to try again;
# LifecyclePolicy.Action: the other action). For FAIL_TASK both mean the same.
_FAULTS = (
    FailureClass.UNKNOWN,
    FailureClass.USER,
    FailureClass.DATA,
    FailureClass.OUT_OF_MEMORY,
    FailureClass.DISK_FULL,
)
STOPS = sorted({2, 50005, *(EXIT_CODES[fault] for fault in _FAULTS)})


def render(job: Job, settings: BatchPlatformConfig) -> Submission:
    """Return the submission. Its `job` is a file for `gcloud batch jobs submit`."""
    machine, resources = settings.machine_type, None
    network = tcp.network(NetworkContext(machine=machine), settings)
    shm = int(TypeAdapter(ByteSize).validate_python(f"{settings.shm}B")) if settings.shm else network.shm_bytes
    own, more = dict[str, Any](shm_bytes=min(network.node.shm_bytes, shm)), list[Entry]()
    if settings.node_gpus and settings.os == "cos":
        own["library_paths"] = (LIBRARIES,)
        # The linker's cache does not know the mounted driver (https://github.com/triton-lang/triton/issues/2507), nor
        # does gcc (https://github.com/vllm-project/vllm/pull/39161).
        why = "where the driver is mounted; the linker's cache does not know it"
        names = ("TRITON_LIBCUDA_PATH", "LIBRARY_PATH")
        more = [Entry(name=name, value=LIBRARIES, origin="platform", why=why) for name in names]
    environment = node_environment(job, settings, network, more, named=False, **own)
    # The task has the VM to itself. For an unknown machine Batch assumes 2 cores and 2,000 MiB. They only decide how
    # many tasks share a VM, which taskCountPerNode sets.
    if machine is not None:
        # A tenth of the memory, at least 2 GiB, is left to the VM's system and Batch's agent.
        memory = machine.memory_gib * 1024 - max(2048, machine.memory_gib * 1024 // 10)
        resources = {"cpuMilli": machine.cpus * 1000, "memoryMib": memory}
    # Batch restarts single tasks. One of several nodes cannot join its peers again, which takes a new attempt.
    restarts = settings.in_place_restarts if job.nodes == 1 else 0
    longest = settings.flex_start_duration or settings.max_duration
    lifecycle = [{"action": "FAIL_TASK", "actionCondition": {"exitCodes": STOPS}}]
    server, _, path = (settings.nfs or "").partition(":")
    nfs = {"nfs": {"server": server, "remotePath": path}, "mountPath": settings.nfs_path}
    # One task per VM, all at once: with less parallelism the first would wait at the barrier forever.
    tasks = {
        "taskSpec": {
            "runnables": list(_runnables(job, settings, shm)),
            **drop_empty(computeResource=resources),
            "maxRetryCount": restarts,
            **drop_empty(
                lifecyclePolicies=restarts and lifecycle,
                maxRunDuration=longest and f"{longest}s",
                volumes=settings.nfs and [nfs],
            ),
            "environment": {
                "variables": {entry.name: entry.value for entry in environment},
                **drop_empty(secretVariables=dict(settings.secrets)),
            },
        },
        "taskCount": job.nodes,
        "parallelism": job.nodes,
        "taskCountPerNode": 1,
        "schedulingPolicy": "AS_SOON_AS_POSSIBLE",
        **drop_empty(requireHostsFile=job.nodes > 1),
    }
    sent = {
        **drop_empty(priority=settings.priority),
        "taskGroups": [tasks],
        "allocationPolicy": _allocation(job, settings),
        "labels": labels_of(job),
        "logsPolicy": {"destination": "CLOUD_LOGGING"},
    }
    job_id = job_id_of(settings, job.attempt_name)
    body = {"parent": settings.parent, "jobId": job.attempt_name, "job": sent}
    return Submission(platform=settings.kind, job_id=job_id, body=body, environment=as_rows(environment))


def container_of(body: Object) -> Any:
    [group] = body["job"]["taskGroups"]
    return next(part["container"] for part in group["taskSpec"]["runnables"] if "container" in part)


def job_id_of(settings: BatchPlatformConfig, attempt_name: str) -> JobId:
    return JobId(f"{settings.parent}/jobs/{attempt_name}")


def labels_of(job: Job) -> dict[str, str]:
    """Return the labels of an attempt without dots, slashes and capitals, which Batch refuses."""
    return {_fit(name): _fit(value) for name, value in job.all_labels.items()}


def _fit(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63]


RUN = _fit(RUN_LABEL)
"""The label with the run's name."""


def _runnables(job: Job, settings: BatchPlatformConfig, shm: int) -> Iterator[dict[str, Any]]:
    volumes = [f"{HOME}:{DIRECTORY}"]
    if settings.nfs:
        volumes.append(f"{settings.nfs_path}:{settings.nfs_path}")
    options = [
        f"--shm-size={shm}",
        "--ulimit=memlock=-1",
        f"--stop-timeout={settings.grace_period + 20}",
        f"--env-file={VARIABLES}",
    ]
    if job.nodes > 1:  # they find each other by the VMs' addresses, and listen on any free port
        options.insert(0, "--network=host")
    if settings.node_gpus and settings.os == "cos":
        # No toolkit there: the driver's files are mounted, and its devices come with --privileged
        # (https://cloud.google.com/batch/docs/create-run-job-gpus).
        options.append("--privileged")
        volumes += [f"{NVIDIA}/{part}:/usr/local/nvidia/{part}:ro" for part in ("lib64", "bin")]
    else:  # a training needs no capability, as root or as any other user
        options += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
        if settings.node_gpus:
            options += ["--runtime=nvidia", "--gpus=all"]
    container = {
        "imageUri": job.image or UNBUILT,
        "entrypoint": "python",
        # The same on all nodes. Batch keeps the words apart: no quoting.
        "commands": job.node_command(
            node_rank="env:LITGPT_NODE_RANK",
            master="env:LITGPT_MASTER",
            run_id="env:LITGPT_ATTEMPT",
            directory=DIRECTORY,
            log_flags=("--log-uri", job.directory),
            grace=settings.grace_period,
        ),
        "options": " ".join(options),
        "volumes": volumes,
        # Names of secrets, which Batch reads as the job's service account
        # (https://cloud.google.com/batch/docs/reference/rest/v1/projects.locations.jobs#Container).
        **drop_empty(username=settings.registry_username, password=settings.registry_password),
    }

    def script(name: str, text: str) -> dict[str, Any]:
        return {"displayName": name, "script": {"text": text}}

    if settings.node_gpus:
        yield script("gpus", _DEBIAN_GPUS if settings.os == "debian" else _COS_GPUS)
    if job.nodes > 1:
        # Behind this barrier all VMs run, and the list of them is complete.
        yield {"displayName": "all-up", "barrier": {"name": "all-up"}, "timeout": f"{settings.startup_timeout}s"}
        if settings.os == "cos":
            yield script("firewall", _COS_FIREWALL)
    yield script("node", _node_variables(job.attempt_name, job.nodes))
    yield {"displayName": "train", "container": container}
    if job.nodes > 1:
        # Batch removes the VM of a node that has ended, and with it node 0's store, which other nodes may still need. A
        # node that does not arrive within ten minutes has failed, and its task has an exit code of its own.
        barrier = {"displayName": "all-done", "barrier": {"name": "all-done"}}
        yield {**barrier, "timeout": "600s", "ignoreExitStatus": True}


def _allocation(job: Job, settings: BatchPlatformConfig) -> dict[str, Any]:
    machine, image = settings.machine_type, settings.boot_image or f"batch-{settings.os}"
    accelerators, provisioning = None, "STANDARD"
    if settings.spot:
        provisioning = "SPOT"
    elif settings.flex_start:
        provisioning = "FLEX_START"
    # Machines of newer families have their GPUs; for N1 they are attached. A driver's version belongs to them too.
    if machine is not None and (machine.name.startswith("n1-") or settings.gpu_driver):
        driver = drop_empty(driverVersion=settings.gpu_driver)
        accelerators = [{"type": machine.gpu, "count": machine.gpus, **driver}]
    policy = drop_empty(
        # Google's name: an N1 with GPUs is called after both in our table (`n1-standard-8-t4`).
        machineType=re.sub(r"^(n1-\w+-\d+)-\w+$", r"\1", settings.machine),
        provisioningModel=provisioning,
        bootDisk={"image": image, "sizeGb": settings.boot_disk_gb, "type": settings.boot_disk_type},
        accelerators=accelerators,
        reservation=settings.reservation,
    )
    network = drop_empty(
        network=settings.vpc,
        subnetwork=settings.subnetwork,
        noExternalIpAddress=not settings.external_ip,
        nicType=settings.gvnic and "GVNIC",
    )
    places = [f"zones/{zone}" for zone in settings.zones] or [f"regions/{settings.location}"]
    return drop_empty(
        location={"allowedLocations": places},
        instances=[drop_empty(policy=policy, installGpuDrivers=settings.node_gpus > 0)],
        serviceAccount=drop_empty(email=settings.service_account),
        network=network and {"networkInterfaces": [network]},
        placement=settings.compact and {"collocation": "COLLOCATED"},
        tags=list(settings.tags),
        labels=labels_of(job),
    )


_HEAD = f"""\
set -eu
fail() {{
  echo "error [$1] $2 -> $3"
  exit {EXIT_CODES[FailureClass.NODE]}
}}
"""

# Let Docker give GPUs to containers. The images have NVIDIA's toolkit, but not configured, so that containers would
# find no libcuda in their linker's cache, which triton and others look through.
_DEBIAN_GPUS = f"""{_HEAD}\
nvidia-smi -L || fail batch.driver "nvidia-smi shows no GPU" "leave platform.gpu_driver out, or name one for this GPU"
command -v nvidia-ctk || fail batch.toolkit "the boot image has no nvidia-ctk" "set platform.os=cos, or a newer image"
nvidia-ctk runtime configure --runtime=docker
systemctl restart docker
tries=0
until docker info > /dev/null 2>&1; do
  tries=$((tries + 1))
  [ "$tries" -lt 30 ] || fail batch.docker "Docker does not restart" "see journalctl -u docker on the VM"
  sleep 1
done
ldconfig -p | grep libcuda.so.1 || fail batch.libcuda "the VM has no libcuda.so.1" "see batch_agent_logs on the driver"
"""

# Check what is mounted into containers. The root file system cannot be written, so there is no nvidia-ctk; the driver's
# programs lie on a file system that COS mounts noexec
# (https://cloud.google.com/container-optimized-os/docs/how-to/run-gpus).
_COS_GPUS = f"""{_HEAD}\
ls {NVIDIA}/lib64/libcuda.so.1 || fail batch.libcuda "no driver in {NVIDIA}" "see batch_agent_logs on its installation"
mount --bind {NVIDIA} {NVIDIA}
mount -o remount,exec {NVIDIA}
{NVIDIA}/bin/nvidia-smi -L || fail batch.driver "nvidia-smi shows no GPU" "see batch_agent_logs on its installation"
"""

# Let in only the other VMs, which COS's own firewall keeps out.
_COS_FIREWALL = f"""{_HEAD}\
for host in $(cat "${{BATCH_HOSTS_FILE:-{HOSTS}}}"); do
  iptables -w -A INPUT -s "$host" -j ACCEPT
done
"""


def _node_variables(attempt: str, nodes: int) -> str:
    """BATCH_MAIN_NODE_HOSTNAME and BATCH_NODE_INDEX occur in Google's samples only, and go together (INFERRED: the main
    node is the one with index 0). Without them the hosts file decides both who is first and who is who."""
    place = f"""\
rank=0
master=127.0.0.1:{PORT}"""
    if nodes > 1:
        place = f"""\
hosts="${{BATCH_HOSTS_FILE:-{HOSTS}}}"
tries=0
until [ "$(grep -c . "$hosts" 2> /dev/null)" = {nodes} ]; do
  tries=$((tries + 1))
  [ "$tries" -lt 60 ] || fail batch.hosts "$hosts does not list {nodes} VMs: $(cat "$hosts")" "try again"
  sleep 2
done
if [ -n "${{BATCH_MAIN_NODE_HOSTNAME:-}}" ]; then
  main=$BATCH_MAIN_NODE_HOSTNAME
  rank="${{BATCH_NODE_INDEX:-$BATCH_TASK_INDEX}}"
else
  main=$(grep -m 1 . "$hosts")
  rank=
  number=0
  for other in $(cat "$hosts"); do
    case " $host $(hostname -f 2> /dev/null || true) $(hostname -I 2> /dev/null || true) " in
      *" $other "*) rank=$number ;;
    esac
    number=$((number + 1))
  done
  [ -n "$rank" ] || fail batch.rank "$host is not in $hosts: $(cat "$hosts")" "run again; if it fails again, report it"
fi
[ "$rank" = "$BATCH_TASK_INDEX" ] || echo "warning [batch.rank] task $BATCH_TASK_INDEX is node $rank"
master=$main:{PORT}"""
    return f"""{_HEAD}\
mkdir -p {HOME}
chmod 0777 {HOME}  # containers do not run as root
host=$(hostname)
life="${{BATCH_TASK_RETRY_ATTEMPT:-0}}"
{place}
{{
  echo "LITGPT_NODE_RANK=$rank"
  echo "LITGPT_MASTER=$master"
  echo "LITGPT_HOST=$host"
  echo "LITGPT_RESTART=$life"
  echo "LITGPT_ATTEMPT={attempt}-$life"
}} > {VARIABLES}
cat {VARIABLES}
"""
