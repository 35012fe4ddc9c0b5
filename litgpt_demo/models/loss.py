"""The loss of a model, computed without ever holding the logits of a whole batch.

The projection onto the vocabulary and the cross-entropy are most of a small model's step. Computed one after the other,
they write and read batch x sequence x vocabulary numbers half a dozen times, in two precisions. Here a few rows at a
time go through both, and the gradients are ready when the loss is: three matrix products and one softmax, forward and
backward, as in Hsu et al. 2024 (https://arxiv.org/abs/2410.10989). torch's own `linear_cross_entropy` does likewise,
but it supports neither autocast nor the softcapping of some models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from litgpt_demo.models.estimates import block_rows, chunk_rows


class Workspace:
    """Temporary memory that a CPU keeps from call to call: clearing new pages took up to a third of the time."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def of(self, name: str, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None or (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if device.type == "cpu":
                self._tensors[name] = tensor
        return tensor


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    workspace: Workspace | None = None,
    per_token_loss_out: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy of `hidden @ weight.T + bias`, optionally softcapped, against `targets`.

    It is a float32 scalar. The loss of each target is written into `per_token_loss_out`. Under autocast the products
    have its precision and all else float32, like `cross_entropy` after a `Linear`. The gradients are those of the
    cross-entropy plus `z_loss` times the mean of log(Z)^2, Z the sum of a row's exponentials (Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, section 5). It keeps logits small; the value without it stays comparable.
    """
    device, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    options = softcap, z_loss, dtype, torch.is_grad_enabled(), workspace or Workspace(), per_token_loss_out
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.reshape(-1, hidden.size(-1)), weight, bias, targets.reshape(-1), *options
        )
    return loss


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: float | None,
        z_loss: float, dtype: torch.dtype, with_gradients: bool, workspace: Workspace,
        per_token_loss_out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the loss; keep its gradients by `hidden`, `weight` and `bias` if they are wanted."""
        precise, device = torch.promote_types(dtype, torch.float32), hidden.device
        inputs, matrix, count = hidden.to(dtype), weight.to(dtype), len(targets)
        rows = chunk_rows(count, len(weight), device=device.type)
        rows_of_block = block_rows(rows, len(weight), device=device.type)
        products = workspace.of("products", rows, len(weight), dtype=dtype, device=device)
        logits = products
        if dtype != precise:
            logits = workspace.of("logits", rows_of_block, len(weight), dtype=precise, device=device)
        total = hidden.new_zeros((), dtype=precise)
        gradients = _Gradients(hidden, weight, bias, dtype, workspace) if with_gradients else None

        for first in range(0, count, rows):
            part = slice(first, min(first + rows, count))
            chunk = products[: part.stop - first]
            # On a GPU a chunk is one block, and the product is summed in its precision.
            _multiply(inputs[part], matrix.T, out=logits[: len(chunk)] if device.type == "cuda" else chunk)
            for start in range(0, len(chunk), rows_of_block):
                multiplied = chunk[start : start + rows_of_block]
                block = multiplied
                if dtype != precise:
                    block = logits[: len(multiplied)]
                    if device.type != "cuda":
                        block.copy_(multiplied)
                if bias is not None:
                    block += bias
                cap_slope = None if softcap is None else _softcap_(block, softcap)
                place = slice(first + start, first + start + len(block))
                losses = _cross_entropy_gradient_(block, targets[place], z_loss)
                total += losses.sum()
                if per_token_loss_out is not None:
                    per_token_loss_out[place] = losses
                if gradients is not None:
                    if cap_slope is not None:
                        block *= cap_slope
                    gradients.add_block(block, multiplied)
            if gradients is not None:
                gradients.add_chunk(part, chunk, inputs, matrix)

        ctx.gradients = (None, None, None) if gradients is None else gradients.in_types_of(hidden, weight, bias)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # Drop the references, so that autograd may keep the tensors themselves as gradients instead of copying them.
        gradients, ctx.gradients = ctx.gradients, None
        if scale.device.type != "cpu" or float(scale) != 1.0:  # reading a GPU's value would wait for the GPU
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(scale)
        return *gradients, *[None] * 7


def _softcap_(logits: Tensor, softcap: float) -> Tensor:
    logits.div_(softcap).tanh_()
    slope = 1 - logits * logits
    logits.mul_(softcap)
    return slope


def _cross_entropy_gradient_(logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    # A target's loss is log(Z) minus its logit, and log(Z) is the largest logit minus the logarithm of its probability.
    # That is at least 1 / vocabulary; the target's own may be 0. One exponential of each logit is computed in all.
    columns = targets.unsqueeze(1)
    target_logits, largest = logits.gather(1, columns), logits.amax(dim=-1, keepdim=True)
    torch.softmax(logits, dim=-1, out=logits)
    losses = (largest - target_logits) - logits.amax(dim=-1, keepdim=True).log_()
    if z_loss:
        logits *= 1 + 2 * z_loss * (target_logits + losses)
    logits.scatter_add_(1, columns, logits.new_full((), -1.0).expand(columns.shape))
    return losses.squeeze(1)


_LIFT = 1024.0  # a power of two; sums of float16 products stay far below 65,504


class _Gradients:
    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, workspace: Workspace
    ) -> None:
        precise = torch.promote_types(dtype, torch.float32)
        self.by_hidden = torch.empty_like(hidden, dtype=precise)
        self.by_weight = torch.empty_like(weight, dtype=precise)
        self.by_bias = None if bias is None else torch.zeros_like(bias, dtype=precise)
        self.product = None  # holds a chunk's part of `by_weight` where the device cannot add to it (_multiply)
        if dtype != precise and hidden.device.type != "cuda":
            self.product = workspace.of("product", *weight.shape, dtype=dtype, device=hidden.device)
        # Gradients of logits in float16, which has nothing below 6e-8, are lifted. The trainer's own scale of the loss
        # reaches them only after their cast.
        self.lift = _LIFT if dtype == torch.float16 else 1.0
        self.count = len(hidden)

    def add_block(self, by_logits: Tensor, narrow: Tensor) -> None:
        """Add the bias's part of a block of rows; `narrow` gets the gradient by logits in the type of the products."""
        if self.by_bias is not None:
            self.by_bias.add_(by_logits.sum(0), alpha=1 / self.count)
        if self.lift != 1:
            torch.mul(by_logits, self.lift, out=narrow)
        elif narrow is not by_logits:
            narrow.copy_(by_logits)  # a product by 1 would go through a copy of its own

    def add_chunk(self, part: slice, by_logits: Tensor, inputs: Tensor, matrix: Tensor) -> None:
        alpha, by_weight = 1 / (self.count * self.lift), self.by_weight
        _multiply(by_logits, matrix, out=self.by_hidden[part], alpha=alpha)
        _multiply(by_logits.T, inputs[part], out=by_weight, workspace=self.product, alpha=alpha, add=part.start > 0)

    def in_types_of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        by_bias = self.by_bias
        if bias is not None and by_bias is not None:
            by_bias = by_bias.to(bias.dtype)
        return self.by_hidden.to(hidden.dtype), self.by_weight.to(weight.dtype), by_bias


def _multiply(
    first: Tensor,
    second: Tensor,
    *,
    out: Tensor,
    workspace: Tensor | None = None,
    alpha: float = 1.0,
    add: bool = False,
) -> None:
    # Where the device cannot sum in the precision of `out`, `workspace` holds the product in the operands' precision.
    if first.dtype == out.dtype:
        torch.addmm(out, first, second, beta=float(add), alpha=alpha, out=out)
    elif first.device.type == "cuda":
        torch.addmm(out, first, second, out_dtype=out.dtype, beta=float(add), alpha=alpha, out=out)
    else:
        product = torch.mm(first, second, out=workspace)
        if add:
            out.add_(product, alpha=alpha)
        else:
            # A plain number would be rounded to the product's type.
            torch.mul(product, out.new_tensor([alpha]), out=out)
