"""The architecture of `transformers` for a LitGPT model, and its config.json.

LitGPT's own weight maps (litgpt.scripts.convert_lit_checkpoint) rename the tensors. They write no config, choose by the
model's name, and leave out output projections that Hugging Face's own checkpoints tie to the embedding; a model that
was trained here has its own. So the choice is made by what the model is, and nothing is left out.

config.json is in the form that the Hub's files have, which transformers 4 and 5 both read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from litgpt.config import Config
from litgpt.scripts import convert_lit_checkpoint as maps

from litgpt_demo.export.weights import Rename, Tensors

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model in Hugging Face's terms."""

    architecture: str
    """Class in transformers."""
    fields: Fields
    """Return config.json without tokens and precision."""
    rename: Rename


@dataclass(frozen=True)
class _Family:
    architecture: str
    model_type: str
    fits: Callable[[Config], bool]
    fields: Callable[[Config], Fields]
    weights: Callable[..., None]
    """One of LitGPT's maps."""
    known_as: str = ""
    """A name by which that map knows the family, where it goes by names."""


def huggingface_model(config: Config) -> HuggingFaceModel | None:
    """The model in Hugging Face's terms; None where transformers has no architecture that computes the same."""
    family = next((family for family in _FAMILIES if family.fits(config)), None)
    if family is None:
        return None
    fields = {"architectures": [family.architecture], "model_type": family.model_type} | _sizes(config)
    return HuggingFaceModel(
        architecture=family.architecture,
        fields=fields | family.fields(config),
        rename=partial(_renamed, family, replace(config, name=family.known_as) if family.known_as else config),
    )


def _renamed(family: _Family, config: Config, tensors: Tensors) -> Tensors:
    renamed: Tensors = {}
    if family.model_type == "olmo2":
        # LitGPT's map back from OLMo 2 knows the norm after attention by a name that its model does not have.
        tensors = {name.replace("post_attention_norm", "norm_2"): tensor for name, tensor in tensors.items()}
    family.weights(config, renamed, tensors)
    return renamed


# --- what the families have in common ---------------------------------------------------------------------------------


def _sizes(config: Config) -> Fields:
    return {
        "vocab_size": config.padded_vocab_size,
        "max_position_embeddings": config.block_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "tie_word_embeddings": False,
        "use_cache": True,
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


def _rope(config: Config) -> Fields:
    scaling: Fields | None = None
    if config.rope_condense_ratio != 1:
        scaling = {"rope_type": "linear", "factor": float(config.rope_condense_ratio)}
    if adjusted := config.rope_adjustments:
        scaling = {"rope_type": "linear", "factor": float(adjusted["factor"])}
        if "low_freq_factor" in adjusted:
            scaling |= {
                "rope_type": "llama3",
                "low_freq_factor": float(adjusted["low_freq_factor"]),
                "high_freq_factor": float(adjusted["high_freq_factor"]),
                "original_max_position_embeddings": adjusted["original_max_seq_len"],
            }
    return {"rope_theta": float(config.rope_base)} | ({"rope_scaling": scaling} if scaling else {})


def _gelu(config: Config) -> str:
    return "gelu" if config.gelu_approximate == "none" else "gelu_pytorch_tanh"


def _layer_types(config: Config) -> list[str]:
    windowed = config.sliding_window_indices or [0] * config.n_layer
    return ["sliding_attention" if one else "full_attention" for one in windowed]


def _plain(config: Config) -> bool:
    """None of what only some families have."""
    return (
        config.attention_logit_softcapping is None
        and config.final_logit_softcapping is None
        and config.attention_scores_scalar in (None, config.head_size)
        and config.latent_attention is None
        and not (config.scale_embeddings or config.rope_interleave or config.norm_qk)
        and not (config.post_attention_norm or config.post_mlp_norm)
        and config.norm_1
        and config.norm_2
        and config.rope_local_base_freq is None
        and not _is(config, "Gemma")
    )


def _is(config: Config, word: str) -> bool:
    """LitGPT itself goes by these words in a model's name: they say how it normalises."""
    return word in config.name


def _scaling_is_known(config: Config) -> bool:
    """One way of scaling at most: transformers has no two at once."""
    return not config.rope_adjustments or (
        config.rope_condense_ratio == 1
        and set(config.rope_adjustments)
        in ({"factor"}, {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"})
    )


def _old_block(config: Config) -> bool:
    """LayerNorm, and one hidden layer with GELU."""
    return (
        (config.norm_class_name, config.mlp_class_name) == ("LayerNorm", "GptNeoxMLP")
        and config.head_size * config.n_head == config.n_embd
        and _plain(config)
        and _scaling_is_known(config)
        and config.sliding_window_size is None
        and not _is(config, "OLMo")
    )


def _llama_block(
    config: Config,
    *,
    mlp: str = "LLaMAMLP",
    norm: str = "RMSNorm",
    attn_bias: bool = False,
    windows: Sequence[str] = ("none",),
) -> bool:
    return (
        (config.norm_class_name, config.mlp_class_name, config.attn_bias) == (norm, mlp, attn_bias)
        and not (config.parallel_residual or config.bias or config.lm_head_bias)
        and _scaling_is_known(config)
        and _windows(config) in windows
    )


def _llama(config: Config, **block: Any) -> bool:
    experts = block.get("mlp") == "LLaMAMoE"
    return (
        _llama_block(config, **block)
        and _plain(config)
        and _whole_rotary(config)
        and not (experts and _grouped_experts(config))
    )


def _whole_rotary(config: Config) -> bool:
    return bool(config.rope_n_elem == config.head_size)


def _windows(config: Config) -> str:
    """Return which layers look back over a window only."""
    indices = config.sliding_window_indices if config.sliding_window_size else None
    return "none" if not indices or not any(indices) else "all" if all(indices) else "some"


def _grouped_experts(config: Config) -> bool:
    """Anything but: every expert may be chosen, by a softmax over those that are."""
    return bool(
        config.n_expert_groups
        or config.n_shared_expert
        or config.first_k_dense_replace
        or config.routed_scaling_factor != 1.0
    )


# --- the families, in the order in which they are tried ---------------------------------------------------------------


def _neox(config: Config) -> bool:
    return (
        _old_block(config)
        and config.bias
        and not (config.shared_attention_norm or config.lm_head_bias)
        and config.n_query_groups == config.n_head
    )


def _neox_fields(config: Config) -> Fields:
    return {
        "hidden_act": _gelu(config),
        "layer_norm_eps": config.norm_eps,
        "rotary_pct": config.rotary_percentage,
        "rotary_emb_base": config.rope_base,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": True,
        **_rope(config),
    }


def _phi(config: Config) -> bool:
    return (
        _old_block(config)
        and config.bias
        and config.parallel_residual
        and config.shared_attention_norm
        and config.lm_head_bias
    )


def _phi_fields(config: Config) -> Fields:
    return {
        "hidden_act": _gelu(config),
        "layer_norm_eps": config.norm_eps,
        "num_key_value_heads": config.n_query_groups,
        "partial_rotary_factor": config.rotary_percentage,
        "qk_layernorm": False,
        **_rope(config),
    }


def _falcon(config: Config) -> bool:
    return (
        _old_block(config)
        and not (config.bias or config.attn_bias or config.lm_head_bias)
        and config.parallel_residual
        and _whole_rotary(config)
        and (not config.shared_attention_norm or config.n_query_groups in (1, config.n_head))
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


def _falcon_weights(config: Config, renamed: Tensors, tensors: Tensors) -> None:
    # The map tells the two kinds of blocks by these names.
    name = "falcon-7b" if config.shared_attention_norm else "falcon-40b"
    maps.copy_weights_falcon(replace(config, name=name), renamed, tensors)


def _mistral_fields(config: Config) -> Fields:
    return _llama_fields(config, sliding_window=config.sliding_window_size)


def _phi3(config: Config) -> bool:
    named = config.name.lower().startswith(("phi-3", "phi-4"))
    return (
        _llama_block(config, windows=("none", "all"))
        and _plain(config)
        and not (config.rope_adjustments or config.rope_condense_ratio != 1)
        and (named or not _whole_rotary(config))
        and config.head_size * config.n_head == config.n_embd
    )


def _phi3_fields(config: Config) -> Fields:
    window = config.sliding_window_size if _windows(config) == "all" else None
    # Its default padding token is 32000, which a smaller vocabulary does not have.
    return _llama_fields(
        config, partial_rotary_factor=config.rotary_percentage, sliding_window=window, pad_token_id=None
    )


def _qwen3(config: Config, *, mlp: str) -> bool:
    return (config.norm_qk, config.norm_qk_type) == (True, "default") and _llama(
        replace(config, norm_qk=False), mlp=mlp
    )


def _expert_size(config: Config) -> int:
    return int(config.moe_intermediate_size or config.intermediate_size)


def _mixtral_fields(config: Config) -> Fields:
    return _llama_fields(
        config,
        intermediate_size=_expert_size(config),
        num_local_experts=config.n_expert,
        num_experts_per_tok=config.n_expert_per_token,
        sliding_window=None,
    )


def _qwen3_moe_fields(config: Config) -> Fields:
    return _llama_fields(
        config,
        moe_intermediate_size=_expert_size(config),
        num_experts=config.n_expert,
        num_experts_per_tok=config.n_expert_per_token,
        norm_topk_prob=True,  # what a softmax over the chosen experts is
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


def _stablelm(config: Config) -> bool:
    return (
        _llama_block(config, norm="LayerNorm")
        and _plain(config)
        and not _is(config, "OLMo")
        and config.head_size * config.n_head == config.n_embd
    )


def _stablelm_fields(config: Config) -> Fields:
    return {
        "hidden_act": "silu",
        "layer_norm_eps": config.norm_eps,
        "num_key_value_heads": config.n_query_groups,
        "partial_rotary_factor": config.rotary_percentage,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        **_rope(config),
    }


def _olmo(config: Config) -> bool:
    return (
        _llama(config, norm="LayerNorm")
        and _is(config, "OLMo")
        and config.norm_eps == 1e-5  # transformers' class has no other
        and config.head_size * config.n_head == config.n_embd
    )


def _olmo2(config: Config) -> bool:
    without = replace(config, norm_qk=False, post_attention_norm=False, post_mlp_norm=False, norm_1=True, norm_2=True)
    return (
        _llama(without)
        and (config.norm_qk, config.norm_qk_type) == (True, "olmo2")
        and config.post_attention_norm
        and config.post_mlp_norm
        and not (config.norm_1 or config.norm_2)
        and config.head_size * config.n_head == config.n_embd
    )


def _gemma(config: Config, *, version: int) -> bool:
    later = version > 1
    return (
        _llama_block(config, mlp="GemmaMLP", windows=("none",) if version == 1 else ("none", "some", "all"))
        and _is(config, "Gemma")
        and config.scale_embeddings
        and config.gelu_approximate == "tanh"
        and config.norm_1
        and config.norm_2
        and (config.post_attention_norm, config.post_mlp_norm) == (later, later)
        and (config.norm_qk, config.norm_qk_type) == (version == 3, "default")
        and not (config.rope_interleave or config.latent_attention)
        and _whole_rotary(config)
        and (later or _plain(replace(config, name="", scale_embeddings=False)))
        and (version == 3 or config.rope_local_base_freq is None)
        and (version == 2 or config.attention_logit_softcapping is None)
        and (version != 3 or config.rope_indices in (None, config.sliding_window_indices))
    )


def _gemma_fields(config: Config) -> Fields:
    gelu = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return _llama_fields(config, **gelu)


def _gemma2_fields(config: Config) -> Fields:
    return _gemma_fields(config) | {
        "query_pre_attn_scalar": config.attention_scores_scalar or config.head_size,
        "attn_logit_softcapping": config.attention_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "sliding_window": config.sliding_window_size or config.block_size,
        "layer_types": _layer_types(config),
    }


def _gemma3_fields(config: Config) -> Fields:
    local = config.rope_local_base_freq or config.rope_base
    return _gemma2_fields(config) | {"rope_local_base_freq": float(local)}


_FAMILIES = (
    _Family("GPTNeoXForCausalLM", "gpt_neox", _neox, _neox_fields, maps.copy_weights_gpt_neox),
    _Family("PhiForCausalLM", "phi", _phi, _phi_fields, maps.copy_weights_phi, "phi-2"),
    _Family("FalconForCausalLM", "falcon", _falcon, _falcon_fields, _falcon_weights),
    _Family("Phi3ForCausalLM", "phi3", _phi3, _phi3_fields, maps.copy_weights_phi, "Phi-3"),
    _Family("LlamaForCausalLM", "llama", _llama, partial(_llama_fields, mlp_bias=False), maps.copy_weights_llama),
    _Family(
        "MistralForCausalLM", "mistral", partial(_llama, windows=("all",)), _mistral_fields, maps.copy_weights_llama
    ),
    _Family(
        "Qwen2ForCausalLM",
        "qwen2",
        partial(_llama, attn_bias=True),
        partial(_llama_fields, use_sliding_window=False),
        maps.copy_weights_qwen_2_5,
    ),
    _Family(
        "Qwen3ForCausalLM",
        "qwen3",
        partial(_qwen3, mlp="LLaMAMLP"),
        partial(_llama_fields, use_sliding_window=False),
        maps.copy_weights_qwen_3,
    ),
    _Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", partial(_qwen3, mlp="LLaMAMoE"), _qwen3_moe_fields, maps.copy_weights_qwen_3
    ),
    _Family("MixtralForCausalLM", "mixtral", partial(_llama, mlp="LLaMAMoE"), _mixtral_fields, maps.copy_weights_llama),
    _Family("StableLmForCausalLM", "stablelm", _stablelm, _stablelm_fields, maps.copy_weights_llama),
    _Family("OlmoForCausalLM", "olmo", _olmo, partial(_llama_fields, clip_qkv=None), maps.copy_weights_llama),
    _Family("Olmo2ForCausalLM", "olmo2", _olmo2, _llama_fields, maps.copy_weights_olmo2),
    _Family("GemmaForCausalLM", "gemma", partial(_gemma, version=1), _gemma_fields, maps.copy_weights_llama),
    _Family(
        "Gemma2ForCausalLM",
        "gemma2",
        partial(_gemma, version=2),
        _gemma2_fields,
        partial(maps.copy_weights_gemma_2, untie_weights=False),
    ),
    _Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        partial(_gemma, version=3),
        _gemma3_fields,
        partial(maps.copy_weights_gemma_3, untie_weights=False),
    ),
)
