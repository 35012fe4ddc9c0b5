"""The environment and the command of a container, as the kubelet makes them of the pod's spec."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .quantities import amount
from .store import Object, Store

_REFERENCE = re.compile(r"\$\$|\$\((?P<name>[^()$\s]+)\)")
_KEYED = re.compile(r"metadata\.(?P<map>labels|annotations)\['(?P<key>[^']+)'\]")


class ConfigProblem(Exception):
    """What the container refers to is not there (CreateContainerConfigError)."""


def expand(text: str, known: Mapping[str, str]) -> str:
    """`$(NAME)` by its value, `$$` by `$`; what is not known stays as it is written."""
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else known.get(found["name"], found[0]), text)


def environment(container: Mapping[str, Any], pod: Object, store: Store, services: Mapping[str, str]) -> dict[str, str]:
    """The variables that the spec gives, in order, so that later ones may refer to earlier ones.

    Raises:
        ConfigProblem: A ConfigMap, Secret or one of their keys is missing.
    """
    found = dict(services)
    for source in container.get("envFrom") or []:
        for kind, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if reference := source.get(kind):
                for key, value in _data(plural, reference, pod, store).items():
                    found[source.get("prefix", "") + key] = value
    for variable in container.get("env") or []:
        if "valueFrom" not in variable:
            found[variable["name"]] = expand(variable.get("value", ""), found)
            continue
        value = _value_from(variable["valueFrom"], container, pod, store)
        if value is not None:
            found[variable["name"]] = value
    return found


def command(container: Mapping[str, Any], known: Mapping[str, str]) -> list[str]:
    """The command line; empty where it is the image's own."""
    if not container.get("command"):
        return []
    return [expand(one, known) for one in (*container["command"], *(container.get("args") or []))]


def _value_from(source: Mapping[str, Any], container: Mapping[str, Any], pod: Object, store: Store) -> str | None:
    if reference := source.get("fieldRef"):
        return field(pod, reference["fieldPath"])
    if reference := source.get("resourceFieldRef"):
        kind, _, resource = reference["resource"].partition(".")
        given = (container.get("resources", {}).get(kind) or {}).get(resource)
        return "0" if given is None else f"{-(-amount(given) // amount(reference.get('divisor') or 1)):.0f}"
    for kind, plural in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
        if reference := source.get(kind):
            data = _data(plural, reference, pod, store)
            if reference["key"] not in data and not reference.get("optional"):
                what = KINDS_OF[plural]
                raise ConfigProblem(
                    f"couldn't find key {reference['key']} in {what} {pod['metadata']['namespace']}/{reference['name']}"
                )
            return data.get(reference["key"])
    raise ConfigProblem(f"{sorted(source)} is not known to this kubelet")


KINDS_OF = {"configmaps": "ConfigMap", "secrets": "Secret"}


def field(pod: Object, path: str) -> str:
    """A field of the downward API.

    Raises:
        ConfigProblem: There is no such field.
    """
    meta, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    if match := _KEYED.fullmatch(path):
        return str((meta.get(match["map"]) or {}).get(match["key"], ""))
    known = {
        "metadata.name": meta["name"], "metadata.namespace": meta["namespace"], "metadata.uid": meta["uid"],
        "spec.nodeName": spec.get("nodeName", ""), "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": status.get("podIP", ""), "status.podIPs": status.get("podIP", ""),
        "status.hostIP": status.get("hostIP", ""), "status.hostIPs": status.get("hostIP", ""),
    }  # fmt: skip
    if path not in known:
        raise ConfigProblem(f"unsupported fieldPath: {path}")
    return str(known[path])


def _data(plural: str, reference: Mapping[str, Any], pod: Object, store: Store) -> dict[str, str]:
    found = store.get(plural, pod["metadata"]["namespace"], reference["name"])
    if found is None:
        if reference.get("optional"):
            return {}
        raise ConfigProblem(f'{KINDS_OF[plural].lower()} "{reference["name"]}" not found')
    return contents(found)


def contents(thing: Mapping[str, Any]) -> dict[str, str]:
    """What a ConfigMap or Secret holds, decoded."""
    plain: Sequence[tuple[str, str]] = [*(thing.get("stringData") or {}).items()]
    data = thing.get("data") or {}
    if thing["kind"] == "Secret":
        data = {key: base64.b64decode(value).decode() for key, value in data.items()}
    return {**data, **dict(plain)}
