"""LitGPT's model: made from settings, with initial weights that depend only on the seed, and with its loss."""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b

import torch
from litgpt.config import Config
from litgpt.model import GPT, GroupedTopkRouter, do_softcapping
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from litgpt_demo import catalogue
from litgpt_demo.config import ModelConfig
from litgpt_demo.errors import UserError
from litgpt_demo.models.attention import Attention, LatentAttention, attention_masks
from litgpt_demo.models.estimates import has_window
from litgpt_demo.models.loss import Workspace, projected_cross_entropy


def litgpt_config(model: ModelConfig, *, vocab_size: int) -> Config:
    """Return LitGPT's Config of this model; a UserError if it has fewer embeddings than the tokenizer has ids."""
    has_weights = model.init_from is not None
    problem = catalogue.vocabulary_problem(model.name, model.config, vocab_size=vocab_size, has_weights=has_weights)
    if problem is not None:
        raise UserError(problem[0], fix=problem[1])
    return unchecked_config(model, vocab_size=vocab_size)


def unchecked_config(model: ModelConfig, *, vocab_size: int) -> Config:
    """Return LitGPT's Config of this model, even if it has fewer embeddings than the tokenizer has ids."""
    length = model.sequence_length
    return Config(**catalogue.fields_of(model.name, model.config, sequence_length=length, vocab_size=vocab_size))


def initialise(model: GPT, *, seed: int) -> None:
    """Draw small normal weights. Those of the projections back into the residual stream are smaller still.

    GPT-NeoX's scheme (https://arxiv.org/abs/2204.06745, section 2.1), which `litgpt pretrain` uses too: a standard
    deviation of sqrt(2 / 5d), and 1 / (layers * sqrt(d)) for the projections.
    """
    config, device = model.config, model.lm_head.weight.device
    usual = math.sqrt(2 / (5 * config.n_embd))
    residual = 1 / (math.sqrt(config.n_embd) * config.n_layer)
    # A new thread uses the first GPU, whichever its process uses.
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with torch.no_grad(), ThreadPoolExecutor(torch.get_num_threads(), initializer=begin) as pool:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | GroupedTopkRouter):
                std = residual if name.endswith(".proj") else usual
                draw = partial(_draw, module.weight, std, seed, name.replace(_WRAPPER, ""))
                deque(pool.map(draw, _pieces(module.weight)), maxlen=0)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
            if isinstance(module, GroupedTopkRouter):
                module.e_score_correction_bias.zero_()


_WRAPPER = "_checkpoint_wrapped_module."  # of torch's activation checkpointing, within a name
_DRAWN_AT_ONCE = 1 << 22  # numbers that one generator draws: whole rows, by any thread of any rank


def _pieces(weight: Tensor) -> range:
    local, first = _held(weight)
    rows = max(1, _DRAWN_AT_ONCE // weight.shape[1])
    if not len(local):
        return range(0)
    return range(first // rows, -(-(first + len(local)) // rows))


def _held(weight: Tensor) -> tuple[Tensor, int]:
    if not isinstance(weight, DTensor):
        return weight, 0
    offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)[1]
    return weight.to_local(), offsets[0]


@torch.no_grad()
def _draw(weight: Tensor, std: float, seed: int, name: str, piece: int) -> None:
    (local, first), columns = _held(weight), weight.shape[1]
    rows = max(1, _DRAWN_AT_ONCE // columns)
    start = piece * rows
    stop = min(start + rows, len(weight))
    digest = blake2b(f"{seed}/{name}/{piece}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    values = torch.empty(stop - start, columns, dtype=torch.float32).normal_(0.0, std, generator=generator)
    begin, end = max(start, first), min(stop, first + len(local))
    local[begin - first : end - first].copy_(values[begin - start : end - start])


class LossGPT(GPT):  # type: ignore[misc]
    """A GPT that, given targets, returns the mean loss: in `forward`, so that wrappers (DDP, FSDP) see one call."""

    def __init__(self, config: Config, *, z_loss: float = 0.0, end_of_text: int | None = None) -> None:
        """With an id of `end_of_text`, attention stays within the documents of a sample."""
        super().__init__(config)
        self._z_loss, self._end_of_text = z_loss, end_of_text
        self.workspace = Workspace()
        self.per_token_loss_out: Tensor | None = None
        """A tensor for the loss of each token of the next pass, in the order of the targets; None if not wanted."""
        self.by_flex = False
        """True for masks of FlexAttention, which must be compiled: uncompiled, it computes all scores."""
        layers = range(config.n_layer)
        self._windows = [config.sliding_window_size if has_window(config, layer) else None for layer in layers]
        for block in self.transformer.h:  # as FSDP2 does it: the weights, once drawn, and their names stay
            block.attn.__class__ = LatentAttention if config.latent_attention else Attention

    def forward(self, idx: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the mean negative log-likelihood of `targets`, in nats per token; without targets, GPT's logits.

        The gradients of a model with a z-loss have that of it too. With `positions`, one of each sample, only their
        logits are computed, of shape (samples, vocabulary): those of all could take more memory than the training.
        """
        hidden, head, softcap = self.body(idx), self.lm_head, self.config.final_logit_softcapping
        if targets is not None:
            return projected_cross_entropy(
                hidden,
                head.weight,
                targets,
                bias=head.bias,
                softcap=softcap,
                z_loss=self._z_loss,
                workspace=self.workspace,
                per_token_loss_out=self.per_token_loss_out,
            )
        if positions is not None:
            hidden = hidden[torch.arange(len(positions), device=hidden.device), positions]
        logits: Tensor = head(hidden)
        return logits if softcap is None else do_softcapping(logits, softcap)

    def body(self, idx: Tensor) -> Tensor:
        """Compute GPT.forward up to the output projection, without a KV cache."""
        length, indices = idx.size(1), self.config.rope_indices
        cos, sin = self.cos[:length].unsqueeze(0), self.sin[:length].unsqueeze(0)
        hidden, dtype = self.transformer.wte(idx), None
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden = hidden.float()  # the residual stream stays precise even if FSDP gathered the table in bfloat16
        if self.config.scale_embeddings:
            hidden = hidden * torch.tensor(self.config.n_embd**0.5, dtype=hidden.dtype)
        masks = attention_masks(
            idx,
            windows=self._windows,
            end_of_text=self._end_of_text,
            dtype=dtype or hidden.dtype,
            capped=self.config.attention_logit_softcapping is not None,
            by_flex=self.by_flex,
        )
        for number, (block, mask) in enumerate(zip(self.transformer.h, masks, strict=True)):
            rotary = (cos, sin)
            if indices is not None:
                rotary = cos[..., indices[number]], sin[..., indices[number]]
            hidden = block(hidden, *rotary, mask)
        normed: Tensor = self.transformer.ln_f(hidden)
        return normed
