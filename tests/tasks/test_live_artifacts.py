"""What Prefect shows of a job, while its server comes and goes, and whatever a script writes as its rows."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from leaking import leaks
from prefect import flow, get_client

from launcher.errors import ConfigProblem
from launcher.runs.diagnosis import Verdict
from litgpt_demo.errors import Fault
from litgpt_demo.findings import Finding
from tasks import live as module
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
@pytest.mark.parametrize("lost", ["acreate_progress_artifact", "acreate_markdown_artifact"])
def test_what_the_server_missed_while_it_was_away_is_shown_when_it_is_back_and_no_more_than_figures(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, create = lost.replace("_", "-"), getattr(module, lost)
    away: list[None] = [None]

    async def away_at_first(*given: Any, **named: Any) -> Any:
        if away:
            away.pop()
            raise httpx.ConnectError("no route to host")
        return await create(*given, **named)

    monkeypatch.setattr(module, lost, away_at_first)
    monkeypatch.setattr(report, "_MOST_ROWS", 40)

    def train(live: LiveArtifacts) -> None:
        live.add({"kind": "start", "step": 0, "steps": 100, "tokens_per_step": 128, "argv": [SECRET]})
        for step in range(1, 101):
            live.add({"kind": "step", "step": step, "loss": 5.0 - step / 100, "tokens": 128 * step, "said": SECRET})

    @flow(name="scene")
    async def scene() -> None:
        async with LiveArtifacts(name) as live:
            await asyncio.to_thread(train, live)

    asyncio.run(scene())
    assert not away
    found = shown(name)
    assert found["progress"] == 100
    assert "100\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}100" in found["training"]
    assert "xychart-beta" in found["training"]
    assert leaks(str(found), SECRET) == []


@pytest.mark.prefect
def test_a_server_that_takes_questions_and_answers_none_holds_no_attempt_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "acreate_markdown_artifact", never)
    monkeypatch.setattr(module, "acreate_progress_artifact", never)
    monkeypatch.setattr(report, "acreate_markdown_artifact", never)
    monkeypatch.setattr(module, "_ANSWER", 0.05)
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
