"""A real server and worker, started as `make serve` starts them."""

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
from waiting import free_port

from deployments.bootstrap import Place
from flows.serving import settings_in
from launcher.config import RunConfig


@dataclass(frozen=True)
class Served:
    """Where it is, and how to call the product's commands against it."""

    place: Place
    root: Path
    """For what runs write; every process of a job below it can be told by it."""

    @property
    def secret(self) -> str:
        return self.settings["PREFECT_API_AUTH_STRING"]

    @property
    def settings(self) -> dict[str, str]:
        """The settings in the file that `serve` tells people to read into their shells."""
        return settings_in(self.place.environment_file)

    def bootstrap(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call(sys.executable, "-m", "deployments.bootstrap", *arguments)

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """In the environment that `serve` tells people to set."""
        env = {**os.environ, "PREFECT_HOME": str(self.place.home), **self.settings}
        checkout = Path(__file__).parents[2]
        return subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="package")
def served(prefect_home: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home, root = prefect_home(), tmp_path_factory.mktemp("served")
    made = Served(Place(port=free_port(), home=home), root)
    try:
        started = made.bootstrap("serve", "--port", str(made.place.port))
        assert started.returncode == 0, started.stdout + started.stderr
        assert f"    . {made.place.environment_file}\n" in started.stdout
        assert made.secret not in started.stdout
        yield made
    finally:
        running = [made.place.server.process(), made.place.worker.process()]
        stopped = made.bootstrap("stop")
    assert stopped.stdout.split() == ["worker", "stopped", "server", "stopped"]
    assert not [process for process in running if process is not None and psutil.pid_exists(process.pid)]


@pytest.fixture(scope="package")
def whole(served: Served, tiny_under: Callable[..., RunConfig]) -> RunConfig:
    """A training that Prefect's own command started and watched to its good end."""
    config = tiny_under(served.root, {"name": f"whole-{os.getpid()}"})
    document = config.model_dump(mode="json")
    given = [part for name in document for part in ("-p", f"{name}={json.dumps(document[name])}")]
    command = (sys.executable, "-m", "prefect", "--no-prompt", "deployment", "run", "train-litgpt/local")
    done = served.call(*command, *given, "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    return config
