"""The logs that nodes keep in their attempt's directory, each read on from where the last look at it ended."""

from __future__ import annotations

import json
from dataclasses import astuple

from launcher.errors import PlatformUnreachable
from launcher.job import LogLine, LogPage
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.storage import Position, Storage


def page_of(attempt: Storage, nodes: int, position: str, *, ended: bool) -> LogPage:
    """Return the lines that the nodes' logs have had added since `position`, node by node.

    Args:
        ended: whether the job had ended before this look: then a line without its end is a line too.

    Raises:
        PlatformUnreachable: a log cannot be read.
    """
    positions = {int(node): Position(*place) for node, place in json.loads(position or "{}").items()}
    lines: list[LogLine] = []
    for node in range(nodes):
        fresh, positions[node] = _fresh(attempt, f"node-{node}.log", positions.get(node, Position()), whole=not ended)
        text = fresh.decode(errors="replace").removesuffix("\n")
        lines += (LogLine(node, terminal_text(line)) for line in (text.split("\n") if fresh else ()))
    return LogPage(tuple(lines), json.dumps({node: astuple(place) for node, place in positions.items()}))


def _fresh(attempt: Storage, name: str, position: Position, *, whole: bool) -> tuple[bytes, Position]:
    """Return the bytes of a log behind `position`, with `whole` up to the last newline, and the position behind them.

    A pod that comes back moves the log of its last life away and begins a new one, which is read from its beginning.
    """
    try:
        begin, fresh = attempt.read_on(name, position)
    except FileNotFoundError:
        return b"", Position()
    except TrainLitgptError as error:
        raise PlatformUnreachable(f"{attempt.address(name)} cannot be read: {error}") from error
    fresh = fresh[: fresh.rfind(b"\n") + 1] if whole else fresh
    return fresh, begin.after(fresh)


def terminal_text(line: str) -> str:
    """Return what a terminal would show of a line in which a progress bar went back to its start again and again."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]
