"""Label and field selectors, as strings of a query and as node selectors of a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import ApiError
from .store import Object, labels_of

_FIELDS = {"metadata.name", "metadata.namespace", "spec.nodeName", "status.phase", "involvedObject.name"}
Test = Callable[[Object], bool]


def selected(labels: str | None, fields: str | None) -> Test:
    """A test of objects.

    Raises:
        ApiError: A selector asks for a field that the API does not index.
    """
    tests = [_label(one) for one in (labels or "").split(",") if one]
    tests += [_field(one) for one in (fields or "").split(",") if one]
    return lambda thing: all(test(thing) for test in tests)


def expression(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """One matchExpression of a node selector."""
    value, values = labels.get(one["key"]), one.get("values") or []
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }[one["operator"]]


def _label(text: str) -> Test:
    key, equals, value = text.replace("==", "=").partition("=")
    return lambda thing: labels_of(thing).get(key) == value if equals else key in labels_of(thing)


def _field(text: str) -> Test:
    path, _, value = text.partition("=")
    if path not in _FIELDS:
        raise ApiError(400, f'field label not supported: "{path}"')
    return lambda thing: _at(thing, path) == value


def _at(thing: Mapping[str, Any], path: str) -> str:
    found: Any = thing
    for name in path.split("."):
        found = (found or {}).get(name)
    return "" if found is None else str(found)
