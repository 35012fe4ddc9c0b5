"""The list of `make mutants` fits the source and the tests as they are. Only `make mutants` says what tests notice."""

from __future__ import annotations

import ast

import pytest
from mutants import CHECKOUT, MUTANTS, Mutant


@pytest.fixture(params=MUTANTS, ids=lambda mutant: mutant.name)
def mutant(request: pytest.FixtureRequest) -> Mutant:
    found: Mutant = request.param
    return found


def test_it_can_be_made_in_one_line_and_is_still_python(mutant: Mutant) -> None:
    source = (CHECKOUT / mutant.path).read_text(encoding="utf-8")
    assert "\n" not in mutant.old + mutant.new
    assert ast.unparse(ast.parse(mutant.mutated(source))) != ast.unparse(ast.parse(source))


def test_the_tests_that_should_notice_it_are_there(mutant: Mutant) -> None:
    for test in mutant.tests:
        file, _, name = test.partition("::")
        tree = ast.parse((CHECKOUT / file).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
        assert name in names if name else names


def test_there_are_forty_at_least_and_each_is_another() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len({(one.path, one.new) for one in MUTANTS}) >= 40


def test_a_mistake_that_no_longer_fits_says_so() -> None:
    with pytest.raises(ValueError, match="2 times, not once; write the mutant anew"):
        MUTANTS[0].mutated(2 * MUTANTS[0].old)
