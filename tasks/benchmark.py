"""The last step of a benchmark: its results read and shown."""

from __future__ import annotations

import asyncio

from prefect import task
from prefect.artifacts import acreate_markdown_artifact

from launcher.benchmark import Benchmark, markdown
from launcher.config import ScriptConfig
from launcher.runs.index import Index
from launcher.runs.run import plan_script
from litgpt_demo.node.collectives import RESULT, Result, read_result
from litgpt_demo.storage import Storage, open_storage
from tasks.steps import RETRIED

FIGURES = f"node-0/{RESULT}"


@task(name="publish-benchmark", task_run_name="publish-benchmark", **RETRIED)
async def publish_benchmark(name: str, jobs: list[ScriptConfig]) -> tuple[Benchmark, str]:
    """Show the results as tables in Prefect; returns the address of the first job's figures."""
    results = [await asyncio.to_thread(result_of, job) for job in jobs]
    made = Benchmark(name=name, result=results[0], sockets=results[1] if len(results) > 1 else None)
    await acreate_markdown_artifact(markdown(made), key=f"network-{name}", description="How fast the network is")
    return made, (await asyncio.to_thread(attempt_of, jobs[0])).address(FIGURES)


def attempt_of(job: ScriptConfig) -> Storage:
    """The folder of the job's last attempt."""
    return open_storage(Index.of(job.root).records(plan_script(job).name)[-1].directory)


def result_of(job: ScriptConfig) -> Result:
    """Return the result that node 0 left; all nodes leave the same."""
    attempt = attempt_of(job)
    return read_result(attempt.read(FIGURES), attempt.address(FIGURES))
