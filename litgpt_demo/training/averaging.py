"""The moving average of the weights: a second model that a run carries along, exported on request.

Each rank averages the part of the weights that it holds, in float32: in 16 bits, small changes would be rounded away.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor


class WeightAverage:
    """An exponential moving average of a model's weights."""

    def __init__(self, model: Any, decay: float) -> None:
        """`decay` is the share of the average that a step keeps; the rest comes from the weights."""
        self._decay = decay
        # References to the live weights, which training changes in place.
        self._weights = cast(dict[str, Tensor], get_model_state_dict(model))
        self.tensors = {name: weight.detach().float().clone() for name, weight in self._weights.items()}
        """The averages by the names of their weights, sharded as these are. A checkpoint holds them."""

    @torch.no_grad()
    def restart(self) -> None:
        """Begin at the present weights."""
        for name, weight in self._weights.items():
            self.tensors[name].copy_(weight)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights of step `step`, counted from 0. Early averages forget their beginning sooner: by the rule of
        TensorFlow's ExponentialMovingAverage, a step keeps at most (1 + step) / (10 + step) of them."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        averages, weights = list[Tensor](), list[Tensor]()
        for name, weight in self._weights.items():
            average = self.tensors[name]
            if isinstance(weight, DTensor) and isinstance(average, DTensor):
                weight, average = weight.to_local(), average.to_local()
            averages.append(average)
            weights.append(weight)
        if all(weight.dtype == torch.float32 for weight in weights):
            torch._foreach_lerp_(averages, weights, share)
            return
        for average, weight in zip(averages, weights, strict=True):  # one float32 copy at a time
            average.lerp_(weight.float(), share)
