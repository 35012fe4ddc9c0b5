"""Bytecode that `make` leaves for every process that follows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = Path(__file__).parents[2] / "deployments" / "compile.py"


@pytest.mark.parametrize("where", [{}, {"PYTHONDONTWRITEBYTECODE": "1"}], ids=["usually", "where Python writes none"])
def test_what_is_imported_is_compiled_once(tmp_path: Path, where: dict[str, str]) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").touch()
    done = subprocess.run(
        [sys.executable, str(COMPILE), "first", "second"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)} | where,
        check=False,
    )
    assert done.returncode == 0
    assert {path.name.partition(".")[0] for path in (tmp_path / "__pycache__").iterdir()} == {"first", "second"}


def test_an_installation_that_cannot_import_what_it_needs_is_not_called_done() -> None:
    done = subprocess.run([sys.executable, str(COMPILE), "no_such_module"], capture_output=True, check=False)
    assert done.returncode != 0
