"""Step 2: the software the nodes run, pinned."""

from __future__ import annotations

import asyncio
import threading

from prefect import task

from launcher.checks.fitness import check_fitness, chosen_image
from launcher.config import RunConfig, ScriptConfig
from launcher.errors import require
from launcher.events import Note, Output, Step, StepDone, StepStarted
from launcher.images.build import prepare_image
from launcher.images.identity import SoftwareIdentity
from launcher.images.settings import NoImage
from launcher.runs.code import CodeArchive
from litgpt_demo.storage import open_storage
from tasks.steps import RETRIED, emit


@task(name=Step.IMAGE.task, task_run_name=Step.IMAGE.task, **RETRIED)
async def build_image(config: RunConfig | ScriptConfig) -> SoftwareIdentity:
    """Build or resolve the image; where the platform runs this very environment, record that instead."""
    containers = not config.platform.on_this_machine
    image = chosen_image(config) if containers else NoImage(kind="none")
    emit(StepStarted(step=Step.IMAGE, what="" if isinstance(image, NoImage) else image.kind))
    stopped = threading.Event()  # the thread ends soon after this task is cancelled: a build elsewhere is cancelled too

    def stop_if_asked() -> None:
        if stopped.is_set():
            raise asyncio.CancelledError

    def log(line: str) -> None:
        stop_if_asked()
        emit(Output(line=line))

    def pause(seconds: float) -> None:
        stopped.wait(seconds)
        stop_if_asked()

    try:
        identity = await asyncio.to_thread(prepare_image, image, log=log, root=config.root, pause=pause)
    finally:
        stopped.set()
    if containers and identity.image:
        # Only now it is known what a tag means, or what a Dockerfile of the user's has made. A registry that is busy
        # after a build of an hour is no reason to end: nodes look at their NCCL themselves.
        found = await asyncio.to_thread(list, check_fitness(config, identity.image))
        require(finding for finding in found if finding.severity != "unknown")
        for finding in found:
            if finding.severity in {"warning", "unknown"}:
                emit(Note(what=str(finding), severity="warning"))
    known = ", ".join(filter(None, [*identity.listed("torch", "litgpt"), identity.revision]))
    here = f"nothing to build on {config.platform.kind}: nodes run this environment ({known})"
    emit(StepDone(step=Step.IMAGE, what=f"{identity.image}" if containers else here))
    return identity


@task(name="ship-code", task_run_name="ship-code", **RETRIED)
async def ship_code(code: CodeArchive, root: str) -> None:
    """Bring a user's own code under the root, once for all runs of it; a retry sends nothing that is there."""
    storage = open_storage(root)
    put = await asyncio.to_thread(code.ship, storage)
    emit(Note(what=f"code: {storage.address(code.path)}{'' if put else ' (there already)'}"))
