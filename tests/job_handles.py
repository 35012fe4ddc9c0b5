"""Job handles for the attempts of a run that no config made, on a platform that a test decides."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig
from launcher.job import Job, JobId
from launcher.platforms.base import Platform
from launcher.runs.attempts import Attempts, JobHandle, job_handle
from launcher.runs.index import Index
from launcher.runs.run import plan_run, plan_script
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints


def handle_of(config: RunConfig | ScriptConfig | BenchmarkConfig) -> JobHandle:
    """The job handle of what a config means now."""
    if isinstance(config, RunConfig):
        return job_handle(plan_run(config))
    return job_handle(plan_script(config.jobs()[0] if isinstance(config, BenchmarkConfig) else config))


def handle_on(platform: Platform, folder: Path | str, run: str, /, **changes: Any) -> JobHandle:
    """The job handle of a script of two nodes under a root, with `changes` of its config. Its checkpoints are in the
    root's folder of the run's name."""

    def make_job(attempt: int) -> Job:
        directory = f"{folder}/runs/{run}/attempts/{attempt}"
        return Job(
            name=run, root=str(folder), attempt=attempt, nodes=2, processes=1, program=("a.py",), directory=directory
        )  # fmt: skip

    return JobHandle(
        attempts=Attempts(index=Index.of(str(folder)), run=run, open_platform=lambda section: platform),
        config=ScriptConfig(name=run.partition("-")[0], root=str(folder), script="/train.py", **changes),
        platform=platform,
        make_job=make_job,
        progress=lambda: checkpoints.newest_step(open_storage(f"{folder}/{run}"), max_step=1000),
    )


def begin(handle: JobHandle) -> JobId:
    """Start the next attempt as the pipeline does."""
    return handle.platform.submit(handle.platform.render(handle.job_of(handle.reattach_or_create())))


def running_job(config: RunConfig | ScriptConfig, *flow_runs: UUID) -> JobHandle:
    """Start a job of this run whose orchestrator is gone; it works until it is ended, whatever the machine does."""
    handle = replace(handle_of(config), flow_runs=[str(flow_run) for flow_run in flow_runs])
    record = handle.reattach_or_create()
    script = Path(config.root) / "works.py"
    script.write_text("import time; time.sleep(600)")
    job = replace(handle.job_of(record), program=(str(script),), stage=())
    handle.platform.submit(handle.platform.render(job))
    assert handle.attempts.live()
    return handle
