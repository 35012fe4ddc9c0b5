"""YAML as people write it. A key given twice is refused: YAML forbids it, and PyYAML takes the last in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml


class DuplicateKeys(yaml.YAMLError):
    """Some keys are given twice in one mapping; the message names each with both of its lines."""


def load_yaml(text: str) -> Any:
    """Return the value that a YAML text stands for; None for an empty one.

    Raises:
        DuplicateKeys: all of them at once.
        yaml.YAMLError: the text is not YAML.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if twice := list(_duplicates(root, "", set())):
            raise DuplicateKeys("; ".join(twice) + ": keep one of them")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _duplicates(node: yaml.Node, name: str, seen: set[int]) -> Iterator[str]:
    """Yield every key below a node that its mapping has already. An anchored node is looked at once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _duplicates(item, f"{name}[{number}]", seen)
    if not isinstance(node, yaml.MappingNode):
        return
    given: dict[tuple[str, str], yaml.ScalarNode] = {}
    for key, value in node.value:
        # `<<` is no key: several of them merge several mappings.
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        dotted = f"{name}.{key.value}" if name else key.value
        first = given.setdefault((key.tag, key.value), key)
        if first is not key:
            yield f"{dotted} is given in line {first.start_mark.line + 1} and again in line {key.start_mark.line + 1}"
        yield from _duplicates(value, dotted, seen)
