"""What `make serve` starts and brings up to date; a whole server is in tests/real/server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from serving_thread import Answering, served

from deployments.bootstrap import AUTOMATIONS_FILE, NOTICES, NOTIFY, _roots, put_automation, serve
from deployments.bootstrap import _notify as take_address
from flows.serving import CHECKOUT, PREFECT_SETTINGS, server_command
from launcher.errors import ConfigProblem


def test_the_server_is_heard_on_this_machine_alone() -> None:
    from uvicorn.main import main as uvicorn

    command = server_command(0, app="own_server")
    options = uvicorn.make_context("uvicorn", command[command.index("uvicorn") + 1 :]).params
    assert options["host"] == "127.0.0.1"


def test_nothing_of_make_tells_prefects_makers_of_its_user() -> None:
    env = {name: value for name, value in os.environ.items() if name != "DO_NOT_TRACK"}
    shown = subprocess.run(
        ["make", "--eval=shown: ; @env", "shown"], env=env, cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert "DO_NOT_TRACK=1" in shown.stdout.splitlines()


@pytest.mark.prefect
def test_old_automation_is_updated_but_stays_disabled() -> None:
    """Only an automation that its user has disabled stays so."""
    from prefect.client.orchestration import get_client

    automation: dict[str, Any] = yaml.safe_load(AUTOMATIONS_FILE.read_text())[0] | {"name": "dead-of-a-test"}
    before = {**automation, "trigger": {**automation["trigger"], "within": 60}}

    async def put() -> tuple[list[str], Any]:
        async with get_client() as client:
            reported = [await put_automation(client, before)]
            [made] = await client.read_automations_by_name(automation["name"])
            await client.pause_automation(made.id)
            reported += [await put_automation(client, automation) for _ in range(2)]
            [found] = await client.read_automations_by_name(automation["name"])
            return reported, found

    reported, found = asyncio.run(put())
    assert reported == ["created", "updated", "exists"]
    assert (found.trigger.within.total_seconds(), found.enabled) == (1200, False)


@pytest.mark.prefect
def test_notices_are_off_until_there_is_an_address() -> None:
    from prefect.blocks.webhook import Webhook
    from prefect.client.orchestration import get_client

    [notices] = [
        entry for entry in yaml.safe_load(AUTOMATIONS_FILE.read_text()) if entry["name"] == "notify-on-failure"
    ]

    async def put() -> list[str]:
        async with get_client() as client:
            reported = [await put_automation(client, notices)]
            await Webhook.model_validate({"url": "http://127.0.0.1:9"}).asave(NOTICES)
            return reported + [await put_automation(client, notices) for _ in range(2)]

    assert asyncio.run(put()) == ["off", "created", "exists"]


@pytest.mark.parametrize("address", ["http://hooks.example/secret", "http://127.0.0.1.evil.example/x", "ftp://x/y"])
def test_notices_go_to_no_plain_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTIFY, address)
    with pytest.raises(ConfigProblem, match=f"{NOTIFY}.* https://") as refused:
        take_address()
    assert address not in str(refused.value), "who has the address may write there"
    assert NOTIFY not in os.environ


class Strange(Answering):
    """Somebody else's Prefect server: it answers Prefect's command `server status`."""

    def do_GET(self) -> None:
        self.answer(200, b"true")


def test_port_of_a_strange_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("deployments.bootstrap._start", Mock(side_effect=AssertionError("a server is started")))
    with served(server := ThreadingHTTPServer(("127.0.0.1", 0), Strange)):
        problem = f"port {server.server_port} .* is in use by a program that `train-litgpt serve` did not start"
        with pytest.raises(ConfigProblem, match=problem):
            serve(server.server_port)
    assert not [*tmp_path.iterdir()], "its secret is kept nowhere"


def test_serve_names_the_port_of_its_running_server(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(cmdline=lambda: server_command(4300, app="server"))
    monkeypatch.setattr("deployments.bootstrap._start", Mock(side_effect=AssertionError("a server is started")))
    monkeypatch.setattr("flows.serving.live", lambda name: process if name == "server" else None)
    with pytest.raises(ConfigProblem, match="listens on port 4300; use it with `train-litgpt serve --port 4300`"):
        serve(4200)


@pytest.mark.prefect
def test_stop_looks_at_all_pages_of_flow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest flow run may be the only one of its root."""
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    from flows.train_litgpt import train_litgpt

    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name(train_litgpt.name)
        for root in ("the-oldest", *["the-newest"] * 6):
            body = {"flow_id": str(flow), "parameters": {"root": root}}
            client.request("POST", "/flow_runs/", json=body).raise_for_status()
    monkeypatch.setenv("PREFECT_API_URL", str(get_current_settings().api.url))
    monkeypatch.setattr("flows.reconciling._PAGE", 3)
    assert {"the-oldest", "the-newest"} <= asyncio.run(_roots())


def test_prefect_takes_its_settings_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import Settings

    monkeypatch.delenv("PREFECT_SERVER_ANALYTICS_ENABLED")
    monkeypatch.chdir(CHECKOUT)
    taken = Settings()
    assert taken.runner.crash_on_cancellation_failure
    assert taken.worker.query_seconds == 2
    assert taken.client.retry_extra_codes == {500}
    assert not taken.server.analytics_enabled
    assert taken.flows.heartbeat_frequency == 30
    # A worker hands them to its flow runs.
    handed = taken.to_environment_variables(exclude_unset=True)
    # Without a checkout there is no such file.
    section = (CHECKOUT / "pyproject.toml").read_text().split("[tool.prefect]")[1].split("\n[")[0]
    names = re.findall(r"^([a-z_.]+) = ", section, re.MULTILINE)
    assert {f"PREFECT_{name.replace('.', '_').upper()}" for name in names} == {*PREFECT_SETTINGS}
    assert PREFECT_SETTINGS.items() <= handed.items()
    assert handed["PREFECT_RUNNER_CRASH_ON_CANCELLATION_FAILURE"] == "True"
