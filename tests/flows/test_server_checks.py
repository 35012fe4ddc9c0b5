"""Prefect's server is not there, is something else, or goes away: one message, the fix, and an exit code of its own."""

import os
import socket
from http.server import ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from prefect import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from serving_thread import Answering, served

from flows.server import OwnServer, require_server, server_address, server_problems
from flows.serving import AUTH, kept_file, serving_home, workplace
from launcher.errors import ServerUnreachable
from litgpt_demo import heartbeat

NOBODY = "http://127.0.0.1:9/api"  # the discard port, where nobody listens


class Handler(Answering):
    """Something that is not Prefect's server."""

    status, body = 200, b""

    def do_GET(self) -> None:
        self.answer(self.status, self.body)


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (404, b"", "it answers 404 Not Found. Start it with `train-litgpt serve`, or correct the address, which ends"),
        (401, b"Unauthorized", "it answers 401 Unauthorized. Set PREFECT_API_AUTH_STRING"),
        (200, b'"2.20.1"', "Major versions must match"),
    ],
)
def test_address_of_another_service_is_refused_with_its_answer(
    status: int, body: bytes, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "status", status)
    monkeypatch.setattr(Handler, "body", body)
    with served(server := ThreadingHTTPServer(("127.0.0.1", 0), Handler)):
        address = f"http://127.0.0.1:{server.server_port}"
        with temporary_settings({PREFECT_API_URL: address}), pytest.raises(ServerUnreachable) as refused:
            require_server()
    assert advice in str(refused.value)
    assert str(refused.value).startswith(f"PREFECT_API_URL={address} cannot be used")


def test_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.server._ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        silence = pytest.raises(ServerUnreachable, match="no answer in time")
        with temporary_settings({PREFECT_API_URL: address}), silence:
            require_server()


def test_server_of_make_serve_is_found_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command's own server has its data next to the code."""
    monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.setattr("flows.serving.CHECKOUT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    assert serving_home() == tmp_path / ".prefect"
    kept_file("environment").parent.mkdir(parents=True)
    kept_file("environment").write_text(f"export PREFECT_API_URL={NOBODY}\nexport {AUTH}=litgpt:x\n")
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        kept_file("server.pid").write_text(f"{os.getpid()} 0.5\n")  # of a process before this one
        assert server_address() is None
        began = []
        with pytest.raises(OSError, match="seen"), patch("subprocess.Popen", side_effect=OSError("seen")) as started:
            OwnServer()
        assert started.call_args.kwargs["env"]["PREFECT_HOME"] == str(serving_home())
        kept_file("server.pid").write_text(f"{os.getpid()} {heartbeat.started(os.getpid())}\n")
        with patch("flows.server._configure", began.append):
            server_address()
    assert began == [{"PREFECT_API_URL": NOBODY, AUTH: "litgpt:x"}]


def test_server_of_an_installed_package_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an installed package is site-packages: nobody looks there for a database, and an update removes it."""
    (folder := tmp_path / "site-packages").mkdir()
    monkeypatch.setattr("flows.serving.CHECKOUT", folder)
    for name in ("PREFECT_HOME", "TRAIN_LITGPT_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert serving_home() == tmp_path / "home" / ".train-litgpt" / "prefect"
    assert workplace() == tmp_path
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "own"))
    assert serving_home() == tmp_path / "own"


def test_a_password_in_the_address_is_not_shown() -> None:
    with temporary_settings({PREFECT_API_URL: NOBODY.replace("127", "me:opensesame@127")}):
        with pytest.raises(ServerUnreachable, match=NOBODY) as refused:
            require_server()
        assert "opensesame" not in str(refused.value)


def test_dead_server_ends_a_run_with_the_way_to_continue() -> None:
    with temporary_settings({PREFECT_API_URL: NOBODY, PREFECT_CLIENT_MAX_RETRIES: 0}):
        lost = pytest.raises(ServerUnreachable, match=r"stopped answering.*Run the same command again")
        with lost, server_problems(), get_client(sync_client=True) as client:
            client.read_flows()
        with pytest.raises(httpx.ConnectError), server_problems():
            httpx.get(NOBODY.replace("api", "datasets"))
