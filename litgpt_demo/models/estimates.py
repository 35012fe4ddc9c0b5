"""The cost of a training, from LitGPT's config fields alone: parameters, arithmetic per token, memory per device.

Nothing is built and torch is not imported, so that a model of 175 billion parameters is answered for at once.

Sources: parameters follow litgpt.model (0.5.13) layer by layer. The arithmetic is Chowdhery et al. 2022 (PaLM,
https://arxiv.org/abs/2204.02311, appendix B): 6 per weight that a token is multiplied with, forward and backward, and
12 x heads x head size x length per layer for attention, the causal half not taken off; nothing for what activation
checkpointing computes twice. Memory is what autograd keeps of each layer in training.loss.LossGPT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from litgpt_demo.config import TrainConfig

# --- parameters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The numbers of a layer, and those of them that each token is multiplied with."""

    held: int
    used: int

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.held + other.held, self.used + other.used)


def _linear(inputs: int, outputs: int, *, bias: bool = False) -> Weights:
    return Weights(inputs * outputs + outputs * bias, inputs * outputs)


def _norm(config: Any, size: int) -> Weights:
    if config.norm_class_name == "RMSNorm":
        return Weights(size, 0)
    return Weights(0 if "OLMo" in config.name else 2 * size, 0)


def _attention(config: Any) -> Weights:
    if config.latent_attention:
        width, heads = config.n_embd, config.n_head
        return (
            _linear(width, config.q_lora_rank, bias=config.attn_bias)
            + Weights(config.q_lora_rank, 0)
            + _linear(config.q_lora_rank, heads * config.qk_head_dim, bias=config.bias)
            + _linear(width, config.kv_lora_rank + config.qk_rope_head_dim, bias=config.attn_bias)
            + Weights(config.kv_lora_rank, 0)
            + _linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=config.bias)
            + _linear(heads * config.v_head_dim, width, bias=config.bias)
        )
    queries, keys = config.n_head * config.head_size, config.n_query_groups * config.head_size
    found = _linear(config.n_embd, queries + 2 * keys, bias=config.bias or config.attn_bias)
    found += _linear(queries, config.n_embd, bias=config.bias)
    if config.norm_qk:
        each_head = config.norm_qk_type == "default"
        found += _norm(config, config.head_size if each_head else queries)
        found += _norm(config, config.head_size if each_head else keys)
    return found


def _mlp(config: Any, size: int, *, kind: str) -> Weights:
    found = _linear(size, config.n_embd, bias=config.bias)
    for _ in range(1 if kind == "GptNeoxMLP" else 2):
        found += _linear(config.n_embd, size, bias=config.bias)
    return found


def _has_experts(config: Any, layer: int) -> bool:
    return config.mlp_class_name == "LLaMAMoE" and layer >= (config.first_k_dense_replace or 0)


def block(config: Any, layer: int) -> Weights:
    """One of the model's blocks."""
    found = _attention(config)
    if _has_experts(config, layer):
        size = config.moe_intermediate_size or config.intermediate_size
        expert = _mlp(config, size, kind="LLaMAMLP")
        found += _linear(config.n_embd, config.n_expert)
        found += Weights(config.n_expert * expert.held, config.n_expert_per_token * expert.used)
        if config.n_shared_expert:
            found += _mlp(config, config.moe_intermediate_size * config.n_shared_expert, kind="LLaMAMLP")
    else:
        kind = "LLaMAMLP" if config.mlp_class_name == "LLaMAMoE" else config.mlp_class_name
        found += _mlp(config, config.intermediate_size, kind=kind)
    has_second = config.norm_2 and not config.shared_attention_norm
    for _ in range(config.norm_1 + has_second + config.post_attention_norm + config.post_mlp_norm):
        found += _norm(config, config.n_embd)
    return found


def table(config: Any) -> int:
    """Weights of the embedding; the output projection has as many, which LitGPT does not share with it."""
    return int(config.padded_vocab_size * config.n_embd)


def parameters(config: Any) -> int:
    """The parameters of the whole model, experts that a token does not see included."""
    blocks = sum(block(config, layer).held for layer in range(config.n_layer))
    head = config.padded_vocab_size if config.lm_head_bias else 0
    return blocks + 2 * table(config) + head + _norm(config, config.n_embd).held


def used_parameters(config: Any) -> int:
    """Weights in the matrix products that one token passes through: no embedding, for that is a look-up."""
    return sum(block(config, layer).used for layer in range(config.n_layer)) + table(config)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def attention_flops(config: Any, length: int) -> int:
    """Per token, in all layers, of scores and weighted values. A window that is shorter than the sample counts."""
    if config.latent_attention:
        width = config.n_head * (config.qk_head_dim + config.v_head_dim)
    else:
        width = 2 * config.n_head * config.head_size
    context = 0  # tokens that the layers look back on
    for layer in range(config.n_layer):
        windowed = config.sliding_window_size is not None and config.sliding_window_indices[layer]
        context += min(length, config.sliding_window_size) if windowed else length
    return int(6 * width * context)


def flops_per_token(config: Any, length: int) -> int:
    """Return the operations per token of training: forward and backward."""
    return 6 * used_parameters(config) + attention_flops(config, length)


# --- memory -----------------------------------------------------------------------------------------------------------

# Rows x vocabulary x 4 bytes of logits at a time. On a CPU what a large cache can hold; on a GPU enough to fill it.
CHUNK_BYTES = {"cpu": 50 << 20, "cuda": 1 << 30}


def chunk_rows(count: int, vocabulary: int, *, device: str) -> int:
    """Rows of logits to hold at once: `count` of them in as few equal parts as keep to CHUNK_BYTES."""
    at_most = max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * vocabulary))
    return -(-count // -(-count // at_most))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by what they are for."""

    weights: int
    optimizer: int
    """AdamW's two averages."""
    gathered: int
    """Weights of other devices that FSDP brings together, and their gradients before they are spread."""
    gradients: int
    kept: bool
    """Return True if gradients are there all the time: batches are accumulated, or ranks sum theirs in buckets."""
    activations: int
    """Bytes that the forward pass keeps for the backward pass."""
    room: int
    """Bytes for the logits of a few rows, on a CPU alone: memory that is kept from step to step."""
    moments: Mapping[str, int]
    """Bytes on top of the state, and of what FSDP gathers, when a step is fullest."""

    @property
    def state(self) -> int:
        """Bytes between two steps, whatever the batch."""
        return self.weights + self.optimizer + self.room + (self.gradients if self.kept else 0)

    @property
    def least(self) -> int:
        """Bytes of a step, whatever the batch: the optimizer sees weights, gradients and averages together."""
        return self.weights + self.optimizer + self.gradients

    @property
    def saved(self) -> int:
        """Bytes that a checkpoint copies into the host's memory."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.gathered + max(self.moments.values())


def memory(config: Any, train: TrainConfig, *, length: int, world_size: int, device: str = "cuda") -> Memory:
    """Return what one of `world_size` devices holds in a step; less with torch.compile, by what that fuses.

    Args:
        device: cuda or cpu.
    """
    kept = 2 if train.precision in {"bf16-true", "16-true"} else 4
    multiplied = 4 if train.precision == "32-true" else 2
    cast = multiplied if kept != multiplied else 0
    layers, tokens, count = range(config.n_layer), train.micro_batch * length, parameters(config)
    sharded = train.strategy == "fsdp" and world_size > 1
    share = -(-count // world_size) if sharded else count
    sizes = [block(config, layer).held for layer in layers]
    gathered = 0
    if sharded:
        # Two blocks or all of them, and the two tables, which stay gathered; gradients of one block and of the tables.
        here = 2 * max(sizes) if train.reshard_after_forward else sum(sizes)
        gathered = multiplied * (here + 2 * table(config)) + 4 * (max(sizes) + 2 * table(config))
    # Per token, what waits for the backward pass: of each block, and what enters the last norm.
    whole = [_layer_bytes(config, layer, length, multiplied=multiplied, kept=kept) for layer in layers]
    entry = int(kept * config.n_embd)
    stored = sum(whole) + entry
    if train.activation_checkpointing != "none":
        stored = int(config.n_layer + 1) * entry
    if train.activation_checkpointing == "selective":
        stored += sum(_product_bytes(config, layer, length, multiplied=multiplied) for layer in layers)
    # training.loss at its fullest: the last norm's output, both gradients and a chunk of logits, in float32.
    narrow = multiplied if multiplied < 4 else 0  # the logits' gradient, and gradients of narrow weights, again
    capped = 8 if config.final_logit_softcapping is not None else 0  # the cap's slope, as it is computed
    hidden = int(tokens * config.n_embd)
    logits = int(chunk_rows(tokens, config.padded_vocab_size, device=device) * config.padded_vocab_size)
    room = 4 * logits if device == "cpu" else 0
    loss = hidden * kept + (hidden + table(config)) * (4 + max(cast, narrow)) + logits * (4 + max(narrow, capped))
    # Weights in the type that they are multiplied in, where that is not their own.
    copies = 0 if sharded else cast * sum(sizes)
    # The gradient on its way from block to block, twice, and all of one block where it is recomputed.
    recomputed = 0 if train.activation_checkpointing == "none" else tokens * max(whole)
    begins = 2 * tokens * config.n_embd * kept + recomputed
    accumulates = world_size > 1 or train.accumulation(world_size) > 1
    return Memory(
        weights=kept * share,
        optimizer=2 * kept * share,
        gathered=gathered,
        gradients=kept * share,
        kept=accumulates,
        activations=tokens * stored,
        room=room,
        moments={
            "loss": copies + tokens * stored + loss - room,
            "first block of the backward pass": tokens * stored + begins + (0 if accumulates else kept * table(config)),
            "last block of the backward pass": begins + (0 if accumulates else kept * share),
        },
    )


def _layer_bytes(config: Any, layer: int, length: int, *, multiplied: int, kept: int) -> int:
    """Return what autograd keeps of one block, per token: inputs of norms, products, attention, nonlinearities."""
    width = config.n_embd
    rms = config.norm_class_name == "RMSNorm"
    # A norm keeps what enters it, LitGPT's RMSNorm its scaled values too; what leaves is kept by the product behind it.
    norm = multiplied * width + (4 * width if rms else 0)
    # The residual stream between the two halves is kept apart where the second half has to wait for the first.
    found = kept * width * (1 if config.parallel_residual else 2)
    found += (config.norm_1 + (config.norm_2 and not config.shared_attention_norm)) * norm
    found += (config.post_attention_norm + config.post_mlp_norm) * (multiplied * width + (8 * width if rms else 0))
    if config.latent_attention:
        products = config.n_head * (2 * config.qk_head_dim + 2 * config.v_head_dim)
        found += multiplied * (products + 2 * (config.q_lora_rank + config.kv_lora_rank)) + 4 * config.n_head
    else:
        queries, keys = config.n_head * config.head_size, config.n_query_groups * config.head_size
        # Queries and keys after rotation, values, what comes out. Values are a view of the product unless they are
        # repeated, and so keep all of it.
        values = 3 * queries if keys == queries else queries
        found += multiplied * (3 * queries + values) + 4 * config.n_head
        if config.attention_logit_softcapping is not None:
            # No fused attention then: the scores themselves are there, capped, as probabilities, and those once more.
            found += config.n_head * length * (2 * multiplied + 4)
        if config.norm_qk:
            found += 4 * (queries + keys) * (2 if rms else 1)
    if _has_experts(config, layer):
        shared = (config.n_shared_expert or 0) * (config.moe_intermediate_size or 0)
        each = 2 * width + 4 * (config.moe_intermediate_size or config.intermediate_size)
        return int(found + multiplied * int(config.n_expert_per_token * each + 4 * shared))
    ways = 2 if config.mlp_class_name == "GptNeoxMLP" else 4
    return int(found + multiplied * int(ways * config.intermediate_size))


def _product_bytes(config: Any, layer: int, length: int, *, multiplied: int) -> int:
    """Return the outputs of the products and the attention of one block, per token."""
    if config.latent_attention:
        attention = config.n_head * (2 * config.qk_head_dim + 2 * config.v_head_dim)
    else:
        attention = (2 * config.n_head + 2 * config.n_query_groups) * config.head_size
    if config.attention_logit_softcapping is not None:
        attention += config.n_head * length
    ways_in = 1 if config.mlp_class_name == "GptNeoxMLP" else 2
    size = config.intermediate_size
    times = 1
    if _has_experts(config, layer):
        size, times = config.moe_intermediate_size or size, config.n_expert_per_token
    products = attention + config.n_embd + times * (ways_in * size + config.n_embd)
    return int(multiplied * products + 4 * config.n_head)
