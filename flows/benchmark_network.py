"""The network benchmark: it runs with the same nodes, ranks and cards that a training would have."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow, task
from prefect.artifacts import acreate_markdown_artifact

from flows.hooks import begin, cancel_jobs
from flows.parameters import config_from, takes
from flows.run_torchrun import run_script
from launcher.benchmark import BenchmarkConfig, lead, markdown
from launcher.config import ScriptConfig
from launcher.events import Note
from launcher.runs.index import Index
from launcher.runs.run import plan_script
from litgpt_demo.node.gate import RESULT, Result, read_result
from litgpt_demo.storage import open_storage
from tasks.steps import RETRIED, emit


@flow(name="benchmark-network", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
@takes(BenchmarkConfig)
async def benchmark_network(**parameters: Any) -> list[Result]:
    """Measure all-reduce among 2, 4, 8, … ranks and between pairs of nodes; the slow node is named."""
    begin()
    config = config_from(BenchmarkConfig, parameters)
    jobs = config.jobs()
    for job in jobs:
        await run_script(job)
    made, address = await publish_benchmark(config.name, jobs)
    emit(Note(what=f"{lead(made[0])}\n  figures: {address}"))
    return made


@task(name="publish-benchmark", task_run_name="publish-benchmark", **RETRIED)
async def publish_benchmark(name: str, jobs: list[ScriptConfig]) -> tuple[list[Result], str]:
    """Show the results as tables in Prefect; returns the address of the first job's figures."""
    results = [await asyncio.to_thread(_result_of, job) for job in jobs]
    made = [result for result, _ in results]
    await acreate_markdown_artifact(markdown(made), key=f"network-{name}", description="How fast the network is")
    return made, results[0][1]


def _result_of(job: ScriptConfig) -> tuple[Result, str]:
    """Return the result that node 0 left in the job's last attempt, and its address; all nodes leave the same."""
    attempt = open_storage(Index.of(job.root).records(plan_script(job).name)[-1].directory)
    address = attempt.address(figures := f"node-0/{RESULT}")
    return read_result(attempt.read(figures), address), address
