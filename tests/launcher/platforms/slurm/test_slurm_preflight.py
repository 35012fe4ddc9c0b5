"""The findings before a job is submitted, on Slurm's own daemons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from services.slurm_cluster import SlurmCluster

from launcher.errors import ConfigProblem, PlatformRefused
from launcher.job import Job
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from litgpt_demo.findings import Finding

JobOf = Callable[..., Job]


def found(job_of: JobOf, **settings: Any) -> list[Finding]:
    asked = {"kind": "slurm", "nodes": 2, "environment": {"kind": "venv", "path": sys.prefix}, **settings}
    platform = SlurmPlatform(SlurmPlatformConfig.model_validate(asked))
    return list(platform.check(platform.render(job_of("true", nodes=platform._settings.nodes))))


def errors(job_of: JobOf, **settings: Any) -> dict[str, str]:
    return {one.code: one.message for one in found(job_of, **settings) if one.severity == "error"}


def test_a_job_that_fits_is_told_when_it_would_start(slurm: SlurmCluster, job_of: JobOf) -> None:
    told = {one.code: one for one in found(job_of, account="lab", gpus=2, time="1h")}
    assert {one.severity for one in told.values()} == {"info"}, told
    assert "Slurm would start it at" in told["slurm.start"].what
    assert "KillWait" in told["slurm.kill-wait"].what
    assert slurm.run("squeue", "--noheader") == ""


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"partition": "gpu"}, "slurm.partition", "take closed, main, requeued"),
        ({"partition": "main", "time": "48h"}, "slurm.time", "above the partition's MaxTime of 1 day"),
        ({"gpus": 4}, "slurm.gpus", "2 nodes with 4 GPUs each are asked for, and 0 of the partition's 3 have them"),
        ({"gpus": 2, "gpu": "h100"}, "slurm.gpus", "h100"),
        ({"gpus": 2, "nodes": 4}, "slurm.gpus", "4 nodes with 2 GPUs each"),
        ({"account": "physics"}, "slurm.account", "take lab or narrow or root or staff"),
        ({"account": "narrow", "gpus": 2}, "slurm.limit", "4 GPUs are asked for, and the account narrow may have 2"),
        ({"qos": "urgent"}, "slurm.qos", "take brief or normal or single"),
        ({"qos": "brief", "time": "1h"}, "slurm.time", "above the 0:10:00 of the QOS brief"),
        ({"nodes": 9}, "slurm.refused", "sbatch on this machine"),
        ({"partition": "staff", "account": "lab"}, "slurm.refused", "account"),
        ({"secrets": {"KEY": "/nowhere/key"}}, "slurm.secret", "is not there"),
        ({"environment": {"kind": "venv", "path": "/nowhere"}}, "slurm.environment", "/nowhere/bin/python"),
    ],
)
def test_what_the_cluster_would_not_run_is_told_with_what_it_would(
    slurm: SlurmCluster, job_of: JobOf, settings: dict[str, Any], code: str, words: str
) -> None:
    told = errors(job_of, **settings)
    assert list(told) == [code]
    assert words in told[code]


def test_a_secret_that_others_can_read_is_refused(slurm: SlurmCluster, job_of: JobOf, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("planted")
    file.chmod(0o640)
    told = errors(job_of, secrets={"KEY": str(file)})
    assert f"chmod 600 {file}" in told["slurm.secret"]
    assert "planted" not in str(told)


@pytest.mark.parametrize("name", ["100%j", "my runs", "a'b", "[1]"])
def test_a_root_that_sbatch_would_misread_is_refused(job_of: JobOf, tmp_path: Path, name: str) -> None:
    platform = SlurmPlatform(
        SlurmPlatformConfig.model_validate({"kind": "slurm", "environment": {"kind": "venv", "path": sys.prefix}})
    )
    with pytest.raises(ConfigProblem, match="choose a root without blanks"):
        platform.render(job_of("true", nodes=1, directory=str(tmp_path / name)))


def test_a_machine_without_slurm_plans_what_it_can(job_of: JobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (told,) = [one for one in found(job_of) if one.code == "slurm.cluster"]
    assert told.severity == "unknown"


def test_a_cluster_without_accounting_has_no_accounts_to_check(
    slurm_without_accounting: SlurmCluster, job_of: JobOf
) -> None:
    assert errors(job_of, account="anything") == {}


def test_a_plan_starts_nothing_of_the_environment_that_a_config_names_and_a_submission_does(
    slurm: SlurmCluster, job_of: JobOf, tmp_path: Path
) -> None:
    python, ran = tmp_path / "venv" / "bin" / "python", tmp_path / "ran"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {ran}\nexit 3\n")
    python.chmod(0o755)
    settings = {"kind": "slurm", "environment": {"kind": "venv", "path": str(tmp_path / "venv")}}
    platform = SlurmPlatform(SlurmPlatformConfig.model_validate(settings))
    submission = platform.render(job_of("true", nodes=1))
    assert [one for one in platform.check(submission) if one.severity == "error"] == []
    platform.check_access()
    assert not ran.exists()
    with pytest.raises(PlatformRefused, match="does not start: exit code 3"):
        platform.submit(submission)
    assert slurm.run("squeue", "--noheader") == ""
