"""The `platform` section of a config for Run:ai."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from launcher.errors import LoginProblem
from launcher.machines import require_gpus
from launcher.networks import DEFAULT, ByMultus, MultusSettings, chosen_network, require_fit
from launcher.networks.profile import Carrier, Network
from launcher.platforms.settings import ClusterSettings, PlatformSettings, only_recorded, without_default
from litgpt_demo.config import Count, PositiveCount, Settings, WholeSeconds, discriminator
from litgpt_demo.secrets import is_protected, origin_of

if TYPE_CHECKING:
    from launcher.platforms.base import Platform

NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
# No commas, at which the CLI splits values, and no characters that a shell interprets.
WORD = r"^[A-Za-z0-9_@%+=:./-]+$"


@dataclass(frozen=True)
class Credentials:
    """The secret of an application that an administrator has made in Run:ai. It is held in memory only."""

    client_id: str
    client_secret: str = field(repr=False)


def credentials_of(name: str, environ: Mapping[str, str]) -> Credentials | None:
    """Return the credentials of a name from the environment, or from files that it names; None if a half is missing."""
    halves = []
    for variable in (f"{name}_CLIENT_ID", f"{name}_CLIENT_SECRET"):
        try:
            path = environ.get(f"{variable}_FILE")
            halves.append(environ.get(variable) or (Path(path).read_text().strip() if path else ""))
        except OSError as error:
            raise LoginProblem(f"{variable}_FILE={path} cannot be read ({error.strerror}); fix the path") from error
    return Credentials(*halves) if all(halves) else None


class MountedPvc(Settings):
    """A volume that all pods mount."""

    name: str = Field(pattern=NAME)
    """The name of the PersistentVolumeClaim in the project's namespace."""
    path: str = Field(pattern=r"^/[A-Za-z0-9_./-]*$")
    """The folder where it is mounted."""


class RunaiPlatformConfig(MultusSettings, ClusterSettings, title="Run:ai"):
    """A project of a Run:ai cluster, by its REST API or by its command line, old or new."""

    opens: ClassVar[str] = "launcher.platforms.runai.platform:RunaiPlatform"

    kind: Literal["runai"] = discriminator("runai")

    api: Literal["auto", "rest", "cli"] = "auto"
    """The REST API, the `runai` program, or `auto`: REST with a `url` and credentials, else the program."""
    url: str | None = Field(None, pattern=r"^https?://[^\s/@]+$")
    """The URL of the control plane, for REST: https://my-company.run.ai"""
    credentials: str = Field("RUNAI", pattern=r"^[A-Z][A-Z0-9_]*$")
    """Name of the application's credentials: variables <NAME>_CLIENT_ID and <NAME>_CLIENT_SECRET, or …_FILE paths."""
    cli: str = "runai"
    """The name on PATH of the `runai` program, as `runai-2.18`. Log in with it before."""
    cli_version: Literal["auto", "v1", "v2"] = "auto"
    """v1 has `runai submit-dist pytorch`, v2 `runai training pytorch submit`; auto queries the program."""
    project: str = Field(pattern=NAME)
    """Run:ai project that the job belongs to."""
    cluster: str | None = None
    """Cluster's name or id, where the project could be on several; REST only."""
    nodes: Count = Field(1, gt=0, le=1000)
    """The number of pods: one master, the others workers."""
    gpus: float = Field(0, ge=0, le=16)
    """GPUs per pod; all of a machine's, or two pods may share one. Below 1 is a part of a GPU, for one pod only."""
    cpus: float | None = Field(None, gt=0, json_schema_extra=without_default)
    """CPU cores that each pod requests."""
    memory: str | None = Field(None, pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$")
    """Memory that each pod requests (`200G`)."""
    node_pools: tuple[str, ...] = ()
    """Node pools to try, the first first."""
    node_type: str | None = Field(None, pattern=WORD)
    """Only machines with this node-type label."""
    topology: str | None = Field(None, pattern=WORD)
    """Label whose value all machines of the job should share."""
    topology_required: bool = False
    """Wait for such machines, rather than prefer them."""
    network: ByMultus = DEFAULT
    allow_tcp_fallback: bool = False
    """Continue if NCCL uses plain sockets instead of RDMA; otherwise such a run stops."""
    priority: str | None = Field(None, pattern=NAME)
    """Priority class; empty is the project's default."""
    preemptible: bool | None = None
    """Whether Run:ai may stop the job for others, and lend it more than the project's quota; empty is its default."""
    pvcs: tuple[MountedPvc, ...] = ()
    """Volumes that all pods mount; one has the root, where that is a folder."""
    secrets: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variable to a Kubernetes secret's entry, `name/key`; REST only."""
    large_shm: bool = True
    """A large /dev/shm; a container has 64 MB otherwise, too little for NCCL and data loaders."""
    run_as_user: bool = False
    """Run as the submitting user (CLI), so that files on shared volumes are theirs; not as root."""
    uid: PositiveCount | None = None
    """Run as this user id."""
    gid: PositiveCount | None = None
    """Run as this group id."""
    interactive: bool = False
    """Pods only wait (`sleep infinity`); the command that `train-litgpt render` prints is then run in each by hand."""
    grace_period: WholeSeconds = Field(20, ge=1, le=3600)
    """Seconds that ranks have to save after SIGTERM; Kubernetes gives a pod 30 seconds by default."""

    @property
    def fabric(self) -> Network:
        return chosen_network(self, Carrier.MULTUS)

    def uses_rest(self, environ: Mapping[str, str]) -> bool:
        """Return whether the settings choose REST; with `auto`, a URL and credentials choose it."""
        if self.api == "auto":
            return self.url is not None and credentials_of(self.credentials, environ) is not None
        return self.api == "rest"

    def open_recorded(self, config: PlatformSettings | None) -> Platform:
        """Refuse to send credentials to a control plane that neither the user's config nor the environment names."""
        if not self.uses_rest(os.environ):
            return self.open()
        origin, variable = origin_of(self.url or ""), f"{self.credentials}_URL"
        trusted = {origin_of(os.environ.get(variable, ""))}
        if isinstance(config, RunaiPlatformConfig) and config.credentials == self.credentials:
            trusted.add(origin_of(config.url or ""))
        if not origin or origin not in trusted:
            raise only_recorded(f"the credentials {self.credentials} are for {origin}", variable=variable, value=origin)
        return self.open()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # `plan` and `render` run this program, and a config may come from another user.
        if not re.fullmatch(r"[A-Za-z0-9_.-]*runai[A-Za-z0-9_.-]*", self.cli):
            fix = "add its folder to PATH, and give only its name, which must contain `runai`"
            raise ValueError(f"platform.cli={self.cli!r} is not the name of a runai program on PATH; {fix}")
        if self.gpus % 1 and (self.gpus > 1 or self.nodes > 1 or self.network != DEFAULT):
            what = f"platform.gpus={self.gpus}, nodes={self.nodes}, network={self.network}"
            fix = f"give whole GPUs, or a part with platform.nodes=1 and platform.network={DEFAULT}"
            raise ValueError(f"{what}: NCCL wants a GPU of its own for each rank; {fix}")
        require_gpus(None, gpus=self.node_gpus, processes=self.processes_per_node)
        if self.url is not None and not is_protected(self.url):
            fix = "write https:// in front of its name"
            raise ValueError(f"platform.url={self.url} is not encrypted, and would be sent a secret; {fix}")
        if self.api == "rest" and self.url is None:
            raise ValueError("platform.api=rest needs platform.url, as in https://my-company.run.ai")
        if (self.run_as_user and self.uid is not None) or (self.uid is None and self.gid is not None):
            what = f"platform.uid={self.uid} with gid={self.gid}, run_as_user={self.run_as_user}"
            raise ValueError(f"{what}; give uid and gid, or only run_as_user")
        for name, entry in self.secrets.items():
            if not re.fullmatch(r"[^/]+/[^/]+", entry):
                fix = "name a Kubernetes secret of the project and its entry"
                raise ValueError(f"platform.secrets.{name}={entry!r} is not a `name/key`; {fix}")
        return self

    _network_fits = model_validator(mode="after")(require_fit)
