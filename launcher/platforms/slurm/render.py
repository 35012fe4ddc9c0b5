"""Rendering of a job as the script that `sbatch` reads. Pure: no cluster, no clock, no disk."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from launcher.environment import as_rows, node_environment
from launcher.errors import ConfigProblem
from launcher.job import UNBUILT, Job, Submission
from launcher.platforms.log_files import JobRef
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from litgpt_demo.errors import EXIT_CODES, FailureClass
from litgpt_demo.storage import is_remote

_WAIT = 120
"""Seconds that the other nodes have to end by themselves, and to say what they saw, once the first has ended."""


class SlurmJob(JobRef):
    """Its scope is the login node, empty for this machine. Its name is the job's, because Slurm reuses numbers."""

    platform = "Slurm"
    scheme = "slurm"


def render(job: Job, settings: SlurmPlatformConfig) -> Submission:
    """Return the batch script, and the id under which the job is found again."""
    _check_directory(job.directory)
    network = settings.fabric
    shm = network.node.shm_bytes if settings.gpus else 0
    entries = node_environment(job, settings, network, allow_tcp_fallback=settings.allow_tcp_fallback, shm_bytes=shm)
    folder, mounts = list[str](), list(settings.mounts)
    container, python = list[str](), ["python"]
    log_flags: tuple[str, ...] = ()
    if is_remote(job.directory):
        directory, output, start = "@OWN@", "", _IN_A_FOLDER_OF_ITS_OWN
        log_flags = ("--log-uri", job.directory, "--log-every", "10")
    else:
        directory, start = job.directory, 'exec "$@"'
        fail = _fail("root", f"the run's folder {job.directory} does not exist on this node, or cannot be written")
        folder.append(_FOLDER.format(folder=shlex.quote(job.directory), fail=fail))
        mounts.insert(0, str(PurePosixPath(job.root or job.directory)))
        log = f"{job.directory.replace('%', '%%')}/node-%n.log"  # `%` begins a replacement
        output = f" --output={shlex.quote(log)} --open-mode=append"
    if settings.container == "pyxis":  # by options of srun (https://github.com/NVIDIA/pyxis#usage)
        container.append(f"--container-image={settings.container_image or (job.image or UNBUILT).replace('/', '#', 1)}")
        if mounts:
            pairs = (mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
            container.append(f"--container-mounts={','.join(pairs)}")
    elif settings.container == "apptainer":
        python = ["apptainer", "exec"]
        if settings.gpus:
            python.append("--nv")
        for mount in mounts:
            python += ["--bind", mount]
        python += [settings.container_image or f"docker://{job.image or UNBUILT}", "python"]
    command = job.node_command(
        node_rank="env:SLURM_NODEID",
        master="env:LITGPT_MASTER",
        directory=directory,
        log_flags=log_flags,
        grace=settings.grace_period,
    )
    script = _SCRIPT.format(
        wait=_WAIT,
        output=output,
        container="".join(f" {shlex.quote(flag)}" for flag in container),
        python=shlex.join(python),
        command=shlex.join(command),
        start=start,
    )
    heading = [f"#SBATCH {flag}" for flag in _flags(job, settings)]
    exports = [f"export {entry.name}={shlex.quote(entry.value)}" for entry in entries]
    software = [*_secrets(settings), *_software(settings)]
    text = "\n".join(["#!/bin/bash", *heading, "", _FAIL, *folder, *exports, *software, script])
    reference = SlurmJob(settings.host or "", job.attempt_name, job.nodes, job.directory)
    return Submission(
        platform=settings.kind, job_id=reference.job_id, body={"script": text}, environment=tuple(as_rows(entries))
    )


def _check_directory(directory: str) -> None:
    if not is_remote(directory) and not PurePosixPath(directory).is_absolute():
        what = f"the run's folder {directory} is relative, and nodes have other working directories"
        raise ConfigProblem(what, fix="set root to an absolute path that all nodes see, or to gs://bucket/prefix")
    if unwritable := re.search(r"[\\\x00-\x1f]", directory):  # Slurm takes backslashes out of a path
        what = f"the run's folder {directory!r} has {unwritable[0]!r}, which Slurm cannot write in a path"
        raise ConfigProblem(what, fix="choose a root without backslashes and control characters")


def _flags(job: Job, settings: SlurmPlatformConfig) -> list[str]:
    gpus: object = settings.gpus
    if settings.gres:
        gpus = None
    elif settings.gpus and settings.gpu_type:
        gpus = f"{settings.gpu_type}:{settings.gpus}"
    options = {
        "job-name": job.attempt_name,
        "comment": " ".join(f"{name}={value}" for name, value in job.all_labels.items()),
        "account": settings.account,
        "partition": settings.partition,
        "qos": settings.qos,
        "reservation": settings.reservation,
        "constraint": settings.constraint,
        "exclude": ",".join(dict.fromkeys((*settings.exclude, *job.exclude_nodes))),
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus,
        "gres": settings.gres,
        "cpus-per-task": settings.cpus,
        "mem": settings.memory,
        "time": settings.time,
        "signal": f"B:TERM@{settings.grace_period}",
        "output": "/dev/null",  # which every node can open: Slurm silently ends a job that cannot open its output
        "export": "NONE",
    }
    flags = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value]
    flags.append("--no-requeue")
    if settings.exclusive:
        flags.append("--exclusive")
    return [*flags, *settings.options]


def _secrets(settings: SlurmPlatformConfig) -> Iterator[str]:
    """Yield the lines that read secrets from their files, so that no script and no command line has a value."""
    for name, path in settings.secrets.items():
        file = f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
        fail = _fail("secret", f"the file {path} of platform.secrets.{name} cannot be read")
        yield f"{name}=$(cat {file}) || {fail}"
        yield f"export {name}"


def _software(settings: SlurmPlatformConfig) -> Iterator[str]:
    for module in settings.modules:
        yield f"module load {shlex.quote(module)} || {_fail('module', f'platform.modules: {module} cannot be loaded')}"
    if settings.container is not None:
        has = {"pyxis": "srun --help | grep -e --container-image", "apptainer": "command -v apptainer"}
        fail = _fail("container", f"platform.container={settings.container}, but this node does not have it")
        yield f"{has[settings.container]} > /dev/null || {fail}"
    elif settings.venv is not None:
        yield f"export PATH={shlex.quote(settings.venv)}/bin:$PATH"
        fail = _fail("venv", f"platform.venv={settings.venv} has no python with train-litgpt")
        yield f"{shlex.quote(f'{settings.venv}/bin/python')} -c 'import litgpt_demo' || {fail}"  # not PATH's next
    else:
        fail = _fail("venv", "platform.venv is not set, and PATH has no python with train-litgpt")
        yield f"python -c 'import litgpt_demo' || {fail}"
    if settings.container_image is not None:
        fail = _fail("container", f"platform.container_image={settings.container_image} cannot be read")
        yield f"[ -r {shlex.quote(settings.container_image)} ] || {fail}"


def _fail(code: str, message: str) -> str:
    return f"fail {code} {shlex.quote(message)}"


FAILED = re.compile(r"error (\[slurm\.[a-z]+\] .*)")
"""The comment that a job gets whose batch script could not start the nodes."""

# The job's comment is seen where the run's folder is not, and by everybody who sees the job.
_FAIL = f"""\
fail() {{
  echo "error [slurm.$1] $2"
  scontrol update "jobid=$SLURM_JOB_ID" "comment=error [slurm.$1] $2 (on ${{SLURMD_NODENAME:-its first node}})"
  exit {EXIT_CODES[FailureClass.USER]}
}}
"""

# The batch script itself runs only on the first node, and prints into its log. SIGTERM, which Slurm sends before the
# time limit, reaches the nodes (`scancel --signal` reaches the steps and not this shell), and the shell waits until
# they have saved. Each job has a port of its own, for two jobs may share a machine. A node that loses its peers ends by
# itself; `--wait` ends one that does not.
#
# Since 22.05 `srun` does not inherit --cpus-per-task: a task gets one core where the cluster binds tasks to cores. If
# that option was not given, each node takes what the smallest has in this job, for a step has one number for all nodes.
# --cpus-per-gpu excludes it, and is inherited (https://slurm.schedmd.com/srun.html#OPT_cpus-per-task).
_SCRIPT = """\
litgpt_first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
litgpt_address=$(scontrol show node -o "$litgpt_first" | sed -n 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/p')
export LITGPT_MASTER="${{litgpt_address:-$litgpt_first}}:$((20000 + SLURM_JOB_ID % 6000 * 2))"
export LITGPT_RESTART="${{SLURM_RESTART_COUNT:-0}}"
litgpt_cpus=$(echo "$SLURM_JOB_CPUS_PER_NODE" | tr , '\\n' | sort -n | head -n 1)
[ -n "$SLURM_CPUS_PER_GPU" ] || export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-${{litgpt_cpus%%(*}}}}"
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
srun --export=ALL --kill-on-bad-exit=0 --wait={wait}{output}{container} \\
  bash -c 'export LITGPT_HOST="$SLURMD_NODENAME"; {start}' node {python} {command} &
litgpt_step=$!
while kill -0 "$litgpt_step" 2> /dev/null; do wait "$litgpt_step"; done
wait "$litgpt_step"
exit $?
"""
# The launcher has made the folder: one that a node makes would be on the node's own disk.
_FOLDER = """\
: >> {folder}/node-0.log || {fail}
exec >> {folder}/node-0.log 2>&1"""

# Where the run's folder is in a bucket: logs are copied there, and the node's own go with it. The signal is the ranks'.
_IN_A_FOLDER_OF_ITS_OWN = (
    'trap : TERM; litgpt_own=$(mktemp -d "${TMPDIR:-/tmp}/train-litgpt.XXXXXX") '
    f"|| exit {EXIT_CODES[FailureClass.NODE]}; "
    '"${@//@OWN@/$litgpt_own}"; litgpt_code=$?; rm -rf "$litgpt_own"; exit "$litgpt_code"'
)
