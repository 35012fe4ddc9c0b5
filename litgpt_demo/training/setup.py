"""The state of a rank before the first step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

from litgpt_demo.config import TrainingSpec
from litgpt_demo.heartbeat import Heartbeat
from litgpt_demo.models.model import decay_groups, initialise, litgpt_config
from litgpt_demo.storage import Storage
from litgpt_demo.training.blocks import prepare_blocks
from litgpt_demo.training.feed import Data, Feed
from litgpt_demo.training.loss import LossGPT
from litgpt_demo.training.ranks import Ranks


class Clock:
    """The seconds that a run has been trained for: those up to the checkpoint an attempt went on from, and its own.

    What a crash cost is left out: it was trained again.
    """

    def __init__(self) -> None:
        self.go_on_from(0.0)

    def go_on_from(self, seconds: float) -> None:
        """The training stands where it stood after `seconds`."""
        self.before, self._begun = seconds, monotonic()

    @property
    def seconds(self) -> float:
        """Trained until now."""
        return self.before + monotonic() - self._begun

    def at_least(self, seconds: float) -> None:
        """Another rank's clock, a moment ahead of this one, says that it is so late."""
        self.before += max(0.0, seconds - self.seconds)


def _silent() -> Heartbeat:
    """One that tells nobody."""
    return Heartbeat(allow=0, environ={})


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything one rank holds."""

    spec: TrainingSpec
    data: Data
    feed: Feed
    fabric: Fabric
    model: Any
    """Fabric's wrapper of the (possibly DDP or FSDP) model: what is called. Its `module` is a GPT."""
    optimizer: Any
    run: Storage
    scratch: Path
    clock: Clock = field(default_factory=Clock)
    heart: Heartbeat = field(default_factory=_silent)
    """Tells the node that this rank lives."""

    @cached_property
    def ranks(self) -> Ranks:
        """All ranks, for what the thread that trains has to settle with them. The first to ask waits for the others."""
        return Ranks.of(self.fabric)

    @property
    def scaler(self) -> Any:
        """Return the scaler of train.precision=16-mixed, which leaves out an update that it overflowed in."""
        return scaler_of(self.fabric)


def scaler_of(fabric: Fabric) -> Any:
    """The scaler of losses, or None."""
    return getattr(fabric.strategy.precision, "scaler", None)


def set_up(
    spec: TrainingSpec, data: Data, fabric: Fabric, run: Storage, scratch: Path, heart: Heartbeat | None = None
) -> Training:
    """Model and optimizer with their initial values, distributed as the strategy says.

    Raises:
        UserError: the settings ask for what this device or installation cannot do.
    """
    train, config = spec.train, litgpt_config(spec.model, vocab_size=data.manifest.vocab_size)
    # A model that is to be sharded may fit no device whole: it gets memory once it is, and values then.
    sharded = isinstance(fabric.strategy, ModelParallelStrategy)
    with fabric.init_module(empty_init=sharded):
        model = LossGPT(config)
    model.max_seq_length = spec.model.sequence_length
    if not sharded:
        initialise(model, seed=train.seed)
    prepare_blocks(model, train, fabric.device)
    wrapped = fabric.setup_module(model)
    if sharded:
        initialise(model, seed=train.seed)
    adamw = torch.optim.AdamW(
        decay_groups(wrapped, train.weight_decay),
        lr=train.learning_rate,
        betas=train.betas,
        # A fused one would take the scale off the gradients by itself, after they should have been clipped.
        fused=None if scaler_of(fabric) is not None else fabric.device.type in {"cuda", "cpu"},
    )
    return Training(
        spec=spec,
        data=data,
        feed=Feed(spec, data.train, fabric.device, rank=fabric.global_rank),
        fabric=fabric,
        model=wrapped,
        optimizer=fabric.setup_optimizers(adamw),
        run=run,
        scratch=scratch,
        heart=heart or _silent(),
    )
