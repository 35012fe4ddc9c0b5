"""Which node this is and where all meet: by flags, or by what the platform sets."""

import shlex
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import FailureClass, UserError
from litgpt_demo.node.rendezvous import SPEC, contradictions, pack, parse, plain, unpack

CALL = "--nodes 2 --node-rank 1 --processes 4 --master 10.0.0.5:29500 --run-id r-1 --directory /d"
TOLD = "--nodes 4 --node-rank pytorchjob --master pytorchjob --processes 8 --run-id r --directory /d -- x.py"

# As the platforms set them (kubeflow/trainer; run-ai/docs, distributed training).
TRAINER = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "run-node-0-0.run", "PET_MASTER_PORT": "29400"}
NEW_RUNAI = {"PET_NNODES": "4", "RANK": "2", "WORLD_SIZE": "32", "MASTER_ADDR": "run-master-0", "LOCAL_RANK": "0"}


def test_everything_behind_the_dashes_is_the_programs() -> None:
    requested = parse(f"{CALL} --stage gs://b/one --stage /two -- -m mine --nodes 9 --".split(), {})
    assert astuple(requested)[:5] == (2, 1, "10.0.0.5", 29500, "r-1")
    assert requested.program == ("-m", "mine", "--nodes", "9", "--")
    assert requested.stage == ("gs://b/one", "/two")
    assert requested.own == Path("/d/node-1")


@pytest.mark.parametrize(
    ("old", "new", "arguments"),
    [
        ("--node-rank 1", "--node-rank env:INDEX", "INDEX is not in the environment"),
        ("--nodes 2", "--nodes two", "--nodes='two' is not a whole number"),
        ("10.0.0.5:29500", "10.0.0.5", "has no port"),
        (" -- x.py", "", "no program given"),
    ],
)
def test_a_call_that_cannot_work_says_what_would(old: str, new: str, arguments: str) -> None:
    with pytest.raises(UserError, match=arguments):
        parse(f"{CALL} -- x.py".replace(old, new).split(), {})


@pytest.mark.parametrize(
    ("environ", "host", "port"),
    [
        (TRAINER, "run-node-0-0.run", 29400),
        (NEW_RUNAI, "run-master-0", 23456),
        # A pod's own number outweighs RANK, which may count processes.
        (TRAINER | {"RANK": "17"}, "run-node-0-0.run", 29400),
    ],
)
def test_rank_and_peers_are_learnt_from_what_the_platform_sets(environ: dict[str, str], host: str, port: int) -> None:
    assert astuple(parse(TOLD.split(), environ))[:5] == (4, 2, host, port, "r")


@pytest.mark.parametrize(
    ("environ", "severity"),
    [
        ({"PET_NNODES": "2"}, "error"),
        ({"JOB_COMPLETION_INDEX": "3"}, "error"),
        ({"PET_NNODES": "4", "WORLD_SIZE": "8"}, "error"),
        ({"WORLD_SIZE": "1"}, "warning"),
    ],
)
def test_a_platform_that_says_something_else_is_told(environ: dict[str, str], severity: str) -> None:
    argv = f"{CALL} -- x.py".replace("--nodes 2 --node-rank 1 --processes 4", "--nodes 4 --node-rank 2 --processes 8")
    (found,) = contradictions(parse(argv.split(), {}), environ)
    assert (found.severity, found.fault, found.code) == (severity, FailureClass.USER, "node.contradiction")


def runai(rank: int, nodes: int, gpus: int | None) -> dict[str, str]:
    """Run:ai of 2.13, whose WORLD_SIZE counts pods, or of 2.18, whose counts GPUs."""
    variables = {"RANK": rank, "WORLD_SIZE": nodes * (gpus or 1), "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": 23456}
    newer = {"PET_NNODES": nodes, "PET_NODE_RANK": rank, "RUNAI_NUM_OF_GPUS": gpus} if gpus else {}
    return {name: str(value) for name, value in (variables | newer).items()}


@given(nodes=st.integers(1, 64), gpus=st.integers(1, 16), data=st.data())
def test_both_versions_mean_the_same_node(nodes: int, gpus: int, data: st.DataObject) -> None:
    """Another number of nodes is detected."""
    rank = data.draw(st.integers(0, nodes - 1))
    argv = TOLD.replace("nodes 4", f"nodes {nodes}").replace("processes 8", f"processes {gpus}")
    for environ in (runai(rank, nodes, None), runai(rank, nodes, gpus)):
        node = parse(argv.split(), environ)
        assert astuple(node)[:5] == (nodes, rank, "10.0.0.7", 23456, "r")
        named = {"HOSTNAME": f"run-worker-{rank - 1}" if rank else "run-master-0"}
        assert list(contradictions(node, environ | named)) == []
        (another,) = contradictions(node, environ | {"HOSTNAME": f"run-worker-{rank}"})
        assert f"the pod's name run-worker-{rank}: node={rank + 1}" in another.what
    variables = [item.what for item in contradictions(node, runai(rank, nodes + 1, gpus))]
    assert variables[0].startswith(f"PET_NNODES={nodes + 1} does not agree with --nodes={nodes} ")
    with pytest.raises(UserError, match="PET_NODE_RANK or RANK is not in the environment"):
        parse(argv.split(), {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1"})


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)


@given(argv=st.lists(TEXT, max_size=5), env=st.dictionaries(TEXT, TEXT, max_size=3))
def test_packed_value_is_one_plain_word_that_unpacks_the_same(argv: list[str], env: dict[str, str]) -> None:
    word = pack(argv, env)
    assert plain(word)
    assert shlex.split(word) == [word]
    assert "," not in word  # at which flags split
    found: dict[str, str] = {}
    assert unpack([SPEC, word], found) == argv
    assert found == env
