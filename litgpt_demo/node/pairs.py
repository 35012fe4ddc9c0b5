"""The search for the slow node of many: every node is measured with several others, and a slow one is slow with all."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

NodePair = tuple[int, int]

# A node counts as slow below this share of what is usual. Links of one fabric are alike to some percent; a card that
# has fallen back to a lower rate, or a cable that drops packets, costs more than half.
SHARE = 0.5


def rounds(nodes: int, *, most: int) -> list[list[NodePair]]:
    """Rounds in each of which every node has one partner (or none, where their number is odd), all pairs different.

    It is the circle method of tournaments: number 0 keeps its place, the others move on by one.

    Args:
        most: how many rounds at most; with fewer than all they are spread evenly, so that partners are near and far.
    """
    seats = nodes + nodes % 2
    every = []
    for turn in range(seats - 1):
        circle = [0, *((place + turn) % (seats - 1) + 1 for place in range(seats - 1))]
        pairs = [(circle[place], circle[-1 - place]) for place in range(seats // 2)]
        every.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
    if len(every) <= most:
        return every
    return [every[number * len(every) // most] for number in range(most)]


def best_of(speeds: Mapping[NodePair, float]) -> dict[int, float]:
    """Each node's best speed with any partner: a sound node has at least one sound partner, a slow one is slow with
    all."""
    best: dict[int, float] = {}
    for pair, speed in speeds.items():
        for node in pair:
            best[node] = max(speed, best.get(node, 0.0))
    return best


def outliers(speeds: Mapping[int, float]) -> list[int]:
    """Nodes that have less than SHARE of what is usual among them."""
    if len(speeds) < 2:
        return []
    usual = median(speeds.values())
    return sorted(node for node, speed in speeds.items() if speed < SHARE * usual)


def culprits(speeds: Mapping[NodePair, float], alone: Mapping[int, float]) -> list[int]:
    """The slow nodes, as far as the measurements tell.

    Two nodes have one pair, which does not say whose fault it is; what each of them does alone may.

    Args:
        speeds: GB/s between the two nodes of a pair.
        alone: GB/s among the ranks within each node; empty where nodes have one rank.
    """
    return sorted({*outliers(best_of(speeds)), *outliers(alone)})
