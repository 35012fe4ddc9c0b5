"""The cost of a training before anything is rented: parameters, operations, memory, and whether it fits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checks.cost import UTILISATION
from launcher.config import RunConfig
from launcher.formatting import bytes_text, count_text, duration_text
from litgpt_demo.config import TrainConfig
from litgpt_demo.findings import Finding
from litgpt_demo.models import catalogue, estimates
from litgpt_demo.models.devices import device_named, multiplied_in

_RECOMPUTE = ("none", "selective", "full")
"""Activation checkpointing, from what costs no time to what costs most."""
_UNCERTAIN = 1.5
"""Estimates come within 10 % of what torch measures (tests/litgpt_demo/models/test_estimates.py), without fragments."""
_COMPILED = 3.0
"""torch.compile keeps less for the backward pass than is estimated, by what it fuses."""
_SHORTEST = 128
"""Tokens: shorter samples are not proposed."""
_MOST = 16_384
"""Processes: more are not proposed."""


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
        peak = device.peak(multiplied_in(train.precision, float8=train.float8))
        return Place(name=device.name, kind="cuda", memory=device.memory, peak=peak)
    if not platform.on_this_machine:
        return None
    share = host_memory() // config.world_size
    name = "its share of this machine" if config.world_size > 1 else "this machine"
    return Place(name=name, kind="cpu", memory=share, peak=None)


def arithmetic(config: RunConfig, *, vocab_size: int | None, tokens: int | None = None) -> list[dict[str, str]]:
    """Parameters, FLOPs and memory as a table with how they come about; empty where the vocabulary is not known yet.

    Args:
        vocab_size: of the tokenizer, which a model without a name takes over.
        tokens: to train on, where it is known already.
    """
    model = _model(config, vocab_size)
    if model is None:
        return []
    length, place = config.model.sequence_length, place_of(config)
    per_token = estimates.flops_per_token(model, length)
    rows = [
        ("parameters", count_text(estimates.parameters(model)), _parameters(model)),
        ("FLOPs per token", count_text(per_token), _per_token(model, length)),
    ]
    if tokens is not None:
        rows.append(("FLOPs in all", f"{per_token * tokens:.3g}", _in_all(config, tokens, per_token * tokens, place)))
    memory = _memory(config, model, config.train, place)
    rows.append(("memory per process", bytes_text(_needed(memory, place)), _memory_text(memory, place)))
    return [{"what": what, "figure": figure, "arithmetic": how} for what, figure, how in rows]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The bytes that one process of a training takes of its place."""

    likely: int
    certain: int
    place: Place | None


def needs(config: RunConfig, *, vocab_size: int | None) -> Needs | None:
    """Return the memory that each process takes; None where the vocabulary is not known yet."""
    model = _model(config, vocab_size)
    if model is None:
        return None
    place = place_of(config)
    memory = _memory(config, model, config.train, place)
    return Needs(likely=_needed(memory, place), certain=memory.least, place=place)


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
    model, place = _model(config, vocab_size), place_of(config)
    if model is None or place is None:
        return
    memory = _memory(config, model, config.train, place)
    needed, certain = _needed(memory, place), memory.least
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


def _fitting(config: RunConfig, model: Any, place: Place) -> str:
    """Return the change that fits and costs least: a smaller micro-batch, then recomputation, then sharding.

    Where none of these is enough, shorter samples, more processes, or a smaller model.
    """
    train = config.train
    for changes in _cheaper(config):
        needed = _needed(_memory(config, model, train.model_copy(update=changes), place), place)
        if needed <= place.memory:
            return f"set {_changed(config, changes)}, which takes about {bytes_text(needed)}"
    return _larger_or_smaller(config, model, place)


def _cheaper(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the settings that take less memory, the ones that cost least first."""
    train = config.train
    for strategy in dict.fromkeys([train.strategy, *_sharding(config)]):
        for recompute in _RECOMPUTE[_RECOMPUTE.index(train.activation_checkpointing) :]:
            for size in _micro_batches(config):
                yield {"strategy": strategy, "activation_checkpointing": recompute, "micro_batch": size}


def _sharding(config: RunConfig) -> tuple[str, ...]:
    """Return fsdp where it can be used: among several processes, and with a precision that it knows."""
    usable = config.world_size > 1 and config.train.precision != "16-mixed" and config.train.compile != "model"
    return ("fsdp",) if usable else ()


def _micro_batches(config: RunConfig) -> list[int]:
    """Return the micro-batches up to the present one that divide a process's share of the batch, largest first."""
    share = config.train.global_batch // config.world_size
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = {*small, *(share // size for size in small)}
    return sorted((size for size in sizes if size <= config.train.micro_batch), reverse=True)


def _larger_or_smaller(config: RunConfig, model: Any, place: Place) -> str:
    """Return what fits where no setting of the training is enough, at the least memory that these can reach."""
    *_, least = _cheaper(config)
    told = _changed(config, least)
    leanest = config.train.model_copy(update=least)
    length = config.model.sequence_length
    while (length := length // 2) >= _SHORTEST:
        if _needed(_memory(config, model, leanest, place, length=length), place) <= place.memory:
            return f"set model.sequence_length={length} {told}".rstrip()
    count = estimates.parameters(model)
    held = _memory(config, model, leanest, place, length=_SHORTEST)
    smaller = f"a model of at most about {count_text(count * place.memory // _needed(held, place))} parameters"
    more = _more_processes(config, model, place)
    return f"{more}, or take {smaller}" if more else f"take {smaller}, or devices with more memory"


def _more_processes(config: RunConfig, model: Any, place: Place) -> str:
    """Return how many GPUs could share the model, and how; nothing for a CPU, whose processes share one memory."""
    count, spread = config.world_size, {"strategy": "fsdp", "activation_checkpointing": "full", "micro_batch": 1}
    while place.kind == "cuda" and config.train.precision != "16-mixed" and (count := 2 * count) <= _MOST:
        tried = config.train.model_copy(update=spread | {"global_batch": count})
        if _needed(_memory(config, model, tried, place, world_size=count), place) <= place.memory:
            return f"take {count} processes and set {_changed(config, spread)}".removesuffix(" and set ")
    return ""


def _changed(config: RunConfig, changes: Mapping[str, Any]) -> str:
    """Return the settings of the training that `changes` would change, as they are written on the command line."""
    train = config.train
    return " ".join(f"train.{name}={value}" for name, value in changes.items() if value != getattr(train, name))


# --- the figures ------------------------------------------------------------------------------------------------------


def _model(config: RunConfig, vocab_size: int | None) -> Any:
    """LitGPT's Config of the model; None for one whose vocabulary is that of a tokenizer which is not known yet."""
    model = config.model
    if vocab_size is None and catalogue.padded_vocabulary(model.name, model.config) is None:
        return None
    length = model.sequence_length
    return catalogue.config_of(
        catalogue.fields_of(model.name, model.config, sequence_length=length, vocab_size=vocab_size)
    )


def _memory(
    config: RunConfig, model: Any, train: TrainConfig, place: Place | None, *,
    length: int | None = None, world_size: int | None = None,
) -> estimates.Memory:  # fmt: skip
    return estimates.memory(
        model,
        train,
        length=length or config.model.sequence_length,
        world_size=world_size or config.world_size,
        device="cuda" if place is None else place.kind,
    )


def _needed(memory: estimates.Memory, place: Place | None) -> int:
    """A save on a CPU copies the state into the same memory."""
    return memory.total + (memory.saved if place is not None and place.kind == "cpu" else 0)


def _parameters(model: Any) -> str:
    blocks = [estimates.block(model, layer).held for layer in range(model.n_layer)]
    each = count_text(blocks[0]) if len(set(blocks)) == 1 else f"{count_text(min(blocks))} to {count_text(max(blocks))}"
    rows, width = model.padded_vocab_size, model.n_embd
    return f"{len(blocks)} blocks of {each}, embedding and output of {rows:,} x {width:,} each"


def _per_token(model: Any, length: int) -> str:
    used, attention = estimates.used_parameters(model), estimates.attention_flops(model, length)
    return f"6 x {count_text(used)} weights in products + {count_text(attention)} for attention over {length:,} tokens"


def seconds_for(config: RunConfig, flops: float) -> float | None:
    """Return the seconds that all processes take for `flops` operations, by the peak of their devices in the training's
    precision; None where that is not known."""
    place = place_of(config)
    if place is None or place.peak is None:
        return None
    return flops / (UTILISATION * place.peak * config.world_size)


def _in_all(config: RunConfig, tokens: int, flops: float, place: Place | None) -> str:
    said = f"{count_text(tokens)} tokens"
    seconds = seconds_for(config, flops)
    if place is None or place.peak is None or seconds is None:
        return said
    peak = f"{config.world_size} {place.name} of {place.peak / 1e12:g} TFLOP/s"
    return f"{said}; {duration_text(seconds)} at {UTILISATION:.0%} of {peak}"


def _memory_text(memory: estimates.Memory, place: Place | None) -> str:
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
