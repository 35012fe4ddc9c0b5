"""Another user of this machine learns no secret, decides nothing and has nothing of ours locked; needs root."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from another_user import Squatter, as_nobody, needs_another_user, shared_temporary, socket_of_nobody, squatter
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

from deployments.bootstrap import Place, start_server
from flows.hooks import taken
from flows.server import require_server
from flows.serving import environment_file, new_secret, stranger_at, write_settings
from launcher.errors import ConfigProblem

pytestmark = needs_another_user

TAKEN = r"port \d+ of this machine is taken by the user nobody, .*choose another port: .*serve --port 4300"


@pytest.fixture
def theirs() -> Iterator[Squatter]:
    with squatter() as listening:
        yield listening
        assert listening.asked == []


def test_no_worker_is_sent_to_another_users_server(theirs: Squatter, tmp_path: Path) -> None:
    with pytest.raises(ConfigProblem, match=TAKEN):
        start_server(Place(port=theirs.port, home=tmp_path))


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_kept_secret_is_not_sent_to_another_users_server(
    name: str, theirs: Squatter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"PREFECT_API_URL": f"http://127.0.0.1:{theirs.port}/api", "PREFECT_API_AUTH_STRING": new_secret()}
    write_settings(environment_file(tmp_path), kept)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    configured = {PREFECT_API_URL: f"http://{name}:{theirs.port}/api"}
    with (
        temporary_settings(configured, restore_defaults=[PREFECT_API_AUTH_STRING, PREFECT_API_KEY]),
        pytest.raises(ConfigProblem, match=TAKEN),
    ):
        require_server()


@pytest.mark.parametrize("address", ["::1", "::", "::ffff:127.0.0.1"])
def test_a_stranger_is_seen_at_every_address_that_leads_here(address: str) -> None:
    with socket_of_nobody(socket.AF_INET6) as theirs:
        theirs.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        theirs.bind((address, 0))
        theirs.listen()
        assert stranger_at(theirs.getsockname()[1]) == "nobody"


def test_another_user_cannot_have_a_flow_run_lock_a_file_of_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_temporary(monkeypatch) as shared:
        (victim := shared / "victim").touch(mode=0o600)
        assert as_nobody('ln -s "$1" "$2"', victim, shared / "train-litgpt-5f7a.lock")
        assert taken("5f7a")
        with victim.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
