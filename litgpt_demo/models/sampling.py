"""A model writes on, one token after the other, through LitGPT's cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from litgpt.generate.base import sample
from litgpt.model import GPT


@torch.inference_mode()
def sampled(
    model: GPT, prompt: Sequence[int], *, length: int, temperature: float, top_k: int, eos_id: int
) -> Iterator[int]:
    """Yield the tokens that the model writes after `prompt`, to the end of its document or `length` tokens in all."""
    config, device, tokens = model.config, model.lm_head.weight.device, list(prompt)
    model.max_seq_length = length
    model.set_kv_cache(batch_size=1, device=device)
    start, end = 0, len(prompt)
    # LitGPT 0.5.13 does not hide the later tokens of a pass where attention is capped, for it adds its boolean mask to
    # the scores, nor in a full window, for the pass overwrites that ring. A pass over one token has no later ones.
    if config.attention_logit_softcapping is not None:
        end = 1
    elif config.sliding_window_size is not None:
        end = min(end, config.sliding_window_size)
    while start < length - 1:
        ids, positions = torch.tensor([tokens[start:end]], device=device), torch.arange(start, end, device=device)
        logits = model(ids, positions, input_pos_maxp1=end)
        start, end = end, end + 1
        if start < len(prompt):
            continue
        token = int(sample(logits, temperature=temperature, top_k=top_k))
        if token == eos_id:
            return
        tokens.append(token)
        yield token
