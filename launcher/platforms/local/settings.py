"""The `platform` section of a config for this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

from pydantic import Field

from launcher.platforms.settings import PlatformSettings
from litgpt_demo.config import Count, WholeSeconds, discriminator
from litgpt_demo.errors import Finding


class LocalPlatformConfig(PlatformSettings, title="This machine"):
    """This machine: every node is a torchrun agent of its own, so that a real multi-node job runs without a cluster."""

    opens: ClassVar[str] = "launcher.platforms.local.platform:LocalPlatform"
    on_this_machine: ClassVar[bool] = True

    kind: Literal["local"] = discriminator("local")
    nodes: Count = Field(1, gt=0, le=64)
    """The number of nodes, each a torchrun agent of its own on this machine."""
    processes_per_node: Count = Field(1, gt=0, le=64)
    """Ranks per node; the default is one. With GPUs, take one per GPU."""
    port: int | None = Field(None, ge=1024, le=65535)
    """The port on which node 0 listens; empty takes one that is free when the job begins."""
    # Nobody takes this machine away at a certain time; 10 were too few for two steps and a save under load.
    grace_period: WholeSeconds = Field(60, ge=1, le=3600)
    """Seconds that ranks have to save when the job is cancelled. They end as soon as they have saved."""

    def missing_secrets(self, names: Iterable[str]) -> Iterator[Finding]:
        """Yield a finding for each secret that is missing in the environment, which ranks inherit."""
        for name in names:
            if not os.environ.get(name):
                what = f"the training needs the secret {name}, but this environment has no such variable"
                fix = f"export {name}; or set train.wandb.secret=null, which keeps the records in the run's folder"
                yield Finding("error", "platform.secrets", what, fix)
