"""The example of a notification, from a node that is lost in a real training to the POST that a webhook gets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prefect import flow, get_client
from serving_thread import served as in_a_thread
from test_server import OURS, rank_of, steps_done
from typer.testing import CliRunner
from waiting import until

from deployments.bootstrap import app, notify_webhook
from launcher.config import RunConfig
from launcher.errors import ConfigProblem
from launcher.runs.run import plan_run
from tasks.run_events import CheckpointCommitted, RunEvent, RunFinished, VerdictGiven, emit_run_event

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(600)]


@dataclass
class Inbox:
    """A webhook on this machine, and what was posted to it."""

    url: str = ""
    posts: list[dict[str, Any]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    def __init__(self, inbox: Inbox, *given: Any) -> None:
        self._inbox = inbox
        super().__init__(*given)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self._inbox.posts.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows what failed."""


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, made))
    made.url = f"http://127.0.0.1:{server.server_port}/hooks/team"
    with in_a_thread(server):
        yield made


ABOUT: dict[str, Any] = {
    "run": "demo-k", "folder": "/data/runs/demo-k", "sweep": None, "attempt": 2, "submitted": 1.0, "step": 8,
}  # fmt: skip
TOLD: tuple[RunEvent, ...] = (
    CheckpointCommitted(**ABOUT, validation_loss=3.0),
    VerdictGiven(
        **ABOUT, fault="hang", node=1, rank=3, machine="gpu-'7'", action="stop", reason="", advice="look at <stacks>",
        logs="/data/runs/demo-k/attempts/2",
    ),
    RunFinished(
        **ABOUT, loss=2.5, validation_loss=3.0, tokens=1024, seconds=60.0, usd=1.5,
        report="/data/runs/demo-k/report.html",
    ),
)  # fmt: skip


@pytest.mark.long
def test_a_webhook_gets_each_verdict_and_each_end_as_json_and_nothing_else(inbox: Inbox) -> None:
    asyncio.run(notify_webhook(inbox.url))

    @flow(name="scene")
    def scene() -> None:
        for event in TOLD:
            emit_run_event(event)

    try:
        scene()
        until(lambda: len(inbox.posts) == 2)
    finally:
        with get_client(sync_client=True) as client:
            [made] = client.read_automations_by_name("notify-webhook")
            client.delete_automation(made.id)
    posted = {one["event"]: one for one in inbox.posts}
    assert posted == {event.name: {**event.payload, "event": event.name} for event in TOLD[1:]}
    assert posted[VerdictGiven.name]["text"] == (
        "demo-k: attempt 2 ended as hang on node 1, rank 3; no other follows: look at <stacks>"
    )


@pytest.mark.parametrize("address", ["hooks.example.com/team", "file:///etc/passwd"])
def test_what_is_no_address_of_a_webhook_is_refused_before_a_server_is_asked(
    address: str,
) -> None:
    refused = CliRunner().invoke(app, ["notify"], env={"WEBHOOK_URL": address})
    assert isinstance(refused.exception, ConfigProblem)
    assert address not in str(refused.exception), "it may hold a secret"


@pytest.mark.drill  # minutes: a rank is killed and the run goes on to its end
@pytest.mark.training
def test_a_webhook_hears_why_an_attempt_ended_and_that_the_run_is_finished(
    served: Any, inbox: Inbox, tiny_under: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOK_URL", inbox.url)
    command = (sys.executable, "-m", "deployments.bootstrap", "notify")
    made, again = served.call(*command), served.call(*command)
    assert made.stdout.split() == [
        "block",
        "written",
        "webhook/train-litgpt",
        "automation",
        "created",
        "notify-webhook",
    ]
    assert again.stdout.split()[3:] == ["automation", "there", "notify-webhook"]
    assert inbox.url not in made.stdout + made.stderr

    steps = {"train.global_batch": 32, "train.max_steps": 40, "train.checkpoint_every": 8, "train.max_restarts": 1}
    config = tiny_under(served.root, {"name": f"notified-{os.getpid()}", **steps})
    sections = ("name", "root", "data", "model", "train", "platform")
    document = config.model_dump(mode="json")
    done = served.call(*OURS, "submit", "local", *(f"{name}={json.dumps(document[name])}" for name in sections))
    assert done.returncode == 0, done.stderr
    until(lambda: steps_done(config) > 10)
    rank_of(config).send_signal(signal.SIGKILL)

    until(lambda: len(inbox.posts) == 2)
    verdict, finished = inbox.posts
    run = plan_run(config).name
    assert (verdict["event"], verdict["run"]) == ("train-litgpt.verdict", run)
    assert (verdict["attempt"], verdict["fault"], verdict["action"]) == (1, "node fault", "restart")
    assert verdict["text"] == f"{run}: attempt 1 ended as node fault on node 0, rank 0; another attempt follows"
    assert (finished["event"], finished["run"]) == ("train-litgpt.run.finished", run)
    assert (finished["attempt"], finished["step"]) == (2, 40)
    assert finished["report"] in finished["text"]
