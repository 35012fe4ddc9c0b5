"""The architecture of `transformers` for a LitGPT model, and its config.json.

LitGPT's own weight maps (litgpt.scripts.convert_lit_checkpoint) rename the tensors. They write no config, choose by the
model's name, and leave out output projections that Hugging Face's own checkpoints tie to the embedding; a model that
was trained here has its own. So the choice is made by what the model is, and nothing is left out.

config.json is in the form that the Hub's files have, which transformers 4 and 5 both read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from litgpt.config import Config
from litgpt.scripts import convert_hf_checkpoint as maps_back
from litgpt.scripts import convert_lit_checkpoint as maps
from torch import Tensor

Fields = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
Rename: TypeAlias = Callable[[Tensors], Tensors]
"""A function from tensors of one block, by one library's names, to the same by another's."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model in Hugging Face's terms."""

    fields: Fields
    """config.json without token ids and dtype."""
    rename: Rename
    """From LitGPT's names to transformers'."""
    back: Rename
    """From transformers' names to LitGPT's; a KeyError where a name is none of this architecture's."""


@dataclass(frozen=True)
class _Family:
    architecture: str
    model_type: str
    traits: Fields
    """What `_traits` has to say of the model, where it is not _PLAIN; a set holds several values that will do."""
    fields: Callable[[Config], Fields]
    weights: Callable[..., None]
    """One of LitGPT's maps."""
    known_as: str = ""
    """A name by which that map knows the family, where it goes by names."""


def huggingface_model(config: Config) -> HuggingFaceModel | None:
    """The model in Hugging Face's terms; None where transformers has no architecture that computes the same."""
    traits = _traits(config)
    for family in _FAMILIES:
        wanted = _PLAIN | family.traits
        if all(traits[name] in (one if isinstance(one, set) else {one}) for name, one in wanted.items()):
            break
    else:
        return None

    def rename(tensors: Tensors) -> Tensors:
        renamed: Tensors = {}
        if family.model_type == "olmo2":
            # LitGPT's map back from OLMo 2 knows the norm after attention by a name that its model does not have.
            tensors = {name.replace("post_attention_norm", "norm_2"): tensor for name, tensor in tensors.items()}
        family.weights(known, renamed, tensors)
        return renamed

    def back(tensors: Tensors) -> Tensors:
        # LitGPT takes an output projection that is not among the tensors for one that is tied to the embedding.
        renamed: Fields = {"lm_head.weight": None, "transformer.wte.weight": None}
        way_back(state_dict=renamed, hf_weights=tensors, **{one: given[one] for one in given if one in needs})
        return {name: tensor for name, tensor in renamed.items() if tensor is not None}

    known = replace(config, name=family.known_as or config.name)
    map_name: str = getattr(family.weights, "func", family.weights).__name__  # of a partial one, what it calls
    way_back: Callable[..., None] = getattr(maps_back, map_name.replace("_llama", "_hf_llama"))
    given: Fields = {"config": known, "qkv_weights": {}}
    needs = inspect.signature(way_back).parameters

    sizes = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.padded_vocab_size,
        "max_position_embeddings": config.block_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    fields = sizes | family.fields(config)
    return HuggingFaceModel(fields=fields, rename=rename, back=back)


def _traits(config: Config) -> Fields:
    """All that one architecture computes and another does not: the config's fields, and what follows from several."""
    adjustments = set(config.rope_adjustments or ())
    llama3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
    rope = "scaled" if adjustments or config.rope_condense_ratio != 1 else "unscaled"
    if adjustments and (config.rope_condense_ratio != 1 or adjustments not in ({"factor"}, llama3)):
        rope = "scaled in two ways"  # which transformers has not
    name, whole_rotary = config.name, config.rope_n_elem == config.head_size
    windows = config.sliding_window_indices or () if config.sliding_window_size else ()
    grouped = config.n_expert_groups or config.n_shared_expert or config.first_k_dense_replace
    fields: Fields = vars(config)
    return fields | {
        "block": (config.norm_class_name, config.mlp_class_name),
        # LitGPT itself goes by these words in a model's name: they say how it normalises.
        "gemma": "Gemma" in name,
        "olmo": "OLMo" in name and config.norm_class_name == "LayerNorm",
        "norms": (config.norm_1, config.norm_2, config.post_attention_norm, config.post_mlp_norm),
        "qk_norm": config.norm_qk_type if config.norm_qk else "",
        "square": config.head_size * config.n_head == config.n_embd,
        "queries": {1: "one", config.n_head: "own"}.get(config.n_query_groups, "groups"),
        "windows": "none" if not any(windows) else "all" if all(windows) else "some",
        "rope": rope,
        "whole_rotary": whole_rotary,
        "two_ropes": config.rope_local_base_freq is not None,
        "ropes_by_windows": config.rope_indices in (None, config.sliding_window_indices),
        "phi3": name.lower().startswith(("phi-3", "phi-4")) or not whole_rotary,
        "softcaps": (config.attention_logit_softcapping is not None, config.final_logit_softcapping is not None),
        "attention_scale": config.attention_scores_scalar not in (None, config.head_size),
        "latent_attention": config.latent_attention is not None,
        # Anything but: every expert may be chosen, by a softmax over those that are.
        "grouped_experts": config.mlp_class_name == "LLaMAMoE" and bool(grouped or config.routed_scaling_factor != 1.0),
    }


_PLAIN: Fields = {
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
    # transformers' own choice, sdpa, leaves the cap of attention scores out. Of a config.json it reads this name, while
    # its argument `attn_implementation`, given or not, takes the place of a field of that name.
    eager = {"_attn_implementation": "eager"} if config.attention_logit_softcapping is not None else {}
    return (
        _gemma_fields(config)
        | eager
        | {
            "query_pre_attn_scalar": config.attention_scores_scalar or config.head_size,
            "attn_logit_softcapping": config.attention_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "sliding_window": config.sliding_window_size or config.block_size,
            "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        }
    )


_FAMILIES = (  # in the order in which they are tried
    _Family(
        "GPTNeoXForCausalLM", "gpt_neox",
        _OLD | {"bias": True, "shared_attention_norm": False, "queries": "own"},
        lambda config: _layer_norm_fields(
            config, rotary_pct=config.rotary_percentage, rotary_emb_base=config.rope_base,
            use_parallel_residual=config.parallel_residual, attention_bias=True,
        ),
        maps.copy_weights_gpt_neox,
    ),
    _Family(
        "PhiForCausalLM", "phi",
        _OLD | {"bias": True, "parallel_residual": True, "shared_attention_norm": True, "lm_head_bias": True},
        _partly_rotated_fields, maps.copy_weights_phi, "phi-2",
    ),
    _Family(
        "FalconForCausalLM", "falcon",
        _OLD | _UNBIASED | {"parallel_residual": True, "whole_rotary": True, "shared_attention_norm": False},
        _falcon_fields, maps.copy_weights_falcon, "falcon-40b",  # the map tells its two kinds by these names
    ),
    _Family(
        "FalconForCausalLM", "falcon",
        _OLD | _UNBIASED | {"parallel_residual": True, "whole_rotary": True, "queries": {"one", "own"}},
        _falcon_fields, maps.copy_weights_falcon, "falcon-7b",
    ),
    _Family(
        "Phi3ForCausalLM", "phi3",
        _LLAMA | {
            "windows": {"none", "all"}, "rope": "unscaled", "phi3": True, "square": True, "whole_rotary": {True, False},
        },
        lambda config: _llama_fields(
            config, partial_rotary_factor=config.rotary_percentage,
            sliding_window=config.sliding_window_size if any(config.sliding_window_indices or ()) else None,
            pad_token_id=None,  # its default is 32000, which a smaller vocabulary does not have
        ),
        maps.copy_weights_phi, "Phi-3",
    ),
    _Family("LlamaForCausalLM", "llama", _LLAMA, partial(_llama_fields, mlp_bias=False), maps.copy_weights_llama),
    _Family(
        "MistralForCausalLM", "mistral", _LLAMA | {"windows": "all"},
        lambda config: _llama_fields(config, sliding_window=config.sliding_window_size), maps.copy_weights_llama,
    ),
    _Family(
        "Qwen2ForCausalLM", "qwen2", _LLAMA | {"attn_bias": True},
        partial(_llama_fields, use_sliding_window=False), maps.copy_weights_qwen_2_5,
    ),
    _Family(
        "Qwen3ForCausalLM", "qwen3", _LLAMA | {"qk_norm": "default"},
        partial(_llama_fields, use_sliding_window=False), maps.copy_weights_qwen_3,
    ),
    _Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", _EXPERTS | {"qk_norm": "default"},
        lambda config: _llama_fields(
            config,
            moe_intermediate_size=int(config.moe_intermediate_size or config.intermediate_size),
            num_experts=config.n_expert, num_experts_per_tok=config.n_expert_per_token,
            norm_topk_prob=True,  # what a softmax over the chosen experts is
            decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False,
        ),
        maps.copy_weights_qwen_3,
    ),
    _Family(
        "MixtralForCausalLM", "mixtral", _EXPERTS,
        lambda config: _llama_fields(
            config,
            intermediate_size=int(config.moe_intermediate_size or config.intermediate_size),
            num_local_experts=config.n_expert, num_experts_per_tok=config.n_expert_per_token, sliding_window=None,
        ),
        maps.copy_weights_llama,
    ),
    _Family(
        "StableLmForCausalLM", "stablelm", _LAYER_NORM,
        partial(_partly_rotated_fields, hidden_act="silu", use_qkv_bias=False, use_parallel_residual=False),
        maps.copy_weights_llama,
    ),
    _Family(
        "OlmoForCausalLM", "olmo",
        _LAYER_NORM | {"olmo": True, "whole_rotary": True, "norm_eps": 1e-5},  # transformers' class has no other
        partial(_llama_fields, clip_qkv=None), maps.copy_weights_llama,
    ),
    _Family(
        "Olmo2ForCausalLM", "olmo2",
        _LLAMA | {"qk_norm": "olmo2", "norms": (False, False, True, True), "square": True},
        _llama_fields, maps.copy_weights_olmo2,
    ),
    _Family("GemmaForCausalLM", "gemma", _GEMMA, _gemma_fields, maps.copy_weights_llama),
    _Family(
        "Gemma2ForCausalLM", "gemma2",
        _LATER_GEMMA | {"softcaps": {(False, False), (False, True), (True, False), (True, True)}},
        _gemma2_fields, partial(maps.copy_weights_gemma_2, untie_weights=False),
    ),
    _Family(
        "Gemma3ForCausalLM", "gemma3_text",
        _LATER_GEMMA | {
            "softcaps": {(False, False), (False, True)}, "qk_norm": "default", "two_ropes": {True, False},
            "ropes_by_windows": True,
        },
        lambda config: _gemma2_fields(config)
        | {"rope_local_base_freq": float(config.rope_local_base_freq or config.rope_base)},
        partial(maps.copy_weights_gemma_3, untie_weights=False),
    ),
)  # fmt: skip
