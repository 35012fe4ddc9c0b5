"""The check of an image's labels while it is built, against this very environment."""

import platform
import subprocess
import sys
from pathlib import Path

import litgpt_demo

PROGRAM = Path(litgpt_demo.__file__).parent / "stacks" / "installed.py"


def test_false_labels_are_named_with_the_installed_version() -> None:
    """Labels of other things are ignored."""
    labels = ["stack=default", f"glibc={platform.libc_ver()[1]}", "python=3.9", "torch=2.2.2", "architecture=riscv64"]
    done = subprocess.run([sys.executable, str(PROGRAM), *labels], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the label torch says '2.2.2', but the image has '2." in done.stderr
    assert "label python says '3.9'" in done.stderr
    assert "label architecture says 'riscv64'" in done.stderr
    assert "-> take another image.base" in done.stderr
    assert "glibc" not in done.stderr
