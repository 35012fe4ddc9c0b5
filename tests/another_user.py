"""Another user of this machine, and a temporary folder that both can write to."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from serving_thread import served

needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def shared_temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a temporary folder as a machine of several users has it; this process takes it for its own."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own are below a folder that no other user can enter
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def as_nobody(script: str, *arguments: Path) -> bool:
    """Return whether a shell script of another user succeeds."""
    nobody = pwd.getpwnam("nobody")
    done = subprocess.run(
        ["/bin/sh", "-ec", script, "sh", *map(str, arguments)],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        stderr=subprocess.DEVNULL,
        cwd="/",
        check=False,
    )
    return done.returncode == 0


def socket_of_nobody(family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """Make a socket of another user, which it stays whoever binds it."""
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        return socket.socket(family)
    finally:
        os.seteuid(0)


@dataclass(frozen=True)
class Squatter:
    """A server of another user that answers everything as a healthy Prefect server answers for its health."""

    port: int
    asked: list[str] = field(default_factory=list)
    """The paths that it was asked for."""


@contextmanager
def squatter() -> Iterator[Squatter]:
    """Listen as nobody."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers, bind_and_activate=False)
    server.socket.close()
    server.socket = socket_of_nobody()
    server.server_bind()
    server.server_activate()
    with served(server):
        yield Squatter(server.server_port, asked)
