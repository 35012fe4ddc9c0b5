from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import launcher.errors
import litgpt_demo.errors
from cli.main import errors_for_people
from launcher.errors import JobFailed
from litgpt_demo.errors import EXIT_CODES, Fault, TrainLitgptError

DOCS = Path(__file__).parents[2] / "docs" / "failures.md"


def tree(
    kind: type[TrainLitgptError] = TrainLitgptError, depth: int = 0
) -> Iterator[tuple[int, type[TrainLitgptError]]]:
    yield depth, kind
    for child in kind.__subclasses__():
        if child.__module__ in {"litgpt_demo.errors", "launcher.errors"}:
            yield from tree(child, depth + 1)


TREE = [kind for _, kind in tree()]


def an(kind: type[TrainLitgptError]) -> TrainLitgptError:
    return kind("it broke", fault=Fault.HANG) if kind is JobFailed else kind("it broke")


def drawn(docstring: str) -> dict[str, tuple[int, str]]:
    """Name of every class in a drawing: its indentation, and the rest of its line."""
    lines = re.finditer(r"^( *)([A-Z][A-Za-z]+) {2,}(.*)$", docstring, re.MULTILINE)
    return {line[2]: (len(line[1]) // 2, line[3]) for line in lines}


@pytest.mark.parametrize("module", [litgpt_demo.errors, launcher.errors], ids=["litgpt_demo", "launcher"])
def test_the_drawing_of_the_tree_is_the_tree(module: object) -> None:
    picture = drawn(module.__doc__ or "")
    there = {kind.__name__: (depth, kind) for depth, kind in tree()}
    offset = min(there[name][0] for name in picture)
    assert {name for name, (_, kind) in there.items() if kind.__module__ == module.__name__} <= set(picture)  # type: ignore[attr-defined]
    for name, (depth, words) in picture.items():
        found, kind = there[name]
        assert depth == found - offset, name
        if kind is not JobFailed:
            assert re.match(rf"{kind.fault} +{EXIT_CODES[kind.fault]}\b", words), f"{name}: {words}"


@pytest.mark.parametrize("kind", TREE)
def test_the_command_line_ends_with_the_code_of_the_errors_class(
    kind: type[TrainLitgptError], capsys: pytest.CaptureFixture[str]
) -> None:
    error = an(kind)
    with pytest.raises(SystemExit) as ended, errors_for_people():
        raise error
    assert ended.value.code == EXIT_CODES[error.fault] == error.exit_code
    assert "it broke" in capsys.readouterr().err


@pytest.mark.parametrize("kind", TREE)
def test_an_error_of_a_worker_process_keeps_its_class(kind: type[TrainLitgptError]) -> None:
    again = pickle.loads(pickle.dumps(an(kind)))
    assert (type(again), str(again), again.fault) == (kind, "it broke", an(kind).fault)


def test_every_class_has_an_exit_code_of_its_own_and_a_line_in_the_docs() -> None:
    assert set(EXIT_CODES) == set(Fault)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    table = dict(re.findall(r"^\| ([^|]+) \| (\d+)\b", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    codes = {fault: str(code) for fault, code in EXIT_CODES.items()}
    assert {fault: table.get(fault) for fault in codes} == codes
