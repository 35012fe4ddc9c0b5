"""Rendering of a job as the script that `sbatch` reads. Pure: no cluster, no clock, no disk."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath

from launcher.environment import as_rows, node_environment
from launcher.errors import ConfigProblem
from launcher.job import UNBUILT, Job, Submission
from launcher.platforms.log_files import KeptJob
from launcher.platforms.settings import drop_empty
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from litgpt_demo.errors import EXIT_CODES, FailureClass
from litgpt_demo.storage import is_remote

_WAIT = 120
"""Seconds that the other nodes have to end by themselves, and to say what they saw, once the first has ended."""


class SlurmJob(KeptJob):
    """Its place is the login node, empty for this machine. Slurm numbers jobs anew; their names are ours."""

    platform = "Slurm"
    form = "slurm://host"


def render(job: Job, settings: SlurmPlatformConfig) -> Submission:
    """The submission: the batch script, and the id under which the job is found again."""
    network = settings.fabric
    shm = network.node.shm_bytes if settings.gpus else 0
    entries = node_environment(job, settings, network, allow_sockets=settings.allow_sockets, shm_bytes=shm)
    remote = is_remote(job.directory)
    if not remote and not PurePosixPath(job.directory).is_absolute():
        what = f"the run's folder {job.directory} is relative, and nodes have other working directories"
        raise ConfigProblem(what, fix="set root to an absolute path that all nodes see, or to gs://bucket/prefix")
    command = job.node_command(
        node_rank="env:SLURM_NODEID",
        master="env:LITGPT_MASTER",
        directory="@OWN@" if remote else job.directory,
        log_flags=("--log-uri", job.directory, "--log-every", "10") if remote else (),
        grace=settings.grace,
    )
    if unwritable := re.search(r"[\\\x00-\x1f]", job.directory):  # Slurm takes backslashes out of a path
        what = f"the run's folder {job.directory!r} has {unwritable[0]!r}, which Slurm cannot write in a path"
        raise ConfigProblem(what, fix="choose a root without backslashes and control characters")
    log = shlex.quote(f"{job.directory.replace('%', '%%')}/node-%n.log")  # `%` begins a replacement
    output = "" if remote else f" --output={log} --open-mode=append"
    setup = []
    if not remote:
        fail = _fail("root", f"the run's folder {job.directory} is not there on this node, or cannot be written")
        setup = [_FOLDER.format(folder=shlex.quote(job.directory), fail=fail)]
    setup += [f"export {entry.name}={shlex.quote(entry.value)}" for entry in entries]
    # Read from their files on the cluster: values are in no script and on no command line.
    for name, path in settings.secrets.items():
        file = f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
        fail = _fail("secret", f"the file {path} of platform.secrets.{name} cannot be read")
        setup += [f"{name}=$(cat {file}) || {fail}", f"export {name}"]
    software = [
        f"module load {shlex.quote(module)} || {_fail('module', f'platform.modules: {module} cannot be loaded')}"
        for module in settings.modules
    ]
    software += [f"export PATH={shlex.quote(settings.venv)}/bin:$PATH"] if settings.venv else []
    if settings.container is None:
        where = f"platform.venv={settings.venv} has" if settings.venv else "platform.venv is not set, and PATH has"
        program = shlex.quote(f"{settings.venv}/bin/python") if settings.venv else "python"  # not PATH's next
        software += [f"{program} -c 'import litgpt_demo' || {_fail('venv', f'{where} no python with train-litgpt')}"]
    else:
        has = {"pyxis": "srun --help | grep -e --container-image", "apptainer": "command -v apptainer"}
        fail = _fail("container", f"platform.container={settings.container}, but this node does not have it")
        software += [f"{has[settings.container]} > /dev/null || {fail}"]
    if settings.container_image:
        fail = _fail("container", f"platform.container_image={settings.container_image} cannot be read")
        software += [f"[ -r {shlex.quote(settings.container_image)} ] || {fail}"]
    mounts = [*([] if remote else [str(PurePosixPath(job.root or job.directory))]), *settings.mounts]
    container, python = list[str](), ["python"]
    if settings.container == "pyxis":  # by options of srun (https://github.com/NVIDIA/pyxis#usage)
        container = [f"--container-image={settings.container_image or (job.image or UNBUILT).replace('/', '#', 1)}"]
        both = ",".join(one if ":" in one else f"{one}:{one}" for one in mounts)
        container += [f"--container-mounts={both}"] if both else []
    elif settings.container == "apptainer":
        bound = (word for one in mounts for word in ("--bind", one))
        image = settings.container_image or f"docker://{job.image or UNBUILT}"
        python = ["apptainer", "exec", *(["--nv"] if settings.gpus else []), *bound, image, "python"]
    avoided = ",".join(dict.fromkeys((*settings.exclude, *job.exclude_nodes)))
    gpus = settings.gpus if settings.gres is None else 0
    options = {
        "job-name": job.attempt_name,
        "comment": " ".join(f"{name}={value}" for name, value in job.all_labels.items()),
        **drop_empty(
            account=settings.account, partition=settings.partition, qos=settings.qos, reservation=settings.reservation,
            constraint=settings.constraint, exclude=avoided,
        ),
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        **drop_empty(**{
            "gpus-per-node": gpus and f"{settings.gpu_type}:{gpus}" if settings.gpu_type else gpus,
            "gres": settings.gres, "cpus-per-task": settings.cpus, "mem": settings.memory, "time": settings.time,
        }),
        "signal": f"B:TERM@{settings.grace}",
        "output": "/dev/null",  # which every node can open: Slurm ends a job, without a word, where it cannot
        "export": "NONE",
    }  # fmt: skip
    flags = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items()] + ["--no-requeue"]
    flags += [*(["--exclusive"] if settings.exclusive else []), *settings.options]
    heading = [f"#SBATCH {flag}" for flag in flags]
    text = "\n".join(["#!/bin/bash", *heading, "", _FAIL, *setup, *software, _SCRIPT.format(
        wait=_WAIT,
        output=output,
        container="".join(f" {shlex.quote(one)}" for one in container),
        python=shlex.join(python),
        words=shlex.join(command),
        run=_IN_A_FOLDER_OF_ITS_OWN if remote else 'exec "$@"',
    )])  # fmt: skip
    kept = SlurmJob(settings.host or "", job.attempt_name, job.nodes, job.directory)
    return Submission(
        platform=settings.kind, job_id=kept.job_id, body={"script": text}, environment=tuple(as_rows(entries))
    )


def _fail(code: str, words: str) -> str:
    return f"fail {code} {shlex.quote(words)}"


FAILED = re.compile(r"error (\[slurm\.[a-z]+\] .*)")
"""The comment that a job gets whose batch script could not start the nodes."""

# The job's comment is seen where the run's folder is not, and by whoever sees the job.
_FAIL = f"""\
fail() {{
  echo "error [slurm.$1] $2"
  scontrol update "jobid=$SLURM_JOB_ID" "comment=error [slurm.$1] $2 (on ${{SLURMD_NODENAME:-its first node}})"
  exit {EXIT_CODES[FailureClass.USER]}
}}
"""

# The batch script itself runs on the first node alone, and prints into its log. SIGTERM, which Slurm sends before the
# time limit, goes on to the nodes (`scancel --signal` reaches the steps and not this shell), and the shell waits until
# they have saved. Each job has a port of its own, for two jobs may share a machine. A node that loses its peers ends by
# itself; `--wait` ends one that does not.
#
# Since 22.05 `srun` does not inherit --cpus-per-task: a task gets one core where the cluster binds tasks to cores. If
# that option was not given, each node takes what the smallest has in this job, for a step has one number for all nodes.
# --cpus-per-gpu excludes it, and is inherited (https://slurm.schedmd.com/srun.html#OPT_cpus-per-task).
_SCRIPT = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node -o "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/p')
export LITGPT_MASTER="${{address:-$first}}:$((20000 + SLURM_JOB_ID % 6000 * 2))"
export LITGPT_RESTART="${{SLURM_RESTART_COUNT:-0}}"
cpus=$(echo "$SLURM_JOB_CPUS_PER_NODE" | tr , '\\n' | sort -n | head -n 1)
[ -n "$SLURM_CPUS_PER_GPU" ] || export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-${{cpus%%(*}}}}"
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
srun --export=ALL --kill-on-bad-exit=0 --wait={wait}{output}{container} \\
  bash -c 'export LITGPT_HOST="$SLURMD_NODENAME"; {run}' node {python} {words} &
step=$!
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
exit $?
"""
# The launcher has made the folder: one that a node makes would be on the node's own disk.
_FOLDER = """\
: >> {folder}/node-0.log || {fail}
exec >> {folder}/node-0.log 2>&1"""

# Where the run's folder is in a bucket: logs are copied there, and the node's own go with it. The signal is the ranks'.
_IN_A_FOLDER_OF_ITS_OWN = (
    f'trap : TERM; own=$(mktemp -d "${{TMPDIR:-/tmp}}/train-litgpt.XXXXXX") || exit {EXIT_CODES[FailureClass.NODE]}; '
    '"${@//@OWN@/$own}"; code=$?; rm -rf "$own"; exit "$code"'
)
