"""The cost of a training, only from LitGPT's config fields: parameters, arithmetic per token, memory per device.

Nothing is built and torch is not imported, so that a model of 175 billion parameters is answered for at once.

Sources: parameters follow litgpt.model (0.5.13) layer by layer. The arithmetic is Chowdhery et al. 2022 (PaLM,
https://arxiv.org/abs/2204.02311, appendix B): 6 per weight that a token is multiplied with, forward and backward, and
12 x heads x head size x length per layer for attention, the causal half not taken off; nothing for what activation
checkpointing computes twice. Memory is what autograd keeps of each layer in models.model.LossGPT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from litgpt_demo.config import TrainConfig
from litgpt_demo.optimizers import optimizer_of


class ParamCount(NamedTuple):
    total: int
    active: int
    """Those that each token is multiplied with."""
    matrices: int
    """Those in matrices, without routers: `optimizers.block_matrices` of the block."""
    largest_matrix: int


def _norm(config: Any) -> int:
    if config.norm_class_name == "RMSNorm":
        return 1
    return 0 if "OLMo" in config.name else 2


def _inputs(config: Any) -> int:
    """Return the number of products that widen the input of an MLP: a gated one has two."""
    return 1 if config.mlp_class_name == "GptNeoxMLP" else 2


def _has_experts(config: Any, layer: int) -> bool:
    return config.mlp_class_name == "LLaMAMoE" and layer >= (config.first_k_dense_replace or 0)


def block(config: Any, layer: int) -> ParamCount:
    width, heads, bias = config.n_embd, config.n_head, config.bias
    has_second = config.norm_2 and not config.shared_attention_norm
    total = _norm(config) * width * (config.norm_1 + has_second + config.post_attention_norm + config.post_mlp_norm)
    # The products, as inputs, outputs and whether there is a bias.
    if config.latent_attention:
        total += config.q_lora_rank + config.kv_lora_rank
        products = [
            (width, config.q_lora_rank, config.attn_bias),
            (config.q_lora_rank, heads * config.qk_head_dim, bias),
            (width, config.kv_lora_rank + config.qk_rope_head_dim, config.attn_bias),
            (config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias),
            (heads * config.v_head_dim, width, bias),
        ]
    else:
        queries, keys = heads * config.head_size, config.n_query_groups * config.head_size
        products = [(width, queries + 2 * keys, bias or config.attn_bias), (queries, width, bias)]
        if config.norm_qk:
            each_head = config.norm_qk_type == "default"
            total += _norm(config) * (2 * config.head_size if each_head else queries + keys)

    def mlp(size: int) -> list[tuple[int, int, bool]]:
        return [(size, width, bias), *[(width, size, bias)] * _inputs(config)]

    experts, router = list[tuple[int, int, bool]](), 0
    if _has_experts(config, layer):
        experts = mlp(config.moe_intermediate_size or config.intermediate_size)
        router = width * config.n_expert
        products.append((width, config.n_expert, False))
        if config.n_shared_expert:
            products += mlp(config.moe_intermediate_size * config.n_shared_expert)
    else:
        products += mlp(config.intermediate_size)
    return ParamCount(
        total + _sizes(products, biases=True) + (config.n_expert or 0) * _sizes(experts, biases=True),
        _sizes(products) + (config.n_expert_per_token or 0) * _sizes(experts),
        _sizes(products) + (config.n_expert or 0) * _sizes(experts) - router,
        max(inputs * outputs for inputs, outputs, _ in products + experts),
    )


def _sizes(products: Iterable[tuple[int, int, bool]], *, biases: bool = False) -> int:
    return sum(outputs * (inputs + (biases and bias)) for inputs, outputs, bias in products)


def table(config: Any) -> int:
    """Weights of the embedding; the output projection has as many, which LitGPT does not share with it."""
    return int(config.padded_vocab_size * config.n_embd)


def parameters(config: Any) -> int:
    """The parameters of the whole model, experts that a token does not see included."""
    blocks = sum(block(config, layer).total for layer in range(config.n_layer))
    head = config.padded_vocab_size if config.lm_head_bias else 0
    return int(blocks + 2 * table(config) + head + _norm(config) * config.n_embd)


def used_parameters(config: Any) -> int:
    """Weights in the matrix products that one token passes through: no embedding, for that is a look-up."""
    return sum(block(config, layer).active for layer in range(config.n_layer)) + table(config)


def attention_flops(config: Any, length: int) -> int:
    """Per token, in all layers, of scores and weighted values. A window that is shorter than the sample counts."""
    if config.latent_attention:
        width = config.n_head * (config.qk_head_dim + config.v_head_dim)
    else:
        width = 2 * config.n_head * config.head_size
    context = 0  # tokens that the layers look back on
    for layer in range(config.n_layer):
        context += min(length, config.sliding_window_size) if has_window(config, layer) else length
    return int(6 * width * context)


def has_window(config: Any, layer: int) -> bool:
    return config.sliding_window_size is not None and bool(config.sliding_window_indices[layer])


def flops_per_token(config: Any, length: int) -> int:
    """The operations per token of training: forward and backward."""
    return 6 * used_parameters(config) + attention_flops(config, length)


def update_flops(config: Any, train: TrainConfig) -> int:
    """The operations of an optimizer's matrix products in one step, of all devices that share a copy of the model."""
    numbers = sum(block(config, layer).matrices for layer in range(config.n_layer))
    return int(optimizer_of(train).flops_per_matrix_number * config.n_embd * numbers)


# Rows x vocabulary x 4 bytes of logits that one matrix product makes. On a CPU, many rows read the weights less often,
# and the softmax takes as few at a time as a core's own cache holds; on a GPU enough to fill it.
CHUNK_BYTES = {"cpu": 100 << 20, "cuda": 1 << 30}
_BLOCK_BYTES = 2 << 20


def chunk_rows(count: int, vocabulary: int, *, device: str) -> int:
    """Rows of logits to hold at once: `count` of them in as few equal parts as keep to CHUNK_BYTES."""
    at_most = max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * vocabulary))
    return -(-count // -(-count // at_most))


def block_rows(rows: int, vocabulary: int, *, device: str) -> int:
    """Rows of a chunk whose softmax is computed at once."""
    return rows if device != "cpu" else min(rows, max(1, _BLOCK_BYTES // (4 * vocabulary)))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by their purpose."""

    weights: int
    optimizer: int
    average: int
    """The moving average of the weights, in float32; 0 without one."""
    unsharded: int
    """Weights of other devices that FSDP gathers, and their gradients before they are scattered."""
    gradients: int
    gradients_persist: bool
    """Whether gradients are kept between steps: batches are accumulated, or ranks reduce theirs in buckets."""
    activations: int
    """Bytes that the forward pass keeps for the backward pass."""
    workspace: int
    """Bytes for the logits of a few rows. Only a CPU keeps them from step to step."""
    peak_phases: Mapping[str, int]
    """Bytes on top of the state and of `unsharded`, in each phase of a step that may be the fullest."""

    @property
    def state(self) -> int:
        """Bytes between two steps, whatever the batch."""
        gradients = self.gradients if self.gradients_persist else 0
        return self.weights + self.optimizer + self.average + self.workspace + gradients

    @property
    def min_bytes(self) -> int:
        """Bytes of a step, whatever the batch: its update needs weights, gradients and optimizer state."""
        return self.weights + self.optimizer + self.average + self.gradients

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that a checkpoint copies into the host's memory."""
        return self.weights + self.optimizer + self.average

    @property
    def total(self) -> int:
        return self.state + self.unsharded + max(self.peak_phases.values())


def memory(
    config: Any, train: TrainConfig, *, length: int, world_size: int, nodes: int = 1, device: str = "cuda"
) -> Memory:
    """Return what one of `world_size` devices, cuda or cpu, holds in a step; torch.compile needs less."""
    # Bytes of a number: as a weight is stored, and as it is multiplied.
    stored = 2 if train.precision in {"bf16-true", "16-true"} else 4
    multiplied = 4 if train.precision == "32-true" else 2
    cast = multiplied if stored != multiplied else 0

    tokens = train.micro_batch * length
    layers = range(config.n_layer)
    counts = [block(config, layer) for layer in layers]
    sizes = [count.total for count in counts]
    shard_degree = train.shard_degree(nodes, world_size // nodes)
    weights = stored * -(-parameters(config) // shard_degree)
    matrices = stored * -(-sum(count.matrices for count in counts) // shard_degree)

    unsharded = 0
    if shard_degree > 1:
        # Two blocks or all of them, and the two tables, which stay gathered; gradients of one block and of the tables.
        blocks = 2 * max(sizes) if train.reshard_after_forward else sum(sizes)
        unsharded = (stored if device == "cpu" else multiplied) * (blocks + 2 * table(config))
        unsharded += 4 * (max(sizes) + 2 * table(config))

    # Per token, what waits for the backward pass: of each block, and what enters the last norm.
    kept_of_blocks = [_kept_of_block(config, layer, length, multiplied=multiplied, stored=stored) for layer in layers]
    everything, products = zip(*kept_of_blocks, strict=True)
    entry = int(stored * config.n_embd)
    kept = {
        "none": sum(everything) + entry,
        "selective": int(config.n_layer + 1) * entry + sum(products),
        "full": int(config.n_layer + 1) * entry,
    }[train.activation_checkpointing]
    mask_numbers, making = _mask_numbers(config, train, length=length), 0
    if device != "cpu" and train.compile != "none" and config.attention_logit_softcapping is None:
        # FlexAttention keeps a few numbers for each block of scores, but they are made of all scores: of a boolean and
        # of a sum in 64 bits for each, with torch 2.13 (measured on a CPU: 10 bytes).
        mask_numbers, making = 0, 10 * mask_numbers
    mask = multiplied * mask_numbers
    activations = tokens * kept + mask

    # The loss (models.loss) at its fullest: the last norm's output, both gradients, a chunk of logits as they are
    # multiplied, and a block of it in float32.
    narrow = multiplied if multiplied < 4 else 0  # the logits' gradient, and gradients of narrow weights, again
    capped = 8 if config.final_logit_softcapping is not None else 0  # the cap's slope, as it is computed
    hidden = int(tokens * config.n_embd)
    rows = chunk_rows(tokens, config.padded_vocab_size, device=device)
    chunk = int(rows * config.padded_vocab_size)
    block_size = int(block_rows(rows, config.padded_vocab_size, device=device) * config.padded_vocab_size)
    logits = chunk * (narrow or 4) + block_size * (capped + (4 if narrow else 0))
    workspace = chunk * (narrow or 4) if device == "cpu" else 0
    loss = hidden * stored + (hidden + table(config)) * (4 + max(cast, narrow)) + logits

    # Weights in the type that they are multiplied in, where that is not their own.
    copies = 0 if shard_degree > 1 else cast * sum(sizes)
    # The gradient on its way from block to block, twice, and all of one block where it is recomputed.
    recomputed = 0 if train.activation_checkpointing == "none" else tokens * max(everything)
    backward = 2 * tokens * config.n_embd * stored + recomputed
    first_gradients, last_gradients = stored * table(config), weights
    gradients_persist = world_size > 1 or train.gradient_accumulation_steps(world_size) > 1
    if gradients_persist:  # the state has them
        first_gradients = last_gradients = 0
    update = optimizer_of(train).matrix_copies * max(count.largest_matrix for count in counts)
    return Memory(
        weights=weights,
        optimizer=optimizer_of(train).state_bytes(weights, matrices),
        average=4 * weights // stored if train.weight_average else 0,
        unsharded=unsharded,
        gradients=weights,
        gradients_persist=gradients_persist,
        activations=activations,
        workspace=workspace,
        peak_phases={
            "making of masks": making,
            "loss": copies + activations + loss - workspace,
            "first block of the backward pass": activations + backward + first_gradients,
            "last block of the backward pass": backward + mask + last_gradients,
            "update": (4 if device == "cpu" else 2) * update + last_gradients,
        },
    )


def network_bytes_per_step(config: Any, train: TrainConfig, *, world_size: int, nodes: int) -> float:
    """Return the bytes that each node sends over the network in a step, as rings move them."""
    count, updates = parameters(config), 0
    if train.optimizer == "muon":  # in 16 bits: ddp sends updates, fsdp also the directions that they are made of
        updates = 2 * sum(block(config, layer).matrices for layer in range(config.n_layer))
    if train.strategy == "hybrid":  # the ranks of a node divide the matrices
        updates = 0
    if train.strategy != "fsdp":  # the sum of float32 gradients over the nodes, once
        return (2 * 4 * count + updates) * (nodes - 1) / nodes
    passes = train.gradient_accumulation_steps(world_size)
    gathered = 4 if train.precision == "32-true" else 2
    if train.reshard_after_forward:
        gathered *= 2
    return (passes * (gathered + 4) * count + 2 * updates) * (world_size - 1) / world_size


def _mask_numbers(config: Any, train: TrainConfig, *, length: int) -> int:
    """Return the numbers of the masks of a pass (models.attention), which all layers of one kind share."""
    capped = config.attention_logit_softcapping is not None
    masks = {has_window(config, layer) and config.sliding_window_size < length for layer in range(config.n_layer)}
    if train.attention == "documents":
        return len(masks) * train.micro_batch * length**2
    if not capped:
        masks.discard(False)  # causal attention needs none
    return len(masks) * length**2


def _kept_of_block(config: Any, layer: int, length: int, *, multiplied: int, stored: int) -> tuple[int, int]:
    """Return the bytes per token that autograd keeps of one block: inputs of norms, products, attention and
    nonlinearities; and only those of the products' and the attention's outputs."""
    width, rms = config.n_embd, config.norm_class_name == "RMSNorm"
    # A norm keeps what enters it, LitGPT's RMSNorm its scaled values too; what leaves is kept by the product behind it.
    norm = multiplied * width + (4 * width if rms else 0)
    # The residual stream between the two halves is kept apart where the second half has to wait for the first.
    total = stored * width * (1 if config.parallel_residual else 2) + 4 * config.n_head
    total += (config.norm_1 + (config.norm_2 and not config.shared_attention_norm)) * norm
    total += (config.post_attention_norm + config.post_mlp_norm) * (multiplied * width + (8 * width if rms else 0))
    if config.latent_attention:
        attended = config.n_head * (2 * config.qk_head_dim + 2 * config.v_head_dim)
        total += multiplied * (attended + 2 * (config.q_lora_rank + config.kv_lora_rank))
    else:
        queries, keys = config.n_head * config.head_size, config.n_query_groups * config.head_size
        attended = 2 * queries + 2 * keys
        # Queries and keys after rotation, what comes out, and the product: values are a view of it, and keep all of it.
        total += multiplied * 3 * (queries + keys)
        if config.norm_qk:
            total += 4 * (queries + keys) * (2 if rms else 1)
    if config.attention_logit_softcapping is not None:
        # No fused attention then: the scores themselves are there, capped, as probabilities, and those once more.
        total += config.n_head * length * (2 * multiplied + 4)
        attended += config.n_head * length
    size, times, inner = config.intermediate_size, 1, 2 * _inputs(config) * config.intermediate_size
    if _has_experts(config, layer):
        size, times = config.moe_intermediate_size or size, config.n_expert_per_token
        shared = (config.n_shared_expert or 0) * (config.moe_intermediate_size or 0)
        inner = times * (2 * width + 4 * size) + 4 * shared
    products = attended + width + times * (_inputs(config) * size + width)
    return int(total + multiplied * inner), int(multiplied * products + 4 * config.n_head)
