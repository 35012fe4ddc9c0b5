"""The ground of Slurm's tests: a login node, and jobs whose nodes are quick, for what Slurm does and not torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from services.login_node import LoginNode, login_node

from launcher.job import Job
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from launcher.platforms.slurm.shell import SSH


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoginNode]:
    """A login node that this user's ssh finds as `login`."""
    with login_node({"PLACE": "there"}) as node:
        monkeypatch.setenv(SSH, f"ssh -F {node.config}")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(node.folder))
        yield node


# The word behind `--` is the program. On SIGTERM a node saves and ends as ranks do, but for one that will not hear.
NODE = f"""#!/bin/sh
[ "$1" != -c ] || exec {sys.executable} "$@"
"""
NODE += """
while [ "$1" != -- ]; do shift; done
case "$2" in
  "# deaf"*) trap "" TERM ;;
  *) trap 'sleep 1; echo "node $SLURM_NODEID saved"; exit 45' TERM ;;
esac
echo "node $SLURM_NODEID begins on $LITGPT_HOST, node 0 is at $LITGPT_MASTER, life $LITGPT_RESTART"
(trap "" TERM; exec sh -c "$2") & wait $!
"""


@pytest.fixture
def platform_of(tmp_path: Path) -> Callable[..., SlurmPlatform]:
    """Makes platforms whose nodes run such a program as they would run Python."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(NODE)
    python.chmod(0o755)
    venv = {"kind": "venv", "path": str(python.parents[1])}

    def make(**settings: Any) -> SlurmPlatform:
        asked = {"kind": "slurm", "nodes": 2, "grace": 5, "environment": venv, **settings}
        return SlurmPlatform(SlurmPlatformConfig.model_validate(asked), settle=0)

    return make


@pytest.fixture
def job_of(tmp_path: Path) -> Callable[..., Job]:
    """Makes jobs that run a line of sh on each node."""

    def make(line: str, **changes: Any) -> Job:
        asked: dict[str, Any] = {
            "name": "owt-1a2b", "attempt": 1, "nodes": 2, "processes": 1, "program": (line,),
            "directory": str(tmp_path / "runs" / "owt-1a2b" / "attempts" / "1"),
        }  # fmt: skip
        return Job(**{**asked, **changes})

    return make
