"""The cost of a training before any machine is rented: parameters, operations, memory and its limit, time, money."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from launcher.config import RunConfig
from launcher.formatting import bytes_text, count_text, duration_text
from launcher.machines import ListPrice, Machine
from launcher.runs.run import model_of
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
"""Estimates are within 10 % of torch's measurements (tests/litgpt_demo/models/test_estimates.py), without fragments."""
_COMPILED = 3.0
"""torch.compile fuses operations, and so keeps less for the backward pass than is estimated."""
_MISSING = "tensor, pipeline and expert parallelism are not available"
_SHORTEST_SAMPLE, _MOST_PROCESSES = 128, 16_384
"""Limits of what a fix proposes: tokens of a sample, and number of processes."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device and memory of one process of a job."""

    name: str
    kind: str
    """cuda or cpu, which have different estimates."""
    memory: int
    """Bytes."""
    peak: float | None
    """FLOP/s in the training's precision, if known."""


def device_of(config: RunConfig) -> Device | None:
    """Return the device of each process; None if the platform does not name it, or our table lacks it."""
    train, platform = config.train, config.platform
    if platform.on_this_machine:
        name = next(iter(gpu_names()), None)
    else:
        name = platform.hardware
    if name is not None:
        device = device_named(name)
        if device is None:
            return None
        peak = device.peak(matmul_dtype(train.precision, float8=train.float8))
        return Device(name=device.name, kind="cuda", memory=device.memory, peak=peak)
    if not platform.on_this_machine:
        return None
    share = host_memory() // config.world_size
    name = "its share of this machine" if config.world_size > 1 else "this machine"
    return Device(name=name, kind="cpu", memory=share, peak=None)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The memory that one process of a training takes, in bytes."""

    model: Any
    """LitGPT's Config."""
    train: TrainConfig
    length: int
    world_size: int
    nodes: int
    device: Device | None
    why: str = ""
    """The reason for the strategy in `train`, if the config has `auto`."""

    @cached_property
    def memory(self) -> estimates.Memory:
        kind = "cuda" if self.device is None else self.device.kind
        ranks = {"world_size": self.world_size, "nodes": self.nodes}
        return estimates.memory(self.model, self.train, length=self.length, device=kind, **ranks)

    @property
    def save_copy(self) -> int:
        """Return the bytes of a save's copy, which is in the same memory on a CPU."""
        if self.device is None or self.device.kind != "cpu":
            return 0
        return self.memory.checkpoint_bytes

    @property
    def likely(self) -> int:
        return self.memory.total + self.save_copy

    @property
    def fits(self) -> bool:
        return self.device is None or self.likely <= self.device.memory


def needs(config: RunConfig, *, vocab_size: int | None, metrics: Sequence[Row] = ()) -> Needs | None:
    """Return the memory of each process with the strategy that `auto` chooses; None if the vocabulary is not known yet.
    `metrics` are the run's: they may have a measurement of the network."""
    model = model_of(config, vocab_size)
    if model is None:
        return None
    train, length, nodes = config.train, config.model.sequence_length, config.platform.nodes
    ranks: dict[str, Any] = {"world_size": config.world_size, "nodes": nodes}
    copied = Needs(model=model, train=train, length=length, device=device_of(config), **ranks)
    if train.strategy != "auto" or config.world_size == 1:
        return copied
    sharded = [_with(copied, strategy=name) for name in _shardings(copied)]
    fitting = {needs.train.strategy: needs for needs in sharded if needs.fits}
    if copied.device is None:
        return replace(copied, why="the memory of the devices is not known here, so each process has a copy")
    if copied.fits or not sharded:
        return replace(copied, why=f"each process has a copy, which takes {bytes_text(copied.likely)}")
    if not fitting:
        return replace(sharded[-1], why="no strategy fits with these settings, and this one takes least memory")
    if "hybrid" not in fitting:
        unit, too_large = "process", copied
        if len(sharded) > 1:
            unit, too_large = "node", sharded[0]
        taken = f"it takes {bytes_text(too_large.likely)} of each {copied.device.name}"
        return replace(fitting["fsdp"], why=f"a copy for each {unit} does not fit: {taken}")
    speed, how = _speed(config, metrics)
    over_all, over_nodes = (
        estimates.network_bytes_per_step(model, fitting[name].train, **ranks) for name in ("fsdp", "hybrid")
    )
    flops = estimates.flops_per_token(model, length) * train.batch_sizes[-1] * length
    products, seconds = seconds_for(config, flops), over_all / speed if speed else None
    sends = f"{bytes_text(int(over_all))} a step"
    if seconds:
        sends += f", {seconds:.2g} s at {how}"
    if seconds and products:
        if seconds <= products:
            hidden = f"which the matrix products of {products:.2g} s hide"
            return replace(fitting["fsdp"], why=f"it takes least memory and sends {sends}, {hidden}")
        sends += f", and the matrix products take {products:.2g} s"
    why = f"each node holds a copy and sends {bytes_text(int(over_nodes))} a step"
    return replace(fitting["hybrid"], why=f"{why}; fsdp would send {sends}")


def _with(needs: Needs, **changes: Any) -> Needs:
    return replace(needs, train=needs.train.model_copy(update=changes))


def _shardings(needs: Needs) -> list[str]:
    """Return the strategies that shard these ranks and this precision; the one that sends least is first."""
    train, nodes, ranks = needs.train, needs.nodes, needs.world_size
    if ranks == 1 or train.precision == "16-mixed" or train.compile == "model":
        return []
    return ["hybrid", "fsdp"] if 1 < nodes < ranks else ["fsdp"]


def _speed(config: RunConfig, metrics: Sequence[Row]) -> tuple[float | None, str]:
    nodes, fabric = config.platform.nodes, config.platform.fabric
    measured = [row for row in metrics if row["kind"] == "network" and row.get("nodes") == nodes and row.get("busbw")]
    floor = None if fabric is None else fabric.node.floor(nodes)
    if measured:
        speed, how = measured[-1]["busbw"], "as the network test measured"
    elif fabric is not None and floor is not None:
        speed, how = floor, f"the least of {fabric.node.name}"
    else:
        return None, ""
    return speed * 1e9, f"{8 * speed:,.0f} Gbit/s ({how})"


def figures(
    config: RunConfig, *, vocab_size: int | None, tokens: int = 0, metrics: Sequence[Row] = ()
) -> list[dict[str, str]]:
    """Return parameters, FLOPs and memory as a table with their arithmetic; empty if the vocabulary is not known yet.
    `tokens` are those to train on, 0 if not known yet; `metrics` are the run's."""
    needed = needs(config, vocab_size=vocab_size, metrics=metrics)
    if needed is None:
        return []
    model, length, device, memory = needed.model, needed.length, needed.device, needed.memory
    sizes = sorted(estimates.block(model, layer).total for layer in range(model.n_layer))
    size_text = count_text(sizes[0])
    if sizes[0] != sizes[-1]:
        size_text += f" to {count_text(sizes[-1])}"
    embedding = f"embedding and output of {model.padded_vocab_size:,} x {model.n_embd:,} each"
    how = f"{len(sizes)} blocks of {size_text}, {embedding}"
    rows = [("parameters", count_text(estimates.parameters(model)), how)]
    per_token, attention = estimates.flops_per_token(model, length), estimates.attention_flops(model, length)
    products = f"6 x {count_text(estimates.used_parameters(model))} weights in products"
    how = f"{products} + {count_text(attention)} for attention over {length:,} tokens"
    rows.append(("FLOPs per token", count_text(per_token), how))
    if tokens:
        how, seconds = f"{count_text(tokens)} tokens", seconds_for(config, per_token * tokens)
        how += f", {tokens / estimates.parameters(model):.3g} per parameter"
        if device is not None and device.peak is not None and seconds is not None:
            peak = f"{config.world_size} {device.name} of {device.peak / 1e12:g} TFLOP/s"
            how = f"{how}; {duration_text(seconds)} at {UTILISATION:.0%} of {peak}"
        rows.append(("FLOPs in all", f"{per_token * tokens:.3g}", how))
    train, nodes = needed.train, config.platform.nodes
    optimizer = optimizer_of(train).title
    ways = train.shard_degree(nodes, config.platform.processes_per_node)
    saved = f"weights and {optimizer}"
    if memory.average:
        saved = f"weights, their average and {optimizer}"
    if needed.world_size > 1:
        strategy = train.strategy.replace("auto", "ddp")
        how = needed.why or f"as train.strategy={strategy} says"
        if ways > 1:
            state = memory.weights + memory.optimizer + memory.average + memory.gradients
            how += f"; {saved.replace(' and ', ', ')} and gradients of {bytes_text(ways * state)} / {ways} processes"
            how += f" = {bytes_text(state)}; {_MISSING}"
        rows.append(("strategy", strategy, how))
    gradients = memory.gradients if memory.gradients_persist else 0
    parts = {
        "weights": memory.weights,
        optimizer: memory.optimizer,
        "average of weights": memory.average,
        "gathered": memory.unsharded,
        "gradients": gradients,
    }
    moment, most = max(memory.peak_phases.items(), key=lambda item: item[1])
    parts |= {f"at the {moment}": most, "copy while saving": needed.save_copy}
    how = " + ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    if device is not None:
        how += f"; {device.name} has {bytes_text(device.memory)}"
        if device.kind == "cpu":
            how += "; a report's peak memory counts Python and torch too, 0.5 GB"
    rows.append(("memory per process", bytes_text(needed.likely), how))
    if device is None or device.kind == "cuda":  # a CPU's copy is in its memory above
        state = memory.checkpoint_bytes * ways
        how = f"{saved} {bytes_text(state)}" + (f" / {nodes} nodes" if nodes > 1 else "")
        rows.append(("host memory of a save", bytes_text(-(-state // nodes)), f"{how}, copied on each node"))
    return [{"what": what, "figure": figure, "arithmetic": how} for what, figure, how in rows]


def check_together(trials: Sequence[Needs]) -> Iterator[Finding]:
    """Yield a finding if trainings that run at the same time do not fit in one device's memory together."""
    device = trials[0].device if trials else None
    total = sum(needs.likely for needs in trials)
    if device is None or total <= device.memory or any(needs.likely > device.memory for needs in trials):
        return  # a training that does not fit by itself has a finding of its own
    fits = max(1, device.memory // trials[0].likely)
    is_certain = sum(needs.memory.min_bytes for needs in trials) > device.memory or total > _UNCERTAIN * device.memory
    what = f"{len(trials)} trials at a time take about {bytes_text(total)} per process together"
    what += f", but {device.name} has {bytes_text(device.memory)}"
    yield Finding("error" if is_certain else "warning", "sweep.memory", what, f"set sweep.max_parallel={fits}")


def check_memory(config: RunConfig, *, vocab_size: int | None) -> Iterator[Finding]:
    """Yield a finding if the training does not fit in the memory of a process, with a change that would fit. It is an
    error only if no inaccuracy of the estimate could make it fit."""
    needed = needs(config, vocab_size=vocab_size)
    if needed is None or needed.device is None or needed.fits:
        return
    device, likely, certain = needed.device, needed.likely, needed.memory.min_bytes
    margin = _UNCERTAIN
    if config.train.compile in {"blocks", "model"} or (config.train.compile == "auto" and device.kind == "cuda"):
        margin = _COMPILED
    is_certain = certain > device.memory or likely > margin * device.memory
    tokens = f"train.micro_batch={config.train.micro_batch} x {config.model.sequence_length:,} tokens"
    parts = f"{bytes_text(certain)} for any batch and the rest for {tokens}"
    what = f"the training takes about {bytes_text(likely)} per process, {parts}, but {device.name} has "
    what += bytes_text(device.memory)
    yield Finding("error" if is_certain else "warning", "train.memory", what, _fix_of_memory(needed, device))


def _fix_of_memory(needs: Needs, device: Device) -> str:
    train, leanest, changes = needs.train, needs, dict[str, Any]()
    for changes in _cheaper(needs):
        leanest = _with(needs, **changes)
        if leanest.fits:
            return f"set {_changed(train, changes)}, which takes about {bytes_text(leanest.likely)}"
    length = needs.length // 2
    while length >= _SHORTEST_SAMPLE:
        if replace(leanest, length=length).fits:
            return f"set model.sequence_length={length} {_changed(train, changes)}".rstrip()
        length //= 2
    smallest = replace(leanest, length=_SHORTEST_SAMPLE).likely
    parameters = count_text(estimates.parameters(needs.model) * device.memory // smallest)
    smaller = f"take a model of at most about {parameters} parameters"
    more = _more_processes(needs, device)
    if more:
        return f"{more}, or {smaller}; {_MISSING}"
    return f"{smaller}, or take devices with more memory; {_MISSING}"


def _more_processes(needs: Needs, device: Device) -> str:
    if device.kind != "cuda" or needs.train.precision == "16-mixed":  # processes of a CPU share one memory
        return ""
    changes = {"strategy": "fsdp", "activation_checkpointing": "full", "micro_batch": 1}
    count = 2 * needs.world_size
    while count <= _MOST_PROCESSES:
        if replace(_with(needs, **changes, global_batch=count), world_size=count, nodes=1).fits:
            settings = _changed(needs.train, changes)
            return f"take {count} processes and set {settings}" if settings else f"take {count} processes"
        count *= 2
    return ""


def _cheaper(needs: Needs) -> Iterator[dict[str, Any]]:
    train = needs.train
    share = math.gcd(*train.batch_sizes) // needs.world_size
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = {size for size in (*small, *(share // size for size in small)) if size <= train.micro_batch}
    for strategy in dict.fromkeys([train.strategy, *_shardings(needs)]):
        for recompute in _RECOMPUTE[_RECOMPUTE.index(train.activation_checkpointing) :]:
            for size in sorted(sizes, reverse=True):
                yield {"strategy": strategy, "activation_checkpointing": recompute, "micro_batch": size}


def _changed(train: TrainConfig, changes: Mapping[str, Any]) -> str:
    return " ".join(f"train.{name}={value}" for name, value in changes.items() if value != getattr(train, name))


def seconds_for(config: RunConfig, flops: float) -> float | None:
    """Return the seconds that all processes take for `flops` operations, by the peak of their devices in the training's
    precision; None if the peak is not known."""
    device = device_of(config)
    if device is None or device.peak is None:
        return None
    return flops / (UTILISATION * device.peak * config.world_size)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The time of a training in seconds, and its cost at list price; None if no list price is known."""

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
    """Return the cost of N of these machines. Spot prices vary: they are a third to a tenth of the list price."""
    price = machine.price
    dollars = None if price is None else price.usd * nodes * seconds / 3600
    return Expected(seconds=seconds, dollars=dollars, price=price)


def together(costs: Sequence[Expected], *, parallel: int) -> Expected | None:
    """Return the cost of several trainings, `parallel` of them at a time; None for no trainings."""
    if not costs:
        return None
    seconds = [cost.seconds for cost in costs]
    dollars = [cost.dollars for cost in costs if cost.dollars is not None]
    return Expected(
        # A training starts as soon as another ends: at best all machines are busy, but the longest cannot be split.
        seconds=max(*seconds, sum(seconds) / parallel),
        dollars=sum(dollars) if len(dollars) == len(costs) else None,
        price=costs[0].price,
    )


def gpu_names(folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the names of this machine's GPUs as its driver has them, without importing torch."""
    files = sorted(folder.glob("*/information"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the bytes that all processes of this machine, or of this container, can use together."""
    physical = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # there is no such file, or it has "max"
        return min(physical, int(limit.read_text()))
    return physical
