"""The last step of a benchmark: its results read, drawn and shown."""

from __future__ import annotations

import asyncio

from prefect import task
from prefect.artifacts import acreate_markdown_artifact

from launcher.benchmark import Benchmark, benchmark_page, markdown
from launcher.config import ScriptConfig
from launcher.runs.index import Index
from launcher.runs.run import plan_script
from litgpt_demo.node.collectives import RESULT, Result, read_result
from litgpt_demo.storage import Storage, open_storage
from tasks.steps import RETRIED

PAGE = "network.html"


@task(name="publish-benchmark", task_run_name="publish-benchmark", **RETRIED)
async def publish_benchmark(name: str, jobs: list[ScriptConfig]) -> tuple[Benchmark, str]:
    """Write the page next to the first job's result, show its table in Prefect; returns the page's address."""
    results = [await asyncio.to_thread(result_of, job) for job in jobs]
    made = Benchmark(name=name, result=results[0], sockets=results[1] if len(results) > 1 else None)
    where = await asyncio.to_thread(attempt_of, jobs[0])
    await asyncio.to_thread(where.write, PAGE, benchmark_page(made).encode())
    await acreate_markdown_artifact(markdown(made), key=f"network-{name}", description="How fast the network is")
    return made, where.address(PAGE)


def attempt_of(job: ScriptConfig) -> Storage:
    """The folder of the job's last attempt."""
    return open_storage(Index.of(job.root).records(plan_script(job).name)[-1].directory)


def result_of(job: ScriptConfig) -> Result:
    """Return the result that node 0 left; all nodes leave the same."""
    attempt, path = attempt_of(job), f"node-0/{RESULT}"
    return read_result(attempt.read(path), attempt.address(path))
