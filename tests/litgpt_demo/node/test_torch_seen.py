"""Why torch cannot be asked; what a real one says of itself is in tests/real, for GPUs and for other versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from litgpt_demo.errors import UserError
from litgpt_demo.node.torch_seen import torch_seen


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'ImportError: libcudnn.so.9: no such file' >&2; exit 1", r"exit code 1\): ImportError: libcudnn\.so\.9"),
        ("echo no JSON", r"exit code 0\): no JSON"),
    ],
)
def test_why_torch_does_not_start_is_told_in_its_own_words(script: str, told: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=told):
        torch_seen(os.environ, python=str(python))
