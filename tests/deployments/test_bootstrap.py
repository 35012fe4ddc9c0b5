"""What `make serve` starts, and where it refuses to."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from serving_thread import served

from deployments.bootstrap import Place, start_server
from flows.serving import server_command
from launcher.errors import ConfigProblem


def test_the_server_is_heard_on_this_machine_alone() -> None:
    from uvicorn.main import main as uvicorn

    command = server_command(0, log_level="warning")
    options = uvicorn.make_context("uvicorn", command[command.index("uvicorn") + 1 :]).params
    assert options["host"] == "127.0.0.1"


def test_nothing_is_started_at_a_port_that_something_else_uses(tmp_path: Path) -> None:
    other = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    with served(other), pytest.raises(ConfigProblem, match=f"port {other.server_port} is in use"):
        start_server(Place(port=other.server_port, home=tmp_path))
    assert not list(tmp_path.iterdir())
