"""The script that sbatch is given: golden files, and what has to hold for whatever is asked."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.config import read_yaml
from launcher.errors import ConfigProblem
from launcher.job import Job, Submission
from launcher.platforms.base import Capability
from launcher.platforms.slurm.render import JobReference, array_script, shared, tasks_of
from launcher.platforms.slurm.settings import SlurmPlatformConfig

GOLDEN = Path(__file__).parents[3] / "golden" / "slurm"
CONFIGS = sorted((Path(__file__).parents[4] / "deployments" / "configs").glob("slurm*.yaml"))
ROOT = "/scratch/me/pretraining"

CASES: dict[str, dict[str, Any]] = {
    "bare": {"nodes": 1},
    "interactive": {"nodes": 2, "interactive": True},
    "full": {
        "partition": "gpu,gpu-long", "account": "lab", "qos": "high", "reservation": "course", "time": "2d",
        "notice": 300, "restart": "platform", "nodes": 4, "gpus": 4, "gpu": "a100", "gres": "nvme:1", "cpus": 64,
        "memory": "480G", "exclusive": True, "constraint": "a100&[rack1|rack2]", "exclude": ("n[1-4]", "n17"),
        "options": ("--switches=1@12:00:00", "--licenses=scratch"), "grace": 240, "gate": 0,
        "secrets": {"WANDB_API_KEY": "/home/me/.secrets/wandb"}, "overrides": {"NCCL_DEBUG": "WARN"},
        "environment": {"kind": "venv", "path": "/home/me/venv", "modules": ("cuda/12.8",)},
    },
    "h100-16x8": {"nodes": 16, "gpus": 8, "gpu": "h100", "time": "24h", "exclusive": True, "memory": "0"},
    "bucket": {"nodes": 2, "folder": "/scratch/me/jobs"},
    "container": {"nodes": 2, "gpus": 8, "environment": {"kind": "pyxis"}},
    **{f"config-{path.stem}": read_yaml(path)["platform"] for path in CONFIGS},
}  # fmt: skip


def configured(options: dict[str, Any]) -> SlurmPlatformConfig:
    base = {"kind": "slurm", "environment": {"kind": "venv", "path": "/scratch/me/venv"}}
    return SlurmPlatformConfig.model_validate({**base, **options})


def training(platform: SlurmPlatformConfig, **changes: Any) -> Job:
    root = "gs://bucket/pretraining" if platform.folder else ROOT
    run = f"{root}/runs/owt-0123456789"
    image = f"registry.example.com/lab/litgpt@sha256:{'1' * 64}" if platform.takes_image else None
    asked: dict[str, Any] = {
        "name": "owt-0123456789", "attempt": 1, "nodes": platform.nodes, "processes": platform.processes,
        "program": ("-m", "litgpt_demo", "train", "--run", run), "directory": f"{run}/attempts/1", "image": image,
        "stage": (f"{root}/datasets/owt-9876543210",), "labels": {"litgpt-demo.dev/flow-run-id": "none"},
    }  # fmt: skip
    return Job(**{**asked, **changes})


def rendered(options: dict[str, Any], **changes: Any) -> Submission:
    platform = configured(options)
    return platform.open().render(training(platform, **changes))


def directives(submission: Submission) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in str(submission).splitlines() if line.startswith("#SBATCH")]
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_the_golden_one(case: str) -> None:
    path, text = GOLDEN / f"{case}.sh", str(rendered(CASES[case]))
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "UPDATE_GOLDEN=1, and review the difference"


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_bash_reads_every_script(case: str) -> None:
    done = subprocess.run(["bash", "-n"], input=str(rendered(CASES[case])), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_words_of_the_program_reach_the_node_as_they_are() -> None:
    program = ("/scratch/me/my script.py", "--name=it's", "$HOME", "a;b", '"', "*")
    script = str(rendered({"nodes": 2}, program=program))
    command = script[script.index("srun ") : script.index(" &\n")].replace("\\\n", " ")
    assert tuple(shlex.split(command)[-len(program) :]) == program


def test_a_job_says_in_its_comment_which_run_and_flow_run_it_belongs_to() -> None:
    said = directives(rendered({}))["comment"]
    assert "train-litgpt/run=owt-0123456789 train-litgpt/attempt=1 litgpt-demo.dev/flow-run-id=none" in said
    assert said.endswith(f"kept={ROOT}/runs/owt-0123456789/attempts/1")


def test_machines_that_are_to_blame_are_left_out_beside_those_that_the_config_names() -> None:
    assert directives(rendered({"exclude": ("n1",)}, exclude_nodes=("n7", "n1")))["exclude"] == "n1,n7"


def test_secrets_are_named_and_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret")
    script = str(rendered({"secrets": {"WANDB_API_KEY": "/home/me/key"}}, secrets=("WANDB_API_KEY",)))
    assert "planted-secret" not in script
    assert "WANDB_API_KEY=$(cat /home/me/key)" in script


def test_a_run_in_a_bucket_needs_a_folder_for_slurm_s_logs() -> None:
    platform = configured({})
    with pytest.raises(ConfigProblem, match=r"platform\.folder"):
        platform.open().render(training(platform, directory="gs://bucket/runs/owt-1/attempts/1"))


def test_only_a_container_of_the_image_step_needs_an_image() -> None:
    assert Capability.IMAGES in configured({"environment": {"kind": "pyxis"}}).open().capabilities
    assert Capability.IMAGES not in configured({}).open().capabilities


def test_an_id_leads_back_to_what_it_was_made_of() -> None:
    reference = JobReference(name="owt-1-2", nodes=3, directory="gs://bucket/a?b&c=d/runs/1")
    assert JobReference.of(reference.job_id) == reference
    with pytest.raises(ConfigProblem, match="no job of ours"):
        JobReference.of("runai://project/name")  # type: ignore[arg-type]


def test_scripts_that_differ_in_their_folders_become_one_array_with_each_in_its_place() -> None:
    options = {"nodes": 2, "time": "1h", "partition": "gpu"}
    runs = [f"{ROOT}/runs/lr-{index}" for index in range(3)]
    jobs = [rendered(options, name=f"lr-{index}", directory=f"{run}/attempts/1") for index, run in enumerate(runs)]
    scripts = {f"{run}/attempts/1": str(job) for run, job in zip(runs, jobs, strict=True)}
    assert len({shared(one) for one in scripts.values()}) == 1
    mark = JobReference.of(jobs[0].job_id).array_mark
    made = array_script(scripts, name="grid", folder=f"{ROOT}/sweeps/grid", mark=mark, parallel=2)
    subprocess.run(["bash", "-n"], input=made, text=True, check=True)
    assert tasks_of(made) == {run: str(index) for index, run in enumerate(scripts)}
    lines = made.splitlines()
    assert {
        "#SBATCH --job-name=grid", "#SBATCH --array=0-2%2", "#SBATCH --partition=gpu", "#SBATCH --time=0-01:00:00",
        '#SBATCH --comment="train-litgpt/attempt=1 litgpt-demo.dev/flow-run-id=none tasks=/scratch/me/pretraining"',
    } <= {*lines}  # fmt: skip
    assert made.count("\nsrun --") == 3
    assert sum(line.startswith("#SBATCH --nodes=") for line in lines) == 1


def test_jobs_that_ask_for_other_nodes_are_no_array() -> None:
    assert shared(str(rendered({"nodes": 1}))) != shared(str(rendered({"nodes": 1}, exclude_nodes=("n7",))))
