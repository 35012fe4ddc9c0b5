"""Muon, an optimizer that makes each update of a matrix about orthogonal. AdamW updates everything else.

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/) for the momentum and the Newton-Schulz
iteration, Liu et al. 2025 (https://arxiv.org/abs/2502.16982, section 2.2) for the size of updates and weight decay.
torch.optim.Muon (2.13) takes only whole matrices, orthogonalises all of them on each rank, and always in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

_MOMENTUM = 0.95
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_ADAMW_RMS = 0.2
"""The usual root mean square of AdamW's updates. Muon's are scaled to it, so that one learning rate suits both."""


class Muon(Optimizer):
    """Updates parameter groups that have `row_blocks` with Muon, and all others with AdamW.

    `row_blocks` are the numbers of rows of the matrices that are stored as one, such as queries, keys and values. Each
    is orthogonalised by itself. An empty tuple stands for one matrix.

    The ranks that hold shards or copies of the matrices divide them: each rank orthogonalises whole ones. All ranks
    must call `step` together. If the attribute `found_inf` is a tensor of 1.0, no parameter and no state changes, as
    with torch's fused AdamW.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], fused: bool | None) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": betas, "eps": 1e-8, "fused": fused, "row_blocks": None})
        # The ranks that divide the matrices.
        self._group: dist.ProcessGroup | None = None
        self._rank, self._count = 0, 1
        if dist.is_initialized():
            first = self.param_groups[0]["params"][0]
            if isinstance(first, DTensor):  # the ranks that share a copy: the last dimension of hybrid's mesh
                self._group = first.device_mesh.get_group(first.device_mesh.ndim - 1)
            self._rank, self._count = dist.get_rank(self._group), dist.get_world_size(self._group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if group["row_blocks"] is None:
                self._update_with_adamw(group, weights)
                continue
            # States are made in the order in which a load makes them, so that a resumed training writes the same files.
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["momentum"] = torch.zeros_like(weight)
            # The largest first, so that matrices that are orthogonalised at the same time take about the same time.
            weights.sort(key=lambda weight: -weight.numel() * min(weight.shape))
            for start in range(0, len(weights), self._count):
                self._update_with_muon(group, weights[start : start + self._count])

    def _update_with_muon(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        rate, skipped = group["lr"], None if self.found_inf is None else self.found_inf.bool()
        for weight in weights:
            gradient, momentum = _local(cast(Tensor, weight.grad)), _local(self.state[weight]["momentum"])
            if skipped is not None:
                # An average with itself leaves the momentum the same to the bit.
                gradient = torch.where(skipped, momentum, gradient)
            momentum.lerp_(gradient, 1 - _MOMENTUM)
        for weight, update in zip(weights, self._updates(weights, group["row_blocks"]), strict=True):
            own = _local(weight)
            changed = own * (1 - rate * group["weight_decay"]) - rate * update.to(own.dtype)
            own.copy_(changed if skipped is None else torch.where(skipped, own, changed))

    def _updates(self, weights: list[Tensor], row_blocks: Sequence[int]) -> Iterator[Tensor]:
        """Yield this rank's part of the update of each matrix. Rank i computes that of matrix i, so a call has at most
        as many matrices as there are ranks."""
        if isinstance(weights[0], DTensor):
            yield from self._updates_of_shards(weights, row_blocks)
            return
        update = None
        if self._rank < len(weights):
            update = orthogonalised(self._direction(weights[self._rank]), row_blocks)
        for index, weight in enumerate(weights):
            received = update if index == self._rank else torch.empty_like(weight, dtype=_dtype(weight))
            assert received is not None
            if self._count > 1:
                dist.broadcast(received, index)
            yield received

    def _updates_of_shards(self, weights: list[Tensor], row_blocks: Sequence[int]) -> list[Tensor]:
        shards, rank, count = [self._direction(weight) for weight in weights], self._rank, self._count
        held = [shard.numel() for shard in shards] + [0] * (count - len(shards))
        gathered = [0] * count  # numbers in each rank's rows of the matrix that this rank computes
        if rank < len(weights):
            rows, columns = weights[rank].shape
            chunk = -(-rows // count)  # as FSDP divides rows: the last ranks may have fewer, or none
            gathered = [columns * max(0, min(chunk, rows - peer * chunk)) for peer in range(count)]
        matrix = self._exchange(torch.cat([shard.flatten() for shard in shards]), held, gathered)
        if rank < len(weights):
            matrix = orthogonalised(matrix.view(weights[rank].shape), row_blocks).flatten()
        parts = torch.split(self._exchange(matrix, gathered, held), held)
        return [part.view_as(shard) for part, shard in zip(parts, shards, strict=False)]

    def _exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)
        return received

    def _direction(self, weight: Tensor) -> Tensor:
        """Return Nesterov's average of the gradient and the momentum, of this rank's rows."""
        direction = _local(cast(Tensor, weight.grad)).lerp(_local(self.state[weight]["momentum"]), _MOMENTUM)
        return direction.to(_dtype(weight))

    def _update_with_adamw(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), device=weight.device if group["fused"] else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        gradients = [cast(Tensor, weight.grad) for weight in weights]
        averages, squares, steps = (
            [self.state[weight][name] for weight in weights] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        beta1, beta2 = group["betas"]
        adamw(
            weights, gradients, averages, squares, [], steps, fused=group["fused"], found_inf=self.found_inf,
            amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"], eps=group["eps"],
            weight_decay=group["weight_decay"],
        )  # fmt: skip


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dtype(weight: Tensor) -> torch.dtype:
    """Return the type to orthogonalise in: Jordan's on a GPU. A CPU trains small models, and float32 lets the number of
    ranks change their results by no more than its rounding."""
    return torch.bfloat16 if weight.is_cuda else torch.float32


def orthogonalised(direction: Tensor, row_blocks: Sequence[int] = ()) -> Tensor:
    """Return U V' of each block of rows, whose singular value decomposition is U S V', about and times its scale."""
    blocks = torch.split(direction, list(row_blocks) or len(direction))
    return torch.cat([_newton_schulz(block) * (_ADAMW_RMS * math.sqrt(max(block.shape))) for block in blocks])


def _newton_schulz(direction: Tensor) -> Tensor:
    """Iterate a polynomial of the singular values, which leads them to between 0.7 and 1.2, from near 0 soonest."""
    is_tall = direction.size(0) > direction.size(1)
    matrix = direction.T if is_tall else direction
    matrix = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), matrix, beta=_A)
    return matrix.T if is_tall else matrix
