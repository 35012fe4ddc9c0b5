"""YAML as users write it: read with bounds, and with the mistakes that people make explained."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import ConfigProblem

_LARGEST = 1_000_000
"""Bytes of a config, and values in it once its aliases are expanded; the largest shipped config has 3,000 and 60."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigProblem for anything else."""
    try:
        with path.open("rb") as file:  # a pipe has no size that could be read first
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ConfigProblem(f"{path} has more than {_LARGEST:,} bytes, so it is not a config; give a config file")
        document = load_yaml(content.decode())
    except FileNotFoundError as error:
        folders = "deployments/configs, platform files in deployments/configs/platforms"
        raise ConfigProblem(f"{path} does not exist; shipped configs are in {folders}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigProblem(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigProblem(f"{path} has no settings; write `name: …`, `train: …` and so on")
    return document


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, with two readings of numbers from YAML 1.2: 010 is ten and not eight, and 8:00 is
    text (a duration in hours and minutes) and not 480."""

    def number(self, node: yaml.ScalarNode) -> float | str:
        text = node.value.replace("_", "")
        if ":" in text:
            return str(node.value)
        if node.tag == _FLOAT:
            return float(self.construct_yaml_float(node))
        is_prefixed = re.match(r"[-+]?0[xb]", text)
        return int(text, 0 if is_prefixed else 10)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
for _tag in (_INT, _FLOAT):
    _Loader.add_constructor(_tag, _Loader.number)

# Common mistakes, found by a part of PyYAML's own message.
_MISTAKES = {
    "'\\t'": "has a tab, but YAML needs spaces",
    "mapping values are not allowed": "cannot be a setting: it or the line above it is indented wrongly or "
    "lacks a colon followed by a space, or a value with a colon needs quotes",
    "expected <block end>": "is not indented like the other settings of its section; indent all of them alike",
}

# Characters that look like a space but are not a space for YAML: web pages and word processors insert U+00A0.
_ODD_BLANK = re.compile(r"[^\S \t\r\n]|[\u200b\u2060\ufeff]")


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text, None for an empty text. A key that a mapping has twice is an error."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        duplicates: list[str] = []
        count = _count_values(root, {}, duplicates)
        # A few lines of aliases can expand to more than fits in memory.
        if count > _LARGEST:
            raise yaml.YAMLError(f"it expands to {count:,} values, so it is not a config; write the aliases out")
        if duplicates:
            raise yaml.YAMLError("; ".join(duplicates) + ": keep one of them")
        return loader.construct_document(root)
    except RecursionError:
        raise yaml.YAMLError("its lists or mappings are nested too deep") from None
    except ValueError as error:  # a date or a number out of its range
        raise yaml.YAMLError(str(error)) from error
    except yaml.MarkedYAMLError as error:
        # YAML itself allows a byte order mark at the start.
        if blank := _ODD_BLANK.search(text, text.startswith("\ufeff")):
            hint = _odd_blank_message(blank[0], text.count("\n", 0, blank.start()))
            raise yaml.YAMLError(f"{error}; {hint}") from error
        mark = error.problem_mark
        for part, explanation in _MISTAKES.items():
            if part in str(error.problem) and mark is not None:
                raise yaml.YAMLError(f"line {mark.line + 1} {explanation}:\n{mark.get_snippet()}") from error
        raise
    finally:
        loader.dispose()


def _odd_blank_message(character: str, lines_before: int) -> str:
    name = unicodedata.name(character, "a blank").lower()
    code = f"line {lines_before + 1} has U+{ord(character):04X} ({name})"
    return f"{code}, which is not a space for YAML; type a space instead, or quote the value"


def _count_values(node: yaml.Node, counts: dict[int, int], duplicates: list[str]) -> int:
    """Return the number of values of a node once its aliases are expanded. Keys that a mapping has twice are added to
    `duplicates`. `counts` has the nodes that were counted already, by their id: an anchored node is counted once."""
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = 0  # an alias inside its own anchor, which the settings refuse
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            parts += [key, value]
            # `<<` is not a key: several of them merge several mappings.
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if (key.tag, key.value) in lines:
                    first_line = lines[key.tag, key.value]
                    duplicates.append(f"{key.value} is given in line {first_line} and again in line {line}")
                lines[key.tag, key.value] = line
    elif isinstance(node, yaml.ScalarNode) and not node.style:
        if blank := _ODD_BLANK.search(node.value):
            raise yaml.YAMLError(_odd_blank_message(blank[0], node.start_mark.line))
    counts[id(node)] = 1 + sum(_count_values(part, counts, duplicates) for part in parts)
    return counts[id(node)]
