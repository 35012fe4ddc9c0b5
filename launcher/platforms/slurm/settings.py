"""The `platform` section of a config for a cluster with Slurm."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from launcher.machines import require_gpus
from launcher.networks import DEFAULT, MachineSettings, OnMachines, chosen_network, require_fit
from launcher.networks.profile import Carrier, Network
from launcher.platforms.settings import ClusterSettings, PlatformSettings, only_recorded, without_default
from litgpt_demo.config import Count, WholeSeconds, discriminator

if TYPE_CHECKING:
    from launcher.platforms.base import Platform

HOST = "TRAIN_LITGPT_SLURM_HOST"
"""The variable with a login node that a job's record may name."""

# The characters of Slurm's names. A comma or a blank would end a value, and Slurm replaces `%` in some values.
_WORD = r"^[A-Za-z0-9_@+=:./&|*()\[\]-]+$"
_PATH = r"^/[A-Za-z0-9_@+=.,/-]*$"
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_@+=:.,/\[\]-]+$")]
_Mount = Annotated[str, Field(pattern=r"^/[A-Za-z0-9_@+=.:/-]*$")]

# Options of sbatch that the batch script sets, that hide the job from its launcher, or that submit none
# (https://slurm.schedmd.com/sbatch.html), with the setting for the same purpose.
_OWN = """
array clusters comment error export export-file gid help job-name no-requeue ntasks ntasks-per-node output parsable
quiet requeue signal tasks-per-node test-only uid usage version wait wrap
"""
_SETTINGS = "account constraint exclude gres nodes partition qos reservation time"
_TAKEN = {
    **dict.fromkeys(_OWN.split(), "leave it out"),
    **{name: f"set platform.{name}" for name in _SETTINGS.split()},
    **dict.fromkeys(("gpus", "gpus-per-node"), "set platform.gpus"),
    "cpus-per-task": "set platform.cpus",
    "mem": "set platform.memory",
}
_TIME = re.compile(r"(?:(?:(\d+)-)?(\d+):(\d+):(\d+)|(\d+)-(\d+)(?::(\d+))?|(\d+)(?::(\d+))?)")


def seconds_of(time: str) -> int | None:
    """Return the seconds of one of Slurm's time limits (https://slurm.schedmd.com/sbatch.html#OPT_time); None for
    `UNLIMITED`, `infinite` and any other text."""
    if (found := _TIME.fullmatch(time)) is None:
        return None
    days, hours, minutes, seconds, only_days, day_hours, day_minutes, only_minutes, rest = (
        int(group or 0) for group in found.groups()
    )
    minutes += day_minutes + only_minutes
    return 86_400 * (days + only_days) + 3600 * (hours + day_hours) + 60 * minutes + seconds + rest


class SlurmPlatformConfig(MachineSettings, ClusterSettings, title="Slurm"):
    """Nodes of a cluster that Slurm shares out: one `sbatch` job, in which `srun` starts each node of the training."""

    opens: ClassVar[str] = "launcher.platforms.slurm.platform:SlurmPlatform"

    kind: Literal["slurm"] = discriminator("slurm")

    host: str | None = Field(None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$")
    """A login node by its name for `ssh` (`me@login.example.org`, or one of ~/.ssh/config), where Slurm's commands are;
    empty is this machine."""
    account: str | None = Field(None, pattern=_WORD)
    """The account that is charged; empty is your default one."""
    partition: str | None = Field(None, pattern=_WORD)
    """Partition; empty is the cluster's default."""
    qos: str | None = Field(None, pattern=_WORD)
    """Quality of service."""
    reservation: str | None = Field(None, pattern=_WORD)
    """Only the nodes of this reservation."""
    constraint: str | None = Field(None, pattern=_WORD)
    """Features that the nodes must have (`h100&ib`)."""
    exclude: tuple[_Word, ...] = ()
    """Nodes not to use, in addition to those that earlier attempts excluded."""
    nodes: Count = Field(1, gt=0, le=10_000)
    """The number of nodes; each starts one torchrun."""
    gpus: Count = Field(0, ge=0, le=16)
    """GPUs of each node."""
    gpu_type: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    """The type of the GPUs, as the cluster calls it."""
    gres: str | None = Field(None, pattern=_WORD)
    """Generic resources of each node, in place of `--gpus-per-node`, where a cluster wants that: gpu:h100:8."""
    cpus: Count | None = Field(None, gt=0, json_schema_extra=without_default)
    """CPU cores of each node; empty is the cluster's default."""
    memory: str | None = Field(None, pattern=r"^[0-9]+[KMGT]?$")
    """Memory of each node (`200G`); 0 is all of it, empty is the cluster's default."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    time: str | None = Field(None, json_schema_extra={"examples": ["24:00:00", "2-00:00:00"]})
    """Time limit in Slurm's own form. The training saves before it, and the next attempt continues from there."""
    network: OnMachines = DEFAULT
    allow_tcp_fallback: bool = False
    """Continue if NCCL uses plain sockets instead of RDMA; otherwise such a run stops."""
    venv: str | None = Field(None, pattern=_PATH)
    """A virtual or conda environment on the cluster, which has train-litgpt; empty takes `python` as PATH has it."""
    modules: tuple[_Word, ...] = ()
    """Environment modules to load before (`cuda/12.8`)."""
    container: Literal["pyxis", "apptainer"] | None = None
    """Run nodes in the image, by NVIDIA's Pyxis or by Apptainer, in place of an environment."""
    container_image: str | None = Field(None, pattern=_PATH)
    """An image file on the cluster (.sqsh, .sif); empty is the image of the config's `image` section."""
    mounts: tuple[_Mount, ...] = ()
    """Folders in the container in addition to the root (`/scratch` or `/scratch:/data`)."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, as they are written (`--licenses=lustre`); none that a job is found by or that another
    setting stands for."""
    secrets: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variable to the file on the cluster that holds its value, which only you can read."""
    admission_timeout: WholeSeconds = Field(600, ge=0)
    """Seconds that a job may wait for a reason that does not pass by itself (a limit, an account, a constraint) before
    the run ends with that reason."""
    grace_period: WholeSeconds = Field(120, ge=1, le=3600)
    """Seconds before the time limit, or after a cancellation, in which ranks save."""

    @property
    def in_containers(self) -> bool:
        return self.container is not None and self.container_image is None

    @property
    def fabric(self) -> Network:
        return chosen_network(self, Carrier.MACHINES)

    def open_recorded(self, config: PlatformSettings | None) -> Platform:
        """Refuse to log in to a host that neither the user's config nor the environment names."""
        known = {os.environ.get(HOST, "")}
        if isinstance(config, SlurmPlatformConfig) and config.host is not None:
            known.add(config.host)
        if self.host is not None and self.host not in known:
            raise only_recorded(f"{self.host} is the login node", variable=HOST, value=self.host)
        return self.open()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        require_gpus(None, gpus=self.gpus, processes=self.processes_per_node)
        if self.time is not None and not seconds_of(self.time):
            fix = "write it as Slurm does: 90 (minutes), 24:00:00 or 2-00:00:00"
            raise ValueError(f"platform.time={self.time!r} is not a time limit; {fix}")
        if self.time is not None and (seconds_of(self.time) or 0) <= self.grace_period:
            what = f"platform.time={self.time} is not longer than platform.grace_period={self.grace_period} seconds"
            raise ValueError(f"{what}; raise platform.time, or lower platform.grace_period")
        if self.container is None and (self.container_image is not None or self.mounts):
            raise ValueError("platform.container_image and platform.mounts need platform.container; set it too")
        if self.container is not None and (self.venv is not None or self.modules):
            raise ValueError("platform.venv and platform.modules are not seen in a container; leave them out")
        for option in self.options:
            if not (found := re.fullmatch(r"--([a-z][A-Za-z0-9-]*)(=\S+)?", option)):
                raise ValueError(f"platform.options has {option!r}; write each as sbatch takes it: --name=value")
            # getopt takes the beginning of an option's name for the option.
            if taken := next((name for name in _TAKEN if name.startswith(found[1])), None):
                why = f"sbatch's --{taken} would undo what the launcher sets or finds its job by"
                what = f"platform.options has {option!r}, but {why}"
                raise ValueError(f"{what}; {_TAKEN[taken]}")
        for name, path in self.secrets.items():
            if not re.fullmatch(r"(/|~/)[^\x00-\x1f]+", path):
                raise ValueError(f"platform.secrets.{name}={path!r} is not a path; name the file that holds the value")
        return self

    _network_fits = model_validator(mode="after")(require_fit)
