"""The settings of Slurm that cannot work, each with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import validated
from launcher.errors import ConfigProblem
from launcher.platforms.slurm.settings import SlurmPlatformConfig

VENV = {"kind": "venv", "path": "/scratch/me/venv"}


def configured(**options: Any) -> SlurmPlatformConfig:
    return validated(SlurmPlatformConfig, {"kind": "slurm", "environment": VENV, **options}, where="it")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "gpu --wrap=x"}, "'gpu --wrap=x' given"),
        ({"account": "-A"}, "'-A' given"),
        ({"constraint": 'a" --uid=0 "'}, "given"),
        ({"memory": "200GB"}, "'200GB' given"),
        ({"folder": "/scratch/my jobs"}, "given"),
        ({"secrets": {"KEY": "$(id)"}}, "given"),
        ({"time": "150s"}, "leaves no time to train"),
        ({"grace": 200}, "raise platform.notice"),
        ({"gpu": "h100"}, "say how many each node has"),
        ({"gpus": 4, "processes": 8}, "leave platform.processes out"),
        ({"options": ("--nodes=4",)}, "the launcher sets --nodes"),
        ({"options": ("-p gpu",)}, "write --name=value"),
        ({"options": ("--switches=1\n#SBATCH --uid=0",)}, "write --name=value"),
        ({"host": "-oProxyCommand=id"}, "given"),
        ({"nodes": {"min": 1, "max": 2}}, "start and end together"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigProblem, match=words):
        configured(**options)


def test_a_rank_for_each_gpu_is_the_default() -> None:
    assert configured(gpus=4).processes == 4
    assert configured().processes == 1
