"""The network benchmark: it runs with the same nodes, ranks and cards that a training would have."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.hooks import begin, cancel_jobs
from flows.parameters import config_from, takes
from flows.run_torchrun import run_script
from launcher.benchmark import Benchmark, BenchmarkConfig, lead
from launcher.events import Note
from tasks.benchmark import publish_benchmark
from tasks.steps import emit


@flow(name="benchmark-network", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
@takes(BenchmarkConfig)
async def benchmark_network(**parameters: Any) -> Benchmark:
    """Measure all-reduce among 2, 4, 8, … ranks and between pairs of nodes; the slow node is named."""
    begin()
    config = config_from(BenchmarkConfig, parameters)
    jobs = config.jobs()
    for job in jobs:
        await run_script(job)
    made, address = await publish_benchmark(config.name, jobs)
    emit(Note(what=f"{lead(made.result)}\n  figures: {address}"))
    return made
