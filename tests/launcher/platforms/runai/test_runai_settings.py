"""What a user may write about Run:ai, and what is refused with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from launcher.platforms.runai.settings import RunaiPlatformConfig

Make = Callable[..., RunaiPlatformConfig]


def test_there_is_one_rank_per_gpu(configured: Make) -> None:
    assert configured(gpus=8).processes == 8
    assert configured(gpus=8, processes=4).processes == 4
    assert configured().processes == 1
    assert configured(gpus=0.5, nodes=1).processes == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 0.5}, "on platform.nodes=2: NCCL wants a GPU of its own for each rank; give whole GPUs, or one node"),
        ({"gpus": 1.5, "nodes": 1}, "give whole GPUs, or a part of one below 1"),
        ({"gpus": 4, "processes": 8}, "a pod has 4 GPUs, and ranks cannot share one; leave platform.processes out"),
        ({"roce_network": "a/b"}, "set network: roce, or leave it out"),
        ({"api": "rest"}, "platform.api=rest needs platform.url, as in https://"),
        ({"url": "my-company.run.ai"}, "String should match pattern"),
        ({"url": "http://my-company.run.ai"}, "would be sent there; write https:// in front of its name"),
        ({"url": "http://127.evil.example:8080"}, "is not encrypted"),
        ({"url": "http://localhost.evil.example"}, "is not encrypted"),
        ({"url": "https://me:secret@my-company.run.ai"}, "String should match pattern"),
        ({"cli": "./runai"}, "no name of a runai program on PATH; add its folder to PATH"),
        ({"cli": "/opt/runai/bin/runai"}, "add its folder to PATH, and give its name"),
        ({"cli": "sh"}, "which has `runai` in it"),
        ({"cli": "runai\n"}, "no name of a runai program"),
        ({"run_as_user": True, "uid": 5}, "keep one"),
        ({"gid": 5}, "give both"),
        ({"secrets": {"KEY": "wandb"}}, "name a Kubernetes secret of the project and its entry"),
        ({"project": ""}, "String should match pattern"),
        ({"claims": [{"name": "scratch", "path": "scratch,ro"}]}, "String should match pattern"),
        ({"credentials": "the secret itself"}, "String should match pattern"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(configured: Make, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as told:
        configured(**changes)
    assert words in str(told.value)
