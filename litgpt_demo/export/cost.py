"""The cost of a run by its own files: the hours of its nodes, and the price that config.json names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from litgpt_demo.config import Settings
from litgpt_demo.documents import parse_json
from litgpt_demo.runs import ATTEMPTS, RecordedPrice, read_document
from litgpt_demo.storage import Storage

# What a node leaves at its end, in an attempt's folder; a life that its platform started again was moved one deeper.
_REPORT = re.compile(r"\d+/(restart-\d+/)?node-\d+\.json")


class Cost(Settings):
    """The cost of all attempts of a run, as far as its nodes reported their ends; one that was killed did not."""

    hours: float
    """Hours of one machine."""
    price: RecordedPrice

    @property
    def usd(self) -> float:
        """Return the cost at list price, in dollars."""
        return self.hours * self.price.usd

    def __str__(self) -> str:
        price = self.price
        return (
            f"${self.usd:,.2f} or more: {self.hours:,.2f} hours of {price.machine} at ${price.usd:,.2f}, "
            f"list price on demand in {price.region} of {price.date}"
        )


def cost_of(run: Storage) -> Cost | None:
    """Return what the run's attempts have cost; None where its machines have no list price or no node reported."""
    price = read_document(run).price
    if price is None:
        return None
    attempts = run.within(ATTEMPTS)
    hours = machine_hours(_report(attempts, path) for path in attempts.list() if _REPORT.fullmatch(path))
    return Cost(hours=hours, price=price) if hours else None


def _report(attempts: Storage, path: str) -> Mapping[str, Any]:
    fix = "remove that file; its node's hours are then left out"
    return parse_json(attempts.read(path), dict[str, Any], where=attempts.address(path), fix=fix)


def machine_hours(reports: Iterable[Mapping[str, Any]]) -> float:
    """Return the hours that nodes were in use, all of them together."""
    return sum(float(report["ended"]) - float(report["started"]) for report in reports if "started" in report) / 3600
