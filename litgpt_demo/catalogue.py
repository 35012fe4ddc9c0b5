"""LitGPT's models by name, read without importing torch, and two more of the sample that this program follows."""

from __future__ import annotations

import difflib
import importlib.util
import math
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

# GoogleCloudPlatform/ai-infra-cluster-provisioning, sample_workloads/lit-gpt-demo, "Add New Model Configurations".
OURS: dict[str, dict[str, Any]] = {
    "transformer-100b": {"block_size": 2048, "n_layer": 55, "n_embd": 12288, "n_head": 96, "padding_multiple": 128},
    "transformer-175b": {"block_size": 2048, "n_layer": 96, "n_embd": 12288, "n_head": 96, "padding_multiple": 128},
}


@cache
def _litgpt_config() -> ModuleType:
    """Import `litgpt/config.py` only, in 0.1 s. `import litgpt` takes 9 s on two cores, for torch and lightning."""
    package = importlib.util.find_spec("litgpt")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("litgpt is not installed: pip install litgpt==0.5.13", name="litgpt")
    path = Path(package.submodule_search_locations[0]) / "config.py"
    spec = importlib.util.spec_from_file_location("_litgpt_config_alone", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@cache
def models() -> Mapping[str, dict[str, Any]]:
    """Return the fields of LitGPT's Config of each known model, by its name."""
    known = {str(name): fields for name, fields in _litgpt_config().name_to_config.items()}
    return known | {name: {"name": name, **fields} for name, fields in OURS.items()}


_MAY_BE_ZERO = frozenset({"n_expert", "n_expert_per_token", "n_shared_expert", "first_k_dense_replace"})
"""Counts that may be 0; every other whole number of LitGPT's Config is a size."""


def settings(name: str | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of LitGPT's Config of a model with `changes`; without a name, only the changes.

    A ValueError if the model or a field does not exist, or LitGPT's Config refuses the combination.
    """
    config_class = _litgpt_config().Config
    known = list(config_class.__dataclass_fields__)
    unknown = sorted(set(changes) - set(known))
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"LitGPT's Config has {', '.join(known)}"
        raise ValueError(f"model.config has unknown fields {unknown}; {hint}")
    if name is not None and name not in models():
        near = difflib.get_close_matches(name, models(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "`litgpt download list` prints the catalogue"
        raise ValueError(f"model.name={name!r} is not a LitGPT model; {hint}")
    if name is None and not {"n_layer", "n_embd", "n_head"} <= set(changes):
        raise ValueError("model.name is empty: name one, or give at least n_layer, n_embd and n_head in model.config")
    # LitGPT's Config accepts values that no model can be made of, such as text for a number or a size below 1.
    hints = get_type_hints(config_class)
    for field, value in changes.items():
        try:
            TypeAdapter(hints[field]).validate_python(value, strict=True)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].lower()
            raise ValueError(f"model.config.{field}={value!r} does not fit: {expected}") from error
        least = 0 if field in _MAY_BE_ZERO else 1
        if int in (hints[field], *get_args(hints[field])) and value is not None and value < least:
            raise ValueError(f"model.config.{field}={value} is too small; give at least {least}")
    fields = dict(changes) if name is None else {**models()[name], **changes}
    try:
        config_class(**fields)
    except (AssertionError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = str(error) or "n_embd must be a multiple of n_head, and n_head a multiple of n_query_groups"
        if name is not None and changes:
            reason += f"; it changes {name}: {changed(name, changes)}; model.config={{}} takes it unchanged"
        raise ValueError(
            f"model.config={dict(changes)} on {name or 'an empty model'} is not a valid LitGPT Config: {reason}"
        ) from error
    return fields


def changed(name: str, changes: Mapping[str, Any]) -> str:
    """Return the sizes of a model that `changes` change, as `n_layer 6→4, …`; empty if there are none."""
    named = _litgpt_config().Config(**models()[name])
    sizes = []
    for field, value in changes.items():
        if field.startswith("n_") and getattr(named, field) != value:
            sizes.append(f"{field} {getattr(named, field)}→{value}")
    return ", ".join(sizes)


def padded_vocabulary(name: str | None, changes: Mapping[str, Any]) -> int | None:
    """Return the rows of the embedding table; None if the model has the vocabulary of the tokenizer."""
    fields = settings(name, changes)
    if name is None and not {"vocab_size", "padded_vocab_size"} & set(changes):
        return None
    return int(_litgpt_config().Config(**fields).padded_vocab_size)


def fields_of(
    name: str | None, changes: Mapping[str, Any], *, sequence_length: int, vocab_size: int | None
) -> dict[str, Any]:
    """Return the arguments of LitGPT's Config for a model, including those that come from the data."""
    fields = settings(name, changes)
    if padded_vocabulary(name, changes) is None:
        fields = {"name": "custom", "padding_multiple": 64} | fields | {"vocab_size": vocab_size}
    return {"block_size": sequence_length} | fields


def config_of(name: str | None, changes: Mapping[str, Any], *, sequence_length: int, vocab_size: int | None) -> Any:
    """Return LitGPT's Config of a model, without importing torch."""
    fields = fields_of(name, changes, sequence_length=sequence_length, vocab_size=vocab_size)
    return _litgpt_config().Config(**fields)


OF_WEIGHTS = "take the tokenizer of the weights that model.init_from names: they have no embeddings for more ids"


def vocabulary_problem(
    name: str | None, changes: Mapping[str, Any], *, vocab_size: int | None, has_weights: bool = False
) -> tuple[str, str] | None:
    """Return a problem and its fix if a tokenizer has more ids than the model has embeddings; else None.

    With `has_weights`, the model starts from weights and must have their embeddings.
    """
    rows = padded_vocabulary(name, changes)
    if rows is None or vocab_size is None or vocab_size <= rows:
        return None
    wider = f", or set model.config.padded_vocab_size={math.ceil(vocab_size / 64) * 64}"
    fix = OF_WEIGHTS if has_weights else f"take a tokenizer that fits{wider}"
    return f"the tokenizer has {vocab_size} ids, but model {name or 'config'} has {rows} embeddings", fix
