"""Does an object have the shape that the API knows? Kubernetes' own OpenAPI schemas, and the CRD of JobSet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

JOBSET_CRD = Path(__file__).parents[2] / "schemas" / "jobset.x-k8s.io_jobsets.yaml"
# The emulated cluster's own release; what we send is older still.
KUBERNETES = "1.36"
_SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{KUBERNETES}.0-local-strict"
Validator = jsonschema.protocols.Validator


def shape_troubles(thing: Mapping[str, Any]) -> list[str]:
    """Unknown fields and wrong types, by path. Kinds without a schema here (Kueue's, GKE's networks) pass."""
    validator = _validator(thing["kind"], thing["apiVersion"])
    return sorted(_lines(validator.iter_errors(thing))) if validator else []


@cache
def _validator(kind: str, api_version: str) -> Validator | None:
    if (kind, api_version) == ("JobSet", "jobset.x-k8s.io/v1alpha2"):
        return jsonschema.Draft202012Validator(_jobset_schema())
    group, _, version = api_version.rpartition("/")
    file = _SCHEMAS / "-".join(filter(None, (kind.lower(), group.partition(".")[0], f"{version}.json")))
    if not file.is_file():
        return None
    return jsonschema.Draft202012Validator(json.loads(file.read_text()), registry=_definitions())


@cache
def _definitions() -> Registry:
    return Resource.from_contents(json.loads((_SCHEMAS / "_definitions.json").read_text())) @ Registry()


@cache
def _jobset_schema() -> dict[str, Any]:
    crd = yaml.load(JOBSET_CRD.read_text(), yaml.CSafeLoader)
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    _close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _close(schema: dict[str, Any]) -> None:
    """As the API server reads it: fields that are not listed are not known."""
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema.pop("anyOf", None)
        schema.pop("pattern", None)
        schema["type"] = ["integer", "string", "number"]
    schema.pop("format", None)
    open_to_all = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("properties") and not open_to_all:
        schema["additionalProperties"] = False
    for child in _children(schema):
        _close(child)


def _children(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from schema.get("properties", {}).values()
    yield from (schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict))


def _lines(errors: Iterator[jsonschema.ValidationError]) -> Iterator[str]:
    for error in errors:
        where = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in error.absolute_path).lstrip(".")
        if error.validator == "additionalProperties":
            known = set(error.schema.get("properties", {}))
            for name in sorted(set(error.instance) - known):
                yield f'strict decoding error: unknown field "{where}.{name}"'.replace('"."', '"').replace('".', '"')
        else:
            yield f"{where}: {error.message[:300]}"
