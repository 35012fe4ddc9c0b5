"""Before a job is started: the preflight, the software that nodes run (step 2), and access (step 3)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from prefect.artifacts import acreate_table_artifact

from launcher.checks.fitness import check_fitness, chosen_image
from launcher.checks.plan import findings_of
from launcher.checks.preflight import check_access
from launcher.config import RunConfig, ScriptConfig
from launcher.errors import raise_on_errors
from launcher.events import Note, Output, Step, StepDone, StepStarted
from launcher.images.build import prepare_image
from launcher.images.identity import SoftwareIdentity
from launcher.images.settings import NoImage
from launcher.runs.attempts import JobHandle, recorded_software, resolve_name_conflicts
from launcher.runs.code import CodeArchive
from launcher.runs.run import Run, Script
from litgpt_demo.errors import Finding
from litgpt_demo.export import finished
from litgpt_demo.secrets import redacted
from litgpt_demo.storage import open_storage
from tasks.steps import emit, step_task, warn
from tasks.training import query_platform

T = TypeVar("T")


async def prepare_job(
    handle: JobHandle, work: Run | Script, inputs: Callable[[bool], Coroutine[Any, Any, T]]
) -> tuple[T, SoftwareIdentity]:
    """Do everything that comes before a job: the preflight, then inputs and image in parallel, then access. A live job
    has passed all of it, which `inputs` is called with, and its image is built only if no record names it."""
    live = await query_platform(handle, handle.attempts.live)
    reattaches = live is not None and handle.should_reattach(live)
    if reattaches:
        identity = await asyncio.to_thread(recorded_software, work)
        if identity is not None:
            return await inputs(reattaches), identity
    else:
        if live is not None:
            handle.require_replaceable(live)
        await preflight(handle, work)
    prepared, identity = await _in_parallel(inputs(reattaches), build_image(handle.config))
    if not reattaches:
        await get_credentials(handle.config)
    return prepared, identity


async def preflight(handle: JobHandle, work: Run | Script) -> None:
    """Refuse what cannot work, and resolve conflicts with other jobs of the config's name. With
    `launch.if_running=cancel` they are cancelled only after the checks have passed. A finished run starts no job that
    could conflict."""
    check = partial(report_findings, partial(findings_of, handle.config, {"": work}), artifact=handle.attempts.run)
    if handle.config.launch.if_running == "cancel":
        await check()
    if isinstance(work, Script) or await asyncio.to_thread(finished, work.storage) is None:
        open_platform = handle.attempts.open_platform
        bad = await asyncio.to_thread(resolve_name_conflicts, handle.config, run=work.name, open_platform=open_platform)
        if bad:
            warn(str(bad))
    if handle.config.launch.if_running != "cancel":
        await check()


async def _in_parallel(
    inputs: Coroutine[Any, Any, T], image: Coroutine[Any, Any, SoftwareIdentity]
) -> tuple[T, SoftwareIdentity]:
    preparing, building = asyncio.create_task(inputs), asyncio.create_task(image)
    try:
        return await asyncio.gather(preparing, building)
    except Exception:
        if not building.done():
            _report_stopped("the dataset or code could not be prepared")
        elif not preparing.done():
            _report_stopped("the image could not be built")
        raise
    finally:
        preparing.cancel()
        building.cancel()
        await asyncio.gather(preparing, building, return_exceptions=True)


def _report_stopped(problem: str) -> None:
    emit(Note(what=f"{problem}; the step in parallel is stopped, and its finished work is kept", severity="error"))


@step_task("preflight")
async def report_findings(find: Callable[[], Sequence[Finding]], *, artifact: str) -> None:
    """Run the checks and show every finding. Errors refuse the run; a platform that does not answer is retried."""
    # Some findings quote a service or a program, and Prefect stores them.
    findings = [
        replace(finding, what=redacted(finding.what), fix=redacted(finding.fix))
        for finding in await asyncio.to_thread(find)
    ]
    for finding in findings:
        if finding.severity == "warning":  # errors are in the exception's message, and the others in the table
            warn(str(finding))
    if findings:
        columns = ("severity", "code", "what", "fix")
        table = [{name: getattr(finding, name) for name in columns} for finding in findings]
        description = "Findings of the preflight"
        await acreate_table_artifact(table, key=f"preflight-{artifact}", description=description)
    raise_on_errors(findings)


@step_task(Step.IMAGE.task)
async def build_image(config: RunConfig | ScriptConfig) -> SoftwareIdentity:
    """Build or resolve the image. If the platform runs this environment, return that instead."""
    containers = config.platform.in_containers
    image = chosen_image(config) if containers else NoImage(kind="none")
    emit(StepStarted(step=Step.IMAGE, what="" if isinstance(image, NoImage) else image.kind))
    stopped = threading.Event()  # ends the thread when this task is cancelled, and cancels a remote build

    def pause(seconds: float) -> None:
        if stopped.wait(seconds):
            raise asyncio.CancelledError

    def log(line: str) -> None:
        pause(0)
        emit(Output(line=line))

    try:
        identity = await asyncio.to_thread(prepare_image, image, log=log, root=config.root, pause=pause)
    finally:
        stopped.set()
    if containers and identity.image:
        # Only now the digest of a tag and the contents of a user's Dockerfile are known. A registry that does not
        # answer after a build of an hour does not end the run, because nodes check their NCCL themselves.
        findings = await asyncio.to_thread(list, check_fitness(config, identity.image))
        raise_on_errors(finding for finding in findings if finding.severity != "unknown")
        for finding in findings:
            if finding.severity in {"warning", "unknown"}:
                warn(str(finding))
    if containers:
        result = str(identity.image)
    elif config.platform.on_this_machine:
        software = ", ".join(filter(None, [*identity.listed("torch", "litgpt"), identity.revision]))
        result = f"nothing to build on {config.platform.kind}: nodes run this environment ({software})"
    else:
        result = f"nothing to build on {config.platform.kind}: nodes run the environment of section platform"
    emit(StepDone(step=Step.IMAGE, what=result))
    return identity


@step_task(Step.CREDENTIALS.task)
async def get_credentials(config: RunConfig | ScriptConfig) -> None:
    """Check access. No secret is returned: a later step gets its own, in memory."""
    emit(StepStarted(step=Step.CREDENTIALS))
    emit(StepDone(step=Step.CREDENTIALS, what=await asyncio.to_thread(check_access, config)))


@step_task("ship-code")
async def ship_code(code: CodeArchive, root: str) -> None:
    """Copy a user's own code under the root, once for all of its runs."""
    storage = open_storage(root)
    is_new = await asyncio.to_thread(code.ship, storage)
    address = storage.address(code.path)
    if not is_new:
        address += " (exists already)"
    emit(Note(what=f"code: {address}"))
