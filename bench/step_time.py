"""The time of a training step with a setting, next to the step without it: pythia-14m, 4 samples of 512 random tokens.

Both sides are in one process and take turns, each first in every other turn. A figure is the ratio of the times that a
fifth of the steps undercut: other programs on the machine only add time. The bare loop does only what any training
must; that it is written out here holds the trainer to it in every checkout, without an older one to compare with.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from bench.training import IDS, random_dataset, write_run
from litgpt_demo.config import ModelConfig
from litgpt_demo.models import loss
from litgpt_demo.models.attention import attend
from litgpt_demo.models.estimates import flops_per_token
from litgpt_demo.models.loss import Workspace, projected_cross_entropy
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.storage import open_storage
from litgpt_demo.training import digests
from litgpt_demo.training.loop import scratch_of
from litgpt_demo.training.reporting import measured_flops
from litgpt_demo.training.setup import Training, open_data, open_fabric, set_up
from litgpt_demo.training.step import train_step

WARM_UP, STEPS, BARE_STEPS = 3, 10, 20  # 1 % needs more pairs than 15 %
MODEL = ModelConfig(name="pythia-14m", sequence_length=512)
Step: TypeAlias = Callable[[int], object]


def new_training(folder: Path, **settings: Any) -> Training:
    place = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    values = {"global_batch": 4, "micro_batch": 4, "max_steps": 100_000, **settings}
    spec = write_run(place, folder / "dataset", model=MODEL, train=values)
    run = open_storage(str(place))
    return set_up(spec, open_data(spec, folder / "dataset"), open_fabric(spec.train), run, scratch_of(run, 0))


def bare_step(training: Training) -> Step:
    """Return a step without z-loss, average and clipping, in code and in effect: it has no branch for them."""
    gpt, adamw = training.model.module, training.optimizer.optimizer
    ((inputs, targets),) = training.feed.get(0).micro_batches

    def plain_gradient_(logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        columns = targets.unsqueeze(1)
        losses = logits.amax(dim=-1, keepdim=True) - logits.gather(1, columns)
        torch.softmax(logits, dim=-1, out=logits)
        losses -= logits.amax(dim=-1, keepdim=True).log_()
        logits.scatter_add_(1, columns, logits.new_full((), -1.0).expand(columns.shape))
        return losses.squeeze(1)

    def step(_: int) -> None:
        with patch.object(loss, "_cross_entropy_gradient_", plain_gradient_):
            gpt(inputs, targets).backward()
        get_total_norm(weight.grad for weight in gpt.parameters())
        adamw.step()
        adamw.zero_grad()

    return step


def seconds_of_digests(training: Training) -> float:
    """Return the time of all that a step does for the digest of its batch, as if no thread did a part of it."""
    ((inputs, targets),) = training.feed.get(0).micro_batches
    inputs, targets, steps = inputs.cpu(), targets.cpu(), 100
    began = time.perf_counter()
    for number in range(steps):
        limbs = digests.to_limbs(digests.batch_sum(inputs, targets))
        training.chain.add(number + 1, digests.of_limbs(limbs))
    return (time.perf_counter() - began) / steps


def shares_of_peak(precision: str, fastest: float) -> dict[str, tuple[float]]:
    """Return the share of the machine's fastest matrix product that attention, the loss and a whole step reach."""
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    config = litgpt_config(MODEL, vocab_size=IDS)
    width, rows, length = config.n_embd, config.padded_vocab_size, MODEL.sequence_length
    shape = (4, config.n_head, length, config.head_size)
    queries, keys, values = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    hidden, weight = (torch.randn(size, width, requires_grad=True) for size in (4 * length, rows))
    targets, workspace = torch.randint(IDS, (4 * length,)), Workspace()

    def attention(_: int) -> None:
        attend(queries, keys, values, None, scale=1.0).sum().backward()

    def whole_loss(_: int) -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            projected_cross_entropy(hidden, weight, targets, workspace=workspace).backward()

    attending, losses = map(min, take_turns(STEPS, attention, whole_loss))
    peak = measured_flops(dtype)
    scores = math.prod(shape) * length / 2  # half of them are in the future
    parts = {
        "attention": (14 * scores, attending),  # two products forward, five backward
        "loss": (6 * hidden.numel() * rows, losses),
        "step": (4 * length * flops_per_token(config, length), fastest),
    }
    return {f"share of the peak, {part}, {precision}": (flops / time / peak,) for part, (flops, time) in parts.items()}


def take_turns(steps: int, *sides: Step) -> list[list[float]]:
    """Return the seconds of each side's steps, without those of the warm-up."""
    seconds = [list[float]() for _ in sides]
    for number in range(WARM_UP + steps):
        for index in range(len(sides))[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            sides[index](number)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[index].append(time.perf_counter() - began)
    return [times[WARM_UP:] for times in seconds]


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    cuda, seconds, masked = torch.cuda.is_available(), dict[str, list[list[float]]](), list[float]()
    shares = dict[str, tuple[float]]()
    bf16 = cuda or (rounds > 1 and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # else a step takes a minute

    def ratio(name: str, steps: int, *sides: Step) -> float:
        seconds[name] = take_turns(steps * rounds, *sides)
        return truediv(*np.percentile(seconds[name], 20, axis=1).tolist())

    with tempfile.TemporaryDirectory(prefix="bench-step-time-") as name:
        folder = Path(name)
        random_dataset(folder / "dataset", tokens=2**20)
        for precision in ("bf16-mixed", "32-true") if bf16 else ("32-true",):
            step = partial(train_step, new_training(folder, precision=precision))
            documents = partial(train_step, new_training(folder, precision=precision, attention="documents"))
            masked.append(ratio(f"documents / causal, {precision}", STEPS, documents, step))
            if not cuda:
                shares |= shares_of_peak(precision, min(seconds[f"documents / causal, {precision}"][1]))
        off = new_training(folder, precision="32-true", clip_norm=None)
        bare = ratio("trainer / bare loop", BARE_STEPS, partial(train_step, off), bare_step(off))
        fastest = min(seconds["trainer / bare loop"][0])
        muon = partial(train_step, new_training(folder, precision="32-true", optimizer="muon"))
        bars: dict[str, Any] = {
            "step time with document masks / without": (max(masked), "at most", 1.15),
            "step time with z-loss, average and clipping off / bare loop": (bare, "at most", 1.01),
            "step time with digests / without": (1 + seconds_of_digests(off) / fastest, "at most", 1.01),
            "step time with Muon / AdamW": (ratio("muon / adamw", STEPS, muon, step),),
            **shares,
        }
    return bars, {"device": torch.cuda.get_device_name() if cuda else "", "seconds": seconds}
