"""The vocabulary of jobs: the values that all platforms take and return."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any, NewType, TypeAlias

import yaml
from pydantic import Field

from litgpt_demo.errors import Finding

JobId = NewType("JobId", str)
Object: TypeAlias = Mapping[str, Any]
"""A JSON object of a platform, read only."""

UNBUILT = "NOT-BUILT-YET"
"""The stand-in for an image that is not built yet. `submit` refuses it.

A pull of it fails, because a reference has no capitals (https://github.com/distribution/reference).
"""


Moment: TypeAlias = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
"""Seconds since the epoch. A stored one may be damaged or forged."""

MACHINE = r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?"
MachineName: TypeAlias = Annotated[str, Field(pattern=f"^{MACHINE}$")]
"""The name of a machine that can be excluded, which is the value of a label. A node can report any text as its name."""

RUN_LABEL = "train-litgpt/run"
ATTEMPT_LABEL = "train-litgpt/attempt"
JOB_LABEL = "train-litgpt/job"

PREVIEW = "000000"
"""The nonce (a random number used once) of a job that is only shown. Each attempt gets its own when it is created."""


def drop_empty(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value. The platform has a default for the others."""
    return {name: value for name, value in fields.items() if value}


def new_nonce() -> str:
    """Return a random nonce, as long as PREVIEW. With it, no job of another root or index has the same name."""
    return secrets.token_hex(len(PREVIEW) // 2)


def attempt_name(run: str, attempt: int, nonce: str) -> str:
    """Return the name of a job on its platform, which identifies one record of the run index."""
    return f"{run}-{attempt}-{nonce}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: one attempt of a run on a platform, `nodes` machines with `processes` ranks each."""

    name: str
    """The name of the run: `<name>-<run id>`. The same inputs have the same name."""
    attempt: int
    """The number of the attempt, from 1."""
    nonce: str = PREVIEW
    """The nonce of the attempt's record, which is part of the job's name on its platform."""
    root: str = ""
    """The address of the run's root. A label has a hash of it."""
    nodes: int
    processes: int
    """Ranks on each node."""
    program: tuple[str, ...]
    """The program of every rank: a script, or `-m` and a module, then its arguments."""
    directory: str
    """The folder of this attempt's logs and error files, under the run: a local path or gs://."""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names of environment variables with secrets of the ranks. The platform's settings say where the values are."""
    image: str | None = None
    """The image by digest, None without containers."""
    stage: tuple[str, ...] = ()
    """The addresses of datasets that each node copies and verifies before it starts its ranks."""
    code: str | None = None
    """The address of the archive of the user's own code, which each node unpacks and starts in."""
    labels: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""
    """The reason why the job's name is not known yet. Such a job can be rendered, but not submitted."""
    exclude_nodes: tuple[str, ...] = ()
    """Machines that this attempt must avoid, by the platform's own names (see Platform.max_excluded_nodes)."""

    @property
    def run_name(self) -> str:
        """Return the run's name in labels, with a hash of the root: two roots may have jobs of one config."""
        return f"{self.name}-{sha256(self.root.encode()).hexdigest()[:6]}" if self.root else self.name

    @property
    def attempt_name(self) -> str:
        """Return the job's name on its platform. Each record of an attempt has its own, which no ended job has."""
        return attempt_name(self.name, self.attempt, self.nonce)

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    @property
    def all_labels(self) -> dict[str, str]:
        """Return the labels that find everything of this run and of this job, and the job's own."""
        own = {RUN_LABEL: self.run_name, ATTEMPT_LABEL: str(self.attempt), JOB_LABEL: self.attempt_name}
        return {**own, **self.labels}

    def node_command(
        self, *, node_rank: str, master: str, directory: str, grace: int, run_id: str | None = None,
        log_flags: Sequence[str] = (), stage: Sequence[str] | None = None,
    ) -> list[str]:  # fmt: skip
        """Return the command of one node, without `python`. Numbers and addresses may be `env:NAME`. `directory` is the
        node's own; `log_flags` name the copies of its logs, which outlive it."""
        addresses = self.stage if stage is None else stage
        return [
            "-m", "litgpt_demo", "node",
            "--nodes", str(self.nodes),
            "--node-rank", node_rank,
            "--processes", str(self.processes),
            "--master", master,
            "--run-id", run_id or self.attempt_name,
            "--directory", directory,
            *log_flags,
            "--grace", str(grace),
            *(argument for address in addresses for argument in ("--stage", address)),
            *(("--code", self.code) if self.code else ()),
            "--", *self.program,
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Exactly what will be sent to a platform. `train-litgpt render` prints `str()` of it."""

    platform: str
    job_id: JobId
    body: Mapping[str, Any]
    environment: tuple[Mapping[str, str], ...] = ()
    """The environment variables of the nodes with their origin and reason. They are shown, not sent."""
    unknown: tuple[str, ...] = ()
    """A sentence for each value that is not known yet: its stand-in, and the reason."""

    def __str__(self) -> str:
        return yaml.dump(dict(self.body), Dumper=_Readable, sort_keys=False, allow_unicode=True, width=1000)


class _Readable(yaml.SafeDumper):
    """Writes text of several lines as a block, and repeats values instead of referring to them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _Readable.text)


class JobState(StrEnum):
    """The states of a job on all platforms."""

    ABSENT = "absent"
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}

    @property
    def is_live(self) -> bool:
        return self in {JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN}


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A job's state, and what its platform reports about it."""

    state: JobState
    native: str
    """The platform's own word for the state, also an unknown one, and its number of the job."""
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Node number to exit code of the ended nodes. A negative one is the number of the signal that killed it."""
    evictions: Mapping[int, str] = field(default_factory=dict)
    """Node number to reason and advice, for nodes that were evicted from a full machine or could not be started. The
    diagnosis uses this instead of their reports."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Node number to its machine, as far as the platform reports it."""
    scheduled: float | None = None
    """When the last of its machines was found, in seconds since the epoch. None if the platform does not report it, 0
    if nothing queues."""
    pulled: float | None = None
    """When the last of its nodes first began, after its image was pulled; 0 without an image."""
    started: float | None = None
    """Seconds since the epoch."""
    ended: float | None = None
    restarts: int = 0
    """The number of restarts by the platform itself."""
    reasons: tuple[Finding, ...] = ()
    """The reasons why it does not run yet, or no longer on all nodes, as far as the platform reports them."""
    refused: Finding | None = None
    """The reason and fix if the platform has refused to run it for longer than a run waits."""
    has_running_nodes: bool = False
    """The job counts as ended, but some of its nodes still run and cost money: the orchestrator cancels it."""


@dataclass(frozen=True)
class LogLine:
    """One line of one node's log, without its newline."""

    node: int
    text: str
    time: float | None = field(default=None, compare=False)
    """When it was printed, in seconds since the epoch. None on platforms with log files, whose lines have no time."""

    def __str__(self) -> str:
        return f"[node {self.node}] {self.text}"


@dataclass(frozen=True)
class LogPage:
    """The lines after a position, and the position behind the last of them."""

    lines: tuple[LogLine, ...]
    position: str
    """Opaque. The next page begins there."""
    more: bool = False
    """There are more lines already. The size of a page is limited."""
