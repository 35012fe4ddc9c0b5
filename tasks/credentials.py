"""Step 3: may we?"""

from __future__ import annotations

import asyncio

from prefect import task

from launcher.checks.preflight import check_access
from launcher.config import RunConfig, ScriptConfig
from launcher.events import Step, StepDone, StepStarted
from tasks.steps import emit, options_of


@task(**options_of(Step.CREDENTIALS))
async def get_credentials(config: RunConfig | ScriptConfig) -> None:
    """Prove access. Nothing secret is returned: what a later step needs, it asks for itself, in memory."""
    emit(StepStarted(step=Step.CREDENTIALS))
    found = await asyncio.to_thread(check_access, config)
    emit(StepDone(step=Step.CREDENTIALS, what=found))
