"""The base of everything a user can write, and the kinds of values that it is made of.

Every model is frozen and refuses unknown keys, because a misspelt key that is silently ignored costs a training.
The docstring under a field is its help text: in the Prefect form, in the JSON schema, in error messages.
"""

from __future__ import annotations

import json
import math
import re
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
)


def complete_fields(schema: dict[str, Any]) -> None:
    """Say what Prefect's form needs of each field besides what pydantic says.

    It sorts by `position`, because Postgres keeps no key order. A field that is a section has no title of its own. A
    union that may also be empty would be one nameless branch, and a union's tag a text to write into: the form knows
    `enum` and not `const`.
    """
    for position, (name, field) in enumerate(schema.get("properties", {}).items()):
        field["position"] = position
        field.setdefault("title", name.replace("_", " ").title())
        if "const" in field:
            field["enum"] = [field["const"]]
            field.setdefault("description", "The name of this choice in a config.")
        if "anyOf" in field:
            field["anyOf"] = [leaf for branch in field["anyOf"] for leaf in branch.get("oneOf", [branch])]


class Settings(BaseModel):
    """Base of everything a user can write."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, json_schema_extra=complete_fields
    )


def key_of(*inputs: BaseModel | JsonValue) -> str:
    """A short hash of the inputs that decide an output: same inputs, same key, same place, same job name."""
    plain = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in inputs]
    return sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:10]


def slug(text: str, limit: int = 40) -> str:
    """`text` as part of a path, a job name and an artifact key at once: lower-case letters, digits, single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:limit].strip("-")


def _whole_number(value: object) -> object:
    """Accept 20e9 and "20e9" where a count is meant: YAML 1.1 reads the bare word as a string."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(_whole_number)]
# Where None is allowed too, pydantic writes a bound on the whole field as `gt`, which no JSON schema validator knows.
PositiveCount = Annotated[int, Field(gt=0), BeforeValidator(_whole_number)]


def _duration(value: object) -> object:
    """Accept 8h, 90m, 30s and 2d besides what pydantic does: seconds, "08:00:00" and ISO 8601's "PT8H"."""
    written = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", value) if isinstance(value, str) else None
    return value if written is None else float(written[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[written[2]]


def _some_time(value: timedelta) -> timedelta:
    if value <= timedelta():
        raise ValueError(f"a time of {value} is none; give one above 0, such as 8h, or leave it out")
    return value


# Prefect's server checks by the schema alone, and pydantic's own has strings of ISO 8601 only.
_DURATION_SCHEMA = {"anyOf": [{"title": "Time", "type": "string"}, {"title": "Seconds", "type": "number"}]}
Duration = Annotated[
    timedelta, BeforeValidator(_duration), AfterValidator(_some_time), WithJsonSchema(_DURATION_SCHEMA)
]


def formerly(**words: bool) -> BeforeValidator:
    """Accept the switch, true or false, that a choice between words once was."""
    return BeforeValidator(lambda value: next((word for word, old in words.items() if value is old), value))


def Kind(name: str) -> Any:  # noqa: N802 (reads as the type of the field it makes)
    """The tag of a union's branch: required, so that `{}` fits no branch, yet filled in by Prefect's form."""
    return Field(json_schema_extra={"default": name})
