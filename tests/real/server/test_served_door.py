"""The server of `make serve` refuses other users, and its user never types the secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId, DeploymentFilterName
from strangers import require_refusals

from deployments.bootstrap import POOL
from flows.serving import environment_file


def test_a_page_elsewhere_starts_no_program_on_this_machine(served: Any, client: SyncPrefectClient) -> None:
    deployment = client.read_deployment_by_name("run-torchrun/pi")
    of_it = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
    before = client.read_flow_runs(deployment_filter=of_it)
    attack = {"parameters": {**deployment.parameters, "script": "/tmp/theirs.py"}}
    require_refusals(f"{served.api}/deployments/{deployment.id}/create_flow_run", attack)
    assert client.read_flow_runs(deployment_filter=of_it) == before


def test_our_commands_find_the_secret_by_themselves(served: Any, client: SyncPrefectClient) -> None:
    shell = {**os.environ, "PREFECT_HOME": str(served.home)}
    shell["PREFECT_API_URL"] = f"http://localhost:{served.port}/api"  # the machine's other name
    program = Path(sys.executable).with_name("train-litgpt")
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))  # to be looked at, not to be run
    try:
        of_it = DeploymentFilter(name=DeploymentFilterName(any_=["local"]))
        before = {run.id for run in client.read_flow_runs(deployment_filter=of_it)}
        subprocess.run([program, "submit", "local"], env=shell, check=True)
        [made] = {run.id for run in client.read_flow_runs(deployment_filter=of_it)} - before
        client.delete_flow_run(made)
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))


def test_files_of_the_server_are_closed_to_other_users(served: Any) -> None:
    """So are the worker's."""
    folder = environment_file(served.home).parent
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert (modes, served.home.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == ({0o600}, 0o700, 0o700)


def test_no_log_and_no_command_line_shows_the_secret(served: Any) -> None:
    logs = [*environment_file(served.home).parent.glob("*.log")]
    assert [log for log in logs if served.secret in log.read_text()] == []
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert any(POOL in line for line in lines)
    assert not [line for line in lines if served.secret in line]
