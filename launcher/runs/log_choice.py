"""The choice among the lines of a job's log: some nodes' or ranks', the last minutes', the last ones of each node."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from launcher.job import LogLine
from litgpt_demo.metrics import parsed

_RANK = re.compile(r"\[rank(\d+)\]:")  # what torchrun begins a rank's lines with (litgpt_demo.node.main)


def rank_of(line: LogLine) -> int | None:
    """Return the rank that printed a line; None for one of the node's own."""
    found = _RANK.match(line.text)
    return int(found[1]) if found else None


@dataclass
class LogChoice:
    """The lines that are wanted. It remembers the time of each node's last line: take the lines in their order.

    A line's time is what the platform tells; where it tells none, as in files, the time of the last metrics row that
    the node has printed before it. A line of which no time is known is wanted: it may be the one that says why.
    """

    nodes: Collection[int] = ()
    """Empty wants all."""
    ranks: Collection[int] = ()
    """Empty wants all, and the nodes' own lines too."""
    since: float | None = None
    """Seconds since the epoch; older lines are not wanted."""
    _began: dict[int, float] = field(default_factory=dict)
    _times: dict[int, float] = field(default_factory=dict)

    def among(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield those of the lines that are wanted."""
        for line in lines:
            if self.nodes and line.node not in self.nodes:
                continue
            if self.since is not None and (time := self._time(line)) is not None and time < self.since:
                continue
            if not self.ranks or rank_of(line) in self.ranks:
                yield line

    def _time(self, line: LogLine) -> float | None:
        if line.time is not None:
            return line.time
        row = parsed(line.text)
        if row is not None:
            if "node_started" in row:
                self._began[line.node] = float(row["node_started"])
            if line.node in self._began and "elapsed" in row:
                self._times[line.node] = self._began[line.node] + float(row["elapsed"])
        return self._times.get(line.node)


class Tail:
    """The last lines of each node."""

    def __init__(self, most: int) -> None:
        """`most`: lines of each."""
        self._lines: defaultdict[int, deque[LogLine]] = defaultdict(lambda: deque(maxlen=most))

    def add(self, lines: Iterable[LogLine]) -> None:
        """Take more lines, in their order."""
        for line in lines:
            self._lines[line.node].append(line)

    def lines(self) -> list[LogLine]:
        """Return the last lines, node by node."""
        return [line for _, lines in sorted(self._lines.items()) for line in lines]
