"""The team's server on this machine: what deployments/server/compose.yaml says is what is started here, as processes.

PostgreSQL, Redis and HAProxy are Debian's; a container's entry point makes the database, which `initdb` does here.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from certificates import certificate_in
from waiting import free_port, until

from launcher.platforms.local.supervisor import JOB_TAG

CHECKOUT = Path(__file__).parents[2]
FILES = CHECKOUT / "deployments" / "server"
PUBLIC_HOST = "localhost"
SECRETS = {"SECRET": "litgpt:the-teams-secret", "DATABASE_PASSWORD": "of-the-database", "MESSAGES_PASSWORD": "of-redis"}
PACKAGES = {"postgres": "postgresql", "redis-server": "redis-server", "haproxy": "haproxy"}
_VARIABLE = re.compile(r"\$\{(\w+)(?::\?[^}]*)?\}")


def program(name: str) -> str | None:
    """Return where Debian has a program: PostgreSQL's are not on PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(versions[-1]) if versions else shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")


def missing_packages() -> list[str]:
    """Return Debian's packages that a team's server needs here and that are not installed."""
    return [package for name, package in PACKAGES.items() if program(name) is None]


def composed(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the compose file with its variables filled in, as `docker compose config` would."""
    text = (FILES / "compose.yaml").read_text()
    document: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(lambda found: environment[found[1]], text))
    return document


def unit() -> dict[str, list[str]]:
    """Return the worker's systemd unit: each name with its values."""
    found: dict[str, list[str]] = {}
    for line in (FILES / "train-litgpt-worker.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


class TeamServer:
    """The processes of the compose file, on free ports of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.port, database, messages, first, second = (free_port() for _ in range(5))
        self._api_ports = {"api-1": first, "api-2": second}
        self._places = {
            "database:5432": f"127.0.0.1:{database}",
            "messages:6379": f"127.0.0.1:{messages}",
            "api-1:4200": f"127.0.0.1:{first}",
            "api-2:4200": f"127.0.0.1:{second}",
            ":8443": f"127.0.0.1:{self.port}",
            "/data": str(folder),
            # What a browser and a worker call the server; the port is 443 everywhere else.
            f"https://{PUBLIC_HOST}": f"https://{PUBLIC_HOST}:{self.port}",
        }
        self._files = {"/etc/haproxy.cfg": FILES / "haproxy.cfg", "/etc/tls.pem": folder / "served.pem"}
        self.database_port, self._messages_port = database, messages
        self.compose = composed({**SECRETS, "PUBLIC_HOST": PUBLIC_HOST})
        _, self.certificate = certificate_in(folder)
        (folder / "served.pem").write_text(self.certificate.read_text() + (folder / "tls.key").read_text())

    @property
    def api(self) -> str:
        return f"https://{PUBLIC_HOST}:{self.port}/api"

    def api_of(self, server: str) -> str:
        """Return the address of one API server, which nothing but the proxy knows."""
        return f"http://127.0.0.1:{self._api_ports[server]}/api"

    @property
    def client_environment(self) -> dict[str, str]:
        """Return the settings of everything that uses the server, as docs/team.md gives them."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return {
            **kept,
            "PREFECT_HOME": str(self._folder / "prefect"),
            "PREFECT_API_URL": self.api,
            "PREFECT_API_AUTH_STRING": SECRETS["SECRET"],
            "PREFECT_API_SSL_CERT_FILE": str(self.certificate),
            "SSL_CERT_FILE": str(self.certificate),
            "DO_NOT_TRACK": "1",
        }

    # --- the services -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything in the order that `depends_on` gives, each when what it needs is ready."""
        self._make_database()
        self.start_service("database")
        until(lambda: self.postgres("pg_isready").returncode == 0)
        self.postgres("createdb", "prefect")
        self.start_service("messages")
        self.migrate()
        for service in ("api-1", "api-2", "services", "proxy"):
            self.start_service(service)
        for server in ("api-1", "api-2"):
            until(lambda server=server: self.is_ready(server), seconds=600)  # type: ignore[misc]
        until(lambda: self.is_ready(None))

    def start_service(self, name: str) -> None:
        command, environment = self._command_of(name), self._environment_of(name)
        log = (self._folder / f"{name}.log").open("ab")
        user = "postgres" if name == "database" and os.geteuid() == 0 else None
        self._running[name] = subprocess.Popen(
            command, env=environment, cwd=CHECKOUT, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True, user=user,
        )  # fmt: skip
        log.close()

    def migrate(self) -> None:
        """Run the step that compose waits for before it starts an API server."""
        command, environment = self._command_of("migrate"), self._environment_of("migrate")
        subprocess.run(command, env=environment, cwd=CHECKOUT, check=True, capture_output=True, timeout=900)

    def kill(self, name: str) -> None:
        """End a process as a power cut does."""
        process = self._running.pop(name)
        os.killpg(process.pid, 9)
        process.wait()

    def stop(self) -> None:
        for process in reversed(self._running.values()):
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
        self._running.clear()

    def is_up(self, name: str) -> bool:
        return name in self._running and self._running[name].poll() is None

    def is_ready(self, server: str | None) -> bool:
        """Return whether one API server is ready; with None, whether the proxy has one that is."""
        address = self.api if server is None else self.api_of(server)
        try:
            return httpx.get(f"{address}/ready", verify=str(self.certificate), timeout=5).is_success
        except httpx.HTTPError:
            return False

    def _command_of(self, name: str) -> list[str]:
        if name == "database":
            data = str(self._data)
            return [str(program("postgres")), "-D", data, "-k", data, "-h", "127.0.0.1", "-p", str(self.database_port)]
        words = [str(self._here(word)) for word in self.compose["services"][name]["command"]]
        if name == "messages":
            configuration = self._folder / "redis.conf"
            configuration.write_text(self._here(self.compose["configs"]["messages"]["content"]))
            return [str(program("redis-server")), str(configuration), "--port", str(self._messages_port)]
        if name in self._api_ports:  # within its container each has port 4200, and nobody else reaches it
            words[words.index("4200")] = str(self._api_ports[name])
            words[words.index("0.0.0.0")] = "127.0.0.1"
        programs = {"python": [sys.executable], "prefect": [sys.executable, "-m", "prefect"]}
        return [*programs.get(words[0], [str(program(words[0]))]), *words[1:]]

    def _environment_of(self, name: str) -> dict[str, str]:
        given = self.compose["services"][name].get("environment", {})
        home = self._folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return {**kept, "PREFECT_HOME": str(home), **{key: self._here(value) for key, value in given.items()}}

    def _here(self, text: str) -> str:
        """Return a word of the compose file with this machine's addresses and files."""
        for there, here in {**self._places, **self._files}.items():
            text = text.replace(there, str(here)) if there in text else text
        return text

    # --- PostgreSQL ---------------------------------------------------------------------------------------------------

    def _make_database(self) -> None:
        """Do what the image's entry point does with POSTGRES_USER and POSTGRES_PASSWORD."""
        self._data = Path(tempfile.mkdtemp(prefix="team-postgres-"))
        given = self.compose["services"]["database"]["environment"]
        password = self._data.with_suffix(".password")
        password.write_text(given["POSTGRES_PASSWORD"])
        user = "postgres" if os.geteuid() == 0 else getpass.getuser()
        for path in (self._data, password):
            shutil.chown(path, user)
        command = [
            str(program("initdb")),
            "-D",
            str(self._data),
            "-U",
            given["POSTGRES_USER"],
            "--pwfile",
            str(password),
        ]
        subprocess.run([*command, "--auth", "scram-sha-256"], check=True, capture_output=True, user=user, cwd="/")
        password.unlink()

    def remove_database(self) -> None:
        shutil.rmtree(self._data, ignore_errors=True)

    def postgres(self, name: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run one of PostgreSQL's programs, as `docker compose exec database` would."""
        environment = {
            "PGHOST": "127.0.0.1", "PGPORT": str(self.database_port), "PGUSER": "prefect",
            "PGPASSWORD": SECRETS["DATABASE_PASSWORD"],
        }  # fmt: skip
        given: dict[str, Any] = {"capture_output": True, **options}
        return subprocess.run([str(program(name)), *arguments], env={**os.environ, **environment}, check=False, **given)


class Worker:
    """A worker as its systemd unit starts it, with a home of its own as another machine would have."""

    def __init__(self, server: TeamServer, folder: Path, name: str) -> None:
        settings, self._folder = unit(), folder / name
        self._folder.mkdir()
        (started,) = settings["ExecStart"]
        words = shlex.split(started.replace("%H", name))
        assert words[0].endswith("/.venv/bin/prefect")
        self._command = [sys.executable, "-m", "prefect", *words[1:], "--limit", "3"]
        self._environment = {
            **server.client_environment,
            **dict(one.split("=", 1) for one in settings["Environment"]),
            "PREFECT_HOME": str(self._folder / "prefect"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "worker.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=CHECKOUT, stdout=log, stderr=log, start_new_session=True
            )

    def flow_runs(self) -> set[str]:
        """Return the flow runs whose processes this worker has."""
        return {found for process in self._processes() if (found := _flow_run_of(process))}

    def lose_power(self) -> set[str]:
        """Kill the worker and the flow runs' processes at once; return these flow runs. Jobs go on, as on a cluster."""
        assert self._process is not None
        mine, killed = self.flow_runs(), self._processes()
        for process in killed:
            process.suspend()  # or one would report the death of another
        for process in killed:
            process.kill()
        self._process.wait()
        self._process = None
        return mine

    def _processes(self) -> list[psutil.Process]:
        assert self._process is not None
        worker = psutil.Process(self._process.pid)
        return [one for one in (worker, *worker.children(recursive=True)) if JOB_TAG not in _environment(one)]

    def stop(self) -> None:
        if self._process is not None:
            self.lose_power()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _flow_run_of(process: psutil.Process) -> str | None:
    return _environment(process).get("PREFECT__FLOW_RUN_ID")


@contextmanager
def team_server(folder: Path) -> Iterator[TeamServer]:
    """Run the team's server below a folder."""
    server = TeamServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        server.remove_database()
