"""Time and cost of a training: arithmetic on list prices, before anything is rented."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.formatting import duration_text
from launcher.machines import ListPrice, Machine
from launcher.platforms.settings import PlatformSettings
from litgpt_demo.runs import RecordedPrice

UTILISATION = 0.35
"""The share of the GPUs' peak: such trainings reach 33 to 46 % (llm-foundry's and torchtitan's published tables)."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The time and cost of a training."""

    seconds: float
    dollars: float | None
    """None where no list price is known."""
    price: ListPrice | None

    def __str__(self) -> str:
        text = f"about {duration_text(self.seconds)} at {UTILISATION:.0%} of peak"
        if self.dollars is None or self.price is None:
            return f"{text}, at a price that is not known here"
        listed = f"on demand, {self.price.region}, {self.price.date}"
        cost = f"${self.dollars:,.2f}" if self.dollars < 100 else f"${self.dollars:,.0f}"
        return f"{text}, {cost} at list price ({listed})"


def together(several: Sequence[Expected], *, parallel: int) -> Expected | None:
    """Return the cost of several trainings, `parallel` of them at a time; None where there are none."""
    if not several:
        return None
    dollars = [one.dollars for one in several if one.dollars is not None]
    return Expected(
        # A new one begins as soon as one ends: at best all ways are busy, and the longest cannot be cut.
        seconds=max(max(one.seconds for one in several), sum(one.seconds for one in several) / parallel),
        dollars=sum(dollars) if len(dollars) == len(several) else None,
        price=several[0].price,
    )


def expected(machine: Machine, *, nodes: int, seconds: float) -> Expected:
    """Return the cost of so many of these machines for so long.

    Spot prices move and are not foretold: they are a third to a tenth of the list's.
    """
    price = machine.price
    dollars = None if price is None else price.usd * nodes * seconds / 3600
    return Expected(seconds=seconds, dollars=dollars, price=price)


def listed_price(platform: PlatformSettings) -> RecordedPrice | None:
    """Return what an hour of one of its nodes costs, for the run's own record; None where no list price is known."""
    machine = platform.machine_type
    if machine is None or machine.price is None:
        return None
    price = machine.price
    return RecordedPrice(machine=machine.name, usd=price.usd, region=price.region, date=price.date)
