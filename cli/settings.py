"""Every setting by its dotted name, with its default and the sentence under it: what `train-litgpt settings` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from litgpt_demo.config import Settings


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One thing a user can write."""

    name: str
    """Dotted, as an override names it."""
    default: str
    """The default as JSON, which YAML reads; empty where a value is required."""
    text: str
    """The docstring under the field; for a section's `kind`, what that kind of section is."""


def settings_of(model: type[Settings], prefix: str = "", whole: Any = None) -> Iterator[Setting]:
    """The settings of a model and of the sections below it, in the order of the form.

    A section that comes in several kinds lists each, headed by its `kind`; one that may be left out is one itself.

    Args:
        whole: the default of the whole section, which may have other values than the section's own.
    """
    for name in model.model_json_schema()["properties"]:
        field = model.model_fields[name]
        value = getattr(whole, name) if isinstance(whole, model) else field.default
        dotted, sections = f"{prefix}{name}", list(_sections(field.annotation))
        if name == "kind":
            yield Setting(name=dotted, default=get_args(field.annotation)[0], text=_one_line(model.__doc__))
        elif not sections or value is None:
            default = "" if value is PydanticUndefined else json.dumps(value, ensure_ascii=False)
            yield Setting(name=dotted, default=default, text=_one_line(field.description))
        for section in sections:
            yield from settings_of(section, f"{dotted}.", value)


def _sections(annotation: Any) -> Iterator[type[Settings]]:
    """The settings models in an annotation: one for a section, several for a union of them."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    elif get_origin(annotation) is not None:
        for part in get_args(annotation):
            yield from _sections(part)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
