"""A command line as one word: any arguments come out as they went in."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import UserError
from litgpt_demo.node.spec import FLAG, pack, plain, unpack

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)


@given(argv=st.lists(TEXT, max_size=5), env=st.dictionaries(TEXT, TEXT, max_size=3))
def test_whatever_is_packed_is_one_plain_word_and_comes_out_the_same(argv: list[str], env: dict[str, str]) -> None:
    word = pack(argv, env)
    assert plain(word)
    assert shlex.split(word) == [word]
    found: dict[str, str] = {}
    assert unpack([FLAG, word], found) == argv
    assert found == env


@given(TEXT)
def test_a_plain_word_is_the_same_to_a_shell_and_to_flags_that_split_at_commas(word: str) -> None:
    if plain(word):
        assert shlex.split(word) == [word]
        assert "," not in word


def test_other_command_lines_are_left_alone() -> None:
    assert unpack(["--nodes", "2"], {}) == ["--nodes", "2"]


@pytest.mark.parametrize("words", [[], ["e30="], ["not base64!"], ["e30=", "more"]])
def test_half_a_word_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="copy the whole command that `train-litgpt render` prints"):
        unpack([FLAG, *words], {})
