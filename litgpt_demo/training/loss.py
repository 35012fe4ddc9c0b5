"""The loss of a batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import cross_entropy


def loss_of(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood of the targets, in nats per token."""
    logits = model(inputs)
    return cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
