"""A notification reports every bad end: a killed orchestrator and a failed job."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling
from serving_thread import served as serving
from test_server import LONG, engine_of, of_job, submitted
from waiting import until

from deployments.bootstrap import NOTIFY
from launcher.config import RunConfig


@pytest.fixture
def notices(served: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts that a webhook of ours got from the server, which was told its address."""
    texts: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with serving(receiver := ThreadingHTTPServer(("127.0.0.1", 0), Webhook)):
        monkeypatch.setenv(NOTIFY, f"http://127.0.0.1:{receiver.server_port}/secret-path")
        assert "secret-path" not in served.serve()
        yield texts


def test_notification_of_a_death_has_its_reason_with_a_fix(
    served: Any, client: SyncPrefectClient, notices: list[str], tiny_under: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """It has a link. An orchestrator dies, and a script."""
    config = tiny_under(served.root, {"name": "night", **LONG, "train.max_steps": 100_000})
    flow_run = submitted(served, config)
    engine_of(flow_run).kill()
    killed = until(lambda: [text for text in notices if text.startswith("night-")])[0]
    assert re.match(r"night-[0-9a-f]{10} \(train-litgpt\): Crashed\n", killed)
    assert "reattaches to its job" in killed
    assert f"/v2/runs/flow-run/{flow_run}" in killed
    until(lambda: client.read_flow_run(flow_run).state_type is StateType.RUNNING)
    client.set_flow_run_state(flow_run, Cancelling())
    until(lambda: not of_job(config))

    (script := tmp_path / "wrong.py").write_text("raise ValueError('the night shift is \"asleep\"')")
    changes = {"name": "broken", "root": str(tmp_path / "out"), "script": str(script)}
    overrides = f"overrides={json.dumps(changes)}"
    served.python("prefect", "deployment", "run", "run-torchrun/pi", "-p", overrides)
    broken = until(lambda: [text for text in notices if text.startswith("broken-")])[0]
    assert re.match(r"broken-[0-9a-f]{10} \(run-torchrun\): Failed\n", broken)
    assert 'ValueError: the night shift is "asleep"' in broken
    assert "what to do: fix what the message names, and run again" in broken
