"""Does an object have the shape that the API knows? Kubernetes' own OpenAPI schemas, and the CRD of JobSet."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

JOBSET_CRD = Path(__file__).parents[2] / "schemas" / "jobset.x-k8s.io_jobsets.yaml"
# Of the emulated cluster's own release; what we send is older still.
_SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema" / "v1.36.0-local-strict"


def shape_troubles(thing: Mapping[str, Any]) -> list[str]:
    """Unknown fields and wrong types, by path. Kinds without a schema here (Kueue's, GKE's networks) pass."""
    errors = _validator(thing["kind"], thing["apiVersion"]).iter_errors(thing)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors)


@cache
def _validator(kind: str, api_version: str) -> Any:
    group, _, version = api_version.rpartition("/")
    file = _SCHEMAS / "-".join(filter(None, (kind.lower(), group.partition(".")[0], f"{version}.json")))
    schema = _jobset_schema() if kind == "JobSet" else json.loads(file.read_text()) if file.is_file() else {}
    return jsonschema.Draft202012Validator(schema, registry=_definitions())


@cache
def _definitions() -> Registry:
    return Resource.from_contents(json.loads((_SCHEMAS / "_definitions.json").read_text())) @ Registry()


def _jobset_schema() -> dict[str, Any]:
    schema = yaml.load(JOBSET_CRD.read_text(), yaml.CSafeLoader)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    _close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return dict(schema)


def _close(schema: dict[str, Any]) -> None:
    """As the API server reads it: fields that are not listed are not known."""
    if schema.pop("x-kubernetes-int-or-string", False):
        for rule in ("anyOf", "pattern"):
            schema.pop(rule, None)
        schema["type"] = ["integer", "string"]
    schema.pop("format", None)
    listed = schema.get("properties", {})
    if listed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    for child in (*listed.values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(child, dict):
            _close(child)
