from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.yaml_text import DuplicateKeys, load_yaml

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(DOCUMENTS)
def test_what_is_given_once_is_read_as_it_was_written(document: Any) -> None:
    assert load_yaml(yaml.safe_dump(document)) == document


@pytest.mark.parametrize("text", ["", "# a comment\n", "---\n"])
def test_an_empty_text_is_nothing(text: str) -> None:
    assert load_yaml(text) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1\nseed: 2\n", ["seed is given in line 1 and again in line 2"]),
        ("a: {b: 1}\nc:\n  d: 1\n  'd': 1\n", ["c.d is given in line 3 and again in line 4"]),
        ("{a: 1, a: 1}", ["a is given in line 1 and again in line 1"]),
        ("- a: 1\n- b: {c: 1,\n c: 2}\n", ["[1].b.c is given in line 2 and again in line 3"]),
        (
            "a: 1\nb: 1\na: 2\nb: 2\na: 3\n",
            ["a is given in line 1 and again in line 3", "line 5", "b is given in line 2"],
        ),
    ],
)
def test_every_key_that_is_given_twice_is_named_with_both_lines(text: str, told: list[str]) -> None:
    with pytest.raises(DuplicateKeys, match=re.escape(told[0])) as refused:
        load_yaml(text)
    assert all(words in str(refused.value) for words in told)
    assert str(refused.value).endswith("keep one of them")


def test_keys_of_a_merged_mapping_may_be_given_again() -> None:
    text = "one: &one {seed: 1, steps: 2}\nmore: &more {lr: 3}\nmine:\n  <<: *one\n  <<: *more\n  seed: 4\nsame: *one\n"
    assert load_yaml(text)["mine"] == {"seed": 4, "steps": 2, "lr": 3}


def test_a_node_that_contains_itself_ends_too() -> None:
    document = load_yaml("&all [*all]")
    assert document[0] is document
