"""A command's own server serves only this command, and refuses other users of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from strangers import require_refusals

# A command with a server of its own: says how it is reached, and what a process started meanwhile would inherit.
COMMAND = """
import json, subprocess, sys
from prefect.settings import get_current_settings
from flows.server import OwnServer
OwnServer().wait()
api = get_current_settings().api
job = subprocess.run(["env"], capture_output=True, text=True).stdout
print(json.dumps({"api": api.url, "secret": api.auth_string.get_secret_value(), "job": job}), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def own(prefect_home: Callable[[], Path]) -> Iterator[Any]:
    """How it is reached, what a job of its command finds in its environment, and the command."""
    home = prefect_home()
    home.chmod(0o755)  # as one of before is
    env = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", COMMAND], env=env, text=True, **pipes) as command:  # type: ignore[call-overload]
        report = json.loads(command.stdout.readline())
        yield SimpleNamespace(**report, command=psutil.Process(command.pid), home=home)
        command.stdin.close()


def test_strangers_are_refused_by_a_server_of_a_commands_own(own: Any) -> None:
    require_refusals(f"{own.api}/flows/", {"name": "run-torchrun"})
    with SyncPrefectClient(own.api, auth_string=own.secret) as client:
        assert client.read_flows() == []


def test_job_inherits_no_secret_or_address_of_the_command(own: Any) -> None:
    assert "PREFECT_HOME=" in own.job
    assert own.secret not in own.job
    assert "PREFECT_API_URL" not in own.job
    [server] = own.command.children()
    assert own.secret not in " ".join(server.cmdline())


def test_its_database_is_closed_to_other_users(own: Any) -> None:
    assert list(own.home.glob("prefect.db*"))
    assert own.home.stat().st_mode & 0o777 == 0o700


def test_it_ends_with_its_command_though_that_is_killed(own: Any) -> None:
    [server] = own.command.children()
    own.command.kill()
    assert server.wait() is None or not server.is_running()
