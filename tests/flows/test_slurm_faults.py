"""Whole trainings on Slurm's own daemons, disturbed as a cluster's nodes, queue and administrators disturb them."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from services.slurm_cluster import SlurmCluster, slurm_cluster
from waiting import until

from launcher.config import RunConfig, validated
from launcher.errors import JobCancelled, JobFailed
from launcher.events import Note
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from launcher.runs.index import Index
from launcher.runs.run import plan_run
from litgpt_demo.metrics import curve, rows_of

pytestmark = [pytest.mark.services, pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(900)]

STEPS, SAVED = 120, 20
"""Some seconds of training, and its first checkpoint."""
AWAY = 60.0  # seconds


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmPlatform, "poll_seconds", 1.0)


@pytest.fixture
def on_slurm(tmp_path: Path, tiny: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes configs of trainings on two nodes of Slurm, for some seconds after their first checkpoint."""

    def make(steps: int = STEPS, **platform: Any) -> RunConfig:
        document = tiny({
            "train.global_batch": 32, "train.micro_batch": 16, "train.max_steps": steps,
            "train.checkpoint_every": SAVED, "train.evaluate_every": steps, "model.config.n_embd": 128,
        }).model_dump(mode="json")  # fmt: skip
        asked = {
            "kind": "slurm", "nodes": 2, "gate": 0, "grace": 10, "overrides": {"GLOO_SOCKET_IFNAME": "lo"},
            "environment": {"kind": "venv", "path": sys.prefix}, **platform,
        }  # fmt: skip
        document["platform"] = SlurmPlatformConfig.model_validate(asked).model_dump(mode="json")
        return validated(RunConfig, document, where="slurm")

    return make


# --- faults -----------------------------------------------------------------------------------------------------------


def jobs(slurm: SlurmCluster) -> list[str]:
    """Return the numbers of the jobs that have not ended."""
    return slurm.run("squeue", "--noheader", "--user=root", "--format=%i").split()


def nodes(slurm: SlurmCluster) -> list[str]:
    """Return the nodes of the job that runs, in the order of their ranks."""
    return slurm.run("scontrol", "show", "hostnames", slurm.run("squeue", "--noheader", "--format=%N")).split()


def power_of_node_0(slurm: SlurmCluster) -> None:
    slurm.stop_node(nodes(slurm)[0])


def power_of_node_1(slurm: SlurmCluster) -> None:
    slurm.stop_node(nodes(slurm)[1])


def slurmd_of_node_1(slurm: SlurmCluster) -> None:
    slurm.stop_node(nodes(slurm)[1], steps=False)


def drain_node_1(slurm: SlurmCluster) -> None:
    slurm.run("scontrol", "update", f"NodeName={nodes(slurm)[1]}", "State=DRAIN", "Reason=fan")


def urgent_job(slurm: SlurmCluster) -> None:
    slurm.run("srun", "--partition=urgent", "--exclusive", "--nodes=3", "sleep", "3")


def requeue(slurm: SlurmCluster) -> None:
    slurm.run("scontrol", "requeue", *jobs(slurm))


def controller(slurm: SlurmCluster) -> None:
    slurm.stop_controller()
    time.sleep(AWAY)
    slurm.start_controller()


@dataclass(frozen=True)
class Disturbance:
    """The events of a training, and what its user is told of them."""

    name: str
    comes: Callable[[SlurmCluster], None]
    told: str
    attempts: int = 2
    steps: int = STEPS
    platform: Mapping[str, Any] = field(default_factory=dict)


DISTURBANCES = (
    Disturbance("power of node 0", power_of_node_0, "Slurm lost the node"),
    Disturbance("power of node 1", power_of_node_1, "Slurm lost the node"),
    # Its step goes on: it would come to its end before Slurm misses the node.
    Disturbance("slurmd of node 1", slurmd_of_node_1, "Slurm lost the node", steps=800),
    Disturbance("drained", drain_node_1, "", attempts=1),
    Disturbance("preempted", urgent_job, "preempted", platform={"partition": "spare"}),
    Disturbance(
        "preempted and queued again by Slurm", urgent_job, "restarted by its platform", attempts=1,
        platform={"partition": "requeued", "restart": "platform"},
    ),
    Disturbance(
        "requeued by an administrator", requeue, "restarted by its platform", attempts=1, steps=600,
        platform={"restart": "platform"},
    ),
    Disturbance("controller away for a minute", controller, "", attempts=1, steps=1000),
)  # fmt: skip


@contextmanager
def after_a_checkpoint(folder: Path, comes: Callable[[], object]) -> Iterator[None]:
    """Have something happen beside this, once there is a checkpoint to go on from."""

    def wait() -> None:
        saved = f'"kind":"checkpoint","step":{SAVED},'
        until(lambda: any(saved in path.read_text() for path in folder.glob("runs/*/metrics.jsonl")), seconds=500)
        comes()
        came.set()

    came = threading.Event()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield
    thread.join(120)
    assert came.is_set(), "it did not happen, or not to its end"


def whole(config: RunConfig, steps: int) -> int:
    """Return the number of attempts of a run that has all its steps once, and lost no checkpoint on the way."""
    storage = plan_run(config).storage
    rows = list(rows_of(storage.read("metrics.jsonl").decode()))
    starts = [row["step"] for row in rows if row["kind"] == "start"]
    assert starts[0] == 0
    assert all(step >= SAVED for step in starts[1:]), starts
    assert sorted(curve(rows, "step", "loss")) == list(range(1, steps + 1))
    kept = storage.list()
    assert "final/litgpt/lit_model.pth" in kept
    return len({path.split("/")[1] for path in kept if path.startswith("attempts/")})


def notes(done: Any) -> str:
    return " ".join(event.what for event in done.events if isinstance(event, Note))


@pytest.mark.drill  # each takes a minute or more
@pytest.mark.parametrize("what", DISTURBANCES, ids=lambda what: str(what.name))
def test_a_training_ends_with_its_models_whatever_befalls_its_nodes(
    tmp_path: Path,
    slurm: SlurmCluster,
    on_slurm: Callable[..., RunConfig],
    run_again: Callable[..., Any],
    what: Disturbance,
) -> None:
    config = on_slurm(what.steps, **what.platform)
    with after_a_checkpoint(tmp_path, lambda: what.comes(slurm)):
        done = run_again(config)
    assert re.search(what.told, notes(done)), notes(done)
    assert whole(config, what.steps) == what.attempts
    assert jobs(slurm) == []


def test_a_job_that_somebody_cancels_is_not_started_again(
    tmp_path: Path, slurm: SlurmCluster, on_slurm: Callable[..., RunConfig], run_again: Callable[..., Any]
) -> None:
    config = on_slurm(600)
    with after_a_checkpoint(tmp_path, lambda: slurm.run("scancel", *jobs(slurm))), pytest.raises(JobCancelled) as said:
        run_again(config)
    assert "cancelled" in str(said.value)
    assert jobs(slurm) == []
    planned = plan_run(config)
    assert [record.attempt for record in Index(planned.root).records(planned.name)] == [1]


def test_a_job_that_takes_more_memory_than_it_asked_for_stops_with_that_reason(
    on_slurm: Callable[..., RunConfig], run_again: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm_cluster(nodes=2, accounting=False, limit_memory=True) as limited:
        for name, value in limited.environment().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(JobFailed) as said:
            run_again(on_slurm(memory="200M"))  # torch alone takes more
    assert "out of memory on node" in str(said.value)
    assert "for want of memory" in str(said.value)
