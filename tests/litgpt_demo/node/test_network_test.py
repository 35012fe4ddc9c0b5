"""The network before a training: what is made of the figures, which nodes are slow, which ranks are neighbours."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import DataError, NetworkError, NodeError
from litgpt_demo.metrics import rows_of
from litgpt_demo.node.collectives import rounds
from litgpt_demo.node.network_test import (
    MEASUREMENT,
    NetworkTestResult,
    Speed,
    check_bandwidth,
    rank_order,
    read_result,
    slow_nodes,
)


def result(
    busbw: float, *, pairs: dict[tuple[int, int], float], alone: dict[int, float] | None = None
) -> NetworkTestResult:
    """What nodes of 8 ranks find, whose own machines do better and say nothing of the network."""
    nodes = max(max(pair) for pair in pairs) + 1
    ranks = nodes * 8
    taken = [(8, 0.001), (ranks, 2**30 / 1e9 / busbw * 2 * (ranks - 1) / ranks)]
    speeds = tuple(Speed(ranks=count, bytes=2**30, seconds=seconds, repeats=3) for count, seconds in taken)
    return NetworkTestResult(
        backend="nccl", nodes=nodes, hosts=("a", "b", "c")[:nodes], speeds=speeds, floor=190, seconds=9, pairs=pairs,
        alone=alone or {},
    )  # fmt: skip


def test_slow_network_blames_no_node_but_a_slow_node_is_blamed() -> None:
    found = check_bandwidth(result(23.0, pairs={(0, 1): 4.1, (1, 2): 4.0, (0, 2): 3.9}), 1, name="tcpxo")
    assert isinstance(found, NetworkError)
    assert "reached 23.00 GB/s" in str(found)
    assert check_bandwidth(result(318.0, pairs={(0, 1): 4.1}), 0, name="tcpxo") is None
    sick = result(23.0, pairs={(0, 1): 4.0}, alone={0: 430.0, 1: 41.0})
    assert isinstance(check_bandwidth(sick, 1, name="tcpxo"), NodeError)
    assert "node 1 (b) is slow" in str(check_bandwidth(sick, 0, name="tcpxo"))


def test_a_result_is_read_back_and_told_by_a_training(
    new_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from litgpt_demo.training.loop import main

    made = result(23.0, pairs={(0, 1): 4.1, (1, 2): 4.0}, alone={0: 430.0})
    (tmp_path / "network.json").write_text(json.dumps(made.document()))
    assert read_result((tmp_path / "network.json").read_bytes(), "there") == made
    monkeypatch.setenv(MEASUREMENT, str(tmp_path / "network.json"))
    run = new_run("measured", max_steps=1, warmup_steps=0, evaluate_every=1, checkpoint_every=1)
    assert main(["--run", str(run)]) == 0
    assert rows_of((run / "metrics.jsonl").read_text())[1] == made.row()
    for damaged in (b"", b"[]", b"\xff", b'{"backend": "gloo", "nodes": 1, "hosts": 3}'):
        with pytest.raises(DataError, match=r"gs://b/network\.json is not "):
            read_result(damaged, "gs://b/network.json")


@given(data=st.data(), nodes=st.integers(5, 60))
def test_only_slow_nodes_are_blamed_wherever_they_are(data: st.DataObject, nodes: int) -> None:
    slow = data.draw(st.sets(st.integers(0, nodes - 1), max_size=(nodes - 1) // 4))
    rates = {node: data.draw(st.floats(0.1, 12) if node in slow else st.floats(36, 50)) for node in range(nodes)}
    played = [pair for turn in rounds(nodes, most=nodes) for pair in turn]
    speeds = {pair: min(rates[pair[0]], rates[pair[1]]) for pair in played}
    assert slow_nodes(speeds, {}) == sorted(slow)


@given(st.lists(st.builds("/{}/{}/{}".format, *[st.sampled_from("abc")] * 2, st.integers(0, 99)), min_size=1))
def test_machines_of_one_block_and_of_one_rack_are_neighbours(locations: list[str]) -> None:
    ranks = rank_order(locations)
    assert sorted(ranks) == list(range(len(locations)))
    assert ranks[0] == 0
    in_order = [locations[ranks.index(rank)] for rank in range(len(ranks))]
    for depth in (2, 3):
        domains = ["/".join(location.split("/")[:depth]) for location in in_order]
        assert 1 + sum(first_node != second_node for first_node, second_node in pairwise(domains)) == len(set(domains))
