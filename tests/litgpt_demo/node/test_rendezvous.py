from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from litgpt_demo.errors import Fault, NetworkError, UserError
from litgpt_demo.node.network import NETWORK
from litgpt_demo.node.rendezvous import Node, await_name, contradictions, parse, without_leftovers
from litgpt_demo.node.torchrun import Rendezvous

FLAGS = "--nodes auto --node-rank auto --master auto --processes 8 --run-id r --directory /d -- x.py"
AUTO = FLAGS.split()

# As the platforms set them (kubeflow/trainer; run-ai/docs, distributed training).
TRAINER = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "run-node-0-0.run", "PET_MASTER_PORT": "29400"}
OLD_RUNAI = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "run-master-0", "MASTER_PORT": "23456"}
NEW_RUNAI = {"PET_NNODES": "4", "RANK": "2", "WORLD_SIZE": "32", "MASTER_ADDR": "run-master-0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "host", "port"),
    [
        (TRAINER, "run-node-0-0.run", 29400),
        (OLD_RUNAI, "run-master-0", 23456),
        (NEW_RUNAI, "run-master-0", 29500),
        ({"JOB_COMPLETION_INDEX": "2", "PET_NNODES": "4", "MASTER_ADDR": "run-0.run"}, "run-0.run", 29500),
    ],
)
def test_rank_and_peers_are_learnt_from_what_the_platform_sets(environ: dict[str, str], host: str, port: int) -> None:
    assert parse(AUTO, environ).meet == Rendezvous(nodes=4, node_rank=2, host=host, port=port, run_id="r")


@pytest.mark.parametrize("number", ["PET_NODE_RANK", "JOB_COMPLETION_INDEX"])
def test_a_pods_own_number_outweighs_rank_which_may_count_processes(number: str) -> None:
    """Two nodes of one number would wait for a third that never comes, or train as a world of the wrong size."""
    environ = {"PET_NNODES": "4", "MASTER_ADDR": "run-master-0", number: "2", "RANK": "17"}
    assert parse(AUTO, environ).meet.node_rank == 2


@pytest.mark.parametrize("missing", ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"])
def test_what_no_platform_tells_is_not_guessed(missing: str) -> None:
    with pytest.raises(UserError, match=f"=auto finds none of .*{missing}"):
        parse(AUTO, {name: value for name, value in TRAINER.items() if name != missing})


def test_the_network_comes_with_the_environment() -> None:
    assert parse(AUTO, {**TRAINER, NETWORK: '{"name": "gib", "nccl_net": "gIB"}'}).network.nccl_net == "gIB"
    with pytest.raises(UserError, match="have to be of one version"):
        parse(AUTO, {**TRAINER, NETWORK: '{"fabric": "gib"}'})
    assert parse(AUTO, TRAINER).network.gate_seconds == 0


# --- what is left over ------------------------------------------------------------------------------------------------

MEET = Rendezvous(nodes=4, node_rank=2, host="h", port=29500, run_id="r")
NODE = Node(meet=MEET, processes=8, directory=Path("/d"), program=("x",))


@pytest.mark.parametrize("environ", [TRAINER, OLD_RUNAI, NEW_RUNAI, {"JOB_COMPLETION_INDEX": "2"}, {}])
def test_a_platform_that_agrees_with_what_was_submitted_is_no_trouble(environ: dict[str, str]) -> None:
    assert list(contradictions(NODE, environ)) == []


@pytest.mark.parametrize(
    ("environ", "severity", "what"),
    [
        ({"PET_NNODES": "2"}, "error", "PET_NNODES=2 does not agree with --nodes=4"),
        ({"PET_NODE_RANK": "0"}, "error", "PET_NODE_RANK=0 does not agree with --node-rank=2"),
        ({"JOB_COMPLETION_INDEX": "3"}, "error", "JOB_COMPLETION_INDEX=3 does not agree with --node-rank=2"),
        ({"PET_NNODES": "4", "WORLD_SIZE": "8"}, "error", "WORLD_SIZE=8 does not agree with --nodes=4 of 8 ranks"),
        ({"WORLD_SIZE": "1"}, "warning", "WORLD_SIZE=1 does not agree with --nodes=4 of 8 ranks"),
    ],
)
def test_a_platform_that_says_something_else_is_told(environ: dict[str, str], severity: str, what: str) -> None:
    (found,) = contradictions(NODE, environ)
    assert (found.severity, found.fault, found.code) == (severity, Fault.USER, "node.contradiction")
    assert found.what.startswith(what)


def test_two_nodes_with_one_number_are_found_by_the_one_that_is_wrong() -> None:
    assert list(contradictions(replace(NODE, meet=replace(MEET, node_rank=3)), TRAINER))


def test_ranks_do_not_inherit_what_counts_nodes() -> None:
    left = without_leftovers({**TRAINER, **OLD_RUNAI, "HOME": "/h", "PETER": "pan"})
    assert left == {"HOME": "/h", "PETER": "pan"}


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_that_does_not_resolve_yet_is_asked_again() -> None:
    answers = iter([socket.gaierror("not known"), socket.gaierror("not known"), None])
    waits: list[float] = []

    def lookup(host: str) -> None:
        assert host == "run-nodes-0-0.run"
        if (answer := next(answers)) is not None:
            raise answer

    await_name("run-nodes-0-0.run", lookup=lookup, sleep=waits.append)
    assert waits == [0.5, 1.0]


def test_a_name_that_never_resolves_says_what_to_look_at() -> None:
    with pytest.raises(NetworkError, match=r"node 0's name no-such-node\.invalid did not resolve .*headless Service"):
        await_name("no-such-node.invalid", limit=0.6)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_addresses_need_no_asking(host: str) -> None:
    await_name(host, limit=0)
