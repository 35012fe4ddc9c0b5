"""Prefect's server is not there, is something else, or goes away: one message, the fix, and an exit code of its own."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prefect import flow
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from cli.main import main
from flows.server import require_server, server_problems
from flows.serving import environment_file, serving_home
from launcher.errors import ServerUnreachable
from litgpt_demo.errors import EXIT_CODES

CONFIGS = Path(__file__).parents[2] / "deployments" / "configs"
NOBODY = "http://127.0.0.1:9/api"  # the discard port, where nobody listens


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("run", "local.yaml"),
        ("run", "pi.yaml"),
        ("prepare", "local.yaml"),
        ("sweep", "sweep.yaml"),
        ("benchmark-network", "network.yaml"),
        ("submit", "local"),
    ],
    ids=" ".join,
)
def test_every_command_that_starts_a_flow_says_that_the_server_is_not_there(
    words: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, what = words
    given = [what] if verb == "submit" else [str(CONFIGS / what), f"root={tmp_path / 'root'}"]
    monkeypatch.setattr(sys, "argv", ["train-litgpt", verb, *given])
    monkeypatch.setenv("PREFECT_API_URL", NOBODY)
    with temporary_settings({PREFECT_API_URL: NOBODY}), pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == EXIT_CODES[ServerUnreachable.fault] == 54
    assert said.startswith(f"error PREFECT_API_URL={NOBODY} cannot be used as Prefect's server: ")
    assert "make serve" in said
    assert "unset PREFECT_API_URL" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "root").exists(), "asked before anything begins"


def test_a_server_that_takes_connections_and_says_nothing_is_given_up_within_seconds() -> None:
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: address}),
            pytest.raises(ServerUnreachable, match="no answer in time"),
        ):
            require_server()
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "edited",
    ["export PREFECT_API_AUTH_STRING=litgpt:secret\n", f"export PREFECT_API_URL='{NOBODY}\n"],
    ids=["its address is gone", "a quotation mark is not closed"],
)
def test_a_damaged_file_of_the_servers_settings_is_not_used(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    (file := environment_file(serving_home())).parent.mkdir()
    file.write_text(edited)
    unknown = {PREFECT_API_URL: NOBODY, PREFECT_API_AUTH_STRING: None}
    with temporary_settings(unknown), pytest.raises(ServerUnreachable, match="make serve"):
        require_server()


@contextmanager
def web_server(status: int, body: bytes) -> Iterator[str]:
    """Something that is not Prefect's server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: pytest shows what failed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (404, b"", "it answers 404 Not Found. Start it with `make serve`, or correct the address, which ends in /api"),
        (200, b"<html></html>", "which ends in /api"),
        (401, b"Unauthorized", "it answers 401 Unauthorized. Set PREFECT_API_AUTH_STRING"),
        (200, b'"2.20.1"', "Major versions must match"),
    ],
)
def test_an_address_of_something_else_is_refused_with_what_it_answered(status: int, body: bytes, advice: str) -> None:
    with web_server(status, body) as address, temporary_settings({PREFECT_API_URL: address}):
        with pytest.raises(ServerUnreachable, match=re.escape(advice)) as refused:
            require_server()
        assert str(refused.value).startswith(f"PREFECT_API_URL={address} in Prefect's settings cannot be used")


def test_a_password_in_the_address_is_not_shown() -> None:
    with temporary_settings({PREFECT_API_URL: NOBODY.replace("127", "me:opensesame@127")}):
        with pytest.raises(ServerUnreachable) as refused:
            require_server()
        assert NOBODY in str(refused.value)
        assert "opensesame" not in str(refused.value)


@contextmanager
def relay(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A way to a port of this machine, and how to cut it with all its connections, as the death of a server does."""
    ends: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                ours, theirs = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                ends.extend((ours, theirs))
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    def cut() -> None:
        for end in (listener, *ends):
            with suppress(OSError):  # the other side may have gone first
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], cut
    cut()


@pytest.mark.long
@pytest.mark.prefect
def test_a_server_that_dies_in_mid_run_ends_in_a_message_that_says_how_to_go_on() -> None:
    api = urlsplit(str(PREFECT_API_URL.value()))
    with relay(api.port or 80) as (port, cut):

        @flow
        async def outlives_its_server() -> None:
            cut()

        address = f"http://127.0.0.1:{port}{api.path}"
        with (
            temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}),
            pytest.raises(ServerUnreachable, match=f"Prefect's server at {address} stopped answering") as lost,
            server_problems(),
        ):
            asyncio.run(outlives_its_server())
    assert "Run the same command again" in str(lost.value)


def test_another_server_that_does_not_answer_is_not_taken_for_prefects() -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}),
        pytest.raises(httpx.ConnectError),
        server_problems(),
    ):
        httpx.get(f"{NOBODY}/datasets/openwebtext")


@pytest.mark.long
def test_a_server_of_its_own_that_could_not_keep_its_data_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "cli.main", "prepare", str(CONFIGS / "local.yaml"), f"root={tmp_path / 'root'}"]
    settings = {"PREFECT_HOME": str(tmp_path / "file" / "prefect")}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == EXIT_CODES[ServerUnreachable.fault], done.stderr
    assert f"cannot keep its data in PREFECT_HOME={tmp_path / 'file' / 'prefect'}: Not a directory" in done.stderr
    assert not (tmp_path / "root").exists()


@pytest.mark.long
def test_a_server_of_its_own_that_is_too_slow_is_a_message_with_cause_and_fix(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "prepare", str(CONFIGS / "local.yaml"), f"root={tmp_path / 'root'}"]
    settings = {"PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "1"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 54, done.stderr
    assert done.stderr.startswith("error Prefect's own server for this run was not up after 1 s")
    assert "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=2" in done.stderr
    assert "make serve" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "root").exists()
