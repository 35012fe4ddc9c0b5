"""Scripts on several nodes, launched and followed as trainings are, and the network benchmark, which is a script."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from prefect import flow, get_run_logger
from prefect.artifacts import acreate_markdown_artifact

from flows.parameters import cancel_jobs, name_flow_run, with_config_parameters
from launcher.benchmark import BenchmarkConfig, lead, markdown
from launcher.config import ScriptConfig
from launcher.events import Note, Step, StepDone, StepStarted
from launcher.formatting import size_text
from launcher.runs.attempts import CancelWatch, job_handle, script_of_flow_run
from launcher.runs.run import plan_script
from litgpt_demo.node.network_test import RESULT, NetworkTestResult, read_result
from litgpt_demo.storage import open_storage
from tasks.preflight import prepare_job, ship_code
from tasks.steps import emit, emit_milestone, opaque, step_task
from tasks.training import flow_runs, run_job

_FIGURES = f"node-0/{RESULT}"


@flow(name="run-torchrun", persist_result=False, on_cancellation=[cancel_jobs])
@with_config_parameters(ScriptConfig)
async def run_torchrun(config: ScriptConfig) -> str:
    """Run a script or module under torchrun on every node; each call is a new attempt, unless one is live."""
    return await run_script(config)


async def run_script(config: ScriptConfig) -> str:
    """Prepare and run a script, and return the address of its logs. A live job is followed at once."""
    # The code is read once for all steps. A resumed flow run continues with the code of its job.
    flow_run = flow_runs()[0]
    script = await asyncio.to_thread(lambda: script_of_flow_run(config, flow_run) or plan_script(config))
    await name_flow_run(script.name)
    handle = job_handle(script)
    watch = await asyncio.to_thread(CancelWatch, handle.attempts.index, handle.names)

    async def inputs(reattaches: bool) -> None:
        if script.code is not None and not reattaches:
            await ship_code(opaque(script.code), config.root)

    _, identity = await prepare_job(handle, script, inputs)
    size = size_text(config.platform.nodes, config.platform.processes_per_node)
    emit(StepStarted(step=Step.SCRIPT, what=f"{config.script} on {size}"))
    handle = replace(handle, make_job=lambda attempt: script.job(attempt=attempt, image=identity.image))
    record = await run_job(handle, watch=watch)
    emit(StepDone(step=Step.SCRIPT, what=f"{config.script} succeeded"))
    get_run_logger().info("logs: %s", record.directory)  # a command prints the address at its end
    index = handle.attempts.index
    if await asyncio.to_thread(index.announce, record.run, f"finished-{record.attempt}"):
        emit_milestone("run.finished", record.run, index.root.address(), logs=record.directory)
    return record.directory


@flow(name="benchmark-network", persist_result=False, on_cancellation=[cancel_jobs])
@with_config_parameters(BenchmarkConfig)
async def benchmark_network(config: BenchmarkConfig) -> list[NetworkTestResult]:
    """Measure all-reduce among 2, 4, 8, … ranks and between pairs of nodes, and name the slow node."""
    await name_flow_run(config.name)
    attempts = [await run_script(job) for job in config.jobs()]
    made = await publish_benchmark(config.name, attempts)
    emit(Note(what=f"{lead(made[0])}\n  figures: {open_storage(attempts[0]).address(_FIGURES)}"))
    return made


@step_task("publish-benchmark")
async def publish_benchmark(name: str, attempts: list[str]) -> list[NetworkTestResult]:
    """Show in Prefect as tables what node 0 left in the folders of these attempts; all nodes leave the same."""
    folders = [open_storage(attempt) for attempt in attempts]
    read = [await asyncio.to_thread(folder.read, _FIGURES) for folder in folders]
    made = [read_result(text, folder.address(_FIGURES)) for text, folder in zip(read, folders, strict=True)]
    await acreate_markdown_artifact(markdown(made), key=f"network-{name}", description="How fast the network is")
    return made
