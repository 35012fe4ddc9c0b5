"""Which node a pod of a PyTorchJob is, in every version's words."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import UserError
from litgpt_demo.node.main import exports
from litgpt_demo.node.pytorchjob import master, node_rank, problems, rank_of_pod
from litgpt_demo.node.rendezvous import contradictions, parse

COUNTS = st.integers(1, 64)


def of_2_13(rank: int, nodes: int) -> dict[str, str]:
    """Run:ai of 2.13: pods."""
    return {"RANK": str(rank), "WORLD_SIZE": str(nodes), "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "23456"}


def of_2_18(rank: int, nodes: int, gpus: int) -> dict[str, str]:
    """Run:ai of 2.18: GPUs."""
    return {
        **of_2_13(rank, nodes), "WORLD_SIZE": str(nodes * gpus), "PET_NNODES": str(nodes), "PET_NODE_RANK": str(rank),
        "RUNAI_NUM_OF_GPUS": str(gpus), "LOCAL_RANK": "0",
        "HOSTNAME": "owt-1-master-0" if rank == 0 else f"owt-1-worker-{rank - 1}",
    }  # fmt: skip


def told(environ: dict[str, str], *, nodes: int, processes: int) -> str:
    """What is wrong, as one text."""
    return "; ".join(problems(environ, nodes=nodes, processes=processes))


@given(nodes=COUNTS, gpus=st.integers(1, 16), data=st.data())
def test_both_versions_mean_the_same_node(nodes: int, gpus: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, nodes - 1))
    for environ in (of_2_13(rank, nodes), of_2_18(rank, nodes, gpus)):
        assert node_rank(environ) == rank
        assert told(environ, nodes=nodes, processes=gpus) == ""


@given(submitted=COUNTS, ran=COUNTS, gpus=st.integers(1, 16))
def test_another_number_of_pods_is_never_taken_for_the_one_submitted(submitted: int, ran: int, gpus: int) -> None:
    if ran != submitted:
        assert f"PET_NNODES={ran} pods run" in told(of_2_18(0, ran, gpus), nodes=submitted, processes=gpus)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "8"}, r"RANK=8 is none of the nodes 0 to 1"),
        ({"PET_NODE_RANK": "0"}, "PET_NODE_RANK=0 and RANK=1 name two different nodes"),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3 is neither the 2 pods nor their GPUs"),
        ({"HOSTNAME": "owt-1-worker-4"}, "owt-1-worker-4 is node 5 by its name, and RANK say otherwise"),
    ],
)
def test_contradictions_are_found(changes: dict[str, str], words: str) -> None:
    assert told({**of_2_13(1, 2), **changes}, nodes=2, processes=8) == words


def test_a_pod_that_is_told_nothing_shows_what_it_is_told() -> None:
    with pytest.raises(UserError, match=r"does not know which node it is(.|\n)*MASTER_ADDR=10\.0\.0\.7"):
        node_rank({"MASTER_ADDR": "10.0.0.7"})


def test_a_pod_with_more_gpus_than_ranks_is_no_contradiction() -> None:
    assert told(of_2_18(1, 2, 8), nodes=2, processes=4) == ""


def test_pods_are_numbered_by_their_names() -> None:
    names = ("a-b-master-0", "a-b-worker-0", "a-b-worker-11", "laptop")
    assert [rank_of_pod(name) for name in names] == [0, 1, 12, None]


def test_node_0_is_where_the_platform_says_and_never_guessed() -> None:
    assert master(of_2_13(1, 2)) == "10.0.0.7:23456"
    assert master({"PET_MASTER_ADDR": "owt-1-master-0", "PET_MASTER_PORT": "29400", "MASTER_ADDR": "no"}) == (
        "owt-1-master-0:29400"
    )
    with pytest.raises(UserError, match="does not know where node 0 is"):
        master({"MASTER_PORT": "23456"})


def test_the_nodes_own_command_line_takes_it_and_ranks_see_nothing_of_it() -> None:
    argv = (
        "--nodes", "2", "--node-rank", "pytorchjob", "--processes", "8", "--master", "pytorchjob", "--run-id", "a",
        "--directory", "/tmp/a", "--", "-m", "program",
    )  # fmt: skip
    environ = of_2_18(1, 2, 8)
    node = parse(argv, environ)
    assert (node.meet.nodes, node.meet.node_rank, node.meet.host, node.meet.port) == (2, 1, "10.0.0.7", 23456)
    assert list(contradictions(node, environ)) == []
    assert [one.code for one in contradictions(node, of_2_18(1, 3, 8))] == ["node.contradiction"] * 2
    left = exports(node, {**environ, "PATH": os.environ["PATH"]}, cores=8)
    assert not [name for name in left if name.startswith("PET_") or name in {"RANK", "WORLD_SIZE", "MASTER_ADDR"}]
