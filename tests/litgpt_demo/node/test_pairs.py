from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.node.pairs import culprits, rounds


@given(nodes=st.integers(2, 70), most=st.integers(1, 80))
def test_in_every_round_a_node_has_one_partner_at_most_and_no_pair_comes_twice(nodes: int, most: int) -> None:
    played = rounds(nodes, most=most)
    assert 1 <= len(played) <= most
    pairs = [pair for turn in played for pair in turn]
    assert len(pairs) == len(set(pairs))
    for turn in played:
        seated = [node for pair in turn for node in pair]
        assert len(seated) == len(set(seated)) >= nodes - 1
        assert all(0 <= first < second < nodes for first, second in turn)


@given(nodes=st.integers(2, 40))
def test_with_enough_rounds_every_pair_is_measured(nodes: int) -> None:
    assert {pair for turn in rounds(nodes, most=nodes) for pair in turn} == set(combinations(range(nodes), 2))


@given(data=st.data(), nodes=st.integers(5, 60))
def test_slow_nodes_are_found_wherever_they_are_and_nobody_else_is_blamed(data: st.DataObject, nodes: int) -> None:
    slow = data.draw(st.sets(st.integers(0, nodes - 1), max_size=(nodes - 1) // 4))
    rates = {node: data.draw(st.floats(0.1, 12) if node in slow else st.floats(36, 50)) for node in range(nodes)}
    # A pair is as fast as the slower of its two; seven rounds give a sound node a sound partner as long as the slow
    # ones are a minority that cannot fill all its rounds.
    played = [pair for turn in rounds(nodes, most=nodes) for pair in turn]
    speeds = {pair: min(rates[pair[0]], rates[pair[1]]) for pair in played}
    assert culprits(speeds, {}) == sorted(slow)


def test_two_nodes_that_are_slow_together_are_not_told_apart_by_their_link() -> None:
    assert culprits({(0, 1): 3.0}, {}) == []
    assert culprits({(0, 1): 3.0}, {0: 400.0, 1: 100.0}) == [1]
    assert culprits({(0, 1): 3.0}, {0: 400.0, 1: 210.0}) == []
