"""What a training will cost, before anything is rented: parameters, operations, memory, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.config import RunConfig
from launcher.figures import bytes_text, count_text, duration_text
from launcher.findings import Finding
from litgpt_demo import catalogue, estimates
from litgpt_demo.config import TrainConfig
from litgpt_demo.devices import device_named, multiplied_in

# Of a device's peak: what well-kept trainings reach (llm-foundry, scripts/train/benchmarking: 35 to 47 % on H100s).
_USUAL = 0.4


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one process of a job has to itself."""

    name: str
    kind: str
    """cuda or cpu, as estimates tell them apart."""
    memory: int
    """Bytes."""
    peak: float | None
    """FLOP/s in the training's precision, where that is known."""


def place_of(config: RunConfig) -> Place | None:
    """Where each process will run; None where the platform does not say, or says what is not in our table."""
    train = config.train
    machine = getattr(config.platform, "machine", None) or next(iter(gpu_names()), None)
    if machine is not None:
        device = device_named(machine)
        if device is None:
            return None
        peak = device.peak(multiplied_in(train.precision, float8=train.float8))
        return Place(name=device.name, kind="cuda", memory=device.memory, peak=peak)
    if config.platform.kind != "local":
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


def check_memory(config: RunConfig, *, vocab_size: int | None) -> Iterator[Finding]:
    """Does it fit? Weights, gradients and averages certainly have to; the rest is an estimate."""
    model, place = _model(config, vocab_size), place_of(config)
    if model is None or place is None:
        return
    memory = _memory(config, model, config.train, place)
    needed, certain = _needed(memory, place), memory.least
    if needed <= place.memory:
        return
    severity: Literal["error", "warning"] = "error" if certain > place.memory else "warning"
    what = f"{bytes_text(needed)} per process, of which {bytes_text(certain)} whatever the batch"
    yield Finding(
        severity,
        "train.memory",
        f"the model takes about {what}, and {place.name} has {bytes_text(place.memory)}",
        _fitting(config, model, place),
    )


def _fitting(config: RunConfig, model: Any, place: Place) -> str:
    """The least change that fits."""
    train, sizes = config.train, [config.train.micro_batch]
    while sizes[-1] > 1 and sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    kinds = ("none", "selective", "full")
    strategies = [train.strategy]
    if train.strategy != "fsdp" and config.world_size > 1 and train.precision != "16-mixed":
        strategies.append("fsdp")
    for strategy in strategies:
        for recompute in kinds[kinds.index(train.activation_checkpointing) :]:
            for size in sizes:
                changes = {"strategy": strategy, "activation_checkpointing": recompute, "micro_batch": size}
                tried = _memory(config, model, train.model_copy(update=changes), place)
                if _needed(tried, place) <= place.memory:
                    told = [f"train.{name}={value}" for name, value in changes.items() if value != getattr(train, name)]
                    return f"{' '.join(told)} takes about {bytes_text(_needed(tried, place))}"
    return "take more processes with train.strategy=fsdp, devices with more memory, or a smaller model"


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


def _memory(config: RunConfig, model: Any, train: TrainConfig, place: Place | None) -> estimates.Memory:
    return estimates.memory(
        model,
        train,
        length=config.model.sequence_length,
        world_size=config.world_size,
        device="cuda" if place is None else place.kind,
    )


def _needed(memory: estimates.Memory, place: Place | None) -> int:
    """On a CPU what is being saved is copied into the same memory."""
    return memory.total + (memory.saved if place is not None and place.kind == "cpu" else 0)


def _parameters(model: Any) -> str:
    blocks = [estimates.block(model, layer).held for layer in range(model.n_layer)]
    each = count_text(blocks[0]) if len(set(blocks)) == 1 else f"{count_text(min(blocks))} to {count_text(max(blocks))}"
    rows, width = model.padded_vocab_size, model.n_embd
    return f"{len(blocks)} blocks of {each}, embedding and output of {rows:,} x {width:,} each"


def _per_token(model: Any, length: int) -> str:
    used, attention = estimates.used_parameters(model), estimates.attention_flops(model, length)
    return f"6 x {count_text(used)} weights in products + {count_text(attention)} for attention over {length:,} tokens"


def _in_all(config: RunConfig, tokens: int, flops: float, place: Place | None) -> str:
    said = f"{count_text(tokens)} tokens"
    if place is None or place.peak is None:
        return said
    seconds = flops / (_USUAL * place.peak * config.world_size)
    peak = f"{config.world_size} {place.name} of {place.peak / 1e12:g} TFLOP/s"
    return f"{said}; {duration_text(seconds)} at {_USUAL:.0%} of {peak}"


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
    """What the driver calls this machine's GPUs, without importing torch."""
    files = sorted(folder.glob("*/information"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes that the processes of this machine, or of this container, can have together."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = limit.read_text().strip() if limit.exists() else "max"
    return min(whole, int(words)) if words.isdigit() else whole
