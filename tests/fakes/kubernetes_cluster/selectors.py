"""Label and field selectors, as strings of a query and as objects of a spec."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ApiError
from .store import Object, labels_of

_SET = re.compile(r"\s*(?P<key>[^\s!=,()]+)\s+(?P<operator>in|notin)\s*\((?P<values>[^)]*)\)\s*")
_FIELDS = {"metadata.name", "metadata.namespace", "spec.nodeName", "status.phase", "involvedObject.name",
           "involvedObject.kind", "involvedObject.uid", "involvedObject.namespace", "reason", "type",
           "spec.unschedulable", "source", "reportingComponent"}  # fmt: skip
Test = Callable[[Object], bool]


def selected(labels: str | None, fields: str | None) -> Test:
    """A test of objects.

    Raises:
        ApiError: A selector cannot be read, or asks for a field that the API does not index.
    """
    tests = [_label(one) for one in _split(labels or "")] + [_field(one) for one in _split(fields or "")]
    return lambda thing: all(test(thing) for test in tests)


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector of a spec; none selects nothing, an empty one everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(expression(one, labels) for one in selector.get("matchExpressions") or [])


def expression(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """One matchExpression, of labels or of a node selector (Gt and Lt are the latter's)."""
    value, values = labels.get(one["key"]), one.get("values") or []
    match one["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(values[0])
        case "Lt":
            return value is not None and int(value) < int(values[0])
    raise ApiError(400, f"{one['operator']!r} is not a valid operator")


def _split(text: str) -> list[str]:
    return [one for one in (part.strip() for part in re.split(r",(?![^(]*\))", text)) if one]


def _label(text: str) -> Test:
    if match := _SET.fullmatch(text):
        key, values = match["key"], {one.strip() for one in match["values"].split(",")}
        inside = match["operator"] == "in"
        return lambda thing: (labels_of(thing).get(key) in values) == inside
    if "!=" in text:
        key, _, value = text.partition("!=")
        return lambda thing: labels_of(thing).get(key.strip()) != value.strip()
    if "=" in text:
        key, _, value = text.replace("==", "=").partition("=")
        return lambda thing: labels_of(thing).get(key.strip()) == value.strip()
    if text.startswith("!"):
        return lambda thing: text[1:] not in labels_of(thing)
    if " " in text:
        raise ApiError(400, f"unable to parse requirement: {text!r}")
    return lambda thing: text in labels_of(thing)


def _field(text: str) -> Test:
    negative = "!=" in text
    path, _, value = text.replace("!=", "=").replace("==", "=").partition("=")
    if path not in _FIELDS:
        raise ApiError(400, f'field label not supported: "{path}"')
    return lambda thing: (_at(thing, path) == value) != negative


def _at(thing: Mapping[str, Any], path: str) -> str:
    found: Any = thing
    for name in path.split("."):
        found = (found or {}).get(name)
    return "" if found is None else str(found)
