"""The process that collects a run's model: what it can reach, and what becomes of a run that others wrote to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from launcher.runs.index import Index
from launcher.runs.lease import Lease
from litgpt_demo.storage import open_storage
from tasks.checkpoints import Collector, _collected

SECRETS = ("KUBECONFIG", "RUNAI_CLIENT_SECRET", "PREFECT_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")


def test_a_run_is_collected_in_a_process_without_the_launchers_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")
    run = cast(Any, SimpleNamespace(storage=open_storage(str(tmp_path / "run"))))
    with Collector(run) as collector:
        collector.follow({"kind": "start", "steps": 8})
        collector.follow({"kind": "step", "step": 8, "step_seconds": 0.1})  # the last one: it is started by then
        (environ,) = [one.environ() for one in psutil.Process().children() if str(tmp_path / "run") in one.cmdline()]
    assert environ.keys().isdisjoint(SECRETS)
    assert "a secret" not in environ.values()
    assert environ["PATH"] == os.environ["PATH"]


def test_who_waits_for_another_orchestrators_collection_keeps_no_process_that_would_block_it(tmp_path: Path) -> None:
    """Both are made ready before the job's end, and one of them at a time may have the run's folder."""
    root = open_storage(str(tmp_path))
    run = cast(Any, SimpleNamespace(root=root, name="run", storage=root.within("runs/run")))
    with Lease(Index(root), "run") as theirs, Collector(run) as mine:
        assert theirs.take()
        mine.follow({"kind": "start", "steps": 8})
        mine.follow({"kind": "step", "step": 8, "step_seconds": 0.1})
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(_collected(run, mine), 2))
        address = run.storage.address()
        assert [child for child in psutil.Process().children() if address in child.cmdline()] == []
