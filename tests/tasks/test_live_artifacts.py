"""The live artifacts where the server is slow or away, over real connections."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest
from prefect import flow, get_client
from prefect.events.worker import EventsWorker
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from serving_thread import served

from tasks.report import LiveArtifacts

pytestmark = pytest.mark.prefect

ROWS: list[dict[str, Any]] = [
    {"kind": "start", "step": 0, "steps": 4, "tokens_per_step": 128},
    *({"kind": "step", "step": step, "loss": 5.0 - step, "tokens": 128 * step} for step in range(1, 5)),
]


@dataclass
class Way:
    """What happens between us and the server to the requests that make an artifact."""

    upstream: str
    url: str = ""
    lost: set[int] = field(default_factory=set)
    """Which of them never arrive, counted from 0."""
    seen: int = 0
    reached: Event = field(default_factory=Event)
    """The first is on the way."""
    open: Event = field(default_factory=Event)
    """Until then they are held up."""

    def lets_through(self) -> bool:
        number, self.seen = self.seen, self.seen + 1
        self.reached.set()
        self.open.wait(60)
        return number not in self.lost


class Handler(BaseHTTPRequestHandler):
    """A proxy; returning without an answer closes the connection, as a server does that goes away."""

    def __init__(self, way: Way, *given: Any) -> None:
        self.way = way
        super().__init__(*given)

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        makes_artifact = self.command == "POST" and self.path.endswith("/artifacts/")
        if makes_artifact and not self.way.lets_through():
            return
        upstream = HTTPConnection(self.way.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = forward  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows what failed."""


@pytest.fixture
def way(prefect_api: None) -> Iterator[Way]:
    """To the server of the tests; open at first."""
    EventsWorker.instance()  # Prefect has one for all flow runs; it shall not be begun on this way, which ends
    api = urlsplit(str(PREFECT_API_URL.value()))
    made = Way(api.netloc)
    made.open.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, made))
    made.url = f"http://127.0.0.1:{server.server_port}{api.path}"
    with served(server):
        yield made
        made.open.set()


@contextmanager
def by(way: Way) -> Iterator[None]:
    """Clients made here take this way, and do not themselves try again what it loses."""
    log = {PREFECT_LOGGING_TO_API_ENABLED: False}
    with temporary_settings({PREFECT_API_URL: way.url, PREFECT_CLIENT_MAX_RETRIES: 0, **log}):
        yield


def run(scene: Callable[[], Coroutine[Any, Any, None]], way: Way) -> None:
    """The scene in a flow run, all of whose own requests go straight to the server.

    The flow is a plain function for that: one that is a coroutine would lend its client to what it calls.
    """

    @flow(name="scene")
    def in_a_flow_run() -> None:
        with by(way):
            asyncio.run(scene())

    in_a_flow_run()


def shown(name: str) -> list[tuple[str, Any]]:
    """Kind and data of each artifact of that job."""
    with get_client(sync_client=True) as client:
        found = [artifact for artifact in client.read_artifacts() if str(artifact.key).endswith(f"-{name}")]
    return sorted((str(artifact.key).removesuffix(f"-{name}"), artifact.data) for artifact in found)


def assert_the_end_is_shown(name: str) -> None:
    (progress, percent), (page, text) = shown(name)
    assert (progress, percent) == ("progress", 100)
    assert page == "training"
    assert "4\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}4" in text
    assert "xychart-beta" in text


@pytest.mark.long
def test_a_job_that_ends_during_its_first_update_is_shown_whole(way: Way) -> None:
    """It ended so on a busy machine: the page was missing, for the update was cut between the two artifacts."""
    way.open.clear()

    async def scene() -> None:
        async with LiveArtifacts("short") as live:
            for row in ROWS:
                live.add(row)
            assert await asyncio.to_thread(way.reached.wait, 60)
            asyncio.get_running_loop().call_later(0.1, way.open.set)

    run(scene, way)
    assert_the_end_is_shown("short")


def test_long_lists_and_texts_in_rows_do_not_fill_the_memory_of_a_job_that_is_watched() -> None:
    live = LiveArtifacts("watched")
    tracemalloc.start()
    try:
        for step in range(1, 201):
            windows, words = [float(number) for number in range(10_000)], f"{step}" * 4096
            live.add({"kind": "step", "step": step, "loss": 5.0, "windows": windows, "why": words, "path": words})
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 << 20


@pytest.mark.parametrize("lost", [0, 1])
def test_what_the_server_missed_while_it_was_away_is_shown_when_it_is_back(lost: int, way: Way) -> None:
    name = f"missed-{lost}"
    way.lost = {lost}

    async def scene() -> None:
        async with LiveArtifacts(name) as live:
            await asyncio.sleep(0)  # as any job does
            for row in ROWS:
                live.add(row)

    run(scene, way)
    assert way.seen == 3
    assert_the_end_is_shown(name)


def test_a_training_of_more_steps_than_are_kept_still_shows_how_far_it_is(way: Way) -> None:
    async def scene() -> None:
        async with LiveArtifacts("long") as live:
            live.add({"kind": "start", "step": 0, "steps": 120_000, "tokens_per_step": 128})
            for step in range(1, 60_001):
                live.add({"kind": "step", "step": step, "loss": 5.0, "tokens": 128 * step, "step_seconds": 0.5})

    run(scene, way)
    (_, percent), (_, text) = shown("long")
    assert percent == 50
    assert "left" in text
