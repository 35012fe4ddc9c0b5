"""The environment of a container, as the kubelet makes it of the pod's spec."""

import re
from collections.abc import Mapping
from typing import Any

from .store import Object

_REFERENCE = re.compile(r"\$\$|\$\((?P<name>[^()$\s]+)\)")


def expand(text: str, known: Mapping[str, str]) -> str:
    """`$(NAME)` by its value, `$$` by `$`; what is not known stays as it is written."""
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else known.get(found["name"], found[0]), text)


def environment(container: Mapping[str, Any], pod: Object) -> dict[str, str]:
    """The variables that the spec gives, in order, so that later ones may refer to earlier ones."""
    found: dict[str, str] = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
            part, name = path.split(".") if keyed is None else ("metadata", keyed[1])
            value = pod[part][name] if keyed is None else pod[part][name].get(keyed[2], "")
        else:
            value = expand(variable.get("value", ""), found)
        found[variable["name"]] = value
    return found
