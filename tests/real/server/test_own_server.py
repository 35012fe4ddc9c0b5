"""The server of a command's own: for this command alone, and closed to everybody else on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
PATIENCE = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"


@dataclass(frozen=True)
class Own:
    """A server of a command's own, its command, and what a job of that command finds in its environment."""

    api: str
    secret: str
    job: str
    command: psutil.Process
    home: Path


@pytest.fixture(scope="module")
def own(prefect_home: Callable[[], Path]) -> Iterator[Own]:
    home = prefect_home()
    home.chmod(0o755)  # as one of before is
    env = {**os.environ, "PREFECT_HOME": str(home), PATIENCE: "600"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", COMMAND], env=env, text=True, **pipes) as command:  # type: ignore[call-overload]
        yield Own(**json.loads(command.stdout.readline()), command=psutil.Process(command.pid), home=home)
        command.stdin.close()


def test_strangers_are_refused_by_a_server_of_a_commands_own(own: Own) -> None:
    require_refusals(f"{own.api}/flows/", {"name": "run-torchrun"})
    with SyncPrefectClient(own.api, auth_string=own.secret) as client:
        assert client.read_flows() == []


def test_a_job_that_outlives_the_command_inherits_neither_secret_nor_address(own: Own) -> None:
    assert "PREFECT_HOME=" in own.job
    assert own.secret not in own.job
    assert "PREFECT_API_URL" not in own.job
    [server] = own.command.children()
    assert own.secret not in " ".join(server.cmdline())


def test_its_database_is_closed_to_other_users(own: Own) -> None:
    assert list(own.home.glob("prefect.db*"))
    assert own.home.stat().st_mode & 0o777 == 0o700


def test_it_ends_with_its_command_though_that_is_killed(own: Own) -> None:
    [server] = own.command.children()
    own.command.kill()
    assert server.wait() is None or not server.is_running()


def test_a_server_of_its_own_that_cannot_be_is_one_message_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = Path(__file__).parents[3] / "deployments" / "configs" / "local.yaml"
    command = [sys.executable, "-m", "cli.main", "prepare", str(config), f"root={tmp_path / 'root'}"]
    for settings, told in (
        ({"PREFECT_HOME": f"{tmp_path}/file/prefect"}, f"cannot keep its data in PREFECT_HOME={tmp_path}/file/prefect"),
        ({"PREFECT_HOME": str(tmp_path), PATIENCE: "1"}, "was not up after 1 s"),
    ):
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
        assert done.returncode == 54, done.stderr
        assert told in done.stderr.splitlines()[-1]
    assert not (tmp_path / "root").exists()
