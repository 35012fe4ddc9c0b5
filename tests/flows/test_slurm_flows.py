"""Whole flows on Slurm's own daemons: a training over several time limits, and pi on two nodes."""

from __future__ import annotations

import asyncio
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bucket_emulator import bucket_emulator
from console_script import Cli
from services.login_node import LoginNode
from services.slurm_cluster import SlurmCluster
from waiting import until

from flows.run_torchrun import run_torchrun
from flows.sweep_litgpt import sweep_litgpt
from launcher.config import RunConfig, SweepConfig, validated
from launcher.errors import JobCancelled
from launcher.events import Listener, Note, Output
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from launcher.runs.run import plan_run
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.storage import open_storage

pytestmark = [pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmPlatform, "poll_seconds", 1.0)


def two_nodes(**changes: Any) -> SlurmPlatformConfig:
    """Two nodes of this machine, which talk over its loopback."""
    asked = {
        "kind": "slurm", "nodes": 2, "gate": 0, "environment": {"kind": "venv", "path": sys.prefix},
        "overrides": {"GLOO_SOCKET_IFNAME": "lo"},
    }  # fmt: skip
    return SlurmPlatformConfig.model_validate({**asked, **changes})


def test_a_training_goes_on_over_as_many_time_limits_as_it_needs_and_ends_with_its_models(
    slurm: SlurmCluster, tiny: Callable[..., RunConfig], run_again: Callable[..., Any]
) -> None:
    changes = {
        "train.micro_batch": 2, "train.max_steps": 300, "train.checkpoint_every": 100, "train.evaluate_every": 100,
        "train.max_restarts": 1, "train.restarts": {"preempted": {"wait": 0}},
    }  # fmt: skip
    document = tiny(changes).model_dump(mode="json") | {"platform": two_nodes().model_dump(mode="json")}
    config = validated(RunConfig, document, where="slurm")
    storage = plan_run(config).storage
    folder = storage.local_path()
    assert folder is not None
    limits = threading.Thread(target=reach_the_limit_twice, args=(slurm, folder), daemon=True)
    limits.start()
    done = run_again(config)
    limits.join(1)
    assert done.final.step == 300
    assert slurm.run("squeue", "--noheader") == ""
    rows = list(rows_of(storage.read("metrics.jsonl").decode()))
    starts = [row["step"] for row in rows if row["kind"] == "start"]
    assert len(starts) == 3
    assert starts == sorted({*starts}), "each attempt goes on behind the one before, and no step is lost"
    assert [row["step"] for row in rows if row["kind"] == "leave"] == starts[1:], "it saved when it was told"
    assert sorted(curve(rows, "step", "loss")) == list(range(1, 301))
    notes = " ".join(event.what for event in done.events if isinstance(event, Note))
    assert "attempt 2 ended: preempted" in notes
    said = "\n".join(event.line for event in done.events if isinstance(event, Output))
    assert "Exited with exit code 45" in said
    assert {"attempts/3/node-1.json", "attempts/3/node-0.log", "final/litgpt/lit_model.pth"} <= set(storage.list())


def reach_the_limit_twice(slurm: SlurmCluster, folder: Path) -> None:
    """Send what slurmctld sends before a time limit, once the first two attempts have each done a few steps."""
    for attempt in (1, 2):
        until(lambda number=attempt: steps_of(folder, number) >= 5, seconds=300)
        job = (folder / "attempts" / str(attempt) / "slurm-job").read_text().strip()
        slurm.run("scancel", "--batch", "--signal=TERM", job)


def steps_of(folder: Path, attempt: int) -> int:
    """Return how many steps an attempt has told of."""
    log = folder / "attempts" / str(attempt) / "node-0.log"
    return log.read_text().count('"kind":"step"') if log.exists() else 0


def test_a_sweep_is_one_array_whose_trials_are_followed_to_its_table(
    slurm: SlurmCluster, tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    document = tiny({"train.max_steps": 4, "train.evaluate_every": 4}).model_dump(mode="json")
    document["platform"] = two_nodes(nodes=1).model_dump(mode="json")
    document["sweep"] = {"grid": {"train.learning_rate": [0.01, 0.02, 0.03]}, "max_parallel": 2}
    config = validated(SweepConfig, document, where="sweep")
    table = asyncio.run(sweep_litgpt(**{name: getattr(config, name) for name in SweepConfig.model_fields}))
    assert [row["error"] for row in table] == ["", "", ""]
    numbers = {path.read_text().strip() for path in tmp_path.glob("runs/*/attempts/1/slurm-job")}
    (array,) = {number.partition("_")[0] for number in numbers}
    assert numbers == {f"{array}_{index}" for index in range(3)}
    assert list(tmp_path.glob("runs/*/attempts/2")) == []
    assert slurm.run("squeue", "--noheader") == ""


def test_the_first_application_finds_pi_on_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    coroutine = run_torchrun(
        script=str(CHECKOUT / "examples/pi.py"),
        name="pi",
        root=str(tmp_path),
        args=("--steps", "1000003"),
        platform=two_nodes(processes=2),
    )
    logs = asyncio.run(coroutine)
    (log,) = tmp_path.glob("runs/pi-*/attempts/1/node-0.log")
    assert logs == str(log.parent)
    assert "pi = 3.141592653589" in log.read_text()
    assert "4 ranks on 2 nodes" in log.read_text()
    assert slurm.run("squeue", "--noheader") == ""


def test_a_run_through_ssh_is_seen_and_cancelled_by_its_name(
    slurm_login: LoginNode, slurm: SlurmCluster, tmp_path: Path, cli: Cli
) -> None:
    """The run is here, and its status, logs and end are asked for as from another terminal."""
    script, root = tmp_path / "waits.py", f"--root={tmp_path}"
    script.write_text("import time\nprint('it waits', flush=True)\ntime.sleep(600)\n")
    platform, ended = two_nodes(host="login", grace=2), []

    def follow() -> None:
        try:
            asyncio.run(run_torchrun(script=str(script), name="waits", root=str(tmp_path), platform=platform))
        except JobCancelled as error:
            ended.append(error)

    run = threading.Thread(target=follow, daemon=True)
    run.start()
    until(lambda: "it waits" in cli("logs", "waits", root).out, seconds=180)
    assert "running" in cli("status", "waits", root).out
    assert cli("cancel", "waits", root).code == 0
    assert slurm.run("squeue", "--noheader") == ""
    run.join(120)
    assert len(ended) == 1


def test_a_run_in_a_bucket_is_followed_from_the_cluster_s_own_folder(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_emulator("my-bucket") as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        platform = two_nodes(folder=str(tmp_path / "jobs"))
        overrides = {**platform.overrides, "STORAGE_EMULATOR_HOST": url}
        coroutine = run_torchrun(
            script=str(CHECKOUT / "examples/pi.py"),
            name="pi",
            root="gs://my-bucket/runs-of-mine",
            args=("--steps", "1000003"),
            platform=platform.model_copy(update={"overrides": overrides}),
        )
        lines: list[str] = []
        with Listener(lambda event: lines.append(event.line) if isinstance(event, Output) else None):
            kept = open_storage(asyncio.run(coroutine))
        assert any("2 ranks on 2 nodes" in line for line in lines)
        assert {"node-0.log", "node-0.json", "node-1.json"} <= set(kept.list())
    (job,) = (tmp_path / "jobs").iterdir()
    assert stat.S_IMODE(job.stat().st_mode) == 0o700
    assert {path.name for path in job.iterdir()} == {
        "exit-0", "exit-1", "exit-job", "node-0.log", "node-1.log", "slurm-job",
    }  # fmt: skip
