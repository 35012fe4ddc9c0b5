"""Drills with the job on Slurm's own daemons: the orchestrator's own, and what befalls nodes, queue and controller.

All nodes are this machine, so that their processes can be hit here one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from services.slurm_cluster import SlurmCluster, slurm_cluster

from cli.drills.ground import Scene, kill
from cli.drills.judging import DrillResult
from cli.drills.table import AGENT, BLOWS, RANK, Drill, at_step, said, trains_again

pytestmark = [pytest.mark.drill, pytest.mark.training, pytest.mark.timeout(900)]

_OUTAGE = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment().items():
            patch.setenv(name, value)
        yield made


@pytest.fixture(scope="module")
def held(
    cluster: SlurmCluster, held_on: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Drill], DrillResult]]:
    platform = {
        "kind": "slurm", "nodes": 2, "processes": 1, "grace": 10, "gate": 0, "partition": "spare",
        "environment": {"kind": "venv", "path": sys.prefix}, "overrides": {"GLOO_SOCKET_IFNAME": "lo"},
    }  # fmt: skip
    with held_on({"root": str(tmp_path_factory.mktemp("slurm")), "platform": platform}) as hold:
        yield hold


@pytest.fixture(autouse=True)
def _idle(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.reset()


def node_of(cluster: SlurmCluster, rank: int) -> str:
    """Return the name of one of the nodes of the job that runs."""
    listed = cluster.run("squeue", "--noheader", "--states=RUNNING", "--format=%N")
    return cluster.run("scontrol", "show", "hostnames", listed).split()[rank]


def kill_on_node(*words: str) -> Callable[[SlurmCluster, Scene], None]:
    """Return what kills the youngest process of the second node that has these words in its command line.

    A job on Slurm has none of the variables by which drills find their own processes.
    """

    def hit(cluster: SlurmCluster, _: Scene) -> None:
        there = cluster.nodes[node_of(cluster, 1)].tree()
        kill([one for one in there if f" {' '.join(words)} " in f"{' '.join(one.cmdline())} "][-1:])

    return hit


def lose_power(cluster: SlurmCluster, _: Scene) -> None:
    cluster.stop_node(node_of(cluster, 1))


def lose_slurmd(cluster: SlurmCluster, _: Scene) -> None:
    cluster.stop_node(node_of(cluster, 1), steps=False)


def preempt(cluster: SlurmCluster, _: Scene) -> None:
    cluster.run("srun", "--partition=urgent", "--exclusive", "--nodes=3", "sleep", "3")


def lose_controller(cluster: SlurmCluster, scene: Scene) -> None:
    cluster.stop_controller()
    scene.pause(_OUTAGE)
    cluster.start_controller()


def trains_on(name: str, injected: str, told: str = "node fault") -> Drill:
    """Return a drill in which a new attempt goes on."""
    return Drill(
        name=name, injected=injected, when=at_step(16), attempts=(2,), back=trains_again,
        told=(f"attempt 1 ended: .*{told}",),
    )  # fmt: skip


DISTURBED = (
    (trains_on("rank", "SIGKILL of a rank"), kill_on_node(*RANK)),
    (trains_on("agent", "SIGKILL of a node's agent"), kill_on_node(*AGENT)),
    (trains_on("node-lost", "a node without power"), lose_power),
    (trains_on("slurmd-lost", "SIGKILL of a node's slurmd, whose steps live on"), lose_slurmd),
    (trains_on("preempted", "a job of a more urgent partition", "preempted"), preempt),
    (
        Drill(
            name="controller", injected="slurmctld gone for 60 s", when=at_step(16), back=said("✓ 4/6"),
            told=("waiting, the job goes on",),
        ),
        lose_controller,
    ),
)  # fmt: skip


@pytest.mark.parametrize(("drill", "comes"), DISTURBED, ids=lambda one: one.name if isinstance(one, Drill) else "")
def test_a_job_is_disturbed(
    cluster: SlurmCluster,
    held: Callable[[Drill], DrillResult],
    drill: Drill,
    comes: Callable[[SlurmCluster, Scene], None],
) -> None:
    assert held(replace(drill, inject=partial(comes, cluster))).violations == ()


@pytest.mark.parametrize("drill", BLOWS, ids=lambda one: one.name)
def test_a_job_is_disturbed_by_its_user_s_own_commands(held: Callable[[Drill], DrillResult], drill: Drill) -> None:
    assert held(drill).violations == ()


def test_an_orchestrator_is_disturbed(held: Callable[[Drill], DrillResult], orchestrator_drill: Drill) -> None:
    assert held(orchestrator_drill).violations == ()
