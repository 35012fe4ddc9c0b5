"""The ratchet of plain language: how many names and expressions of each package a newcomer stumbles over.

A number may only fall, and the aim of each is 0 but where bench/size.py says otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]

# A variable is a noun of its domain: none of these says what it holds.
FORBIDDEN_NAMES = frozenset(
    [
        "one",
        "other",
        "told",
        "said",
        "asked",
        "there",
        "here",
        "mine",
        "theirs",
        "ours",
        "those",
        "given",
        "whole",
        "left",
        "words",
        "gave",
    ]
)
LONGEST_TEST_NAME = 60  # characters

FORBIDDEN_VARIABLES = {
    "cli": 26,
    "deployments": 5,
    "flows": 31,
    "tasks": 18,
    "launcher": 363,
    "litgpt_demo": 259,
    "bench": 25,
    "tests": 909,
}
LAUNCHING_SIDE = ("cli", "deployments", "flows", "tasks", "launcher")
WALRUSES, CONDITIONAL_EXPRESSIONS = 194, 667  # of the launching side
LONG_TEST_NAMES, QUESTIONS_AS_TEST_NAMES = 536, 74


@cache
def nodes_of(package: str) -> list[tuple[Path, ast.AST]]:
    """All syntax nodes of a package's Python files."""
    paths = sorted((CHECKOUT / package).rglob("*.py"))
    return [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]


def bound_names(node: ast.AST) -> Iterator[str]:
    """The names that a node binds: variables, arguments, fields and attributes, without what Python itself names."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name


def forbidden_variables(package: str) -> list[str]:
    """Where a package binds a variable with a forbidden name: file, line and name."""
    return [
        f"{path.relative_to(CHECKOUT)}:{node.lineno} {name}"
        for path, node in nodes_of(package)
        for name in bound_names(node)
        if name.strip("_") in FORBIDDEN_NAMES
    ]


def expressions(package: str) -> tuple[int, int]:
    """The number of walruses and of conditional expressions in a package."""
    kinds = [type(node) for _, node in nodes_of(package)]
    return kinds.count(ast.NamedExpr), kinds.count(ast.IfExp)


def names_of_tests() -> list[str]:
    """The names of all tests."""
    functions = [node for _, node in nodes_of("tests") if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


@pytest.mark.parametrize("package", FORBIDDEN_VARIABLES)
def test_variables_with_forbidden_names_get_fewer(package: str) -> None:
    found = forbidden_variables(package)
    assert len(found) <= FORBIDDEN_VARIABLES[package], "\n".join(found)


def test_expressions_of_the_launching_side_get_fewer() -> None:
    walruses, conditional = map(sum, zip(*map(expressions, LAUNCHING_SIDE), strict=True))
    assert walruses <= WALRUSES
    assert conditional <= CONDITIONAL_EXPRESSIONS


def test_test_names_get_plainer() -> None:
    names = names_of_tests()
    assert sum(len(name) > LONGEST_TEST_NAME for name in names) <= LONG_TEST_NAMES
    assert sum(name.startswith(("test_what_", "test_who_")) for name in names) <= QUESTIONS_AS_TEST_NAMES
