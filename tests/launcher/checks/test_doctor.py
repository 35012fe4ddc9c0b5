from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from serving_thread import served

from launcher.checks.doctor import examine_environment
from litgpt_demo.findings import Finding


def found_by_doctor(root: Path, code: str) -> Finding:
    (finding,) = (one for one in examine_environment(str(root)) if one.code == code)
    return finding


def test_doctor_tells_what_is_there_and_a_fix_of_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    found = {one.code: one for one in examine_environment(str(tmp_path))}
    assert found["python.version"].what == "Python " + ".".join(map(str, sys.version_info[:3]))
    assert found["package.torch"].what.startswith("torch ")
    assert {"machine.memory", "machine.cores", "machine.gpus", "network.loopback", "tool.git"} <= set(found)
    assert all(one.fix for one in found.values() if one.severity != "info")
    (tmp_path / "file").touch()
    assert found_by_doctor(tmp_path / "file", "root.not-a-folder").severity == "error"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found_by_doctor(tmp_path, "tool.git").severity == "warning"
    monkeypatch.setattr(sys, "path", [])
    assert found_by_doctor(tmp_path, "package.litgpt").severity == "error"


@contextmanager
def healthy() -> Iterator[str]:
    """A server that answers as Prefect's does when it is asked for its health."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, format: str, *words: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Healthy)
    with served(server):
        yield f"http://127.0.0.1:{server.server_port}/api"


@contextmanager
def nobody() -> Iterator[str]:
    """A port that is taken, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/api"


@contextmanager
def another_language() -> Iterator[str]:
    def answer() -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/api"
        thread.join()


@pytest.mark.parametrize(("server", "severity"), [(healthy, "info"), (nobody, "error"), (another_language, "error")])
def test_doctor_says_whether_prefects_server_answers(
    server: Callable[[], Iterator[str]], severity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server() as address:  # type: ignore[attr-defined]
        monkeypatch.setenv("PREFECT_API_URL", address)
        finding = found_by_doctor(tmp_path, "prefect.server")
    assert finding.severity == severity
    assert address in finding.what
