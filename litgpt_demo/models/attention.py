"""Attention in the blocks: causal, within a sliding window, within documents, or within both.

It replaces LitGPT's for passes without a cache of keys and values. Masks are made once for each pass, and layers share
them. Heads that share keys and values read one copy of them where torch has a kernel for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from litgpt.model import (
    CausalSelfAttention,
    MultiheadLatentAttention,
    apply_rope,
    apply_rope_interleave,
    do_softcapping,
)
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention, softmax

Mask: TypeAlias = Tensor | BlockMask | None
"""None is causal. A tensor is added to the scores: 0 where a query sees a key, else -inf."""


def document_numbers(tokens: Tensor, end_of_text: int) -> Tensor:
    """Return the number of end-of-text ids before each token of a sample, which belong to the documents they end.

    `tokens` and the result have the shape (samples, length). Tokens with equal numbers are of one document.
    """
    ends = (tokens == end_of_text).long()
    return ends.cumsum(dim=1) - ends


def attention_masks(
    tokens: Tensor, *, windows: Sequence[int | None], end_of_text: int | None, dtype: torch.dtype, capped: bool,
    by_flex: bool,
) -> list[Mask]:  # fmt: skip
    """Return the mask of each layer, whose window is in `windows`, for `tokens` of shape (samples, length).

    With an id of `end_of_text`, no token sees another document. Masks are tensors of `dtype`, which `capped` scores
    need, or `by_flex` for FlexAttention, which skips blocks of scores that no query sees
    (https://arxiv.org/abs/2412.05496).
    """
    length = tokens.size(1)
    documents = None if end_of_text is None else document_numbers(tokens, end_of_text)
    shorter = [window if window is not None and window < length else None for window in windows]
    masks: dict[int | None, Mask] = {}
    for window in dict.fromkeys(shorter):
        sees = _sees(documents, window)
        if documents is None and window is None and not capped:
            masks[window] = None
        elif by_flex and not capped:
            masks[window] = block_mask(sees, tokens, shared=documents is None)
        else:
            masks[window] = dense_mask(sees, tokens, dtype)
    return [masks[window] for window in shorter]


def _sees(documents: Tensor | None, window: int | None) -> Any:
    """Return FlexAttention's form of a mask. Its arguments are indices, or tensors of indices that broadcast."""

    def sees(sample: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if window is not None:
            seen = seen & (key > query - window)
        if documents is not None:
            seen = seen & (documents[sample, query] == documents[sample, key])
        return seen

    return sees


def dense_mask(sees: Any, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    samples, places = (torch.arange(size, device=tokens.device) for size in tokens.shape)
    seen: Tensor = sees(samples[:, None, None, None], None, places[:, None], places)
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -math.inf)


def block_mask(sees: Any, tokens: Tensor, *, shared: bool) -> BlockMask:
    samples, length = tokens.shape
    return create_block_mask(sees, None if shared else samples, None, length, length, device=tokens.device)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Mask, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Return the weighted values of each query, of shape (samples, heads of queries, length, size of a value).

    `queries` have the shape (samples, heads, length, size). Keys and values may have fewer heads, each for several of
    the queries' in a row. `softcap` needs a tensor as mask.
    """
    shared_by = queries.size(1) // keys.size(1)
    if isinstance(mask, BlockMask):
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)  # autocast does not
        return flex_attention(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=shared_by > 1)
    # The kernels that read shared heads in place are FlashAttention's, of GPUs in 16 bits, and the CPU's.
    is_on_gpu_in_32 = queries.device.type == "cuda" and values.dtype == torch.float32
    if shared_by > 1 and (softcap is not None or is_on_gpu_in_32):
        keys, values = keys.repeat_interleave(shared_by, dim=1), values.repeat_interleave(shared_by, dim=1)
        shared_by = 1
    if softcap is None:
        return scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=shared_by > 1
        )
    scores = do_softcapping(queries @ keys.mT * scale, softcap) + mask
    return softmax(scores, dim=-1, dtype=torch.float).to(queries.dtype) @ values


def _attend_in(layer: Any, size: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    config = layer.config
    scale = layer.mscale**2 / math.sqrt(config.attention_scores_scalar or size)
    return attend(queries, keys, values, mask, scale=scale, softcap=config.attention_logit_softcapping)


class Attention(CausalSelfAttention):  # type: ignore[misc]
    """LitGPT's layer, with `attend`."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None, *cached: Any) -> Tensor:
        """Return the layer's output for `x` of shape (samples, length, width); the cosines are those of its places."""
        if any(argument is not None for argument in cached):
            output: Tensor = super().forward(x, cos, sin, mask, *cached)
            return output
        config, sizes = self.config, [self.config.n_head, self.config.n_query_groups, self.config.n_query_groups]
        queries, keys, values = self.qkv(x).split([heads * config.head_size for heads in sizes], dim=-1)
        if config.norm_qk and config.norm_qk_type == "olmo2":
            queries, keys = self.norm_q(queries), self.norm_k(keys)
        parts = queries, keys, values
        queries, keys, values = (part.unflatten(-1, (-1, config.head_size)).transpose(1, 2) for part in parts)
        if config.norm_qk and config.norm_qk_type == "default":
            queries, keys = self.norm_q(queries), self.norm_k(keys)
        queries, keys = (self._rotated(part, cos, sin) for part in (queries, keys))
        attended = _attend_in(self, config.head_size, queries, keys, values, mask)
        projected: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return projected

    def _rotated(self, part: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotate, size = apply_rope_interleave if self.config.rope_interleave else apply_rope, self.config.rope_n_elem
        return torch.cat((rotate(part[..., :size], cos, sin), part[..., size:]), dim=-1)


class LatentAttention(MultiheadLatentAttention):  # type: ignore[misc]
    """LitGPT's layer of few, latent keys and values, with `attend`."""

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None) -> Tensor:
        """Return the attended values, of shape (samples, length, heads, size of a value)."""
        return _attend_in(self, self.config.qk_head_dim, q, k, v, mask).transpose(1, 2)
