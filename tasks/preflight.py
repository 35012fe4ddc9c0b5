"""Before the first step: everything that can be known to go wrong, reported at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from prefect import task
from prefect.artifacts import acreate_table_artifact

from launcher.events import Note
from launcher.findings import require
from litgpt_demo.findings import Finding
from litgpt_demo.secrets import redacted
from tasks.steps import RETRIED, emit


@task(name="preflight", task_run_name="preflight", **RETRIED)
async def report_findings(find: Callable[[], Sequence[Finding]], *, artifact: str) -> None:
    """Look, and show every finding; errors refuse the run. A platform or bucket that does not answer is asked again.

    Raises:
        ConfigProblem: names all errors.
    """
    # Some repeat what a service or a program said, and Prefect keeps them.
    findings = [
        replace(finding, what=redacted(finding.what), fix=redacted(finding.fix))
        for finding in await asyncio.to_thread(find)
    ]
    for finding in findings:
        if finding.severity == "warning":  # errors are the exception's message, and good news is in the table
            emit(Note(what=str(finding), severity=finding.severity))
    if findings:
        table = [
            {"severity": item.severity, "code": item.code, "what": item.what, "fix": item.fix} for item in findings
        ]
        await acreate_table_artifact(
            table, key=f"preflight-{artifact}", description="What was found before anything was started"
        )
    require(findings)
