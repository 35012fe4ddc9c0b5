"""The choice among the ways to divide a training: what each takes of memory and of the links, and so of time.

A step takes as long as its products or what is exchanged beside them, whichever is longer, and in addition what a
product has to wait for. Sizes are exact but for what overlaps less well than it could; speeds are measured where the
gate has measured, else published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from launcher.checks.arithmetic import (
    USUAL,
    Hardware,
    changed,
    cheaper,
    hardware_of,
    memory_of,
    memory_text,
    model_of,
    needed_bytes,
    sharding_text,
    shardings,
)
from launcher.config import RunConfig
from launcher.formatting import bytes_text
from litgpt_demo.config import Sharding, TrainConfig
from litgpt_demo.findings import Finding
from litgpt_demo.metrics import Row
from litgpt_demo.models import estimates

_GRADIENT = 4
"""Bytes of a gradient as it is summed."""
_ROOM = 0.9
"""The share of a device's memory that may be taken: estimates are within a tenth."""
_BETTER = 0.9
"""A layout that takes at most this share of the present one's time is worth saying."""

# busbw of all-reduces of some GB, in GB/s.
WITHIN = MappingProxyType({"H100": 482.0, "H200": 482.0})
"""Eight H200 by NVLink, and an H100's is as fast: https://github.com/stas00/ml-engineering, network/benchmarks."""
OTHERWISE_WITHIN = 207.8
"""1,662 Gbit/s among eight GPUs of a node (https://github.com/epfml/getting-started/blob/5b3f69d/docs/multinode.md)."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The speed of the links among GPUs: busbw, in GB/s."""

    within: float
    between: float | None
    """Among nodes; None where it is not known."""
    source: str
    """The source of `between`."""

    def seconds(self, count: float, *, ranks: int, alone: bool) -> float:
        """Return the time in which `count` bytes come to each of so many ranks that lack all but their own part.

        Args:
            alone: the ranks are those of a node.
        """
        speed = self.within if alone else self.between
        return 0.0 if ranks == 1 or speed is None else count * (ranks - 1) / ranks / speed / 1e9


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train on these processes."""

    train: TrainConfig
    memory: estimates.Memory
    needed: int
    products: float
    """Seconds of a step in products."""
    beside: float
    """Seconds of a step in which weights and gradients travel, beside the products."""
    between: float
    """Seconds in which products wait for what others make."""

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return max(self.products, self.beside) + self.between


def links_of(config: RunConfig, place: Hardware, rows: Sequence[Row]) -> Links:
    """Return the speed of the links: between nodes what the gate of this run measured, else the network's floor.

    Args:
        rows: the run's metrics.
    """
    nodes, within = config.platform.nodes, WITHIN.get(place.name, OTHERWISE_WITHIN)
    measured = [row for row in rows if row["kind"] == "network" and row["nodes"] == nodes]
    if measured:
        speed = float(measured[-1]["busbw"])
        return Links(within=within, between=speed, source="measured by this run's gate")
    fabric = config.platform.fabric
    floor = None if fabric is None else fabric.node.floor(nodes)
    name = "a network that has no figure" if fabric is None else fabric.node.name
    source = f"{name} has no figure before the gate has measured it" if floor is None else f"the least that {name} has"
    return Links(within=within, between=floor, source=source)


def ways(config: RunConfig, model: Any, place: Hardware, links: Links) -> list[Way]:
    """Return the present way, and the fastest that fits of each kind of layout, fastest first.

    Where none of a kind fits, its leanest; ways that do not fit come last.
    """
    kinds = ("hybrid", "fsdp") if config.platform.nodes > 1 else ("fsdp",)
    several: dict[tuple[str, bool], list[Way]] = {}
    for changes in cheaper(config, ["auto", *shardings(config, model, kinds)]):
        way = _way(config, model, place, links, config.train.model_copy(update=changes))
        sharding = way.train.sharding
        kind = ("copies", False) if sharding is None else (sharding.kind, sharding.tensor * sharding.context > 1)
        several.setdefault(kind, []).append(way)
    chosen = [_way(config, model, place, links, config.train)]
    for found in several.values():
        fitting = [way for way in found if fits(way, place)]
        chosen.append(min(fitting, key=_seconds) if fitting else min(found, key=lambda way: way.needed))
    by_settings = {changed(config, _settings(way)): way for way in reversed(chosen)}
    return sorted(by_settings.values(), key=lambda way: (not fits(way, place), way.seconds))


def fits(way: Way, place: Hardware) -> bool:
    """Return whether there is room for it, and for an error of the estimate."""
    return way.needed <= _ROOM * place.memory


def _seconds(way: Way) -> float:
    return way.seconds


def _settings(way: Way) -> dict[str, Any]:
    """Return the settings in which ways differ."""
    return {name: getattr(way.train, name) for name in ("strategy", "activation_checkpointing", "micro_batch")}


def _way(config: RunConfig, model: Any, place: Hardware, links: Links, train: TrainConfig) -> Way:
    memory, length = memory_of(config, model, train, place), config.model.sequence_length
    again = 4 / 3 if train.activation_checkpointing == "full" else 1.0
    flops = estimates.flops_per_token(model, length, train.lora) * train.global_batch * length * again
    return Way(
        train=train,
        memory=memory,
        needed=needed_bytes(memory, place),
        products=flops / (USUAL * (place.peak or math.inf) * config.world_size),
        beside=_beside(config, model, links, train),
        between=_between(config, model, links, train),
    )


def _multiplied(train: TrainConfig) -> int:
    """Bytes of a number in products."""
    return 4 if train.precision == "32-true" else 2


def _beside(config: RunConfig, model: Any, links: Links, train: TrainConfig) -> float:
    """Return the seconds of a step in which weights come together and gradients are summed."""
    own, per_node = estimates.adapters(model, train.lora), config.platform.processes
    count, trained = estimates.parameters(model) + own, own or estimates.parameters(model)
    layout = config.model_copy(update={"train": train}).layout(config.world_size)
    if train.sharding is None:  # an all-reduce sends all twice, once a step
        return links.seconds(2 * _GRADIENT * trained, ranks=config.world_size, alone=config.platform.nodes == 1)
    gathers = 2 if train.reshard_after_forward else 1
    alone = layout.holders <= per_node
    # The GPUs of a node share its cards, and together have to get all of the weights whatever part each needs.
    sent = (gathers * _multiplied(train) * count + _GRADIENT * trained) / (layout.tensor if alone else 1)
    each = links.seconds(sent, ranks=layout.shards, alone=alone)
    copies = links.seconds(2 * _GRADIENT * trained * per_node / layout.holders, ranks=layout.replicas, alone=False)
    return train.accumulation(config.world_size) * (each + copies)


def _between(config: RunConfig, model: Any, links: Links, train: TrainConfig) -> float:
    """Return the seconds of a step in which divided products and samples wait for each other."""
    layout = config.model_copy(update={"train": train}).layout(config.world_size)
    per_node, again = config.platform.processes, train.activation_checkpointing == "full"
    tokens = train.micro_batch * config.model.sequence_length
    # Into attention and out of it, into the MLP and out of it, forward and backward.
    stream = (12 if again else 8) * model.n_layer * tokens / layout.context * model.n_embd * _multiplied(train)
    waits = links.seconds(stream, ranks=layout.tensor, alone=layout.tensor <= per_node)
    pairs = 2 * model.n_query_groups * model.head_size / layout.tensor
    shared = (3 if again else 2) * model.n_layer * tokens * pairs * _multiplied(train)
    waits += links.seconds(shared, ranks=layout.context, alone=layout.together <= per_node)
    return train.accumulation(config.world_size) * waits


# --- what is said of it -----------------------------------------------------------------------------------------------


def layouts(
    config: RunConfig, *, vocab_size: int | None, rows: Sequence[Row]
) -> tuple[list[dict[str, str]], list[Finding]]:
    """Return the ways to train as a table, and which is to be taken; neither where there is no choice among GPUs.

    Args:
        rows: the run's metrics.
    """
    model, place = model_of(config, vocab_size), hardware_of(config)
    if model is None or place is None or place.kind != "cuda" or place.peak is None or config.world_size == 1:
        return [], []
    links = links_of(config, place, rows)
    found = ways(config, model, place, links)
    return [_row(way, place) for way in found], list(_advice(config, found, place, links))


def _row(way: Way, place: Hardware) -> dict[str, str]:
    return {
        "layout": " ".join(f"{name}={_text(value)}" for name, value in _settings(way).items()),
        "memory per process": bytes_text(way.needed) + ("" if fits(way, place) else ": does not fit"),
        "a step": duration(way.seconds),
        "products": duration(way.products),
        "exchange beside": duration(way.beside),
        "waiting": duration(way.between),
        "memory": memory_text(way.memory, place),
    }


def _text(value: Any) -> str:
    return sharding_text(value) if isinstance(value, Sharding) else str(value)


def duration(seconds: float) -> str:
    """Return the time of a step with three digits."""
    return f"{seconds:.3g} s"


def _advice(config: RunConfig, found: Sequence[Way], place: Hardware, links: Links) -> Iterator[Finding]:
    """Yield the layout to take where it is another than the present one, and what the links are too slow for."""
    present = next(way for way in found if not changed(config, _settings(way)))
    best = found[0]
    speeds = f"{links.within * 8:,.0f} Gbit/s within a node"
    if config.platform.nodes > 1:
        said = "unknown" if links.between is None else f"{links.between * 8:,.0f} Gbit/s"
        speeds += f" and {said} between nodes ({links.source})"
    if fits(best, place) and (not fits(present, place) or best.seconds < _BETTER * present.seconds):
        yield Finding(
            "info",
            "train.layout",
            f"the fastest layout that fits takes about {duration(best.seconds)} a step, of which products are "
            f"{duration(best.products)}; the present one {duration(present.seconds)}"
            f"{'' if fits(present, place) else ', and does not fit'}; at {speeds}",
            f"set {changed(config, _settings(best))}: a run may change the strategy and go on",
        )
    slow = [way for way in found if fits(way, place) and way.beside > 2 * way.products]
    if slow:
        told = ", ".join(f"{_text(way.train.strategy)} ({duration(way.beside)})" for way in slow)
        yield Finding(
            "info",
            "train.fabric",
            f"the links are too slow for {told}, beside products of {duration(slow[0].products)}; at {speeds}",
            "take a layout that keeps weights within a node, more tokens per step, or a faster network",
        )
