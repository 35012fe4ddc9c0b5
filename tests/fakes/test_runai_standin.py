"""The stand-in for Run:ai's program refuses what the real one refuses, generation by generation."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runai

SUBMIT = {
    "v1": ["submit-dist", "pytorch", "--name", "a", "--project", "team-a", "--image", "i"],
    "v2": ["training", "pytorch", "submit", "a", "--project", "team-a", "--image", "i"],
}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[runai.Cluster]:
    with runai.running(tmp_path / "runai", grace=0.2) as made:
        yield made


@pytest.fixture
def run(cluster: runai.Cluster, tmp_path: Path) -> Run:
    def call(variant: str, *words: str) -> subprocess.CompletedProcess[str]:
        program = runai.program(tmp_path, cluster, variant)
        return subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)

    return call


@pytest.mark.parametrize(
    ("variant", "words", "refusal"),
    [
        ("v1", ["--existing-pvc", "claimname=a,path=/a"], "unknown flag: --existing-pvc"),
        ("v1", ["--gpu-devices-request", "1"], "unknown flag: --gpu-devices-request"),
        ("v2", ["--gpu", "1"], "unknown flag: --gpu"),
        ("v2", ["--name", "a"], "unknown flag: --name"),
        ("v2", ["--priority", "high"], "unknown flag: --priority"),
        ("v2", ["--workers"], 'invalid argument "--command" for "--workers" flag'),
        ("v2", ["--workers", "two"], 'invalid argument "two" for "--workers" flag'),
        ("v2", ["--existing-pvc", "scratch:/scratch"], "must be formatted as key=value"),
        ("v2", ["--project", "team-b"], 'project "team-b" was not found'),
        ("v1", ["--pvc-exists", "claimname=no,path=/a"], 'persistentvolumeclaim "no" not found'),
        ("v1", ["--extended-resource", "rdma/rdma=1"], "rdma/rdma without a network"),
        ("v1", ["--name", "my_first_distributed_app"], "invalid workload name"),
        ("v1", ["--gpu", "0.5", "--workers", "1"], "fractional GPUs are not supported"),
    ],
)
def test_what_the_real_one_refuses_is_refused(variant: str, words: list[str], refusal: str, run: Run) -> None:
    done = run(variant, *SUBMIT[variant], *words, "--command", "--", "true")
    assert done.returncode == 1
    assert refusal in done.stderr


def test_the_other_generations_commands_are_unknown(run: Run) -> None:
    assert "unknown command" in run("v1", "training", "pytorch", "submit", "--help").stderr
    assert "unknown command" in run("v2", "submit-dist", "pytorch", "--help").stderr


def test_a_rehearsal_starts_nothing_and_a_name_is_taken_once(run: Run, cluster: runai.Cluster) -> None:
    words = [*SUBMIT["v1"], "--workers", "1", "--command"]
    assert run("v1", *words, "--dry-run", "--", "sleep", "60").returncode == 0
    assert cluster.phases("team-a") == {}
    assert run("v1", *words, "--", "sleep", "60").returncode == 0
    again = run("v1", *words, "--", "sleep", "60")
    assert (again.returncode, "already exists" in again.stderr) == (1, True)


def test_the_older_one_joins_the_command_for_a_shell_and_splits_lists_at_commas(
    run: Run, cluster: runai.Cluster
) -> None:
    run("v1", *SUBMIT["v1"], "-e", "A=1,B=2", "--command", "--", "bash", "-c", "echo two  blanks")
    asked = cluster.training("team-a", "a")
    assert asked["command"] == ["/bin/sh", "-c", "exec bash -c echo two  blanks"]
    assert asked["environment"] == {"A": "1", "B": "2"}


def test_the_newer_one_keeps_the_words(run: Run, cluster: runai.Cluster) -> None:
    run("v2", *SUBMIT["v2"], "-e", "A=1,B=2", "--command", "--", "bash", "-c", "echo two  blanks")
    asked = cluster.training("team-a", "a")
    assert asked["command"] == ["bash", "-c", "echo two  blanks"]
    assert asked["environment"] == {"A": "1,B=2"}


def test_pods_are_told_of_themselves_as_in_their_time(run: Run, cluster: runai.Cluster) -> None:
    def told(version: str, variant: str, name: str) -> list[str]:
        cluster.change(version=version, told_gpus=4)
        words = [word if word != "a" else name for word in SUBMIT[variant]]
        run(variant, *words, "--workers", "1", "--command", "--", "env")
        pod = f"{name}-worker-0"
        for _ in range(200):
            text = "".join(run(variant, *LOGS[variant], name, "--project", "team-a", "--pod", pod).stdout)
            if f"HOSTNAME={pod}" in text and "WORLD_SIZE" in text:
                break
        return [line for line in text.splitlines() if line.startswith(("RANK", "WORLD_SIZE", "PET_N", "RUNAI_NUM"))]

    assert sorted(told("2.13", "v1", "old")) == ["RANK=1", "WORLD_SIZE=2"]
    assert sorted(told("2.18", "v2", "new")) == [
        "PET_NNODES=2", "PET_NODE_RANK=1", "RANK=1", "RUNAI_NUM_OF_GPUS=4", "WORLD_SIZE=8",
    ]  # fmt: skip


LOGS = {"v1": ["logs"], "v2": ["training", "pytorch", "logs"]}
