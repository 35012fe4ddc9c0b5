"""bfloat16 on a CPU that cannot multiply in it.

Without AVX512-BF16 or AMX, oneDNN's bfloat16 products convert as they go and take three to four times what float32's
do (measured on a Cascade Lake: 1.1 s against 0.3 s for the output projection of 2048 tokens). A product of two bfloat16
numbers is exact in float32, so rounding the operands and multiplying in float32 is the same arithmetic, faster.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from litgpt.model import CausalSelfAttention, MultiheadLatentAttention
from torch import Tensor, nn
from torch.nn import functional

M = TypeVar("M", bound=nn.Module)


def rounds_by_hand(dtype: torch.dtype, device: str) -> bool:
    """Return True if products in `dtype` are to be made by `rounded`."""
    if dtype != torch.bfloat16 or device != "cpu":
        return False
    able = torch.cpu.get_capabilities()
    # "bf16" is Arm's; a processor that says nothing is left to torch.
    return able.get("architecture") == "x86_64" and not (able.get("avx512_bf16") or able.get("amx_bf16"))


def rounded(values: Tensor) -> Tensor:
    """Bfloat16's nearest, in float32; gradients are rounded likewise on their way back."""
    return values.to(torch.bfloat16).to(torch.float32)


def round_by_hand(model: M) -> M:
    """Make the products of `model`, layers and attention, of rounded operands; autocast is left to the rest."""
    for module in model.modules():
        # The class alone changes: weights, hooks and names stay, and what wraps the model need not know.
        if type(module) in _ROUNDING:
            module.__class__ = _ROUNDING[type(module)]
    return model


class _RoundingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else rounded(self.bias)
        with torch.autocast("cpu", enabled=False):
            return functional.linear(rounded(input), rounded(self.weight), bias)


class _Rounding:
    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = None if mask is None else mask.float()
        with torch.autocast("cpu", enabled=False):
            attended: Tensor = super().scaled_dot_product_attention(rounded(q), rounded(k), rounded(v), mask)  # type: ignore[misc]
        return attended


class _RoundingAttention(_Rounding, CausalSelfAttention):  # type: ignore[misc]
    pass


class _RoundingLatentAttention(_Rounding, MultiheadLatentAttention):  # type: ignore[misc]
    pass


_ROUNDING: dict[type[nn.Module], Any] = {
    nn.Linear: _RoundingLinear,
    CausalSelfAttention: _RoundingAttention,
    MultiheadLatentAttention: _RoundingLatentAttention,
}
