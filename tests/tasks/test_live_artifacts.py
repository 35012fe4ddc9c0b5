"""What Prefect shows of a job, while its server comes and goes, and whatever a script writes as its rows."""

import asyncio
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from job_handles import handle_of
from leaking import leaks
from prefect import flow
from waiting import until

from launcher.config import RunConfig
from launcher.errors import ConfigProblem, JobCancelled, JobFailed
from launcher.runs.diagnosis import Diagnosis
from launcher.runs.run import plan_run
from litgpt_demo.errors import FailureClass, Finding
from litgpt_demo.runs import METRICS, REPORT
from litgpt_demo.storage import MANIFEST
from tasks import report
from tasks.preflight import report_findings
from tasks.report import LiveArtifacts, LiveReport

SECRET = "S3cret-marker-0123456789"


@pytest.mark.prefect
def test_silent_server_delays_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(report.artifacts, "acreate_progress_artifact", never)
    monkeypatch.setattr(report.artifacts, "acreate_markdown_artifact", never)
    monkeypatch.setattr(report, "_ANSWER", 0.05)
    diagnosis = Diagnosis(fault=FailureClass.NODE, node=0, rank=None, evidence="lost", logs="/attempts/1")

    @flow(name="scene")
    async def scene() -> None:
        async with LiveArtifacts("demo") as live:
            live.add({"kind": "step", "step": 1, "loss": 5.0})
        await report.show_diagnosis(diagnosis, attempt="demo-a1")

    asyncio.run(scene())


@pytest.mark.prefect
def test_newest_texts_of_a_model_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a step, and without a secret that a script writes as one."""
    pages = list[str]()

    async def keep(page: str, **_: Any) -> None:
        pages.append(page)

    monkeypatch.setattr(report.artifacts, "acreate_markdown_artifact", keep)

    @flow(name="scene")
    async def scene() -> None:
        async with LiveArtifacts("demo") as live:
            for step in range(1, 12):
                text = f"text {step} Authorization: Bearer {SECRET}"
                live.add({"kind": "sample", "step": step, "prompt": "a", "text": text})

    asyncio.run(scene())
    assert re.findall(r"text \d+", pages[-1]) == [f"text {step}" for step in range(4, 12)]
    assert leaks(pages[-1], SECRET) == []


def test_findings_that_repeat_a_secret_are_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    async def keep(table: Any, **_: Any) -> None:
        kept.append(table)

    monkeypatch.setattr("tasks.preflight.acreate_table_artifact", keep)
    message = [f"https://bucket.example/a?X-Goog-Signature={SECRET}&b=1", f"Authorization: Bearer {SECRET}"]
    findings = [Finding("error", "kubernetes.unseen", entry, f"ask again: {entry}") for entry in message]
    with pytest.raises(ConfigProblem) as reported:
        asyncio.run(report_findings.fn(lambda: findings, artifact="planted"))
    assert "[secure]" in str(kept)
    assert leaks(f"{kept} {reported.value}", SECRET) == []


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (JobFailed("out of memory on node 0\nits traceback"), "Stopped at step 1 of 8: out of memory on node 0"),
        (JobCancelled("it was stopped", fix="run it again"), "Stopped at step 1 of 8: it was stopped; run it again"),
        (ValueError("no such size"), "Stopped at step 1 of 8: ValueError: no such size"),
        (asyncio.CancelledError(), "Training at step 1 of 8"),
    ],
)
def test_a_run_without_a_model_has_a_report(
    error: BaseException, outcome: str, tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, and when it failed or was cancelled; a process that is stopped leaves the last one."""
    shown, run, handle = list[str](), plan_run(tiny()), handle_of(tiny())

    async def show(page: str, **_: Any) -> None:
        shown.append(page)

    monkeypatch.setattr(report.artifacts, "acreate_markdown_artifact", show)
    monkeypatch.setattr(report, "read_document", lambda _: SimpleNamespace(price=None))
    monkeypatch.setattr(report, "LINE", 0.0)

    async def scene() -> None:
        async with LiveReport(run) as page:
            handle.reattach_or_create()
            rows = [{"kind": "start", "step": 0, "steps": 8}, {"kind": "step", "step": 1, "loss": 5.0}]
            run.storage.write(METRICS, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
            page.follow({"kind": "checkpoint", "step": 1})
            await asyncio.to_thread(until, lambda: run.storage.exists(REPORT))
            raise error

    with pytest.raises(type(error)):
        asyncio.run(scene())
    assert re.findall(r'<p class="outcome .*?">(.*?)</p>', run.storage.read(REPORT).decode()) == [outcome]
    assert run.storage.address(REPORT) in shown[0].replace("\\", "")


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_failure_leaves_a_published_report(
    has_manifest: bool, tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later command with the same run may fail, as in its evaluation: the run's manifest lists the page."""
    run = plan_run(tiny())
    made = SimpleNamespace(attempts=1, final=SimpleNamespace(complete=True))
    monkeypatch.setattr(LiveReport, "_made", lambda *_, **__: made)
    monkeypatch.setattr(report.report, "html", lambda _: "stopped")
    run.storage.write(REPORT, b"published")
    if has_manifest:
        run.storage.write(MANIFEST, b"{}")
    asyncio.run(LiveReport(run)._write(live=False, ended="no such task"))
    assert run.storage.read(REPORT) == (b"published" if has_manifest else b"stopped")


def test_a_report_that_fails_hides_no_error(tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no picture")

    async def scene() -> None:
        async with LiveReport(plan_run(tiny())):
            raise JobFailed("out of memory")

    monkeypatch.setattr(LiveReport, "_made", fail)
    with pytest.raises(JobFailed, match="out of memory"):
        asyncio.run(scene())
