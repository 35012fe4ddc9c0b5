from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher.checks.doctor import examine_environment
from litgpt_demo.findings import Finding

HAS_GPU = Path("/proc/driver/nvidia/gpus").is_dir()


def only(findings: Iterable[Finding]) -> Finding:
    """The one finding, which says what to do unless it is good news."""
    (finding,) = findings
    assert finding.what
    assert finding.fix or finding.severity == "info"
    return finding


def found_by_doctor(root: Path, code: str) -> Finding:
    return only(one for one in examine_environment(str(root)) if one.code == code)


def test_doctor_tells_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    found = {one.code: one for one in examine_environment(str(tmp_path))}
    assert found["python.version"].what == "Python " + ".".join(map(str, sys.version_info[:3]))
    for name in ("torch", "lightning", "litgpt", "gigatoken", "prefect"):
        assert found[f"package.{name}"].what.startswith(f"{name} ")
    assert {"machine.memory", "machine.cores", "machine.gpus", "network.loopback", "tool.git", "tool.docker"} <= set(
        found
    )
    assert "PREFECT_API_URL is not set" in found["prefect.server"].what
    assert all(one.fix for one in found.values() if one.severity != "info")


def test_doctor_looks_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert found_by_doctor(tmp_path / "file", "root.not-a-folder").severity == "error"


def installed(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_doctor_knows_the_fastapi_that_breaks_prefect_and_versions_nobody_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "fastapi", "0.165.0")
    installed(tmp_path, "torch", "2.9.1")
    monkeypatch.syspath_prepend(tmp_path)
    fastapi = found_by_doctor(tmp_path, "package.fastapi")
    assert (fastapi.severity, fastapi.fix) == ("error", "pip install 'fastapi<0.151'")
    torch = found_by_doctor(tmp_path, "package.torch")
    assert (torch.severity, torch.what, torch.fix) == ("warning", "torch 2.9.1", "tested with 2.13")


def test_doctor_names_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert found_by_doctor(tmp_path, "package.litgpt").severity == "error"
    assert "package.fastapi" not in {one.code for one in examine_environment(str(tmp_path))}


def test_doctor_says_what_missing_tools_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    docker, git = found_by_doctor(tmp_path, "tool.docker"), found_by_doctor(tmp_path, "tool.git")
    assert (docker.what, docker.fix) == ("docker is not installed", "needed for image.kind=docker only")
    assert (git.severity, git.what) == ("warning", "git is not installed")
    assert "not recorded" in git.fix


@pytest.fixture
def health() -> Iterator[str]:
    """A server that answers as Prefect's does when it is asked for its health."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, *words: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path", ["/api", "/api/"])
def test_doctor_hears_a_prefect_server_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: str, path: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", health + path)
    finding = found_by_doctor(tmp_path, "prefect.server")
    assert (finding.severity, finding.what) == ("info", f"PREFECT_API_URL={health}{path} answers")


def nobody(taken: int) -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}/api"


@pytest.mark.parametrize(
    "address", [nobody, lambda taken: f"http://127.0.0.1:{taken}/api", lambda taken: "not an address"]
)
def test_doctor_names_a_prefect_server_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: Callable[[int], str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer_in_another_language() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=answer_in_another_language, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", address(other.getsockname()[1]))
        finding = found_by_doctor(tmp_path, "prefect.server")
    assert (finding.severity, finding.fix) == ("error", "make serve, or unset PREFECT_API_URL")
    assert os.environ["PREFECT_API_URL"] in finding.what


# A machine of its own: its disk and shared memory are small, its second disk is read-only, its network is down.
POOR_MACHINE = """
set -e
mount -t tmpfs -o size=1m tmpfs "SMALL"
mount -t tmpfs -o ro tmpfs "LOCKED"
mount -t tmpfs -o size=64m tmpfs /dev/shm
exec "$@"
"""
EXAMINE = """
import sys
from launcher.checks.doctor import examine_environment
for root in sys.argv[1:]:
    sys.stdout.writelines(f"{finding}\\n" for finding in examine_environment(root))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's namespaces")
def test_doctor_finds_a_poor_machine_out(tmp_path: Path) -> None:
    own = ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh"]
    if subprocess.run([*own, "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody make namespaces")
    small, locked = tmp_path / "small", tmp_path / "locked"
    small.mkdir()
    locked.mkdir()
    script = POOR_MACHINE.replace("SMALL", str(small)).replace("LOCKED", str(locked))
    command = [*own, "-c", script, "sh", sys.executable, "-c", EXAMINE, str(small), str(locked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"warning [root.disk-space] root={small} has 1.05 MB free -> free some" in done.stdout
    assert f"error [root.not-writable] root={locked}: cannot write to {locked} (Read-only file system)" in done.stdout
    assert "warning [machine.shm] /dev/shm has 67.1 MB -> NCCL" in done.stdout
    assert "error [network.loopback] processes cannot meet on 127.0.0.1 (" in done.stdout
