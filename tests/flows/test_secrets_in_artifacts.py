"""Secrets in what others said and in the environment stand in none of the artifacts that Prefect keeps and shows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from echoing_server import echoing_server
from leaking import leaks
from prefect import flow
from prefect.client.orchestration import get_client

from flows.run_torchrun import run_torchrun
from launcher.errors import ConfigProblem
from litgpt_demo.findings import Finding
from tasks.preflight import report_findings
from tasks.report import LiveArtifacts

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(300)]

SECRET = "S3cret-marker-0123456789"
SAID = [
    f"GET https://bucket.example/a?X-Goog-Signature={SECRET}&b=1",
    f"the proxy http://me:{SECRET}@proxy.example:3128 answers 407",
    f"Authorization: Bearer {SECRET}",
    f'{{"clientSecret": "{SECRET}"}}',
]


def artifacts(name: str) -> str:
    """All that those of a name say."""
    with get_client(sync_client=True) as client:
        found = [one for one in client.read_artifacts() if name in str(one.key)]
    assert found
    return "\n".join(one.model_dump_json() for one in found)


@pytest.mark.parametrize("severity", ["warning", "error"])
def test_findings_that_repeat_a_secret_are_shown_without_it(severity: str) -> None:
    @flow
    async def shown() -> None:
        findings = [Finding(severity, "planted.url", said, f"ask again: {said}") for said in SAID]  # type: ignore[arg-type]
        await report_findings(findings, artifact=f"planted-{severity}")

    if severity == "error":
        with pytest.raises(ConfigProblem) as told:
            asyncio.run(shown())
        assert leaks(str(told.value), SECRET) == []
    else:
        asyncio.run(shown())
    told_in = artifacts(f"preflight-planted-{severity}")
    assert "[secure]" in told_in
    assert leaks(told_in, SECRET) == []


def test_a_control_plane_that_repeats_its_login_is_found_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNAI_CLIENT_ID", "me")
    monkeypatch.setenv("RUNAI_CLIENT_SECRET", SECRET)
    (tmp_path / "pi.py").touch()
    with echoing_server(status=401) as echo:
        platform = {
            "kind": "runai", "project": "team-a", "url": echo.address, "claims": [{"name": "a", "path": str(tmp_path)}],
        }  # fmt: skip
        with pytest.raises(ConfigProblem) as told:
            asyncio.run(
                run_torchrun(script=str(tmp_path / "pi.py"), name="echoed", root=str(tmp_path), platform=platform)
            )
    assert SECRET in "".join(echo.asked)
    assert leaks(str(told.value) + artifacts("echoed"), SECRET) == []


def test_rows_that_a_script_writes_are_shown_without_what_is_no_figure() -> None:
    @flow
    async def shown() -> None:
        live = LiveArtifacts("planted-rows")
        live.add({"kind": "start", "step": 0, "steps": 2, "tokens_per_step": 8, "argv": SAID})
        live.add({"kind": "step", "step": 1, "loss": 2.0, "tokens": 8, "said": SAID[0], "header": SAID[2]})
        await live.show()

    asyncio.run(shown())
    assert leaks(artifacts("planted-rows"), SECRET) == []
