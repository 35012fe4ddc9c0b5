"""`make audit` says what is known of the pinned packages, or that it could not ask."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from waiting import free_port

AUDIT = Path(__file__).parents[2] / "deployments" / "audit.py"

HOLE = {
    "id": "GHSA-0000-0000-0000",
    "summary": "runs what it reads",
    "published": "2026-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "holey"},
            "versions": ["1.0"],
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}],
        }
    ],
}


class Database(BaseHTTPRequestHandler):
    """osv.dev, as far as pip-audit asks it."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"vulns": [HOLE]} if asked["package"]["name"] == "holey" else {}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Database)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    server.server_close()


def audit(folder: Path, pins: str, database: str) -> subprocess.CompletedProcess[str]:
    (file := folder / "constraints.txt").write_text(pins)
    command = [sys.executable, str(AUDIT), str(file), "--osv-url", database]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_package_with_a_known_hole_fails_the_audit_by_name(tmp_path: Path, database: str) -> None:
    done = audit(tmp_path, "sound==2.0\nholey==1.0\n", database)
    assert done.returncode == 1
    assert "holey" in done.stdout
    assert "GHSA-0000-0000-0000" in done.stdout
    assert "1.1" in done.stdout


@pytest.mark.long
def test_packages_that_only_the_image_has_are_audited_too(tmp_path: Path, database: str) -> None:
    (tmp_path / "constraints.txt").write_text("sound==2.0\n")
    told = subprocess.run(["make", "-n", "audit"], cwd=AUDIT.parents[1], capture_output=True, text=True, check=True)
    [asked] = re.findall(r"deployments/audit\.py (.*)", told.stdout)
    files = [str(tmp_path / Path(file).name) for file in asked.split()]
    locks = [Path(file) for file in files if file.endswith(".lock")]
    assert len(locks) == len(list((AUDIT.parents[1] / "litgpt_demo" / "stacks").glob("*.lock")))
    for lock in locks:
        lock.write_text(f"sound==2.0 --hash=sha256:{64 * '0'}\n")
    locks[-1].write_text(f"sound==2.0 --hash=sha256:{64 * '0'}\nholey==1.0 --hash=sha256:{64 * '1'}\n")
    command = [sys.executable, str(AUDIT), *files, "--osv-url", database]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "GHSA-0000-0000-0000" in done.stdout


def test_packages_of_which_nothing_is_known_pass(tmp_path: Path, database: str) -> None:
    done = audit(tmp_path, "sound==2.0\n", database)
    assert done.returncode == 0
    assert "No known vulnerabilities found" in done.stdout


def test_without_a_network_the_audit_says_that_it_did_not_happen(tmp_path: Path) -> None:
    done = audit(tmp_path, "sound==2.0\n", f"http://127.0.0.1:{free_port()}/v1/query")
    assert done.returncode == 0
    assert "NOT AUDITED: the packages of" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_file_that_cannot_be_read_is_no_success(tmp_path: Path, database: str) -> None:
    done = audit(tmp_path, "sound>=2.0\n", database)
    assert done.returncode == 1
    assert "sound" in done.stdout
