"""The cost of a run by its own files: the hours of its nodes, and the price that config.json names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pydantic import BaseModel, FiniteFloat

from litgpt_demo.config import Settings
from litgpt_demo.documents import Unreadable, parse_json
from litgpt_demo.errors import DataError
from litgpt_demo.runs import ATTEMPTS, MOST_NODE_REPORT, NODE_REPORT, RecordedPrice, read_document
from litgpt_demo.storage import Storage

# What a node leaves at its end, in an attempt's folder; a life that its platform started again was moved one deeper.
_REPORT = re.compile(rf"[0-9]+/(restart-[0-9]+/)?{NODE_REPORT}")


class Cost(Settings):
    """The cost of all attempts of a run, as far as its nodes reported their ends; one that was killed did not."""

    hours: float
    """Hours of one machine."""
    price: RecordedPrice
    unreadable: int = 0
    """The number of reports that are damaged or forged; their nodes' hours are left out."""

    @property
    def usd(self) -> float:
        """Return the cost at list price, in dollars."""
        return self.hours * self.price.usd

    def __str__(self) -> str:
        price = self.price
        left_out = f"; reports of nodes that could not be read, and are left out: {self.unreadable}"
        return (
            f"${self.usd:,.2f} or more: {self.hours:,.2f} hours of {price.machine} at ${price.usd:,.2f}, "
            f"list price on demand in {price.region} of {price.date}"
            f"{left_out if self.unreadable else ''}"
        )


def cost_of(run: Storage) -> Cost | None:
    """Return what the run's attempts have cost; None where its machines have no list price or no node reported."""
    price = read_document(run).price
    if price is None:
        return None
    attempts = run.within(ATTEMPTS)
    hours = _machine_hours(_lives(attempts, bad := Unreadable("nodes' reports")))
    return Cost(hours=hours, price=price, unreadable=bad.count) if hours else None


class _NodeLife(BaseModel):
    """The times in a node's report of its end; the rest of it is not needed here."""

    started: FiniteFloat
    """Seconds since the epoch."""
    ended: FiniteFloat


def _lives(attempts: Storage, bad: Unreadable) -> Iterator[_NodeLife]:
    """Yield what nodes reported. `bad` counts reports that are damaged or forged."""
    for path in attempts.list():
        if _REPORT.fullmatch(path):
            try:
                content = attempts.read(path, most=MOST_NODE_REPORT)
                yield parse_json(content, _NodeLife, where=attempts.address(path), fix="it is left out")
            except DataError as error:
                bad.add(str(error))


def _machine_hours(lives: Iterable[_NodeLife]) -> float:
    """Return the hours that nodes were in use, all of them together."""
    return sum(max(0.0, life.ended - life.started) for life in lives) / 3600
