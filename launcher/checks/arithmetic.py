"""The cost of a training before anything is rented: parameters, operations, memory, and whether it fits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config import RunConfig
from launcher.formatting import bytes_text, count_text, duration_text
from litgpt_demo.config import LoraConfig, Sharding, TrainConfig
from litgpt_demo.findings import Finding
from litgpt_demo.models import catalogue, estimates
from litgpt_demo.models.devices import device_named, multiplied_in

# Of a device's peak: what well-kept trainings reach (llm-foundry, scripts/train/benchmarking: 35 to 47 % on H100s).
USUAL = 0.4

_RECOMPUTE = ("none", "selective", "full")
"""Activation checkpointing, from what costs no time to what costs most."""
_WAYS = (2, 4, 8)
"""Neighbours that may divide a product: the GPUs of a node are seldom more."""
_UNCERTAIN = 1.5
"""Estimates come within 10 % of what torch measures (tests/litgpt_demo/models/test_estimates.py), without fragments."""
_COMPILED = 3.0
"""torch.compile keeps less for the backward pass than is estimated, by what it fuses."""
_SHORTEST = 128
"""Tokens: shorter samples are not proposed."""
_MOST = 16_384
"""Processes: more are not proposed."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device and memory that one process of a job has to itself."""

    name: str
    kind: str
    """cuda or cpu, as estimates tell them apart."""
    memory: int
    """Bytes."""
    peak: float | None
    """FLOP/s in the training's precision, where that is known."""


def hardware_of(config: RunConfig) -> Hardware | None:
    """Return the device of each process; None where the platform does not say, or names one that our table lacks."""
    train, platform = config.train, config.platform
    name = next(iter(gpu_names()), None) if platform.on_this_machine else platform.hardware
    if name is not None:
        device = device_named(name)
        if device is None:
            return None
        peak = device.peak(multiplied_in(train.precision, float8=train.float8))
        return Hardware(name=device.name, kind="cuda", memory=device.memory, peak=peak)
    if not platform.on_this_machine:
        return None
    share = host_memory() // config.world_size
    name = "its share of this machine" if config.world_size > 1 else "this machine"
    return Hardware(name=name, kind="cpu", memory=share, peak=None)


def arithmetic(config: RunConfig, *, vocab_size: int | None, tokens: int | None = None) -> list[dict[str, str]]:
    """Parameters, FLOPs and memory as a table with how they come about; empty where the vocabulary is not known yet.

    Args:
        vocab_size: of the tokenizer, which a model without a name takes over.
        tokens: to train on, where it is known already.
    """
    model = model_of(config, vocab_size)
    if model is None:
        return []
    length, place = config.model.sequence_length, hardware_of(config)
    per_token = estimates.flops_per_token(model, length, config.train.lora)
    rows = [
        ("parameters", count_text(estimates.parameters(model)), _parameters(model)),
        ("FLOPs per token", count_text(per_token), _per_token(model, length, config.train.lora)),
    ]
    if (own := estimates.adapters(model, config.train.lora)) and config.train.lora is not None:
        lora = config.train.lora
        rows.insert(1, ("trained", count_text(own), f"adapters of rank {lora.rank} for {', '.join(lora.targets)}"))
    if tokens is not None:
        rows.append(("FLOPs in all", f"{per_token * tokens:.3g}", _in_all(config, tokens, per_token * tokens, place)))
    memory = memory_of(config, model, config.train, place)
    rows.append(("memory per process", bytes_text(needed_bytes(memory, place)), memory_text(memory, place)))
    return [{"what": what, "figure": figure, "arithmetic": how} for what, figure, how in rows]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The bytes that one process of a training takes of its place."""

    likely: int
    certain: int
    place: Hardware | None


def needs(config: RunConfig, *, vocab_size: int | None) -> Needs | None:
    """Return the memory that each process takes; None where the vocabulary is not known yet."""
    model = model_of(config, vocab_size)
    if model is None:
        return None
    place = hardware_of(config)
    memory = memory_of(config, model, config.train, place)
    return Needs(likely=needed_bytes(memory, place), certain=memory.least, place=place)


def check_together(several: Sequence[Needs]) -> Iterator[Finding]:
    """Yield a finding where trainings that run at the same time, in the same place, do not fit it together."""
    place = several[0].place
    total = sum(one.likely for one in several)
    if place is None or total <= place.memory or any(one.likely > place.memory for one in several):
        return  # what does not fit alone is told of that training
    fits = max(1, place.memory // several[0].likely)
    yield Finding(
        "error"
        if sum(one.certain for one in several) > place.memory or total > _UNCERTAIN * place.memory
        else "warning",
        "sweep.memory",
        f"{len(several)} trials at a time take about {bytes_text(total)} per process together, and {place.name} has "
        f"{bytes_text(place.memory)}",
        f"set sweep.max_parallel={fits}",
    )


def check_memory(config: RunConfig, *, vocab_size: int | None) -> Iterator[Finding]:
    """Yield a finding where the training does not fit the memory of a process, with a change that would fit.

    Weights, gradients and averages certainly have to fit; the rest is an estimate, and refused where no error of the
    estimate could make it fit.
    """
    model, place = model_of(config, vocab_size), hardware_of(config)
    if model is None or place is None:
        return
    memory = memory_of(config, model, config.train, place)
    needed, certain = needed_bytes(memory, place), memory.least
    if needed <= place.memory:
        return
    margin = _COMPILED if config.train.compile != "none" else _UNCERTAIN
    surely = certain > place.memory or needed > margin * place.memory
    tokens = f"train.micro_batch={config.train.micro_batch} x {config.model.sequence_length:,} tokens"
    yield Finding(
        "error" if surely else "warning",
        "train.memory",
        f"the training takes about {bytes_text(needed)} per process, {bytes_text(certain)} whatever the batch and the "
        f"rest for {tokens}, and {place.name} has {bytes_text(place.memory)}",
        _fitting(config, model, place),
    )


def _fitting(config: RunConfig, model: Any, place: Hardware) -> str:
    """Return the change that fits and costs least: a smaller micro-batch, then recomputation, then sharding.

    Where none of these is enough, shorter samples, more processes, or a smaller model.
    """
    train = config.train
    for changes in cheaper(config, shardings(config, model, ("fsdp",))):
        needed = needed_bytes(memory_of(config, model, train.model_copy(update=changes), place), place)
        if needed <= place.memory:
            return f"set {changed(config, changes)}, which takes about {bytes_text(needed)}"
    return _larger_or_smaller(config, model, place)


def cheaper(config: RunConfig, strategies: Iterable[str | Sharding]) -> Iterator[dict[str, Any]]:
    """Yield the settings that take no more memory than the present ones in any of these strategies, in whose order the
    ones that cost least come first."""
    train = config.train
    for strategy in dict.fromkeys([train.strategy, *strategies]):
        for recompute in _RECOMPUTE[_RECOMPUTE.index(train.activation_checkpointing) :]:
            for size in _micro_batches(config, strategy):
                yield {"strategy": strategy, "activation_checkpointing": recompute, "micro_batch": size}


def shardings(config: RunConfig, model: Any, kinds: Sequence[str]) -> Iterator[str | Sharding]:
    """Yield the ways to shard this model that can be used: among several processes, in a precision that they know."""
    train, world = config.train, config.world_size
    if world == 1 or train.precision == "16-mixed" or train.compile == "model":
        return
    yield from (kind if kind == "fsdp" else Sharding(kind="hybrid") for kind in kinds)
    if train.compile != "none" or train.float8 or train.lora is not None:
        return
    for tensor in _WAYS:
        for kind in kinds:
            tried = Sharding.model_validate({"kind": kind, "tensor": tensor})
            if config.platform.processes % tensor == 0 and not problem_of(config, model, tried):
                yield tried


def problem_of(config: RunConfig, model: Any, sharding: Sharding) -> tuple[str, str] | None:
    """Return what is wrong with dividing this model so, and what would do; None if nothing is."""
    layout = sharding.layout(config.world_size, per_node=config.platform.processes)
    return catalogue.layout_problem(model, layout, length=config.model.sequence_length)


def _micro_batches(config: RunConfig, strategy: str | Sharding) -> list[int]:
    """Return the micro-batches up to the present one that divide a reader's share of the batch, largest first."""
    readers = config.train.model_copy(update={"strategy": strategy}).layout(config.world_size).readers
    share = config.train.global_batch // readers
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = {*small, *(share // size for size in small)}
    return sorted((size for size in sizes if size <= config.train.micro_batch), reverse=True)


def _larger_or_smaller(config: RunConfig, model: Any, place: Hardware) -> str:
    """Return what fits where no setting of the training is enough, at the least memory that these can reach."""
    *_, least = cheaper(config, shardings(config, model, ("fsdp",)))
    told = changed(config, least)
    leanest = config.train.model_copy(update=least)
    length = config.model.sequence_length
    while (length := length // 2) >= _SHORTEST:
        if needed_bytes(memory_of(config, model, leanest, place, length=length), place) <= place.memory:
            return f"set model.sequence_length={length} {told}".rstrip()
    count = estimates.parameters(model)
    held = memory_of(config, model, leanest, place, length=_SHORTEST)
    smaller = f"a model of at most about {count_text(count * place.memory // needed_bytes(held, place))} parameters"
    more = _more_processes(config, model, place)
    return f"{more}, or take {smaller}" if more else f"take {smaller}, or devices with more memory"


def _more_processes(config: RunConfig, model: Any, place: Hardware) -> str:
    """Return how many GPUs could share the model, and how; nothing for a CPU, whose processes share one memory."""
    count, spread = config.world_size, {"strategy": "fsdp", "activation_checkpointing": "full", "micro_batch": 1}
    while place.kind == "cuda" and config.train.precision != "16-mixed" and (count := 2 * count) <= _MOST:
        tried = config.train.model_copy(update=spread | {"global_batch": count})
        if needed_bytes(memory_of(config, model, tried, place, world_size=count), place) <= place.memory:
            return f"take {count} processes and set {changed(config, spread)}".removesuffix(" and set ")
    return ""


def changed(config: RunConfig, changes: Mapping[str, Any]) -> str:
    """Return the settings of the training that `changes` would change, as they are written on the command line."""
    train = config.train
    return " ".join(
        f"train.{name}={value}" if not isinstance(value, Sharding) else f"'train.{name}={sharding_text(value)}'"
        for name, value in changes.items()
        if value != getattr(train, name)
    )


def sharding_text(strategy: str | Sharding) -> str:
    """Return a strategy as it is written in a config."""
    if isinstance(strategy, str):
        return strategy
    given = strategy.model_dump(exclude_defaults=True)
    return "{" + ", ".join(f"{name}: {value}" for name, value in given.items()) + "}"


# --- the figures ------------------------------------------------------------------------------------------------------


def model_of(config: RunConfig, vocab_size: int | None) -> Any:
    """LitGPT's Config of the model; None for one whose vocabulary is that of a tokenizer which is not known yet."""
    model = config.model
    if vocab_size is None and catalogue.padded_vocabulary(model.name, model.config) is None:
        return None
    length = model.sequence_length
    return catalogue.config_of(
        catalogue.fields_of(model.name, model.config, sequence_length=length, vocab_size=vocab_size)
    )


def memory_of(
    config: RunConfig, model: Any, train: TrainConfig, place: Hardware | None, *,
    length: int | None = None, world_size: int | None = None,
) -> estimates.Memory:  # fmt: skip
    return estimates.memory(
        model,
        train,
        length=length or config.model.sequence_length,
        world_size=world_size or config.least_ranks,
        per_node=config.platform.processes if world_size is None else None,
        device="cuda" if place is None else place.kind,
    )


def needed_bytes(memory: estimates.Memory, place: Hardware | None) -> int:
    """A save on a CPU copies the state into the same memory."""
    return memory.total + (memory.saved if place is not None and place.kind == "cpu" else 0)


def _parameters(model: Any) -> str:
    blocks = [estimates.block(model, layer).held for layer in range(model.n_layer)]
    each = count_text(blocks[0]) if len(set(blocks)) == 1 else f"{count_text(min(blocks))} to {count_text(max(blocks))}"
    rows, width = model.padded_vocab_size, model.n_embd
    return f"{len(blocks)} blocks of {each}, embedding and output of {rows:,} x {width:,} each"


def _per_token(model: Any, length: int, lora: LoraConfig | None) -> str:
    used, attention = estimates.used_parameters(model), estimates.attention_flops(model, length)
    own = estimates.adapters(model, lora)
    products = f"4 x {count_text(used)} frozen and 6 x {count_text(own)}" if own else f"6 x {count_text(used)}"
    return f"{products} weights in products + {count_text(attention)} for attention over {length:,} tokens"


def _in_all(config: RunConfig, tokens: int, flops: float, place: Hardware | None) -> str:
    said = f"{count_text(tokens)} tokens"
    if place is None or place.peak is None:
        return said
    seconds = flops / (USUAL * place.peak * config.world_size)
    peak = f"{config.world_size} {place.name} of {place.peak / 1e12:g} TFLOP/s"
    return f"{said}; {duration_text(seconds)} at {USUAL:.0%} of {peak}"


def memory_text(memory: estimates.Memory, place: Hardware | None) -> str:
    parts = {"weights": memory.weights, "AdamW": memory.optimizer, "gathered": memory.gathered}
    if memory.kept:
        parts["gradients"] = memory.gradients
    moment, most = max(memory.moments.items(), key=lambda item: item[1])
    parts[f"at the {moment}"] = most
    if place is not None and place.kind == "cpu":
        parts["copy while saving"] = memory.saved
    said = " + ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    return said if place is None else f"{said}; {place.name} has {bytes_text(place.memory)}"


# --- this machine -----------------------------------------------------------------------------------------------------


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
