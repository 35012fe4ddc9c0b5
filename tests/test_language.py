"""The ratchet of plain language: names, expressions and phrases that a newcomer stumbles over.

The numbers of expressions may only fall; of everything else there is none.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]

# A variable is a noun of its domain: none of these says what it holds.
FORBIDDEN_NAMES = {"one", "other", "told", "said", "asked", "there", "here", "mine", "theirs", "ours", "those"}
FORBIDDEN_NAMES |= {"given", "whole", "left", "words", "gave"}
LONGEST_TEST_NAME = 60  # characters

LAUNCHING_SIDE = ("cli", "deployments", "flows", "tasks", "launcher")
SOURCE = (*LAUNCHING_SIDE, "litgpt_demo", "train_litgpt")
WALRUSES, CONDITIONAL_EXPRESSIONS = 25, 350  # of the launching side

# Phrases that have a plainer form, and that form.
PHRASES = {
    r"\b(told|tells?|telling)\b": "prints, reports, shows; passes a value",
    r"\b(asks?|asked|asking)\b": "requests, queries, checks; requires",
    r"\b(goes|go|went|going) on\b": "continues",
    r"(?<!there )(?<!There )\b(is|are|was|were) no\b(?! longer)": "is not a; or say what it is",
    r"\b(nothing of|none of|nobody)\b": "say it positively",
    r"\b(some|any)body\b": "you, another user, the administrator",
    r"(?:(?<=[.!?] )|^)(What|Who)\b(?![^.]*\?)": "begin with a noun",
    r"\balone\b": "only",
    r"\bbeside\b": "next to, in parallel with, in addition to",
    r"\b(anew|mends?|mended|so many|found done|takes? up|taken up)\b": "again, fix, N, already done, reattach",
    r"\bof (ours|yours|mine)\b": "our, your",
}


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


def prose_of(path: Path) -> list[str]:
    """The paragraphs of a page without its code, or the texts and comments of a Python file."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    strings = [
        " ".join(node.value.split())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return strings + [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]


def phrases(path: Path) -> list[str]:
    """The phrases of a file that have a plainer form, with that form."""
    texts = prose_of(path)
    return [
        f"{found[0]!r} in {text[max(0, found.start() - 40) : found.end() + 40]!r}: {plainer}"
        for pattern, plainer in PHRASES.items()
        for text in texts
        for found in re.finditer(pattern, text)
    ]


def files_with_prose() -> list[Path]:
    """All pages, and the Python files of the source."""
    pages = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md")]
    return sorted([*pages, *(path for package in SOURCE for path in (CHECKOUT / package).rglob("*.py"))])


@pytest.mark.parametrize("package", [*SOURCE, "bench", "tests"])
def test_no_variable_has_a_forbidden_name(package: str) -> None:
    found = forbidden_variables(package)
    assert not found, "\n".join(found)


def test_expressions_of_the_launching_side_get_fewer() -> None:
    walruses, conditional = map(sum, zip(*map(expressions, LAUNCHING_SIDE), strict=True))
    assert walruses <= WALRUSES
    assert conditional <= CONDITIONAL_EXPRESSIONS


def test_test_names_are_short_and_begin_with_a_subject() -> None:
    names = names_of_tests()
    assert [name for name in names if len(name) > LONGEST_TEST_NAME] == []
    assert [name for name in names if name.startswith(("test_what_", "test_who_"))] == []


def test_pages_and_messages_have_no_phrase_with_a_plainer_form() -> None:
    found = {path.relative_to(CHECKOUT).as_posix(): phrases(path) for path in files_with_prose()}
    assert {name: hits for name, hits in found.items() if hits} == {}
