"""Before a job is started: everything that can be known to go wrong, reported at once, and step 3: may we?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from prefect import task
from prefect.artifacts import acreate_table_artifact

from launcher.checks.preflight import check_access
from launcher.config import RunConfig, ScriptConfig
from launcher.errors import require
from launcher.events import Note, Step, StepDone, StepStarted
from launcher.runs.attempts import Claim, settle_others
from litgpt_demo.errors import Finding
from litgpt_demo.secrets import redacted
from tasks.steps import RETRIED, emit
from tasks.training import ask


async def is_under_way(
    claim: Claim, find: Callable[[], Sequence[Finding]], *, done: Callable[[], object] = lambda: None
) -> bool:
    """Return whether a job of the claim lives; where none does, refuse what cannot work and settle with other jobs.

    Args:
        done: returns what a finished run has, so that no other job can be in its way, else None.
    """
    attempts, config = claim.attempts, claim.config
    if await ask(claim, attempts.live) is not None:
        return True
    if await asyncio.to_thread(done) is None:
        await asyncio.to_thread(settle_others, config, run=attempts.run, open=attempts.open)
    await report_findings(find, artifact=attempts.run)
    return False


@task(name="preflight", task_run_name="preflight", **RETRIED)
async def report_findings(find: Callable[[], Sequence[Finding]], *, artifact: str) -> None:
    """Look, and show every finding; errors refuse the run. A platform or bucket that does not answer is asked again."""
    # Some repeat what a service or a program said, and Prefect keeps them.
    findings = [
        replace(finding, what=redacted(finding.what), fix=redacted(finding.fix))
        for finding in await asyncio.to_thread(find)
    ]
    for finding in findings:
        if finding.severity == "warning":  # errors are the exception's message, and good news is in the table
            emit(Note(what=str(finding), severity=finding.severity))
    if findings:
        columns = ("severity", "code", "what", "fix")
        table = [{name: getattr(finding, name) for name in columns} for finding in findings]
        shown = "What was found before anything was started"
        await acreate_table_artifact(table, key=f"preflight-{artifact}", description=shown)
    require(findings)


@task(name=Step.CREDENTIALS.task, task_run_name=Step.CREDENTIALS.task, **RETRIED)
async def get_credentials(config: RunConfig | ScriptConfig) -> None:
    """Prove access. Nothing secret is returned: what a later step needs, it asks for itself, in memory."""
    emit(StepStarted(step=Step.CREDENTIALS))
    emit(StepDone(step=Step.CREDENTIALS, what=await asyncio.to_thread(check_access, config)))
