"""The optimizers: how each is built, and the memory of its state. A new one is an entry of OPTIMIZERS.

Torch is imported only to build one: `plan` computes the memory without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from litgpt_demo.config import TrainConfig

RATE_SCALE = "rate_scale"
"""The entry of a parameter group by which the schedule's learning rate is multiplied."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """One kind of optimizer."""

    title: str
    """Its name in tables and messages."""
    state_per_parameter: int
    """Numbers that it keeps for each parameter, in the parameter's type."""
    build: Callable[[nn.Module, TrainConfig, bool], Optimizer]
    """Make one for a model. The flag says whether a scaler of losses takes part, as in 16-mixed."""

    def state_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes of the state for `parameter_bytes` bytes of parameters."""
        return self.state_per_parameter * parameter_bytes


def _adamw(model: nn.Module, train: TrainConfig, scaled: bool) -> Optimizer:
    from torch.optim import AdamW

    device = next(model.parameters()).device.type
    # A fused one would take the scale off the gradients by itself, after they should have been clipped.
    fused = None if scaled else device in {"cuda", "cpu"}
    return AdamW(decay_groups(model, train.weight_decay), betas=train.betas, fused=fused)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices decay, vectors (biases and norms) do not."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if weight.dim() >= 2]
    vectors = [weight for weight in trained if weight.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay, RATE_SCALE: 1.0},
        {"params": vectors, "weight_decay": 0.0, RATE_SCALE: 1.0},
    ]


OPTIMIZERS = {"adamw": OptimizerKind(title="AdamW", state_per_parameter=2, build=_adamw)}


def optimizer_of(train: TrainConfig) -> OptimizerKind:
    """Return the kind of optimizer of a training."""
    return OPTIMIZERS["adamw"]


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Give each parameter group the learning rate of a step, times the scale of that group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_SCALE]
