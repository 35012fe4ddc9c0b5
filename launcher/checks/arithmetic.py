"""The cost of a training before anything is rented: parameters, operations, memory and whether it fits, time, money."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.config import RunConfig
from launcher.formatting import bytes_text, count_text, duration_text
from launcher.machines import ListPrice, Machine
from litgpt_demo import catalogue
from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import Finding
from litgpt_demo.metrics import Row
from litgpt_demo.models import estimates
from litgpt_demo.models.devices import device_named, matmul_dtype
from litgpt_demo.optimizers import optimizer_of

UTILISATION = 0.35
"""The share of the GPUs' peak: such trainings reach 33 to 46 % (llm-foundry's and torchtitan's published tables)."""
_RECOMPUTE = ("none", "selective", "full")
"""Activation checkpointing, from what costs no time to what costs most."""
_UNCERTAIN = 1.5
"""Estimates come within 10 % of what torch measures (tests/litgpt_demo/models/test_estimates.py), without fragments."""
_COMPILED = 3.0
"""torch.compile keeps less for the backward pass than is estimated, by what it fuses."""
_NOT_HERE = "tensor, pipeline and expert parallelism are not here"
_SHORTEST, _MOST = 128, 16_384  # tokens of a sample and processes: neither shorter nor more are proposed


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device and memory that one process of a job has to itself."""

    name: str
    kind: str
    """cuda or cpu, as estimates tell them apart."""
    memory: int
    """Bytes."""
    peak: float | None
    """FLOP/s in the training's precision, where that is known."""


def place_of(config: RunConfig) -> Place | None:
    """Return the device of each process; None where the platform does not say, or names one that our table lacks."""
    train, platform = config.train, config.platform
    name = next(iter(gpu_names()), None) if platform.on_this_machine else platform.hardware
    if name is not None:
        device = device_named(name)
        if device is None:
            return None
        peak = device.peak(matmul_dtype(train.precision, float8=train.float8))
        return Place(name=device.name, kind="cuda", memory=device.memory, peak=peak)
    if not platform.on_this_machine:
        return None
    share = host_memory() // config.world_size
    name = "its share of this machine" if config.world_size > 1 else "this machine"
    return Place(name=name, kind="cpu", memory=share, peak=None)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The memory that one process of a training takes, in bytes."""

    model: Any
    """LitGPT's Config."""
    train: TrainConfig
    length: int
    world_size: int
    nodes: int
    place: Place | None
    why: str = ""
    """The reason for the strategy in `train`, where it was `auto`."""

    @cached_property
    def memory(self) -> estimates.Memory:
        device = "cuda" if self.place is None else self.place.kind
        ranks = {"world_size": self.world_size, "nodes": self.nodes}
        return estimates.memory(self.model, self.train, length=self.length, device=device, **ranks)

    @property
    def saved(self) -> int:
        """A save on a CPU copies the state into the same memory."""
        return self.memory.checkpoint_bytes if self.place is not None and self.place.kind == "cpu" else 0

    @property
    def likely(self) -> int:
        return self.memory.total + self.saved

    @property
    def fits(self) -> bool:
        return self.place is None or self.likely <= self.place.memory


def needs(config: RunConfig, *, vocab_size: int | None, metrics: Sequence[Row] = ()) -> Needs | None:
    """Return the memory that each process takes, of the strategy that `auto` comes to; None where the vocabulary is not
    known yet. `metrics` are the run's: the network may have been measured."""
    if (model := model_of(config, vocab_size)) is None:
        return None
    train, length, nodes = config.train, config.model.sequence_length, config.platform.nodes
    ranks: dict[str, Any] = {"world_size": config.world_size, "nodes": nodes}
    asked = Needs(model=model, train=train, length=length, place=place_of(config), **ranks)
    if train.strategy != "auto" or config.world_size == 1:
        return asked
    several = [_with(asked, strategy=name) for name in _shardings(asked)]
    fitting = {one.train.strategy: one for one in several if one.fits}
    if asked.place is None:
        return replace(asked, why="the memory of the devices is not known here, so each process has a copy")
    if asked.fits or not several:
        return replace(asked, why=f"each process has a copy, which takes {bytes_text(asked.likely)}")
    if not fitting:
        return replace(several[-1], why="nothing fits as it is set, and this takes least")
    if "hybrid" not in fitting:
        whose, takes = ("node", several[0]) if len(several) > 1 else ("process", asked)
        why = f"a copy for each {whose} does not fit: it takes {bytes_text(takes.likely)} of each {asked.place.name}"
        return replace(fitting["fsdp"], why=why)
    speed, how = _speed(config, metrics)
    over_all, over_nodes = (
        estimates.network_bytes_per_step(model, fitting[name].train, **ranks) for name in ("fsdp", "hybrid")
    )
    flops = estimates.flops_per_token(model, length) * train.global_batch * length
    products, seconds = seconds_for(config, flops), over_all / speed if speed else None
    sends = f"{bytes_text(int(over_all))} a step" + (f", {seconds:.2g} s at {how}" if seconds else "")
    if seconds and products:
        sends += f", and the products take {products:.2g} s"
        if seconds <= products:
            return replace(fitting["fsdp"], why=f"it takes least memory and sends {sends}, which hide it")
    why = f"each node holds a copy and sends {bytes_text(int(over_nodes))} a step"
    return replace(fitting["hybrid"], why=f"{why}; fsdp would send {sends}")


def _with(needed: Needs, **changes: Any) -> Needs:
    return replace(needed, train=needed.train.model_copy(update=changes))


def _shardings(needed: Needs) -> list[str]:
    """The strategies that shard these ranks, and this precision; the one that sends least over the network first."""
    train, nodes, ranks = needed.train, needed.nodes, needed.world_size
    if ranks == 1 or train.precision == "16-mixed" or train.compile == "model":
        return []
    return ["hybrid", "fsdp"] if 1 < nodes < ranks else ["fsdp"]


def _speed(config: RunConfig, metrics: Sequence[Row]) -> tuple[float | None, str]:
    """Return the bus bandwidth among the nodes in bytes per second as the run's last gate measured it, or the least
    that the network is known for, and that in words."""
    nodes, fabric = config.platform.nodes, config.platform.fabric
    found = [row for row in metrics if row["kind"] == "network" and row.get("nodes") == nodes and row.get("busbw")]
    if found:
        speed, how = found[-1]["busbw"], "as the gate measured"
    elif fabric is not None and (floor := fabric.node.floor(nodes)) is not None:
        speed, how = floor, f"the least of {fabric.node.name}"
    else:
        return None, ""
    return speed * 1e9, f"{8 * speed:,.0f} Gbit/s ({how})"


def model_of(config: RunConfig, vocab_size: int | None) -> Any:
    """LitGPT's Config of the model; None for one whose vocabulary is that of a tokenizer which is not known yet."""
    model = config.model
    if vocab_size is None and catalogue.padded_vocabulary(model.name, model.config) is None:
        return None
    length = model.sequence_length
    return catalogue.config_of(model.name, model.config, sequence_length=length, vocab_size=vocab_size)


def figures(
    config: RunConfig, *, vocab_size: int | None, tokens: int = 0, metrics: Sequence[Row] = ()
) -> list[dict[str, str]]:
    """Parameters, FLOPs and memory as a table with how they come about; empty where the vocabulary is not known yet.
    `tokens` are those to train on, 0 where that is not known yet; `metrics` are the run's."""
    if (needed := needs(config, vocab_size=vocab_size, metrics=metrics)) is None:
        return []
    model, length, place, memory = needed.model, needed.length, needed.place, needed.memory
    sizes = sorted(estimates.block(model, layer).total for layer in range(model.n_layer))
    each = count_text(sizes[0]) if sizes[0] == sizes[-1] else f"{count_text(sizes[0])} to {count_text(sizes[-1])}"
    embedding = f"embedding and output of {model.padded_vocab_size:,} x {model.n_embd:,} each"
    rows = [("parameters", count_text(estimates.parameters(model)), f"{len(sizes)} blocks of {each}, {embedding}")]
    per_token, attention = estimates.flops_per_token(model, length), estimates.attention_flops(model, length)
    products = f"6 x {count_text(estimates.used_parameters(model))} weights in products"
    how = f"{products} + {count_text(attention)} for attention over {length:,} tokens"
    rows.append(("FLOPs per token", count_text(per_token), how))
    if tokens:
        how, seconds = f"{count_text(tokens)} tokens", seconds_for(config, per_token * tokens)
        if place is not None and place.peak is not None and seconds is not None:
            peak = f"{config.world_size} {place.name} of {place.peak / 1e12:g} TFLOP/s"
            how = f"{how}; {duration_text(seconds)} at {UTILISATION:.0%} of {peak}"
        rows.append(("FLOPs in all", f"{per_token * tokens:.3g}", how))
    train, nodes = needed.train, config.platform.nodes
    optimizer = optimizer_of(train).title
    ways = train.shard_degree(nodes, config.platform.processes)
    if needed.world_size > 1:
        strategy = train.strategy.replace("auto", "ddp")
        how = needed.why or f"as train.strategy={strategy} says"
        if ways > 1:
            state = memory.weights + memory.optimizer + memory.gradients
            how += f"; weights, {optimizer} and gradients of {bytes_text(ways * state)} / {ways} processes"
            how += f" = {bytes_text(state)}; {_NOT_HERE}"
        rows.append(("strategy", strategy, how))
    gradients = memory.gradients if memory.gradients_persist else 0
    parts = {
        "weights": memory.weights,
        optimizer: memory.optimizer,
        "gathered": memory.unsharded,
        "gradients": gradients,
    }
    moment, most = max(memory.peak_phases.items(), key=lambda item: item[1])
    parts |= {f"at the {moment}": most, "copy while saving": needed.saved}
    how = " + ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    how += "" if place is None else f"; {place.name} has {bytes_text(place.memory)}"
    how += "; a report's peak memory counts Python and torch too, 0.5 GB" if place and place.kind == "cpu" else ""
    rows.append(("memory per process", bytes_text(needed.likely), how))
    if place is None or place.kind == "cuda":  # a CPU's copy is in its memory above
        state = memory.checkpoint_bytes * ways
        how = f"weights and {optimizer} {bytes_text(state)}" + (f" / {nodes} nodes" if nodes > 1 else "")
        rows.append(("host memory of a save", bytes_text(-(-state // nodes)), f"{how}, copied on each node"))
    return [{"what": what, "figure": figure, "arithmetic": how} for what, figure, how in rows]


def check_together(several: Sequence[Needs]) -> Iterator[Finding]:
    """Yield a finding where trainings that run at the same time, in the same place, do not fit it together."""
    place = several[0].place if several else None
    total = sum(one.likely for one in several)
    if place is None or total <= place.memory or any(one.likely > place.memory for one in several):
        return  # what does not fit alone is told of that training
    fits = max(1, place.memory // several[0].likely)
    surely = sum(one.memory.min_bytes for one in several) > place.memory or total > _UNCERTAIN * place.memory
    what = f"{len(several)} trials at a time take about {bytes_text(total)} per process together"
    what += f", and {place.name} has {bytes_text(place.memory)}"
    yield Finding("error" if surely else "warning", "sweep.memory", what, f"set sweep.max_parallel={fits}")


def check_memory(config: RunConfig, *, vocab_size: int | None) -> Iterator[Finding]:
    """Yield a finding where the training does not fit the memory of a process, with a change that would fit.

    Weights, gradients and the optimizer's state certainly have to fit. The rest is an estimate, and refused where no
    error of the estimate could make it fit.
    """
    needed = needs(config, vocab_size=vocab_size)
    if needed is None or needed.place is None or needed.fits:
        return
    place, likely, certain = needed.place, needed.likely, needed.memory.min_bytes
    margin = _COMPILED if config.train.compile != "none" else _UNCERTAIN
    surely = certain > place.memory or likely > margin * place.memory
    tokens = f"train.micro_batch={config.train.micro_batch} x {config.model.sequence_length:,} tokens"
    parts = f"{bytes_text(certain)} whatever the batch and the rest for {tokens}"
    what = f"the training takes about {bytes_text(likely)} per process, {parts}, and {place.name} has "
    what += bytes_text(place.memory)
    yield Finding("error" if surely else "warning", "train.memory", what, _fitting(needed, place))


def _fitting(needed: Needs, place: Place) -> str:
    # The change that fits and costs least; where none is enough, shorter samples, more processes, or a smaller model.
    train, leanest, least = needed.train, needed, dict[str, Any]()
    for least in _cheaper(needed):
        leanest = _with(needed, **least)
        if leanest.fits:
            return f"set {_changed(train, least)}, which takes about {bytes_text(leanest.likely)}"
    length = needed.length
    while (length := length // 2) >= _SHORTEST:
        if replace(leanest, length=length).fits:
            return f"set model.sequence_length={length} {_changed(train, least)}".rstrip()
    # The processes of a CPU share one memory: more of them share no model.
    count, spread = needed.world_size, {"strategy": "fsdp", "activation_checkpointing": "full", "micro_batch": 1}
    more = ""
    while not more and place.kind == "cuda" and train.precision != "16-mixed" and (count := 2 * count) <= _MOST:
        if replace(_with(needed, **spread, global_batch=count), world_size=count, nodes=1).fits:
            more = f"take {count} processes and set {_changed(train, spread)}".removesuffix(" and set ")
    held = replace(leanest, length=_SHORTEST).likely
    parameters = count_text(estimates.parameters(needed.model) * place.memory // held)
    smaller = f"take a model of at most about {parameters} parameters"
    return f"{more}, or {smaller}; {_NOT_HERE}" if more else f"{smaller}, or devices with more memory; {_NOT_HERE}"


def _cheaper(needed: Needs) -> Iterator[dict[str, Any]]:
    """Yield the settings that take less memory, the ones that cost least first. Micro-batches divide a process's share
    of the batch."""
    train = needed.train
    share = train.global_batch // needed.world_size
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = {size for size in (*small, *(share // size for size in small)) if size <= train.micro_batch}
    for strategy in dict.fromkeys([train.strategy, *_shardings(needed)]):
        for recompute in _RECOMPUTE[_RECOMPUTE.index(train.activation_checkpointing) :]:
            for size in sorted(sizes, reverse=True):
                yield {"strategy": strategy, "activation_checkpointing": recompute, "micro_batch": size}


def _changed(train: TrainConfig, changes: Mapping[str, Any]) -> str:
    return " ".join(f"train.{name}={value}" for name, value in changes.items() if value != getattr(train, name))


def seconds_for(config: RunConfig, flops: float) -> float | None:
    """Return the seconds that all processes take for `flops` operations, by the peak of their devices in the training's
    precision; None where that is not known."""
    place = place_of(config)
    if place is None or place.peak is None:
        return None
    return flops / (UTILISATION * place.peak * config.world_size)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The time of a training, and its cost at list price; None where no list price is known."""

    seconds: float
    dollars: float | None
    price: ListPrice | None

    def __str__(self) -> str:
        text = f"about {duration_text(self.seconds)} at {UTILISATION:.0%} of peak"
        if self.dollars is None or self.price is None:
            return f"{text}, at a price that is not known here"
        listed = f"list price (on demand, {self.price.region}, {self.price.date})"
        cost = f"${self.dollars:,.2f}" if self.dollars < 100 else f"${self.dollars:,.0f}"
        return f"{text}, {cost} at {listed if self.price.region else self.price.source}"


def expected(machine: Machine, *, nodes: int, seconds: float) -> Expected:
    """Return the cost of so many of these machines. Spot prices move: they are a third to a tenth of the list's."""
    price = machine.price
    dollars = None if price is None else price.usd * nodes * seconds / 3600
    return Expected(seconds=seconds, dollars=dollars, price=price)


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


def gpu_names(folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the driver's names for this machine's GPUs, without importing torch."""
    files = sorted(folder.glob("*/information"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes that the processes of this machine, or of this container, can have together."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = limit.read_text().strip() if limit.exists() else "max"
    return min(whole, int(words)) if words.isdigit() else whole
