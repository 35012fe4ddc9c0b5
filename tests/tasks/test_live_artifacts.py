"""What Prefect shows of a job, while its server comes and goes, and whatever a script writes as its rows."""

import asyncio
from typing import Any

import pytest
from leaking import leaks
from prefect import flow, get_client

from launcher.errors import ConfigProblem
from launcher.runs.diagnosis import Verdict
from litgpt_demo.errors import Fault, Finding
from tasks import report
from tasks.preflight import report_findings
from tasks.report import LiveArtifacts

SECRET = "S3cret-marker-0123456789"


def shown(name: str) -> dict[str, Any]:
    """Kind and data of each artifact of that job."""
    with get_client(sync_client=True) as client:
        found = [artifact for artifact in client.read_artifacts() if str(artifact.key).endswith(f"-{name}")]
    return {str(artifact.key).removesuffix(f"-{name}"): artifact.data for artifact in found}


@pytest.mark.prefect
def test_a_server_that_takes_questions_and_answers_none_holds_no_attempt_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(report.artifacts, "acreate_progress_artifact", never)
    monkeypatch.setattr(report.artifacts, "acreate_markdown_artifact", never)
    monkeypatch.setattr(report, "_ANSWER", 0.05)
    verdict = Verdict(fault=Fault.NODE, node=0, rank=None, evidence="lost", logs="/attempts/1")

    @flow(name="scene")
    async def scene() -> None:
        async with LiveArtifacts("demo") as live:
            live.add({"kind": "step", "step": 1, "loss": 5.0})
        await report.show_verdict(verdict, attempt="demo-a1")

    asyncio.run(scene())


def test_findings_that_repeat_a_secret_are_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    async def keep(table: Any, **_: Any) -> None:
        kept.append(table)

    monkeypatch.setattr("tasks.preflight.acreate_table_artifact", keep)
    said = [f"https://bucket.example/a?X-Goog-Signature={SECRET}&b=1", f"Authorization: Bearer {SECRET}"]
    findings = [Finding("error", "planted.url", one, f"ask again: {one}") for one in said]
    with pytest.raises(ConfigProblem) as told:
        asyncio.run(report_findings.fn(lambda: findings, artifact="planted"))
    assert "[secure]" in str(kept)
    assert leaks(f"{kept} {told.value}", SECRET) == []
