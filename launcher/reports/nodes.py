"""The table of a job's nodes: the health of their GPUs, and which of them the others wait for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from pydantic import ValidationError

from launcher.formatting import NOTHING, bytes_text, share_text
from launcher.reports.page import printable
from litgpt_demo.metrics import GpuRow, Row

Value = float | int | None
_NAMED = 3
"""Nodes whose troubles are named in a line; a table has the others."""
_POWER_CAP = "SwPowerCap"


def gpu_row(row: Row) -> GpuRow | None:
    """Return a metrics row of kind `gpus`; None if it is no such one, for a node may write anything."""
    try:
        return GpuRow.model_validate(row)
    except ValidationError:
        return None


def node_table(nodes: Iterable[GpuRow], rows: Iterable[Row]) -> list[dict[str, str]]:
    """Return a row for each node that told of its GPUs, first those that something is wrong with.

    Args:
        rows: the metrics, from which the stragglers are taken.
    """
    slow = _stragglers(rows)
    ranked = sorted(nodes, key=lambda one: (not _troubles(one, slow), one.node))
    return [_cells(one, slow) for one in ranked]


def gpu_health(nodes: Iterable[GpuRow], rows: Iterable[Row]) -> str:
    """Return the health of all GPUs in a line, with the first troubles by name; empty where no node told of any.

    Args:
        rows: as for `node_table`.
    """
    slow, told = _stragglers(rows), sorted(nodes, key=lambda one: one.node)
    if not told:
        return ""
    troubles = [f"node {one.node}: {', '.join(found)}" for one in told if (found := _troubles(one, slow))]
    if not troubles:
        gpus = sum(len(one.utilisation) for one in told)
        return f"good ({gpus:,} GPUs on {len(told):,} nodes)"
    more = f"; {len(troubles) - _NAMED:,} more nodes" if len(troubles) > _NAMED else ""
    return printable("; ".join(troubles[:_NAMED]) + more)


def _stragglers(rows: Iterable[Row]) -> dict[int, Row]:
    needed = {"rank", "factor", "since"}
    return {int(row["rank"]): row for row in rows if row.get("kind") == "straggler" and needed <= row.keys()}


def _troubles(one: GpuRow, slow: Mapping[int, Row]) -> list[str]:
    """Return what is wrong with a node's GPUs, in words."""
    lost = sum(count or 0 for count in one.uncorrected)
    found = [
        f"uncorrected ECC errors: {lost:,}" if lost else "",
        f"Xid {', '.join(_by_gpu(xid) for xid in one.xids)}" if one.xids else "",
        _slowed(one),
        f"the others wait for {waited}" if (waited := _waited_for(one, slow)) else "",
    ]
    return [trouble for trouble in found if trouble]


def _slowed(one: GpuRow) -> str:
    """Return for how much of the time a GPU ran below its clocks, and why, unless only to stay within its power.

    A GPU at full load does that all the time
    (https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html, nvmlClocksEventReasonSwPowerCap).
    """
    found = [
        (share, words)
        for share, words in zip_longest(one.throttled, one.reasons, fillvalue="")
        if isinstance(share, float) and share and set(str(words).split()) != {_POWER_CAP}
    ]
    if not found:
        return ""
    reasons = " ".join(dict.fromkeys(" ".join(str(words) for _, words in found).split()))
    return f"throttled {share_text(max(share for share, _ in found))} of the time" + (
        f" ({reasons})" if reasons else ""
    )


def _cells(one: GpuRow, slow: Mapping[int, Row]) -> dict[str, str]:
    reasons = " ".join(dict.fromkeys(" ".join(one.reasons).split()))
    throttled = _range(one.throttled, "%", 100)
    cells = {
        "node": f"{one.node} {one.host}".strip(),
        "GPUs": str(len(one.utilisation)),
        "busy": _range(one.utilisation, "%", 100),
        "memory": _memory(one),
        "power": _range(one.power, "W"),
        "temperature": _range(one.temperature, "°C"),
        "clock": _range(one.clock, "MHz"),
        "throttled": f"{throttled} ({reasons})" if reasons and throttled != NOTHING else throttled,
        "ECC errors": _errors(one),
        "Xid": ", ".join(_by_gpu(xid) for xid in one.xids) or NOTHING,
        "waited for": _waited_for(one, slow) or NOTHING,
    }
    return {name: printable(value) for name, value in cells.items()}


def _range(values: Sequence[Value], unit: str, times: int = 1) -> str:
    """Return the lowest and the highest of the GPUs' values, once where they look the same."""
    known = [f"{value * times:,.0f}" for value in sorted(value for value in values if value is not None)]
    if not known:
        return NOTHING
    return f"{known[0]} {unit}" if known[0] == known[-1] else f"{known[0]} to {known[-1]} {unit}"


def _memory(one: GpuRow) -> str:
    used, total = (
        max((value for value in values if value), default=0) for values in (one.memory_used, one.memory_total)
    )
    return f"{bytes_text(used)} of {bytes_text(total)}" if total else NOTHING


def _errors(one: GpuRow) -> str:
    told = [
        f"{count:,} {kind} on GPU {gpu}"
        for kind, counts in (("uncorrected", one.uncorrected), ("corrected", one.corrected))
        for gpu, count in enumerate(counts)
        if count
    ]
    return ", ".join(told) or ("0" if any(count is not None for count in one.uncorrected) else NOTHING)


def _by_gpu(xid: str) -> str:
    gpu, _, number = xid.partition(":")
    return f"{number} on GPU {gpu}"


def _waited_for(one: GpuRow, slow: Mapping[int, Row]) -> str:
    """Return which of the node's ranks the others wait for, and how much slower they are."""
    mine = [row for rank, row in slow.items() if one.rank <= rank < one.rank + one.ranks]
    return ", ".join(f"rank {row['rank']}, {row['factor']:.1f} times as long since step {row['since']}" for row in mine)
