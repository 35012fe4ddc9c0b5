"""Rendering of a job as one script for `sbatch`. Pure: no cluster, no clock, no disk."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from textwrap import dedent
from urllib.parse import parse_qs, quote, urlsplit

from launcher.environment import Entry, as_rows, combined
from launcher.errors import ConfigProblem
from launcher.job import UNBUILT, Job, JobId, Submission
from launcher.networks.profile import Network
from launcher.platforms.base import BY_HAND
from launcher.platforms.slurm.environments import Entered, entered
from launcher.platforms.slurm.settings import FILE, SlurmPlatformConfig
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.node.environment import LEAVE_AT
from litgpt_demo.node.network import NETWORK
from litgpt_demo.storage import is_remote

PLATFORM = "slurm"

JOB = "slurm-job"
"""The file of an attempt's folder with the number of its job, written by who is first: the submitter or the job."""
EXIT = "exit-"
"""The beginning of the files with the exit codes of nodes (exit-0, …) and of the whole script (exit-job)."""
CANCELLED = EXIT_CODES[Fault.CANCELLED]
"""The exit code of a script that was told by SIGUSR1 that its job is cancelled."""

WAITS = "waits-"
"""The beginning of the files with the process of each node that only waits (platform.interactive)."""

ALONE = 5
"""Seconds that the peers of a failed node have to end by themselves, as launcher.runs.culprits expects."""

LAST_PORT, PORTS = 20_000, 10_000
"""Node 0's port: above the first, below those that Linux hands out to clients, and another one for each job."""


@dataclass(frozen=True, kw_only=True)
class JobReference:
    """The content of a job's id: enough to find it in the queue, and what it left when Slurm has forgotten it."""

    name: str
    nodes: int
    directory: str

    @property
    def job_id(self) -> JobId:
        """The reference as a URL."""
        return JobId(f"slurm:{self.name}?nodes={self.nodes}&kept={quote(self.directory, safe='/:')}")

    @classmethod
    def of(cls, job_id: JobId) -> JobReference:
        """The reference that an id was made of.

        Raises:
            ConfigProblem: it is none of ours.
        """
        url = urlsplit(job_id)
        asked = parse_qs(url.query)
        try:
            if url.scheme != PLATFORM:
                raise ValueError("it is not a job of Slurm")
            return cls(name=url.path, nodes=int(asked["nodes"][0]), directory=asked["kept"][0])
        except (ValueError, KeyError) as error:
            raise ConfigProblem(
                f"{job_id!r} is no job of ours ({error}); list runs with `train-litgpt runs`"
            ) from error

    @property
    def mark(self) -> str:
        """Return the end of the job's comment, by which it is told from another root's job of the same name."""
        return f"kept={quote(self.directory, safe='/:')}"

    @property
    def root(self) -> str:
        """Return the folder that all runs are under, or the attempt's own where it is no run's."""
        return self.directory.partition("/runs/")[0]

    @property
    def array_mark(self) -> str:
        """Return the end of the comment of an array whose tasks are attempts under the same root."""
        return f"tasks={quote(self.root, safe='/:')}"


def work_of(reference: JobReference, settings: SlurmPlatformConfig) -> str:
    """Return the folder on the cluster where the job's logs and exit codes are: the attempt's own if it is one.

    Raises:
        ConfigProblem: the run is in a bucket, and there is no folder; or sbatch would read its path as another one.
    """
    if not is_remote(reference.directory):
        if not re.fullmatch(FILE, reference.directory):
            raise ConfigProblem(
                f"the run's folder {reference.directory} has characters that sbatch or a shell reads as something "
                "else; choose a root without blanks, %, quotes, brackets and the like"
            )
        return reference.directory
    if settings.folder is None:
        raise ConfigProblem(
            f"the run's folder {reference.directory} is in a bucket, where Slurm writes no logs; give "
            "platform.folder, a folder that login node and nodes share"
        )
    return f"{settings.folder.rstrip('/')}/{reference.name}"


def render(job: Job, settings: SlurmPlatformConfig) -> Submission:
    """The script that `sbatch` is given.

    Raises:
        ConfigProblem: variables clash, there is no folder for the logs, or the environment and the image do not agree.
    """
    reference = JobReference(name=job.attempt_name, nodes=job.nodes, directory=job.directory)
    work = work_of(reference, settings)
    environment = _environment(job, settings)
    image = job.image or (UNBUILT if settings.takes_image else None)
    way = entered(
        settings.environment,
        image=image,
        folders=_folders(job, work),
        variables={one.name: one.value for one in environment},
        gpus=settings.gpus > 0,
    )
    parts = [
        "#!/bin/bash\n",
        "".join(f"#SBATCH {line}\n" for line in _directives(job, settings, reference, work)),
        _begin(job),
        _limit(settings),
        "".join(f"{line}\n" for line in _secrets(settings)),
        "".join(f"export {one.name}={shlex.quote(one.value)}\n" for one in environment),
        "".join(f"{line}\n" for line in way.lines),
        _steps(job, settings, way, work),
        _END,
    ]
    return Submission(
        platform=PLATFORM,
        job_id=reference.job_id,
        body={"script": "\n".join(part for part in parts if part)},
        environment=tuple(as_rows(environment)),
    )


def _folders(job: Job, work: str) -> tuple[str, ...]:
    """Return the folders of the nodes that a container needs: the root, which has all of them, or the logs' own."""
    if is_remote(job.directory):
        return (work,)
    return (JobReference(name=job.attempt_name, nodes=job.nodes, directory=job.directory).root,)


def time_text(time: timedelta) -> str:
    """Return a time as sbatch takes it: days-hours:minutes:seconds."""
    hours, rest = divmod(time.seconds, 3600)
    return f"{time.days}-{hours:02}:{rest // 60:02}:{rest % 60:02}"


# --- directives -------------------------------------------------------------------------------------------------------


def _directives(job: Job, settings: SlurmPlatformConfig, reference: JobReference, work: str) -> Iterator[str]:
    """Yield the options of sbatch, each with the equals sign that keeps its value in one word."""
    comment = " ".join([*(f"{name}={value}" for name, value in job.all_labels.items()), reference.mark])
    yield f"--job-name={job.attempt_name}"
    yield f'--comment="{comment}"'
    for name in ("partition", "account", "qos", "reservation", "constraint", "gres"):
        if (value := getattr(settings, name)) is not None:
            yield f'--{name}="{value}"' if name == "constraint" else f"--{name}={value}"
    if avoided := [*settings.exclude, *job.exclude_nodes]:
        yield f"--exclude={','.join(dict.fromkeys(avoided))}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    if settings.gpus:
        yield f"--gpus-per-node={settings.gpu + ':' if settings.gpu else ''}{settings.gpus}"
    if settings.cpus is not None:
        yield f"--cpus-per-task={settings.cpus}"
    if settings.memory is not None:
        yield f"--mem={settings.memory}"
    if settings.exclusive:
        yield "--exclusive"
    if settings.time is not None:
        yield f"--time={time_text(settings.time)}"
    yield f"--signal=B:TERM@{settings.notice}"
    yield "--requeue" if settings.restart == "platform" else "--no-requeue"
    yield f"--chdir={work}"
    yield f"--output={work}/node-0.log"
    yield "--open-mode=append"
    yield "--export=NONE"
    yield from settings.options


# --- the script -------------------------------------------------------------------------------------------------------


def _begin(job: Job) -> str:
    return dedent(f"""\
        # Steps get this script's environment; sbatch is given no more than HOME, USER, LOGNAME and PATH.
        export SLURM_EXPORT_ENV=ALL LITGPT_RESTART="${{SLURM_RESTART_COUNT:-0}}"
        export LITGPT_ATTEMPT="{job.attempt_name}-$LITGPT_RESTART"
        # An attempt has one job: where an answer of sbatch was lost, there may be a second one.
        job="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_}}${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}}"
        (set -o noclobber; echo "$job" > {JOB}) 2> /dev/null
        if [ "$(cat {JOB})" != "$job" ]; then
          echo "job $(cat {JOB}) is this attempt already; job $job leaves it alone"
          exit {CANCELLED}
        fi
        rm -f {EXIT}*
        trap 'echo $? > {EXIT}job' EXIT
        """)


def _limit(settings: SlurmPlatformConfig) -> str:
    """The time at which a training leaves by itself, should the signal not reach it."""
    if settings.time is None:
        return ""
    return f"export {LEAVE_AT}=$(($(date +%s) + {int(settings.time.total_seconds()) - settings.notice}))\n"


def _secrets(settings: SlurmPlatformConfig) -> Iterator[str]:
    """Yield lines that read secrets from files, because a value in the job's own environment may be kept by Slurm.

    AccountingStoreFlags=job_env, job_script: https://slurm.schedmd.com/slurm.conf.html#OPT_AccountingStoreFlags
    """
    for name, file in settings.secrets.items():
        problem = f"error [slurm.secret] $(hostname) cannot read {file}, which has {name} -> see platform.secrets"
        yield f'{name}=$(cat {file}) || {{ echo "{problem}"; exit {EXIT_CODES[Fault.USER]}; }}'
        yield f"export {name}"


_NODE = dedent(f"""\
    export LITGPT_HOST="$SLURMD_NODENAME" LITGPT_MASTER="%(master)s:$(({LAST_PORT} + SLURM_JOB_ID %% {PORTS}))"
    trap : TERM  # the node is told to leave, and this shell waits for it
    %(enter)s"$@"; code=$?
    echo "$code" > "%(work)s/{EXIT}$SLURM_NODEID"%(leave)s
    [ "$code" = 0 ] || sleep {ALONE}  # its peers tell what they saw before srun ends them
    exit "$code"
""")
"""One node, as sh in a container has it too. SLURM_LAUNCH_NODE_IPADDR is where srun runs: on the first node."""


_WAIT = f"""\
echo $$ > "%(work)s/{WAITS}$SLURM_NODEID"
echo "node $SLURM_NODEID waits on $LITGPT_HOST for train-litgpt shell"
trap 'exit 0' TERM
sleep infinity & wait
"""
"""A node that is entered by hand, as sh: whoever enters finds the environment of its own command in this process."""


def _steps(job: Job, settings: SlurmPlatformConfig, way: Entered, work: str) -> str:
    remote = is_remote(job.directory)
    shell = _NODE % {
        "work": work,
        "master": "127.0.0.1" if job.nodes == 1 else "$SLURM_LAUNCH_NODE_IPADDR",
        # The node's own disk, in a folder that no other user of the node can have made.
        "enter": f'cd "$(mktemp -d)" || exit {EXIT_CODES[Fault.NODE]}\n' if remote else "",
        "leave": '\nrm -rf -- "$PWD"' if remote else "",
    }
    arguments = job.node_command(
        node_rank="env:SLURM_NODEID",
        master="env:LITGPT_MASTER",
        run_id="env:LITGPT_ATTEMPT",
        directory="." if remote else work,
        log_flags=("--log-uri", job.directory) if remote else (),
        grace=settings.grace,
    )
    options = [
        f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1", "--cpu-bind=none",
        # Since 22.05 srun does not take it from the job (https://slurm.schedmd.com/srun.html#OPT_cpus-per-task).
        *((f"--cpus-per-task={settings.cpus}",) if settings.cpus is not None else ()),
        "--kill-on-bad-exit=1", "--open-mode=append", f"--output={work}/node-%n.log",
        *way.srun,
    ]  # fmt: skip
    words = [*way.python, *arguments]
    if settings.interactive:
        words = ["env", f"{BY_HAND}={shlex.join(words)}", "sh", "-c", _WAIT % {"work": work}]
    return (
        f"srun {' '.join(map(shlex.quote, options))} \\\n"
        f"  sh -c {shlex.quote(shell)} node \\\n"
        f"  {' '.join(map(shlex.quote, words))} &\n"
    )


_END = dedent(f"""\
    step=$! cancelled=
    # srun would kill its tasks at once if it was asked itself.
    leave() {{ scancel --signal=TERM "$job" 2> /dev/null; }}
    trap leave TERM                       # the time limit is near
    trap 'cancelled=1; leave' USR1
    wait "$step"; code=$?
    while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done
    wait "$step" 2> /dev/null; again=$?
    [ "$again" = 127 ] || code=$again     # it ended when a signal had just ended the wait for it
    [ -z "$cancelled" ] || code={CANCELLED}
    exit "$code"
""")


def _environment(job: Job, settings: SlurmPlatformConfig) -> list[Entry]:
    network: Network = settings.fabric
    node = network.node.model_copy(
        update={
            "gpus": settings.gpus,
            "allow_sockets": settings.allow_sockets,
            "overrides": dict(settings.overrides),
            "gate_seconds": settings.gate if job.nodes > 1 else 0,
        }
    )
    own = [
        Entry(name=name, value=value, origin="platform", why=why)
        for name, value, why in (
            (NETWORK, node.model_dump_json(exclude_defaults=True), "what the node has to know of its network"),
            ("PYTHONUNBUFFERED", "1", "log lines appear when they are printed"),
        )
    ]
    return combined(own, profile=network.environment, scripted=(), overrides=settings.overrides, job=job.env)


# --- several as one ---------------------------------------------------------------------------------------------------

_OWN = ("--job-name=", "--comment=", "--chdir=", "--output=", "--open-mode=")
"""The directives that each job of an array would have for itself; all tasks of one share them."""
_TASK = re.compile(r"^([0-9]+)\)\ncd (\S+) ", re.MULTILINE)


def shared(script: str) -> tuple[str, ...]:
    """Return the directives of a script that the tasks of an array have in common."""
    return tuple(line for line in _directives_of(script) if not line.startswith(_OWN))


def array_script(scripts: Mapping[str, str], *, name: str, folder: str, mark: str, parallel: int) -> str:
    """Return one script whose tasks are several jobs, of which so many run at a time.

    Args:
        scripts: the folder of each job's logs to its own script; they agree in what is `shared`.
        folder: the place for what Slurm itself says of a task.
        mark: the end of the comment.
    """
    first, *others = scripts.values()
    words = [word for word in _comment(first) if all(word in _comment(other) for other in others)]
    directives = [
        f"--job-name={name}", f'--comment="{" ".join([*words, mark])}"', f"--array=0-{len(others)}%{parallel}",
        *shared(first), f"--chdir={folder}", f"--output={folder}/slurm-%a.log", "--open-mode=append",
    ]  # fmt: skip
    tasks = "".join(
        f"{index})\ncd {work} && exec >> node-0.log 2>&1 || exit {EXIT_CODES[Fault.NODE]}\n{_body(script)};;\n"
        for index, (work, script) in enumerate(scripts.items())
    )
    return "".join([
        "#!/bin/bash\n\n", *(f"#SBATCH {line}\n" for line in directives),
        f'\ncase "$SLURM_ARRAY_TASK_ID" in\n{tasks}esac\n',
    ])  # fmt: skip


def array_folder(reference: JobReference, settings: SlurmPlatformConfig, name: str) -> str:
    """Return the folder on the cluster for what Slurm itself says of an array's tasks, given one of its jobs."""
    if is_remote(reference.directory) and settings.folder is not None:
        return f"{settings.folder.rstrip('/')}/{name}"
    return f"{reference.root}/sweeps/{name}"


def tasks_of(script: str) -> dict[str, str]:
    """Return the folder of each job's logs to its index, of a script that `array_script` has made."""
    return {work: index for index, work in _TASK.findall(script)}


def _directives_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def _comment(script: str) -> list[str]:
    line = next(line for line in _directives_of(script) if line.startswith("--comment="))
    return line.removeprefix('--comment="').removesuffix('"').split(" ")


def _body(script: str) -> str:
    """Return a script behind its directives, which come first."""
    return script[script.rindex("\n#SBATCH ") :].partition("\n\n")[2]
