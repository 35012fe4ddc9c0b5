"""A real server and worker, started as `make serve` starts them: fixtures of several folders of tests/real."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import leaks
import pytest
from prefect.client.orchestration import SyncPrefectClient

from flows.serving import environment_file, settings_in


@dataclass(frozen=True)
class Served:
    """Where it is, and how to call the product's commands against it."""

    port: int
    home: Path
    root: Path
    """For what runs write."""

    @property
    def settings(self) -> dict[str, str]:
        """The settings in the file that `serve` tells people to read into their shells."""
        return settings_in(environment_file(self.home))

    @property
    def secret(self) -> str:
        return self.settings["PREFECT_API_AUTH_STRING"]

    @property
    def ui(self) -> str:
        return self.settings["PREFECT_UI_URL"]

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def call(self, *command: str) -> str:
        """Run a command in the environment that `serve` tells people to set; return what it prints."""
        env = {**os.environ, "PREFECT_HOME": str(self.home), **self.settings}
        done = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, *arguments: str) -> str:
        return self.call(sys.executable, "-m", *arguments)

    def serve(self) -> str:
        output = self.python("cli", "serve", "--port", str(self.port))
        leaks.SHARED.update(int(file.read_text().split()[0]) for file in (self.home / "serve").glob("*.pid"))
        return output


@pytest.fixture(scope="package")
def served(prefect_home: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    made = Served(port, prefect_home(), tmp_path_factory.mktemp("served"))
    try:
        output = made.serve()
        assert made.secret not in output
        yield made
    finally:
        output = made.python("cli", "stop")
        assert output.split() == ["worker", "stopped", "server", "stopped"]


@pytest.fixture
def client(served: Served) -> Iterator[SyncPrefectClient]:
    with SyncPrefectClient(served.api, auth_string=served.secret) as opened:
        yield opened
