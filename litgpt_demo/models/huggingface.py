"""The architecture of `transformers` for a LitGPT model, and its config.json.

LitGPT's own weight maps (litgpt.scripts) rename the tensors. They write no config, choose by the model's name, and omit
output projections that Hugging Face's own checkpoints tie to the embedding. A model that was trained here has its own
projection. So the features of the model choose the family, and every tensor is renamed.

config.json is in the form of the Hub's files, which transformers 4 and 5 both read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from litgpt.config import Config
from litgpt.scripts import convert_hf_checkpoint as to_litgpt
from litgpt.scripts import convert_lit_checkpoint as to_transformers
from torch import Tensor

Fields = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
Rename: TypeAlias = Callable[[Tensors], Tensors]
"""A function from tensors of one block, by one library's names, to the same by another's."""


@dataclass(frozen=True)
class _WeightMap:
    """LitGPT's functions that rename tensors. Each fills its last but one argument from the last one."""

    to_transformers: Callable[[Config, Tensors, Tensors], None]
    to_litgpt: Callable[[Config, Fields, Fields, Tensors], None]
    """The first dict keeps the queries, keys and values of blocks that are not complete yet."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    architecture: str
    features: Fields
    """The features of its models that differ from _DEFAULT_FEATURES; a set lists several allowed values."""
    fields: Callable[[Config], Fields]
    """The fields of config.json besides those that every family has."""
    weights: _WeightMap
    known_as: Callable[[Config], str] = lambda config: config.name
    """The name by which the weight map detects the family, where it goes by names."""

    def matches(self, features: Fields) -> bool:
        for name, required in (_DEFAULT_FEATURES | self.features).items():
            allowed = required if isinstance(required, set) else {required}
            if features[name] not in allowed:
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    fields: Fields
    """config.json without token ids and dtype."""
    config: Config
    """LitGPT's, with the name by which the weight map detects the family."""
    weights: _WeightMap
    incomplete: Fields = field(default_factory=dict)
    """Queries, keys and values that `rename_back` has read and not yet joined."""

    def rename(self, tensors: Tensors) -> Tensors:
        """Return tensors of one block, by LitGPT's names, by transformers' names."""
        renamed: Tensors = {}
        if self.fields["model_type"] == "olmo2":
            # LitGPT's map for OLMo 2 expects another name of the norm after attention than LitGPT's model has.
            tensors = {name.replace("post_attention_norm", "norm_2"): tensor for name, tensor in tensors.items()}
        self.weights.to_transformers(self.config, renamed, tensors)
        return renamed

    def rename_back(self, tensors: Tensors) -> Tensors:
        """Return tensors of one block, by transformers' names, by LitGPT's; a KeyError for an unknown name."""
        # LitGPT ties an output projection that is not among the tensors to the embedding.
        renamed: Fields = {"lm_head.weight": None, "transformer.wte.weight": None}
        self.weights.to_litgpt(self.config, self.incomplete, renamed, tensors)
        return {name: tensor for name, tensor in renamed.items() if tensor is not None}


def huggingface_model(config: Config) -> HuggingFaceModel | None:
    """Return the model in Hugging Face's terms; None if no architecture of transformers computes the same."""
    features = _architecture_features(config)
    for model_type, family in _FAMILIES.items():
        if not family.matches(features):
            continue
        common = {
            "architectures": [family.architecture],
            "model_type": model_type,
            "vocab_size": config.padded_vocab_size,
            "max_position_embeddings": config.block_size,
            "hidden_size": config.n_embd,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "tie_word_embeddings": False,
            "use_cache": True,
        }
        return HuggingFaceModel(
            fields=common | family.fields(config),
            config=replace(config, name=family.known_as(config)),
            weights=family.weights,
        )
    return None


def _architecture_features(config: Config) -> Fields:
    name, whole_rotary = config.name, config.rope_n_elem == config.head_size
    windows = config.sliding_window_indices or () if config.sliding_window_size else ()
    grouped = config.n_expert_groups or config.n_shared_expert or config.first_k_dense_replace
    fields: Fields = vars(config)
    return fields | {
        "block": (config.norm_class_name, config.mlp_class_name),
        # LitGPT itself goes by these words in a model's name: they decide how it normalises.
        "gemma": "Gemma" in name,
        "olmo": "OLMo" in name and config.norm_class_name == "LayerNorm",
        "norms": (config.norm_1, config.norm_2, config.post_attention_norm, config.post_mlp_norm),
        "qk_norm": config.norm_qk_type if config.norm_qk else "",
        "square": config.head_size * config.n_head == config.n_embd,
        "queries": {1: "one", config.n_head: "own"}.get(config.n_query_groups, "groups"),
        "windows": _windows(list(windows)),
        "rope": _rope_scaling(config),
        "whole_rotary": whole_rotary,
        "two_ropes": config.rope_local_base_freq is not None,
        "ropes_by_windows": config.rope_indices in (None, config.sliding_window_indices),
        # Falcon has a norm for attention and another for the MLP, or one query group (or one for each head).
        "falcon_norms": not config.shared_attention_norm or config.n_query_groups in (1, config.n_head),
        "phi3": name.lower().startswith(("phi-3", "phi-4")) or not whole_rotary,
        "softcaps": (config.attention_logit_softcapping is not None, config.final_logit_softcapping is not None),
        "attention_scale": config.attention_scores_scalar not in (None, config.head_size),
        "latent_attention": config.latent_attention is not None,
        # True unless routing is plain: every expert may be chosen, by a softmax over the chosen ones.
        "grouped_experts": config.mlp_class_name == "LLaMAMoE" and bool(grouped or config.routed_scaling_factor != 1.0),
    }


def _windows(layers: list[int]) -> str:
    if not any(layers):
        return "none"
    return "all" if all(layers) else "some"


def _rope_scaling(config: Config) -> str:
    adjustments = set(config.rope_adjustments or ())
    condensed = config.rope_condense_ratio != 1
    llama3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
    if not adjustments:
        return "scaled" if condensed else "unscaled"
    if condensed or adjustments not in ({"factor"}, llama3):
        return "not of transformers"
    return "scaled"


_DEFAULT_FEATURES: Fields = {
    "gemma": False,
    "olmo": False,
    "norms": (True, True, False, False),
    "qk_norm": "",
    "lm_head_bias": False,
    "windows": "none",
    "rope": {"unscaled", "scaled"},
    "two_ropes": False,
    "rope_interleave": False,
    "softcaps": (False, False),
    "attention_scale": False,
    "latent_attention": False,
    "scale_embeddings": False,
    "grouped_experts": False,
}
_OLD: Fields = {"block": ("LayerNorm", "GptNeoxMLP"), "square": True}
_UNBIASED: Fields = {"bias": False, "attn_bias": False, "parallel_residual": False}
_LLAMA: Fields = _UNBIASED | {"block": ("RMSNorm", "LLaMAMLP"), "whole_rotary": True}
_LAYER_NORM: Fields = _UNBIASED | {"block": ("LayerNorm", "LLaMAMLP"), "square": True}
_EXPERTS: Fields = _LLAMA | {"block": ("RMSNorm", "LLaMAMoE")}
_GEMMA: Fields = _LLAMA | {
    "block": ("RMSNorm", "GemmaMLP"), "gemma": True, "scale_embeddings": True, "gelu_approximate": "tanh",
}  # fmt: skip
_LATER_GEMMA: Fields = _GEMMA | {
    "norms": (True, True, True, True),
    "windows": {"none", "some", "all"},
    "attention_scale": {True, False},
}


def _rope(config: Config) -> Fields:
    fields: Fields = {"rope_theta": float(config.rope_base)}
    adjusted = config.rope_adjustments
    if config.rope_condense_ratio != 1:
        fields["rope_scaling"] = {"rope_type": "linear", "factor": float(config.rope_condense_ratio)}
    if adjusted:
        fields["rope_scaling"] = {"rope_type": "linear", "factor": float(adjusted["factor"])}
        if "low_freq_factor" in adjusted:
            fields["rope_scaling"] |= {
                "rope_type": "llama3",
                "low_freq_factor": float(adjusted["low_freq_factor"]),
                "high_freq_factor": float(adjusted["high_freq_factor"]),
                "original_max_position_embeddings": adjusted["original_max_seq_len"],
            }
    return fields


def _gelu(config: Config) -> str:
    return "gelu" if config.gelu_approximate == "none" else "gelu_pytorch_tanh"


def _layer_norm_fields(config: Config, **more: Any) -> Fields:
    return {"hidden_act": _gelu(config), "layer_norm_eps": config.norm_eps, **more, **_rope(config)}


def _partly_rotated_fields(config: Config, **more: Any) -> Fields:
    groups, rotated = config.n_query_groups, config.rotary_percentage
    return _layer_norm_fields(
        config, num_key_value_heads=groups, partial_rotary_factor=rotated, qk_layernorm=False, **more
    )


def _falcon_fields(config: Config) -> Fields:
    return {
        "activation": _gelu(config),
        "ffn_hidden_size": config.intermediate_size,
        "layer_norm_epsilon": config.norm_eps,
        "alibi": False,
        "bias": False,
        "parallel_attn": True,
        "new_decoder_architecture": not config.shared_attention_norm,
        "multi_query": config.n_query_groups == 1,
        "num_kv_heads": config.n_query_groups,
        **_rope(config),
    }


def _llama_fields(config: Config, **more: Any) -> Fields:
    return {
        "num_key_value_heads": config.n_query_groups,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_bias": False,
        **_rope(config),
        **more,
    }


_gemma_fields = partial(_llama_fields, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh")


def _gemma2_fields(config: Config) -> Fields:
    windowed = config.sliding_window_indices or [0] * config.n_layer
    fields: Fields = _gemma_fields(config) | {
        "query_pre_attn_scalar": config.attention_scores_scalar or config.head_size,
        "attn_logit_softcapping": config.attention_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "sliding_window": config.sliding_window_size or config.block_size,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windowed],
    }
    if config.attention_logit_softcapping is not None:
        # transformers' default, sdpa, omits the cap of attention scores. It reads this name from a config.json, while
        # its argument `attn_implementation`, given or not, replaces a field of that name.
        fields["_attn_implementation"] = "eager"
    return fields


def _gemma3_fields(config: Config) -> Fields:
    return _gemma2_fields(config) | {"rope_local_base_freq": float(config.rope_local_base_freq or config.rope_base)}


def _gpt_neox_fields(config: Config) -> Fields:
    return _layer_norm_fields(
        config,
        rotary_pct=config.rotary_percentage,
        rotary_emb_base=config.rope_base,
        use_parallel_residual=config.parallel_residual,
        attention_bias=True,
    )


def _phi3_fields(config: Config) -> Fields:
    return _llama_fields(
        config,
        partial_rotary_factor=config.rotary_percentage,
        sliding_window=config.sliding_window_size if any(config.sliding_window_indices or ()) else None,
        pad_token_id=None,  # its default is 32000, which a smaller vocabulary does not have
    )


def _qwen3_moe_fields(config: Config) -> Fields:
    return _llama_fields(
        config,
        moe_intermediate_size=int(config.moe_intermediate_size or config.intermediate_size),
        num_experts=config.n_expert,
        num_experts_per_tok=config.n_expert_per_token,
        norm_topk_prob=True,  # a softmax over the chosen experts
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


def _mixtral_fields(config: Config) -> Fields:
    return _llama_fields(
        config,
        intermediate_size=int(config.moe_intermediate_size or config.intermediate_size),
        num_local_experts=config.n_expert,
        num_experts_per_tok=config.n_expert_per_token,
        sliding_window=None,
    )


# LitGPT's functions differ in their arguments.
_GPT_NEOX_WEIGHTS = _WeightMap(
    to_transformers.copy_weights_gpt_neox,
    lambda config, incomplete, made, tensors: to_litgpt.copy_weights_gpt_neox(config, made, tensors),
)
_FALCON_WEIGHTS = _WeightMap(
    to_transformers.copy_weights_falcon,
    lambda config, incomplete, made, tensors: to_litgpt.copy_weights_falcon(config, made, tensors),
)
_PHI_WEIGHTS = _WeightMap(to_transformers.copy_weights_phi, to_litgpt.copy_weights_phi)
_LLAMA_WEIGHTS = _WeightMap(to_transformers.copy_weights_llama, to_litgpt.copy_weights_hf_llama)
_QWEN3_WEIGHTS = _WeightMap(to_transformers.copy_weights_qwen_3, to_litgpt.copy_weights_qwen_3)
_GEMMA2_WEIGHTS = _WeightMap(
    partial(to_transformers.copy_weights_gemma_2, untie_weights=False),
    lambda config, incomplete, made, tensors: to_litgpt.copy_weights_gemma_2(incomplete, made, tensors),
)
_GEMMA3_WEIGHTS = _WeightMap(
    partial(to_transformers.copy_weights_gemma_3, untie_weights=False),
    lambda config, incomplete, made, tensors: to_litgpt.copy_weights_gemma_3(incomplete, made, tensors, config=config),
)

# By transformers' `model_type`, in the order in which they are tried: a Phi-3 has the features of a Llama too.
_FAMILIES = {
    "gpt_neox": _Family(
        architecture="GPTNeoXForCausalLM",
        features=_OLD | {"bias": True, "shared_attention_norm": False, "queries": "own"},
        fields=_gpt_neox_fields,
        weights=_GPT_NEOX_WEIGHTS,
    ),
    "phi": _Family(
        architecture="PhiForCausalLM",
        features=_OLD | {"bias": True, "parallel_residual": True, "shared_attention_norm": True, "lm_head_bias": True},
        fields=_partly_rotated_fields,
        weights=_PHI_WEIGHTS,
        known_as=lambda config: "phi-2",
    ),
    "falcon": _Family(
        architecture="FalconForCausalLM",
        features=_OLD | _UNBIASED | {"parallel_residual": True, "whole_rotary": True, "falcon_norms": True},
        fields=_falcon_fields,
        weights=_FALCON_WEIGHTS,
        # The larger ones have a norm for attention and another for the MLP.
        known_as=lambda config: "falcon-7b" if config.shared_attention_norm else "falcon-40b",
    ),
    "phi3": _Family(
        architecture="Phi3ForCausalLM",
        features=_LLAMA
        | {"windows": {"none", "all"}, "rope": "unscaled", "phi3": True, "square": True, "whole_rotary": {True, False}},
        fields=_phi3_fields,
        weights=_PHI_WEIGHTS,
        known_as=lambda config: "Phi-3",
    ),
    "llama": _Family(
        architecture="LlamaForCausalLM",
        features=_LLAMA,
        fields=partial(_llama_fields, mlp_bias=False),
        weights=_LLAMA_WEIGHTS,
    ),
    "mistral": _Family(
        architecture="MistralForCausalLM",
        features=_LLAMA | {"windows": "all"},
        fields=lambda config: _llama_fields(config, sliding_window=config.sliding_window_size),
        weights=_LLAMA_WEIGHTS,
    ),
    "qwen2": _Family(
        architecture="Qwen2ForCausalLM",
        features=_LLAMA | {"attn_bias": True},
        fields=partial(_llama_fields, use_sliding_window=False),
        weights=_WeightMap(to_transformers.copy_weights_qwen_2_5, to_litgpt.copy_weights_qwen_2_5),
    ),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM",
        features=_LLAMA | {"qk_norm": "default"},
        fields=partial(_llama_fields, use_sliding_window=False),
        weights=_QWEN3_WEIGHTS,
    ),
    "qwen3_moe": _Family(
        architecture="Qwen3MoeForCausalLM",
        features=_EXPERTS | {"qk_norm": "default"},
        fields=_qwen3_moe_fields,
        weights=_QWEN3_WEIGHTS,
    ),
    "mixtral": _Family(
        architecture="MixtralForCausalLM", features=_EXPERTS, fields=_mixtral_fields, weights=_LLAMA_WEIGHTS
    ),
    "stablelm": _Family(
        architecture="StableLmForCausalLM",
        features=_LAYER_NORM,
        fields=partial(_partly_rotated_fields, hidden_act="silu", use_qkv_bias=False, use_parallel_residual=False),
        weights=_LLAMA_WEIGHTS,
    ),
    "olmo": _Family(
        architecture="OlmoForCausalLM",
        features=_LAYER_NORM | {"olmo": True, "whole_rotary": True, "norm_eps": 1e-5},  # transformers' has no other
        fields=partial(_llama_fields, clip_qkv=None),
        weights=_LLAMA_WEIGHTS,
    ),
    "olmo2": _Family(
        architecture="Olmo2ForCausalLM",
        features=_LLAMA | {"qk_norm": "olmo2", "norms": (False, False, True, True), "square": True},
        fields=_llama_fields,
        weights=_WeightMap(to_transformers.copy_weights_olmo2, to_litgpt.copy_weights_olmo2),
    ),
    "gemma": _Family(architecture="GemmaForCausalLM", features=_GEMMA, fields=_gemma_fields, weights=_LLAMA_WEIGHTS),
    "gemma2": _Family(
        architecture="Gemma2ForCausalLM",
        features=_LATER_GEMMA | {"softcaps": {(False, False), (False, True), (True, False), (True, True)}},
        fields=_gemma2_fields,
        weights=_GEMMA2_WEIGHTS,
    ),
    "gemma3_text": _Family(
        architecture="Gemma3ForCausalLM",
        features=_LATER_GEMMA
        | {
            "softcaps": {(False, False), (False, True)},
            "qk_norm": "default",
            "two_ropes": {True, False},
            "ropes_by_windows": True,
        },
        fields=_gemma3_fields,
        weights=_GEMMA3_WEIGHTS,
    ),
}
