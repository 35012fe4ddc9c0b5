"""The environment and the command of a container, as the kubelet makes them of the pod's spec."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from .store import Object, Store

_REFERENCE = re.compile(r"\$\$|\$\((?P<name>[^()$\s]+)\)")
_KEYED = re.compile(r"metadata\.(?P<map>labels|annotations)\['(?P<key>[^']+)'\]")


class ConfigProblem(Exception):
    """What the container refers to is not there (CreateContainerConfigError)."""


def expand(text: str, known: Mapping[str, str]) -> str:
    """`$(NAME)` by its value, `$$` by `$`; what is not known stays as it is written."""
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else known.get(found["name"], found[0]), text)


def environment(container: Mapping[str, Any], pod: Object, store: Store) -> dict[str, str]:
    """The variables that the spec gives, in order, so that later ones may refer to earlier ones.

    Raises:
        ConfigProblem: A Secret or a key of it is missing.
    """
    found: dict[str, str] = {}
    for variable in container.get("env") or []:
        source = variable.get("valueFrom")
        if source is None:
            found[variable["name"]] = expand(variable.get("value", ""), found)
        elif reference := source.get("fieldRef"):
            found[variable["name"]] = field(pod, reference["fieldPath"])
        else:
            found[variable["name"]] = _secret(source["secretKeyRef"], pod["metadata"]["namespace"], store)
    return found


def command(container: Mapping[str, Any], known: Mapping[str, str]) -> list[str]:
    """The command line; empty where it is the image's own."""
    if not container.get("command"):
        return []
    return [expand(one, known) for one in (*container["command"], *(container.get("args") or []))]


def _secret(reference: Mapping[str, Any], namespace: str, store: Store) -> str:
    found = store.get("secrets", namespace, reference["name"])
    if found is None:
        raise ConfigProblem(f'secret "{reference["name"]}" not found')
    if reference["key"] not in found.get("data", {}):
        raise ConfigProblem(f"couldn't find key {reference['key']} in Secret {namespace}/{reference['name']}")
    return base64.b64decode(found["data"][reference["key"]]).decode()


def field(pod: Object, path: str) -> str:
    """A field of the downward API."""
    meta, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    if match := _KEYED.fullmatch(path):
        return str((meta.get(match["map"]) or {}).get(match["key"], ""))
    known = {
        "metadata.name": meta["name"], "metadata.namespace": meta["namespace"], "metadata.uid": meta["uid"],
        "spec.nodeName": spec.get("nodeName", ""), "status.podIP": status.get("podIP", ""),
        "status.hostIP": status.get("hostIP", ""),
    }  # fmt: skip
    return str(known[path])
