"""The `platform` section of a config for Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from launcher.machines import one_rank_per_gpu, require_gpus
from launcher.networks import DEFAULT, chosen_network, with_networks
from launcher.networks.profile import Network, NetworkCapability
from launcher.platforms.settings import ClusterSettings
from launcher.platforms.slurm.environment_settings import ContainerEnvironment, Environment, PyxisEnvironment
from litgpt_demo.settings import Count, Duration, Kind, PositiveCount

if TYPE_CHECKING:
    from launcher.platforms.base import Platform

HOST = r"^(ssh://)?([A-Za-z0-9_][A-Za-z0-9_.+-]*@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\[\]-]*$"
"""A host as ssh takes one, `user@host` included. None begins with a dash: ssh would take it for an option, and one of
those names a program to run (ProxyCommand)."""
WORD = r"^[A-Za-z0-9_][A-Za-z0-9_.,:+@/-]*$"
"""A name, or a list of names, that neither a shell nor a line of sbatch's directives takes apart."""
NODES = r"^[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*$"
"""Nodes, or lists of them: n[1-4],n17."""
CONSTRAINT = r"^[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*()\[\]!-]*$"
"""Features and what joins them (https://slurm.schedmd.com/sbatch.html#OPT_constraint)."""
FILE = r"^/[^\s%\\\"'`$;&|<>*?()\[\]{}#!~]*$"
"""A path that means the same to a shell, to sbatch (whose file names have patterns with %) and to us."""

Word = Annotated[str, Field(pattern=WORD)]

# Options of sbatch that the script's own lines have, or that would make it another job than the one that is followed.
_OURS = frozenset(
    (
        "job-name", "comment", "nodes", "ntasks", "ntasks-per-node", "chdir", "output", "error", "open-mode", "export",
        "export-file", "signal", "requeue", "no-requeue", "array", "partition", "account", "qos", "reservation",
        "constraint", "exclude", "time", "gres", "gpus", "gpus-per-node", "cpus-per-task", "mem", "exclusive",
        "parsable", "test-only", "wait", "wrap", "hold", "help", "version", "input", "batch", "clusters",
    )
)  # fmt: skip


@with_networks
class SlurmPlatformConfig(ClusterSettings):
    """A Slurm cluster: one batch job per attempt, submitted here or on a login node through ssh."""

    model_config = ConfigDict(title="Slurm")
    carries: ClassVar[frozenset[NetworkCapability]] = frozenset({NetworkCapability.MACHINES})

    asked: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "root": "",
            "platform.partition": "null",
            "platform.account": "null",
            "platform.time": "24h",
            "platform.nodes": "2",
            "platform.gpus": "8",
            "platform.environment": "",
        }
    )

    kind: Literal["slurm"] = Kind("slurm")

    # How to reach it.
    host: Annotated[str, Field(pattern=HOST, max_length=255)] | None = None
    """A login node to reach by ssh, as your ~/.ssh/config knows it; empty is this machine."""

    # Where in the queue, and for how long.
    partition: Word | None = None
    """Partition, or several with commas between them; empty is the cluster's default."""
    account: Word | None = None
    """Account that the job is charged to; empty is your default one."""
    qos: Word | None = None
    """Quality of service."""
    reservation: Word | None = None
    """Reservation whose nodes the job takes."""
    time: Duration | None = Field(None, json_schema_extra={"default": None})
    """Time limit of one attempt (24h); empty is the partition's. A run goes on over as many attempts as it needs."""
    notice: Count = Field(120, ge=1, le=65_535)
    """Seconds before the time limit at which ranks are asked to save and leave."""
    restart: Literal["attempt", "platform"] = "attempt"
    """The answer to a lost node or a preemption: a new attempt, or `platform`: Slurm queues the same job again."""

    # Which nodes, and what of each.
    nodes: Count = Field(1, gt=0, le=4096)
    """The number of nodes."""
    gpus: Count = Field(0, ge=0, le=16)
    """GPUs of each node."""
    gpu: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """Type of the GPUs by the cluster's own name (h100), as `sinfo -o %G` has it; empty is any."""
    gres: Word | None = None
    """Other generic resources of each node, such as nvme:1."""
    cpus: PositiveCount | None = None
    """CPUs of each node; empty is the partition's default, or all where the node is the job's own."""
    memory: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$")] | None = None
    """Memory of each node (200G; 0 is all of it); empty is the partition's default."""
    exclusive: bool = False
    """Share nodes with no other job."""
    constraint: Annotated[str, Field(pattern=CONSTRAINT)] | None = None
    """Only nodes with these features: a100&nvlink."""
    exclude: tuple[Annotated[str, Field(pattern=NODES)], ...] = ()
    """Never these nodes, or lists of them (n[1-4])."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, each one word: --switches=1, --licenses=scratch."""

    # The network.
    network: str = DEFAULT
    allow_sockets: bool = False
    """Go on where NCCL turns out to use plain sockets instead of the network; otherwise such a run stops."""

    # The nodes' software and files.
    environment: Environment
    """The software of the nodes."""
    folder: Annotated[str, Field(pattern=FILE)] | None = None
    """A folder that login node and nodes share, for the jobs' logs; needed where the root is a bucket."""
    interactive: bool = False
    """Nodes only wait; `train-litgpt shell RUN NODE` enters each, and the command waits there to be started by hand."""
    secrets: dict[str, Annotated[str, Field(pattern=FILE)]] = Field({}, json_schema_extra={"default": {}})
    """Environment variable to a file on the cluster that only you may read, and that holds its value."""

    @property
    def fabric(self) -> Network:
        """Return the network of the nodes."""
        return chosen_network(self)

    @property
    def hardware(self) -> str | None:
        """Return the type of the GPUs, as the config names it."""
        return self.gpu

    @property
    def node_gpus(self) -> int:
        """GPUs of each node."""
        return self.gpus

    @property
    def takes_image(self) -> bool:
        """Return whether the nodes run the image of the image step."""
        return isinstance(self.environment, ContainerEnvironment) and self.environment.file is None

    def open(self) -> Platform:
        """Return the cluster as a platform."""
        from launcher.platforms.slurm.platform import ContainerSlurmPlatform, SlurmPlatform

        return (ContainerSlurmPlatform if self.takes_image else SlurmPlatform)(self)

    _one_rank_per_gpu = model_validator(mode="before")(one_rank_per_gpu)

    @field_validator("options")
    @classmethod
    def _are_no_others(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for word in given:
            name = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[^\s'\"\\#]+)?", word)
            if name is None:
                raise ValueError(f"{word!r} is not one word such as --switches=1; write --name=value without blanks")
            if name[1] in _OURS:
                raise ValueError(f"{word} is not taken here: the launcher sets --{name[1]}, or platform has a setting")
        return given

    @model_validator(mode="after")
    def _can_be_entered(self) -> Self:
        if self.interactive and isinstance(self.environment, PyxisEnvironment):
            raise ValueError(
                "platform.interactive=true, and a step that enters a node later is outside of the container that Pyxis "
                "made for the first one; take platform.environment.kind=apptainer, venv, conda or modules"
            )
        return self

    @model_validator(mode="after")
    def _gpus_fit(self) -> Self:
        require_gpus(None, gpus=self.gpus or None, processes=self.processes)
        if self.gpu is not None and not self.gpus:
            raise ValueError(f"platform.gpu={self.gpu} and platform.gpus=0; say how many each node has: platform.gpus")
        return self

    @model_validator(mode="after")
    def _there_is_time_to_save(self) -> Self:
        least = timedelta(seconds=self.notice + 60)  # Slurm counts minutes, and signals up to 60 s early
        if self.time is not None and self.time < least:
            raise ValueError(
                f"platform.time={self.time} leaves no time to train before platform.notice={self.notice} seconds, at "
                f"which ranks save and leave; give {least} at least, or less notice"
            )
        if self.grace > self.notice:
            raise ValueError(
                f"platform.grace={self.grace} seconds to save, and platform.notice={self.notice} before the time limit "
                "ends them; raise platform.notice"
            )
        return self
