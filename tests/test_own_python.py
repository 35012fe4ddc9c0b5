"""Every Python that we start is started by litgpt_demo.PYTHON, which imports nothing from the current folder."""

from __future__ import annotations

import ast
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def test_no_other_interpreter_is_started() -> None:
    for folder in ("cli", "deployments", "flows", "tasks", "launcher", "litgpt_demo"):
        for path in (CHECKOUT / folder).rglob("*.py"):
            name = path.relative_to(CHECKOUT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                    assert name == "litgpt_demo/__init__.py", (
                        f"{name}:{node.lineno} starts a Python; use litgpt_demo.PYTHON"
                    )
