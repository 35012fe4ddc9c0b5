"""The services of deployments/server/compose.yaml as processes of this machine, and workers as in the systemd unit.

Needs root and Debian's packages: `apt-get install postgresql redis-server haproxy`.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from waiting import until

from flows.serving import CHECKOUT

SERVER = CHECKOUT / "deployments" / "server"
SECRET = "team:of-these-tests"
PACKAGED = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@dataclass
class Team:
    """Where each service listens, and the processes by the names of their services."""

    folder: Path
    home: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ("postgres", "redis", "api-1", "api-2", "door")
        with ExitStack() as stack:  # all at once, so that no two are the same
            probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
            self.ports |= {name: probe.getsockname()[1] for name, probe in zip(names, probes, strict=True)}
        self.url = f"http://127.0.0.1:{self.ports['door']}"
        values = {
            "TEAM_URL": self.url,
            "PREFECT_API_AUTH_STRING": SECRET,
            "POSTGRES_PASSWORD": "quiet",
            "REDIS_PASSWORD": "hush",
        }
        text = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: values[found[1]], (SERVER / "compose.yaml").read_text())
        for name, port in (("postgres", 5432), ("redis", 6379)):
            text = text.replace(f"@{name}:{port}", f"@127.0.0.1:{self.ports[name]}")
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(SERVER / "train-litgpt-worker.service")
        self.worker = unit["Service"]
        self.environment = {
            **os.environ,
            **dict(word.split("=", 1) for word in shlex.split(self.worker["Environment"])),
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_API_AUTH_STRING": SECRET,
            "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}",
        }

    def start(self, name: str) -> None:
        port, more, user = self.ports.get(name, 0), {}, None
        prefect = f"{Path(sys.executable).with_name('prefect')} "
        if name.startswith("worker"):
            command = self.worker["ExecStart"].replace("/opt/train-litgpt/.venv/bin/prefect ", prefect)
            command, more = command.replace("%H", name), self.environment
        elif name == "postgres":
            command, user = f"{PACKAGED[-1]}/postgres -D {self.data} -p {port} -k {self.data}", "postgres"
        elif name == "door":
            text, line = (SERVER / "haproxy.cfg").read_text(), "    server api-{0} 127.0.0.1:{1}"
            servers = [line.format(number, self.ports[f"api-{number}"]) for number in (1, 2)]
            text = re.sub(r"    server-template .*", "\n".join(servers), text).replace("bind :4200", f"bind :{port}")
            (self.folder / "haproxy.cfg").write_text(text)
            command = f"haproxy -db -f {self.folder / 'haproxy.cfg'}"
        else:
            service = self.services[name.partition("-")[0]]
            command = service["command"].replace("4200", str(port)).replace("prefect ", prefect, 1)
            command += f" --port {port} --dir {self.folder}" if name == "redis" else ""
            more = service.get("environment", {})
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "PREFECT_HOME": str(self.home), **more}
            self.processes[name] = subprocess.Popen(
                shlex.split(command), env=environment, cwd=CHECKOUT, stdout=log, stderr=log, user=user
            )

    def up(self) -> None:
        """Start what is not a worker, in the order of `depends_on`."""
        self.start("postgres")
        self.start("redis")
        until(lambda: subprocess.run(self.client("pg_isready"), capture_output=True).returncode == 0)
        subprocess.run(self.client("createdb", "prefect", database="postgres"), check=True)
        self.start("migrate")
        assert self.processes.pop("migrate").wait() == 0, (self.folder / "migrate.log").read_text()
        self.serve()

    def serve(self) -> None:
        for name in ("api-1", "api-2", "services", "door"):
            self.start(name)
        until(lambda: self.answers("api-1") and self.answers("api-2") and self.answers("door"))

    def answers(self, name: str) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports[name]}/api/health").is_success
        except httpx.TransportError:
            return False

    def tree(self, name: str) -> list[int]:
        """The processes that a worker's flow runs are."""
        return [child.pid for child in psutil.Process(self.processes[name].pid).children(recursive=True)]

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> set[int]:
        """End a service; of a worker its flow runs too, as when its machine dies. Returns the processes that it was."""
        process = self.processes.pop(name)
        all_of_it = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in all_of_it:
            if name != "postgres" or member.pid == process.pid:
                member.send_signal(how)
        process.wait()
        return {member.pid for member in all_of_it}

    def down(self) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name, signal.SIGINT if name == "postgres" else signal.SIGKILL)
        shutil.rmtree(self.data)

    @property
    def data(self) -> Path:
        """PostgreSQL's own folder, which its user can reach."""
        return Path(f"/tmp/team-{self.ports['postgres']}")

    def client(self, program: str, *arguments: str, database: str = "prefect") -> list[str]:
        """The command line of one of PostgreSQL's programs."""
        address = f"postgresql://prefect:quiet@127.0.0.1:{self.ports['postgres']}/{database}"
        option = "--maintenance-db" if program == "createdb" else "--dbname"
        return [f"{PACKAGED[-1]}/{program}", f"{option}={address}", *arguments]

    def make_database(self) -> None:
        self.data.mkdir(mode=0o700)
        shutil.chown(self.data, "postgres")
        (self.folder / "password").write_text("quiet")
        command = [PACKAGED[-1] / "initdb", "-Uprefect", "-Ascram-sha-256", "--pwfile=/dev/stdin", "-D", self.data]
        with (self.folder / "password").open() as password:
            subprocess.run(command, stdin=password, user="postgres", check=True, capture_output=True, cwd=self.data)

    def call(self, *arguments: str) -> str:
        """Run a module of ours as somebody of the team does."""
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, env=self.environment, cwd=CHECKOUT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
