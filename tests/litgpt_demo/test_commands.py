"""`python -m litgpt_demo`: what each command costs before it works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

IMPORTED = """
import contextlib, json, sys
from litgpt_demo.__main__ import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
    main(sys.argv[1:])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize(
    ("command", "needed", "unused"),
    [
        ("train", {"lightning", "litgpt", "torch"}, {"transformers", "matplotlib", "scipy"}),
        ("node", {"litgpt_demo"}, {"torch", "lightning"}),
    ],
)
@pytest.mark.long
def test_a_process_of_a_node_imports_nothing_heavy_that_it_does_not_use(
    command: str, needed: set[str], unused: set[str]
) -> None:
    """Each rank pays for its imports at every start and restart."""
    imported = imported_by(command, "--help")
    assert imported >= needed
    assert not imported & unused


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("--on-word",)], ids=["at once", "beside the training"])
def test_a_collection_imports_nothing_heavy_that_no_proof_uses(finished_copy: Path, words: Sequence[str]) -> None:
    imported = imported_by("collect", "--run", str(finished_copy), *words)
    assert (finished_copy / "final" / "manifest.json").exists()
    assert "transformers" in imported
    assert not imported & {"sklearn", "scipy", "torchao"}


def imported_by(*words: str) -> set[str]:
    command = [sys.executable, "-c", IMPORTED, *words]
    done = subprocess.run(command, input="begin\npublish\n", capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))
