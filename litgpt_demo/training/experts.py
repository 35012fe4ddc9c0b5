"""The load-balance loss of mixtures of experts: without it a router may come to use a few of them for everything.

Fedus et al. 2021 (https://arxiv.org/abs/2101.03961, equations 4 to 6), for several experts per token as Mixtral has it.
Models whose router is balanced by a bias of its own (LitGPT's GroupedTopkRouter, DeepSeek-V3's) have none.
"""

from __future__ import annotations

from functools import partial

import torch
from litgpt.model import GroupedTopkRouter, LLaMAMoE
from torch import Tensor, nn


class Balance:
    """Listens to the routers of a model, and makes a loss of what they did in one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._heard: list[Tensor] | None = None
        routers = [module for module in model.modules() if isinstance(module, LLaMAMoE)]
        self.routers = [router for router in routers if not isinstance(router.gate, GroupedTopkRouter)]
        for router in self.routers:
            router.gate.register_forward_hook(partial(self._hear, router.config.n_expert_per_token))

    def _hear(self, used: int, _gate: nn.Module, _inputs: object, logits: Tensor) -> None:
        if self._heard is not None:  # a block that is computed again for the backward pass was heard already
            self._heard.append(imbalance(logits, used=used))

    def listen(self) -> None:
        """Begin with a forward pass."""
        self._heard = []

    def told(self) -> Tensor | None:
        """Return the mean over all layers, of the pass that is over; None of a model without such routers."""
        heard, self._heard = self._heard, None
        return torch.stack(heard).mean() if heard else None


def imbalance(logits: Tensor, *, used: int) -> Tensor:
    """Return how unevenly tokens are spread: 1 where each expert has as many as any, more the fewer have them all.

    Args:
        logits: a router's, of shape (tokens, experts).
        used: experts that each token goes to.
    """
    experts = logits.size(-1)
    likely = logits.float().softmax(-1)
    chosen = likely.topk(used, -1).indices.flatten()
    share = likely.new_zeros(experts).scatter_add_(0, chosen, likely.new_ones(1).expand(len(chosen))) / len(chosen)
    return experts * (share * likely.mean(0)).sum()
