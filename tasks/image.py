"""Step 2: the software the nodes run, pinned."""

from __future__ import annotations

import asyncio

from prefect import task

from launcher.config import RunConfig, ScriptConfig
from launcher.events import Output, Step, StepDone, StepStarted
from launcher.findings import require
from launcher.images.builders import prepare_image
from launcher.images.fitness import check_finished, image_of
from launcher.images.identity import SoftwareIdentity
from launcher.images.settings import NoImage
from launcher.platforms.base import Capability
from tasks.steps import emit, options_of


@task(**options_of(Step.IMAGE))
async def build_image(config: RunConfig | ScriptConfig) -> SoftwareIdentity:
    """Build or resolve the image; where the platform runs this very environment, record that instead."""
    containers = Capability.IMAGES in config.platform.open().capabilities
    image = image_of(config) if containers else NoImage(kind="none")
    emit(StepStarted(step=Step.IMAGE, what="" if isinstance(image, NoImage) else image.kind))
    identity = await asyncio.to_thread(prepare_image, image, log=lambda line: emit(Output(line=line)))
    if containers and identity.image:
        # Only now it is known what a tag means, or what a Dockerfile of the user's has made.
        await asyncio.to_thread(require, check_finished(config, identity.image))
    what = f"{identity.image}" if containers else f"nothing to build on {config.platform.kind}: {_described(identity)}"
    emit(StepDone(step=Step.IMAGE, what=what, reused=False))
    return identity


def _described(identity: SoftwareIdentity) -> str:
    known = [*identity.listed("torch", "litgpt"), identity.revision]
    return f"nodes run this environment ({', '.join(filter(None, known))})"
