"""Where every variable of a node comes from, and which ones cannot be together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.errors import ConfigProblem
from launcher.job import Job
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig

MEGA = {"machine": "a3-megagpu-8g", "network": "tcpxo"}
HIGH = {"machine": "a3-highgpu-8g", "network": "tcpx"}

JOB = Job(
    name="owt-01", attempt=1, nodes=2, processes=8, program=("-m", "x"), directory="gs://b/runs/owt-01/attempts/1"
)


def told(options: dict[str, Any], env: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
    platform = GkePlatform(GkePlatformConfig.model_validate({"kind": "gke", "nodes": 2, **options}))
    submission = platform.render(replace(JOB, env=env or {}))
    return {row["variable"]: dict(row) for row in submission.environment}


def test_every_variable_says_which_profile_platform_user_or_job_it_came_from_and_why() -> None:
    rows = told({**MEGA, "overrides": {"NCCL_DEBUG": "WARN"}}, {"MY_FLAG": "1"})
    assert rows["LITGPT_ATTEMPT"]["from"] == "platform"
    assert rows["NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY"]["from"] == "profile"
    assert rows["NCCL_DEBUG"]["from"] == "user"
    assert "instead of INFO" in rows["NCCL_DEBUG"]["why"]
    assert rows["MY_FLAG"]["from"] == "job"
    assert rows["NCCL_NVLSTREE_MAX_CHUNKSIZE"]["from"] == "script"
    assert rows["LD_LIBRARY_PATH"]["value"] == "/usr/local/nvidia/lib64:$LD_LIBRARY_PATH"
    assert all(row["why"] for row in rows.values())


@pytest.mark.parametrize("options", [MEGA, HIGH, {"machine": "a4-highgpu-8g", "network": "gib"}])
def test_every_value_of_a_profile_names_its_source(options: dict[str, Any]) -> None:
    rows = told(options).values()
    assert [row for row in rows if row["from"] in {"profile", "script"} and "https://" not in row["why"]] == []


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        (HIGH, {"NCCL_NET": "Socket"}, r"the network profile.*set it in platform.overrides"),
        (MEGA, {"NCCL_BUFFSIZE": "1"}, r"a script of the network profile sets NCCL_BUFFSIZE=8388608"),
        (HIGH, {"LITGPT_ATTEMPT": "x"}, r"the launcher sets LITGPT_ATTEMPT.*leave it out of env"),
        ({**HIGH, "overrides": {"A": "1"}}, {"A": "2"}, r"platform.overrides sets A=1"),
        ({**HIGH, "overrides": {"LITGPT_NETWORK": "{}"}}, {}, r"platform.overrides sets LITGPT_NETWORK"),
        (HIGH, {"not a name": "1"}, r"'not a name' cannot be an environment variable"),
    ],
)
def test_variables_that_disagree_are_refused(options: dict[str, Any], env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        told(options, env)


def test_an_override_wins_over_profile_and_script() -> None:
    rows = told({**MEGA, "overrides": {"NCCL_BUFFSIZE": "1"}}, {"NCCL_BUFFSIZE": "1"})
    assert (rows["NCCL_BUFFSIZE"]["value"], rows["NCCL_BUFFSIZE"]["from"]) == ("1", "user")


def test_a_secret_is_read_from_the_cluster_and_only_its_name_is_shown() -> None:
    entry = told({"secrets": {"WANDB_API_KEY": "loggers/wandb"}})["WANDB_API_KEY"]
    assert (entry["value"], entry["from"]) == ("", "user")
    assert "loggers/wandb" in entry["why"]
    settings = GkePlatformConfig.model_validate({"kind": "gke", "nodes": 2, "secrets": {"KEY": "loggers/wandb"}})
    rendered = str(GkePlatform(settings).render(JOB))
    assert "secretKeyRef:" in rendered
    with pytest.raises(ValueError, match=r"secrets\.KEY"):
        GkePlatformConfig.model_validate({"kind": "gke", "nodes": 2, "secrets": {"KEY": "the key itself"}})
