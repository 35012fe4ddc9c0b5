"""Write the lock of each software stack: every package of its image, with its hashes.

python -m deployments.lock UV    the uv program

The versions are those of constraints.txt, except for what the stack pins itself (launcher/images/stacks.py).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from launcher.images.stacks import STACKS, Stack

# The locks are for Linux on x86-64 and on ARM. --universal resolves for both at once, by markers.
_OPTIONS = (
    "--quiet", "--universal", "--python-version=3.11", "--no-build", "--generate-hashes", "--no-annotate",
    "--custom-compile-command=make lock",
)  # fmt: skip


def main(uv: str) -> int:
    """Return the first exit code of uv that is not 0."""
    for stack in STACKS.values():
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(constraints(stack, Path("constraints.txt").read_text("utf-8").splitlines())))
            file.flush()
            chosen = [f"--constraints={file.name}", f"--output-file={stack.lock}", "litgpt_demo/requirements.txt"]
            code = subprocess.run([uv, "pip", "compile", *_OPTIONS, *chosen], check=False).returncode
        if code:
            return code
    return 0


def constraints(stack: Stack, lines: Iterable[str]) -> list[str]:
    """Return the constraints of everybody, with the stack's own pins in place of those of the same packages."""
    own = {pin.partition("==")[0] for pin in stack.pins}
    return [*(line for line in lines if line.partition("==")[0] not in own), *stack.pins]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
