"""The network benchmark: it runs with the same nodes, ranks and cards that a training would have."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.hooks import begin, cancel_jobs
from flows.run_torchrun import run_script
from launcher.benchmark import Benchmark, BenchmarkConfig, MeasureSettings, lead
from launcher.config import NAME_PATTERN, PlatformConfig, StartSettings, validated
from launcher.events import Note
from launcher.images.builders import Image
from tasks.benchmark import publish_benchmark
from tasks.steps import emit


@flow(name="benchmark-network", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
async def benchmark_network(
    name: Annotated[str, Field(pattern=NAME_PATTERN)] = BenchmarkConfig.model_fields["name"].default,
    root: str = BenchmarkConfig.model_fields["root"].default,
    measure: MeasureSettings = BenchmarkConfig.model_fields["measure"].default,
    platform: PlatformConfig = BenchmarkConfig.model_fields["platform"].default,
    image: Image = BenchmarkConfig.model_fields["image"].default,
    start: StartSettings = BenchmarkConfig.model_fields["start"].default,
) -> Benchmark:
    """Measure all-reduce among 2, 4, 8, … ranks and between pairs of nodes; the slow node is named.

    Args:
        name: What to call the job: lower-case letters, digits and dashes, at most 32.
        root: A folder, or gs://bucket/prefix, that the results are written under.
        measure: What to measure.
        platform: Where the nodes are.
        image: What the nodes' software is.
        start: What to do where a job of the same name runs already.
    """
    begin()
    document: dict[str, Any] = {
        "name": name, "root": root, "measure": measure.model_dump(mode="json"),
        "platform": platform.model_dump(mode="json"), "image": image.model_dump(mode="json"),
        "start": start.model_dump(mode="json"),
    }  # fmt: skip
    jobs = validated(BenchmarkConfig, document, where="the parameters").jobs()
    for job in jobs:
        await run_script(job)
    made, address = await publish_benchmark(name, jobs)
    emit(Note(what=f"{lead(made.result)}\n  table and plots: {address}"))
    return made
