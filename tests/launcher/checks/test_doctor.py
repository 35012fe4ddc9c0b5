from __future__ import annotations

import socket
import sys
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
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "0rc1")
        assert found_by_doctor(tmp_path, "package.torch").severity == "warning"
    monkeypatch.setattr(sys, "path", [])
    assert found_by_doctor(tmp_path, "package.litgpt").severity == "error"


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing."""


def test_doctor_says_whether_prefects_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    address = f"http://127.0.0.1:{server.server_port}/api"
    monkeypatch.setenv("PREFECT_API_URL", address)
    with served(server):
        assert found_by_doctor(tmp_path, "prefect.server").severity == "info"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # where nobody listens
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{taken.getsockname()[1]}/api")
        assert found_by_doctor(tmp_path, "prefect.server").severity == "error"
