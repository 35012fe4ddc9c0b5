"""The server of `make serve` is its user's alone: strangers are refused, and the user is never asked for the secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from strangers import require_refusals

from deployments.bootstrap import POOL


def test_a_page_elsewhere_starts_no_program_on_this_machine(served: Any) -> None:
    with SyncPrefectClient(served.place.api, auth_string=served.secret) as client:
        deployment = client.read_deployment_by_name("run-torchrun/pi")
        before = client.read_flow_runs()
        attack = {"parameters": {**deployment.parameters, "script": "/tmp/theirs.py"}}
        require_refusals(served.place.api, f"/deployments/{deployment.id}/create_flow_run", attack, served.secret)
        assert client.read_flow_runs() == before


def test_our_commands_find_the_secret_by_themselves(served: Any) -> None:
    shell = {**os.environ, "PREFECT_HOME": str(served.place.home)}
    shell["PREFECT_API_URL"] = f"http://localhost:{served.place.port}/api"  # the machine's other name
    program = Path(sys.executable).with_name("train-litgpt")
    with SyncPrefectClient(served.place.api, auth_string=served.secret) as client:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))  # to be looked at, not to be run
        try:
            before = {run.id for run in client.read_flow_runs()}
            subprocess.run([program, "submit", "local"], env=shell, check=True)
            [made] = {run.id for run in client.read_flow_runs()} - before
            client.delete_flow_run(made)
        finally:
            client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))


def test_what_server_and_worker_keep_is_closed_to_other_users(served: Any) -> None:
    home, folder = served.place.home, served.place.server.folder
    private = [served.place.environment_file, served.place.server.log, served.place.worker.log]
    assert [one.stat().st_mode & 0o777 for one in (home, folder, *private)] == [0o700, 0o700, 0o600, 0o600, 0o600]


def test_no_log_and_no_command_line_shows_the_secret(served: Any) -> None:
    for daemon in (served.place.server, served.place.worker):
        assert served.secret not in daemon.log.read_text() + " ".join(daemon.process().cmdline())
