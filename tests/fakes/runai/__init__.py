"""Run:ai in small: its program in both generations and its REST API, strict, over a cluster that runs the pods."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving_thread import served

from .api import Api
from .cluster import CHECKOUT, Cluster, Refused, Training, running

__all__ = ["Api", "Cluster", "Refused", "Training", "program", "running", "serving"]


@contextlib.contextmanager
def serving(cluster: Cluster, **settings: Any) -> Iterator[Api]:
    """The cluster's REST API."""
    api = Api(cluster, **settings)
    with served(api):
        yield api


def program(folder: Path, cluster: Cluster, variant: str) -> Path:
    """The `runai` executable for a cluster; variants are listed in `runai.program`."""
    path = folder / "bin" / "runai"
    path.parent.mkdir(parents=True, exist_ok=True)
    python = f'PYTHONPATH="{CHECKOUT / "tests/fakes/runai"}" exec "{sys.executable}" -S'
    path.write_text(f'#!/bin/sh\n{python} -m program "{cluster.folder}" {variant} "$@"\n')
    path.chmod(0o755)
    return path
