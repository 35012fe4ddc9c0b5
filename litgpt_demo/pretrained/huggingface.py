"""Hugging Face's models in LitGPT's terms. Imports torch and transformers, which knows what a config.json leaves out.

The families are those that are exported (litgpt_demo.export.huggingface): what is read is the form that is written, and
LitGPT's own maps rename the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from litgpt.config import Config

from litgpt_demo.export.huggingface import Fields, huggingface_model
from litgpt_demo.models import catalogue

# How many ids and how long a text is told apart; what is said of positions, transformers 5 gathers in rope_parameters.
_APART = frozenset(
    {"vocab_size", "max_position_embeddings", "tie_word_embeddings", "use_cache", "architectures"}
    | {"rope_theta", "rope_scaling", "rope_local_base_freq", "rotary_pct", "rotary_emb_base", "partial_rotary_factor"}
)


def catalogued(config_json: Mapping[str, Any], address: str) -> str | None:
    """Return the name of LitGPT's model with this config.json, the one that is called so first; None without one."""
    called = address.partition("@")[0].rstrip("/").rpartition("/")[2]
    names = sorted(catalogue.models(), key=lambda name: name != called)
    return next(
        (name for name in names if next(config_differences(catalogue.models()[name], config_json), None) is None), None
    )


def config_differences(fields: Mapping[str, Any], config_json: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a config.json is of another model than LitGPT's Config fields; `has 12 …, and the model 6`."""
    model = huggingface_model(Config(**fields))
    if model is None:
        yield "is read as an architecture of transformers, and none computes what the model does"
        return
    if (found := config_json["model_type"]) != model.fields["model_type"]:
        yield f"has model_type={found}, and the model {model.fields['model_type']}"
        return
    ours, theirs = _completed(model.fields), _completed(config_json)
    for name in [*model.fields, "rope_parameters"]:
        if name not in _APART and ours.get(name) != theirs.get(name):
            yield f"has {name}={theirs.get(name)}, and the model {ours.get(name)}"


def ties(config_json: Mapping[str, Any]) -> bool:
    """Return True if the output projection is the embedding, so that files may leave it out."""
    return bool(_completed(config_json)["tie_word_embeddings"])


def _completed(fields: Mapping[str, Any]) -> Fields:
    """Return all that transformers makes of a config.json."""
    from transformers import AutoConfig

    plain = {name: value for name, value in fields.items() if name not in {"model_type", "transformers_version"}}
    completed: Fields = AutoConfig.for_model(fields["model_type"], **plain).to_dict()
    return completed
