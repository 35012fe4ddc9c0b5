"""The node's entry point needs no more than requirements-node.txt names: images of users' own have no more."""

from __future__ import annotations

from pathlib import Path

from distributions import requirements

FOLDER = Path(__file__).parents[3] / "litgpt_demo"


def test_the_ranges_of_what_a_node_needs_are_those_of_the_products_own_image() -> None:
    node, ours = (requirements((FOLDER / name).read_text()) for name in ("requirements-node.txt", "requirements.txt"))
    assert set(node) < set(ours)
