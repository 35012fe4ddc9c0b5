"""The check of an image's labels while it is built, against this very environment."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import litgpt_demo

PROGRAM = Path(litgpt_demo.__file__).parent / "stacks" / "installed.py"


def check(**labels: str) -> str:
    """What it says; nothing where all is true."""
    command = [sys.executable, str(PROGRAM), *(f"{name}={value}" for name, value in labels.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == bool(done.stderr)
    return done.stderr


def test_labels_that_are_true_pass_and_those_of_other_things_are_left_alone() -> None:
    torch = version("torch").partition("+")[0]
    assert check(stack="default", torch=torch, python=platform.python_version(), glibc=platform.libc_ver()[1]) == ""


def test_every_label_that_is_not_true_is_named_with_what_is_there() -> None:
    said = check(torch="2.2.2", python="3.9", architecture="riscv64")
    assert "the label torch says '2.2.2', but the image has '2." in said
    assert "label python says '3.9'" in said
    assert "label architecture says 'riscv64'" in said
    assert "-> take another image.base" in said
