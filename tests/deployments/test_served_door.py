"""The server of `make serve` is its user's alone: strangers are refused, and the user is never asked for the secret."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from strangers import basic, require_refusals
from waiting import free_port, until

from deployments.bootstrap import POOL, Place
from flows.serving import settings_in

pytestmark = [pytest.mark.long, pytest.mark.prefect, pytest.mark.timeout(600)]

OURS = str(Path(sys.executable).with_name("train-litgpt"))


def test_a_page_elsewhere_starts_no_program_on_this_machine(served: Any) -> None:
    with SyncPrefectClient(served.place.api, auth_string=served.secret) as client:
        deployment = client.read_deployment_by_name("run-torchrun/pi")
        before = {run.id for run in client.read_flow_runs()}
        attack = {"parameters": {**deployment.parameters, "script": "/tmp/theirs.py"}}
        require_refusals(served.place.api, f"/deployments/{deployment.id}/create_flow_run", attack, served.secret)
        assert {run.id for run in client.read_flow_runs()} == before


def test_our_commands_find_the_secret_by_themselves(served: Any) -> None:
    shell = {**os.environ, "PREFECT_HOME": str(served.place.home)}
    shell["PREFECT_API_URL"] = f"http://localhost:{served.place.port}/api"  # the machine's other name
    with SyncPrefectClient(served.place.api, auth_string=served.secret) as client:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))  # to be looked at, not to be run
        before = {run.id for run in client.read_flow_runs()}
        try:
            done = subprocess.run([OURS, "submit", "local"], env=shell, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
        finally:
            made = {run.id for run in client.read_flow_runs()} - before
            for run in made:
                client.delete_flow_run(run)
            client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))
    assert len(made) == 1


def test_what_server_and_worker_keep_is_closed_to_other_users(served: Any) -> None:
    home, folder = served.place.home, served.place.server.folder
    assert [one.stat().st_mode & 0o777 for one in (home, folder)] == [0o700, 0o700]
    private = [served.place.environment_file, served.place.server.log, served.place.worker.log]
    assert [file.stat().st_mode & 0o777 for file in private] == [0o600] * len(private)


def test_no_log_and_no_command_line_shows_the_secret(served: Any) -> None:
    for daemon in (served.place.server, served.place.worker):
        assert served.secret not in daemon.log.read_text()
        assert served.secret not in " ".join(daemon.process().cmdline())


def test_the_browser_is_sent_to_a_file_that_its_user_alone_can_read(served: Any, tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    browser.chmod(0o755)
    done = served.call("env", f"BROWSER={browser} %s", sys.executable, "-m", "deployments.bootstrap", "ui")
    assert done.returncode == 0, done.stderr
    until(opened.exists)
    page = Path(opened.read_text().removeprefix("file://"))
    assert page.stat().st_mode & 0o777 == 0o600
    assert f"{served.place.port}/enter#" in page.read_text()


# --- servers alone, without a worker ----------------------------------------------------------------------------------

START = """
import os, sys
from deployments.bootstrap import main, place_at, start_server
from litgpt_demo.errors import TrainLitgptError
place = place_at(int(sys.argv[1]))
os.environ |= place.environment()
try:
    print("started" if start_server(place) else "there")
except TrainLitgptError as error:
    sys.exit(str(error))
"""


@dataclass(frozen=True)
class Alone:
    """A place for a server."""

    place: Place

    @property
    def secret(self) -> str:
        return settings_in(self.place.environment_file)["PREFECT_API_AUTH_STRING"]

    def start(self, **settings: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **settings, "PREFECT_HOME": str(self.place.home)}
        command = [sys.executable, "-c", START, str(self.place.port)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)

    def lets_in(self, secret: str) -> bool:
        with urlopen(Request(f"{self.place.api}/admin/version", headers=basic(secret)), timeout=30) as answer:
            return bool(answer.status == 200)


@pytest.fixture
def alone(prefect_home: Callable[[], Path]) -> Iterator[Alone]:
    made = Alone(Place(port=free_port(), home=prefect_home()))
    yield made
    made.place.server.stop()


def test_a_server_has_the_same_secret_when_it_is_started_again(alone: Alone) -> None:
    assert alone.start().stdout == "started\n"
    before = alone.secret
    assert alone.lets_in(before)
    assert alone.place.server.stop()
    assert alone.start().stdout == "started\n"
    assert alone.secret == before
    assert alone.lets_in(before)


@pytest.mark.parametrize("where", ["variable", "profile"])
def test_a_secret_of_the_users_own_is_the_servers(where: str, alone: Alone) -> None:
    settings = {}
    if where == "variable":
        settings = {"PREFECT_API_AUTH_STRING": "me:my own"}
    else:
        profile = 'active = "mine"\n[profiles.mine]\nPREFECT_API_AUTH_STRING = "me:my own"\n'
        (alone.place.home / "profiles.toml").write_text(profile)
    started = alone.start(**settings)
    assert started.returncode == 0, started.stderr
    assert alone.lets_in("me:my own")
    again = alone.start(PREFECT_API_AUTH_STRING="me:another")
    assert "asks for another secret than PREFECT_API_AUTH_STRING in your settings" in again.stderr


def test_somebodys_own_server_is_used_as_it_is_and_an_old_one_of_ours_is_not(alone: Alone) -> None:
    place = alone.place
    open_server = [sys.executable, "-m", "prefect", "server", "start", "--port", str(place.port), "--no-ui"]
    env = {**os.environ, "PREFECT_HOME": str(place.home)}
    place.server.start(open_server, env=env, cwd=place.home)  # as `make serve` once did
    [record] = place.server.folder.glob("*.json")
    try:
        until(lambda: "there" in alone.start().stdout or "without a secret" in alone.start().stderr)
        refused = alone.start()
        assert refused.returncode != 0
        assert "end it with `python -m deployments.bootstrap stop`, then serve again" in refused.stderr
        kept = record.read_bytes()
        record.unlink()  # now it is somebody's
        assert alone.start().stdout == "there\n"
        assert not place.environment_file.exists()
        record.write_bytes(kept)
    finally:
        place.server.stop()
