"""The process that collects a run's model: what it can reach, and whom it keeps waiting."""

import asyncio
import os
import shutil
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from batch_jobs import settings_of
from golden_files import IMAGE
from pipelines import Done
from waiting import until

from launcher.events import Event, Listener, Step, StepProgress, StepStarted
from launcher.job import Submission
from launcher.runs.attempts import JobHandle
from launcher.runs.index import Index
from launcher.runs.lease import Lease
from launcher.runs.run import plan_run
from litgpt_demo.storage import open_storage
from tasks.checkpoints import Collector, _collected, _collected_by_a_job, collect_checkpoints

SECRETS = ("KUBECONFIG", "RUNAI_CLIENT_SECRET", "PREFECT_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose collector is a program that waits for its end."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nread -r _\n")
    program.chmod(0o755)
    monkeypatch.setattr("tasks.checkpoints.PYTHON", (str(program),))
    root = open_storage(str(tmp_path))
    return SimpleNamespace(root=root, parameters=0, name="run", storage=root.within("runs/run"))


def started(run: Any, collector: Collector) -> psutil.Process:
    """The process, which is there when the last step has come."""
    collector.follow({"kind": "start", "steps": 8})
    collector.follow({"kind": "step", "step": 8, "step_seconds": 0.1})
    # A process of an earlier test may be ending: it has no command any more, which `process_iter` gives as None.
    every = psutil.process_iter(["cmdline"])
    [process] = [entry for entry in every if run.storage.address() in (entry.info["cmdline"] or ())]
    return process


def test_collector_process_has_no_keys_of_the_launcher(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")
    with closing(Collector(run)) as collector:
        environ = started(run, collector).environ()
    assert (environ["PATH"], "a secret" in environ.values()) == (os.environ["PATH"], False)


def test_collection_reports_its_progress(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    final, events = SimpleNamespace(findings=(), step=8, validation_loss=1.0), list[Event]()
    monkeypatch.setattr("tasks.checkpoints.exported", lambda _: final)
    with Listener(events.append), closing(Collector(run)) as collector:
        asyncio.run(collect_checkpoints.fn(run, collector, image=None))
    assert [event.what for event in events if isinstance(event, StepStarted)] != [""]


def test_collection_shows_the_progress_of_its_process(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho a warning\necho progress: comparing it in LitGPT\n")
    monkeypatch.setattr("tasks.checkpoints.exported", lambda _: SimpleNamespace())
    events = list[Event]()
    with Listener(events.append), closing(Collector(run)) as collector:
        asyncio.run(collector.collect())
    assert events == [StepProgress(step=Step.CHECKPOINTS, what="comparing it in LitGPT")]


def test_follower_keeps_no_collector_that_blocks_the_leader(run: Any) -> None:
    """Both are made ready before the job's end, and one of them at a time may have the run's folder."""

    async def scene(collector: Collector) -> None:
        process = started(run, collector)
        waiting = asyncio.create_task(_collected(run, collector))
        await asyncio.to_thread(until, lambda: not process.is_running())
        assert not waiting.done()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

    with Lease(Index(run.root), "run") as lease, closing(Collector(run)) as collector:
        assert lease.take()
        asyncio.run(scene(collector))


def test_large_model_is_collected_by_a_job_of_one_node(
    trained: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that is found first is the training's, which has saved its last checkpoint and has not ended."""
    changes = {"root": str(tmp_path), "platform": settings_of(machine="a3-highgpu-8g")}
    run = plan_run(trained.config.model_copy(update=changes))
    finished = plan_run(trained.config).storage.local_path()
    copied = shutil.copytree(finished, tmp_path / "runs" / run.name, ignore=shutil.ignore_patterns("final"))
    submissions: list[Submission] = []

    async def run_job(handle: JobHandle, **_: Any) -> None:
        submissions.append(handle.platform.render(handle.make_job(len(submissions) + 2)))
        if len(submissions) == 2:
            shutil.copytree(finished / "final", copied / "final")

    monkeypatch.setattr("tasks.checkpoints.LARGE", 0)
    monkeypatch.setattr("tasks.checkpoints.run_job", run_job)
    assert asyncio.run(_collected_by_a_job(run, IMAGE)) == trained.final
    arguments = str(submissions[0]).split()
    assert (arguments[arguments.index("taskCount:") + 1], "--stage" in arguments, "collect" in arguments) == (
        "1",
        False,
        True,
    )
    assert len(submissions) == 2
