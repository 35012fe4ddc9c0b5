"""The server of a command's own: for this command alone, and closed to everybody else on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from strangers import basic, require_refusals

# A command with a server of its own: says how it is reached, and what a process started meanwhile would inherit.
COMMAND = """
import json, subprocess, sys
from prefect.client.orchestration import get_client
from prefect.settings import get_current_settings
from flows.server import OwnServer
own = OwnServer()
own.wait()
with get_client(sync_client=True) as client:
    version = client.api_version()
api = get_current_settings().api
job = subprocess.run(["env"], capture_output=True, text=True).stdout
said = {"api": api.url, "secret": api.auth_string.get_secret_value(), "job": job, "version": version}
print(json.dumps(said), flush=True)
sys.stdin.read()
"""


pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Own:
    """A server of a command's own, its command, and what a job of that command finds in its environment."""

    api: str
    secret: str
    job: str
    version: str
    command: psutil.Process
    home: Path


@pytest.fixture(scope="module")
def own(prefect_home: Callable[[], Path]) -> Iterator[Own]:
    home = prefect_home()
    home.chmod(0o755)  # as one of before is
    env = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", COMMAND], env=env, text=True, **pipes) as command:  # type: ignore[call-overload]
        yield Own(**json.loads(command.stdout.readline()), command=psutil.Process(command.pid), home=home)
        command.stdin.close()


def test_strangers_are_refused_by_a_server_of_a_commands_own(own: Own) -> None:
    require_refusals(own.api, "/flows/", {"name": "run-torchrun"}, own.secret)
    known = httpx.post(f"{own.api}/flows/filter", json={}, headers=basic(own.secret), trust_env=False)
    assert known.json() == []


def test_its_command_knows_the_secret_and_nobody_who_lists_processes_does(own: Own) -> None:
    assert own.version
    [server] = own.command.children()
    assert "uvicorn" in " ".join(server.cmdline())
    assert own.secret not in " ".join(server.cmdline())
    assert server.environ()["PREFECT_SERVER_API_AUTH_STRING"] == own.secret


def test_a_job_that_outlives_the_command_inherits_neither_secret_nor_address(own: Own) -> None:
    assert "PREFECT_HOME=" in own.job
    assert own.secret not in own.job
    assert "PREFECT_API_URL" not in own.job


def test_its_database_is_closed_to_other_users(own: Own) -> None:
    assert list(own.home.glob("prefect.db*"))
    assert own.home.stat().st_mode & 0o777 == 0o700


def test_it_ends_with_its_command_though_that_is_killed(prefect_home: Callable[[], Path]) -> None:
    env = {**os.environ, "PREFECT_HOME": str(prefect_home()), "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", COMMAND], env=env, **pipes) as command:  # type: ignore[call-overload]
        command.stdout.readline()
        [server] = psutil.Process(command.pid).children()
        command.kill()
    assert psutil.wait_procs([server], timeout=15)[1] == []
