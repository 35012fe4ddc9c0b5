"""The `platform` section of a config for this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from launcher.platforms.settings import PlatformSettings
from litgpt_demo.config import Count, Kind, PositiveCount
from litgpt_demo.findings import Finding

if TYPE_CHECKING:
    from launcher.platforms.base import Platform


class LocalPlatformConfig(PlatformSettings):
    """This machine: every node is a torchrun agent of its own, so that a real multi-node job runs without a cluster."""

    model_config = ConfigDict(title="This machine")

    on_this_machine: ClassVar[bool] = True

    kind: Literal["local"] = Kind("local")
    nodes: Count = Field(1, gt=0, le=64)
    """The number of torchrun agents; more than one makes a true multi-node rendezvous on this machine. {min, max} makes
    them elastic: max, and min is min_nodes."""
    processes: Count = Field(1, gt=0, le=64)
    """Ranks per node: one per GPU, or one where there is none."""
    port: int | None = Field(None, ge=1024, le=65535)
    """The port on which node 0 listens; empty takes one that is free when the job begins."""
    grace: Count = Field(60, ge=1, le=3600)
    """Seconds that ranks have to save when the job is cancelled; they leave as soon as they have."""
    min_nodes: PositiveCount | None = None
    """When a node dies, the others go on if so many are left, and it joins again; empty ends the attempt instead."""

    @model_validator(mode="before")
    @classmethod
    def _range(cls, given: Any) -> Any:
        """Read `nodes: {min: 2, max: 4}` as what it says."""
        nodes = given.get("nodes") if isinstance(given, Mapping) else None
        if not isinstance(nodes, Mapping):
            return given
        if set(nodes) != {"min", "max"}:
            raise ValueError(f"platform.nodes={dict(nodes)} is neither a number nor {{min: …, max: …}}; give one")
        return {**given, "nodes": nodes["max"], "min_nodes": nodes["min"]}

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least_nodes > self.nodes:
            raise ValueError(
                f"platform.nodes.min={self.min_nodes} is above the {self.nodes} nodes that there are; lower it"
            )
        return self

    @property
    def least_nodes(self) -> int:
        """Return with how many nodes a job goes on when others are lost; all of them where it does not."""
        return self.min_nodes or self.nodes

    def open(self) -> Platform:
        """Return this machine as a platform."""
        from launcher.platforms.local.platform import LocalPlatform

        return LocalPlatform(port=self.port, grace=self.grace)

    def missing_secrets(self, names: Iterable[str]) -> Iterator[Finding]:
        """Yield a finding for each that is not in the environment, which ranks inherit."""
        for name in names:
            if not os.environ.get(name):
                yield Finding(
                    "error",
                    "platform.secrets",
                    f"the training needs the secret {name}, and this environment has no such variable",
                    f"export {name}; or set train.wandb.secret=null, which keeps the records in the run's folder",
                )
