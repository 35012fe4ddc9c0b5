"""The optimizers: how each is built, and the memory of its state.

A new one is an entry of OPTIMIZERS, a row in docs/howto/optimizer.md, and tests.
Torch is imported only to build one: `plan` computes the memory without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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
    help: str
    """Its part of the help text of `train.optimizer`."""
    settings: frozenset[str]
    """The fields of `train` that this optimizer reads and another one does not. The others refuse them."""
    state_per_parameter: int
    """Numbers that it keeps for each parameter, in the parameter's type."""
    state_per_matrix_number: int
    """The same for the numbers in `block_matrices`."""
    matrix_copies: int
    """Copies of the largest matrix that an update holds at the same time, in the type in which it multiplies them."""
    flops_per_matrix_number: int
    """Operations of an update for each number in `block_matrices` and each number of the embedding's width."""
    build: Callable[[nn.Module, TrainConfig, bool], Optimizer]
    """Make one for a model. The flag says whether a scaler of losses takes part, as in 16-mixed."""

    def state_bytes(self, parameter_bytes: int, matrix_bytes: int) -> int:
        """Return the bytes of the state for `parameter_bytes` bytes of parameters, of which `matrix_bytes` are in
        `block_matrices`."""
        others = parameter_bytes - matrix_bytes
        return self.state_per_parameter * others + self.state_per_matrix_number * matrix_bytes


def _adamw(model: nn.Module, train: TrainConfig, scaled: bool) -> Optimizer:
    from torch.optim import AdamW

    groups = decay_groups(model, train.weight_decay)
    return AdamW(groups, betas=train.betas, fused=_is_fused(model, scaled))


def _is_fused(model: nn.Module, scaled: bool) -> bool | None:
    # A fused AdamW would take the scale off the gradients by itself, after they should have been clipped.
    return None if scaled else next(model.parameters()).device.type in {"cuda", "cpu"}


def _muon(model: nn.Module, train: TrainConfig, scaled: bool) -> Optimizer:
    from litgpt.model import GPT

    from litgpt_demo.muon import Muon

    config = next(module.config for module in model.modules() if isinstance(module, GPT))
    queries, keys = config.n_head * config.head_size, config.n_query_groups * config.head_size
    matrices = block_matrices(model)
    attention = [weight for name, weight in matrices.items() if name.endswith(".qkv.weight")]
    others = [weight for name, weight in matrices.items() if not name.endswith(".qkv.weight")]
    scale = 1.0 if train.muon_learning_rate is None else train.muon_learning_rate / train.learning_rate
    settings = {"weight_decay": train.weight_decay, RATE_SCALE: scale}
    groups = [
        {"params": attention, "row_blocks": (queries, keys, keys), **settings},
        {"params": others, "row_blocks": (), **settings},
        *decay_groups(model, train.weight_decay, without=matrices),
    ]
    filled = [group for group in groups if group["params"]]
    return Muon(filled, betas=train.betas, fused=_is_fused(model, scaled))


def block_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the matrices of the blocks by name. Routers of experts, which are like an output projection, are none."""
    found = {}
    for name, weight in model.named_parameters():
        path = name.split(".")
        if weight.requires_grad and weight.dim() == 2 and "h" in path and "gate" not in path:
            found[name] = weight
    return found


def decay_groups(model: nn.Module, weight_decay: float, *, without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices decay, vectors (biases and norms) do not."""
    named = model.named_parameters()
    trained = [weight for name, weight in named if weight.requires_grad and name not in without]
    matrices = [weight for weight in trained if weight.dim() >= 2]
    vectors = [weight for weight in trained if weight.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay, RATE_SCALE: 1.0},
        {"params": vectors, "weight_decay": 0.0, RATE_SCALE: 1.0},
    ]


OPTIMIZERS = {
    "adamw": OptimizerKind(
        title="AdamW",
        help="updates each weight by its own averages",
        settings=frozenset(),
        state_per_parameter=2,
        state_per_matrix_number=2,
        matrix_copies=0,
        flops_per_matrix_number=0,
        build=_adamw,
    ),
    "muon": OptimizerKind(
        title="Muon",
        help="orthogonalises the updates of the blocks' matrices and leaves all other weights to AdamW",
        settings=frozenset({"muon_learning_rate"}),
        state_per_parameter=2,
        state_per_matrix_number=1,
        matrix_copies=6,
        # Five iterations of three products: 20 m per number and 10 m * m / n of a matrix of m rows and n >= m columns.
        # That is 30 for queries, keys and values, and 22.5 for an MLP of four times the width.
        flops_per_matrix_number=25,
        build=_muon,
    ),
}


def optimizer_of(train: TrainConfig) -> OptimizerKind:
    """Return the kind of optimizer of a training."""
    return OPTIMIZERS[train.optimizer]


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Give each parameter group the learning rate of a step, times the scale of that group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_SCALE]
