"""The vocabulary of jobs: plain values that every platform takes and gives."""

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
"""A JSON object that a platform takes or gives, to be read."""

UNBUILT = "NOT-BUILT-YET"
"""The stand-in for an image that is not known before it has been built; `submit` refuses it.

Nobody can pull it by mistake: a reference has no capitals (https://github.com/distribution/reference).
"""


# What is read back may be damaged or forged.
Moment: TypeAlias = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
"""Seconds since the epoch."""

MACHINE = r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?"
MachineName: TypeAlias = Annotated[str, Field(pattern=f"^{MACHINE}$")]
"""The name of a machine that can be avoided: it is the value of a label. Nodes may report anything else as theirs."""

RUN_LABEL = "train-litgpt/run"
ATTEMPT_LABEL = "train-litgpt/attempt"
JOB_LABEL = "train-litgpt/job"

PREVIEW = "000000"
"""The nonce of a job that is only shown: an attempt gets its own when it is claimed."""


def new_nonce() -> str:
    """Return a random nonce, as long as PREVIEW: the name of a job must not come back with another root or index."""
    return secrets.token_hex(len(PREVIEW) // 2)


def attempt_name(run: str, attempt: int, nonce: str) -> str:
    """Return the name of a job on its platform. It identifies one record of the run index, for ever."""
    return f"{run}-{attempt}-{nonce}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: one attempt of a run on a platform, `nodes` machines with `processes` ranks each."""

    name: str
    """The name of the run: `<name>-<key>`. The same inputs have the same name."""
    attempt: int
    """The number of the attempt, from 1."""
    nonce: str = PREVIEW
    """The nonce of the attempt's record, which is part of the job's name on its platform."""
    root: str = ""
    """The address of the root that the run lies under, which a label has a mark of."""
    nodes: int
    processes: int
    """Ranks on each node."""
    program: tuple[str, ...]
    """The program that torchrun starts in every rank: a script, or `-m` and a module, then its arguments."""
    directory: str
    """The folder of this attempt's logs and error files, under the run: a local path or gs://."""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names of environment variables that ranks need and nobody else may see: the platform knows where to get them."""
    image: str | None = None
    """Image by digest; None where nothing is containerised."""
    stage: tuple[str, ...] = ()
    """Datasets (their addresses) that each node fetches and verifies before it starts its ranks."""
    code: str | None = None
    """Address of the archive of the user's own code, named by its hash, which each node unpacks and starts in."""
    labels: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""
    """The reason why the job's name is not known yet. Such a job can be rendered, and never be submitted."""
    exclude_nodes: tuple[str, ...] = ()
    """Machines that this attempt must avoid, by the platform's own names (see Platform.max_excluded_nodes)."""

    @property
    def run_name(self) -> str:
        """The run's name in labels: its own, and a mark of the root, for two roots may have jobs of one config."""
        return f"{self.name}-{sha256(self.root.encode()).hexdigest()[:6]}" if self.root else self.name

    @property
    def attempt_name(self) -> str:
        """The job's name on its platform: one for each record of an attempt, so that an ended job never shadows it."""
        return attempt_name(self.name, self.attempt, self.nonce)

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    @property
    def all_labels(self) -> dict[str, str]:
        """Return the labels by which everything of this run and of this job is found, and the job's own."""
        own = {RUN_LABEL: self.run_name, ATTEMPT_LABEL: str(self.attempt), JOB_LABEL: self.attempt_name}
        return {**own, **self.labels}

    def node_command(
        self, *, node_rank: str, master: str, directory: str, grace: int, run_id: str | None = None,
        log_flags: Sequence[str] = (), stage: Sequence[str] | None = None,
    ) -> list[str]:  # fmt: skip
        """Return the command of one node, without `python`. Numbers and addresses may be `env:NAME`.

        `directory` is the node's, for logs and error files; `log_flags` say where the logs go which outlive it. Ranks
        have `grace` seconds to save when they are asked to leave. By default `run_id` and `stage` are the job's own.
        """
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
            *(word for address in addresses for word in ("--stage", address)),
            *(("--code", self.code) if self.code else ()),
            "--", *self.program,
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Exactly what will be sent to a platform. `str()` of it is what `train-litgpt render` prints."""

    platform: str
    job_id: JobId
    body: Mapping[str, Any]
    environment: tuple[Mapping[str, str], ...] = ()
    """Every environment variable of the nodes, with where it comes from and why: to be shown, not sent."""
    unknown: tuple[str, ...] = ()
    """The values that are not known from here, or before it is sent, in words: what stands for each, and why."""

    def __str__(self) -> str:
        return yaml.dump(dict(self.body), Dumper=_Readable, sort_keys=False, allow_unicode=True, width=1000)


class _Readable(yaml.SafeDumper):
    """Text of several lines as a block, and nothing said once by referring to another place."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _Readable.text)


class JobState(StrEnum):
    """The states of a job, in our words."""

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
    """A job's state in our words, with the platform's own word."""

    state: JobState
    native: str
    """The platform's own word, with its number of the job: an unlisted one must not stop a two-day run, and must be
    seen."""
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Node number to exit code, for the nodes that ended; negative is the signal that killed it."""
    evictions: Mapping[int, str] = field(default_factory=dict)
    """Node number to the reason and what to do, of nodes that were evicted from a full machine or could not be started;
    it outweighs their reports."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Node number to the machine that it is or was on, as far as the platform tells."""
    scheduled: float | None = None
    """When the last of its machines was found, in seconds since the epoch; None where the platform does not tell, and
    0 where nothing queues."""
    pulled: float | None = None
    """When the last of its nodes first began, its image there; 0 where there is none."""
    started: float | None = None
    """Seconds since the epoch."""
    ended: float | None = None
    restarts: int = 0
    """The number of restarts by the platform itself."""
    reasons: tuple[Finding, ...] = ()
    """The reason why it does not run yet, or not on all of its nodes any more, as far as the platform reports it."""
    refused: Finding | None = None
    """Set when the platform has refused to run it for longer than a run waits for that: why, and what to do."""
    has_running_nodes: bool = False
    """It has ended for us, and some of its nodes still run: who follows the job cancels it, for they cost."""


@dataclass(frozen=True)
class LogLine:
    """One line of one node's log, without its newline."""

    node: int
    text: str
    time: float | None = field(default=None, compare=False)
    """When it was printed, in seconds since the epoch; None where the platform has files, whose lines have no time."""

    def __str__(self) -> str:
        return f"[node {self.node}] {self.text}"


@dataclass(frozen=True)
class LogPage:
    """The lines after some position, and the position behind the last of them."""

    lines: tuple[LogLine, ...]
    position: str
    """Opaque; hand it back to go on where this page ends."""
    more: bool = False
    """More is there already: a page is bounded, however much the nodes wrote."""
