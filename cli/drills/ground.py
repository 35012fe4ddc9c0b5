"""The ground of drills: a folder, a Prefect server and a small training of their own, and real commands.

Nothing in here reaches into a command: it is started, watched and disturbed from outside, as an operating system, a
cluster or a colleague would.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from flows.serving import AUTH, new_secret, server_command, server_environment
from launcher.config import RunConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.platforms.base import Capability
from launcher.runs.attempts import Attempts, opening_beside
from launcher.runs.index import Index
from launcher.runs.run import plan_run
from litgpt_demo import PYTHON
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.node.agent import kill_tagged, tagged
from litgpt_demo.runs import read_metrics
from litgpt_demo.training.checkpoints import committed

MARK = "TRAIN_LITGPT_DRILL"
"""The variable that every process of a drill has, its jobs on this machine among them."""
CLOCK = "TRAIN_LITGPT_DRILL_CLOCK"
"""The file whose size is the number of seconds that the clock has jumped by."""

PATIENCE = 240.0
"""Seconds within which what a drill waits for has to come; most takes ten, a busy machine or a queue longer."""
_LOOK = 0.2  # seconds between two looks at a run
_TIGHT = 0.005  # seconds between two looks for the moment of an injection

# Python runs a sitecustomize.py on its path at its start. Reading a file's size takes a microsecond.
_SHIFTED_CLOCK = f"""
import os, time
_real, _file = time.time, os.environ.get({CLOCK!r}, "")
def _shifted():
    try:
        return _real() + os.stat(_file).st_size
    except OSError:
        return _real()
time.time = _shifted
"""


class Violation(Exception):
    """Something that was promised does not hold."""


class Server:
    """A Prefect server of the drills' own, which can be killed and comes back at the same address."""

    def __init__(self, home: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._home, self._secret = home, new_secret()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return what a command needs to use it."""
        return {"PREFECT_API_URL": f"http://127.0.0.1:{self._port}/api", AUTH: self._secret}

    def start(self) -> None:
        """Start it, and return when it answers."""
        self._home.mkdir(exist_ok=True)
        environment = _without_prefect() | server_environment(self._port, self._secret)
        environment |= {"PREFECT_HOME": str(self._home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        with (self._home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                server_command(self._port, log_level="error", of_command=True),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ConfigProblem(f"Prefect's server for the drills does not start; read {self._home}/server.log")
            time.sleep(0.1)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        with suppress(httpx.TransportError), httpx.Client(trust_env=False, timeout=2) as client:
            return client.get(f"{self.environment['PREFECT_API_URL']}/health").is_success
        return False


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command as a user types it, in a session of its own, its output in a file."""

    words: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def ended(self) -> int | None:
        """Return its exit code, or the negative number of the signal that ended it; None while it runs."""
        return self.process.poll()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The training that nobody disturbed."""

    weights: str
    """The SHA-256 of the exported weights."""
    loss: float
    checkpoints: tuple[int, ...]
    exact: bool
    """False on a GPU, which may add in another order each time."""


@dataclass(kw_only=True)
class Ground:
    """The place of all drills of one call."""

    folder: Path
    """The folder on this machine, for logs, Prefect's server and configs."""
    config: RunConfig
    server: Server
    token: str = field(default_factory=lambda: secrets.token_hex(3))
    reference: Reference | None = None

    @classmethod
    def at(cls, folder: Path, config: RunConfig) -> Ground:
        """Return the ground in a folder that is there."""
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(_SHIFTED_CLOCK)
        return cls(folder=folder, config=config, server=Server(folder / "prefect"))

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.kill()


class Scene:
    """One drill as it goes on: its commands, its run, and what has been seen of them."""

    def __init__(self, ground: Ground, name: str, *, own_server: bool = False, root: str | None = None) -> None:
        self.ground, self.commands = ground, list[Command]()
        self._mark = f"{ground.token}-{len(list(ground.folder.glob('*.yaml'))) + 1}"
        # Ports on one machine follow from names: no two calls may share them.
        changes = {"name": f"{name}-{self._mark}", **({"root": root} if root else {})}
        self.config = validated(RunConfig, overridden(ground.config.model_dump(mode="json"), changes), where=name)
        planned = plan_run(self.config)
        self.storage, self.index = planned.storage, Index(planned.root)
        self.attempts = Attempts(index=self.index, run=planned.name, open=opening_beside(self.config.platform))
        self._here = Capability.ANYWHERE not in self.config.platform.open().capabilities
        self.folder = ground.folder / self._mark
        self.folder.mkdir()
        self._path = ground.folder / f"{self._mark}.yaml"
        self._path.write_text(json.dumps(self.config.model_dump(mode="json")))  # JSON is YAML
        self._own_server = own_server
        self.clock = self.folder / "clock"
        self.furthest = 0
        """The furthest step that was seen."""
        self.most = 0
        """The most jobs that were there at once."""
        self.starts: list[int] = []
        """The steps at which ranks have begun, one for each time that they did."""
        self.injected: float | None = None
        """When the fault was injected, on the monotonic clock."""
        self.saved, self.reached, self.lives = 0, 0, 0
        """The newest checkpoint at that moment, the step that was seen then, and how often ranks had begun."""
        self.recovered: float | None = None
        self.seconds_to_cancel = 0.0
        self._looked = 0.0

    # --- commands ---

    def run(self) -> Command:
        """Type `train-litgpt run` with this drill's config."""
        return self.start("run", str(self._path))

    def start(self, *words: str) -> Command:
        """Type a command; it goes on beside this process."""
        ground, clock = self.ground, self.ground.folder / "clock"
        log = self.folder / f"{len(self.commands) + 1}-{words[0]}.txt"
        environment = _without_prefect() | {
            MARK: self._mark, CLOCK: str(self.clock), "TRAIN_LITGPT_HOME": str(ground.folder / "jobs"),
            "PREFECT_HOME": str(ground.folder / "prefect-of-commands"), "PYTHONPATH": _path_with(clock),
        }  # fmt: skip
        if not self._own_server:
            environment |= ground.server.environment
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*PYTHON, "-m", "cli", *words],
                env=environment,
                # A shell's background job ignores SIGINT and would hand that on: no command would hear of a terminal's.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.commands.append(Command(words=words, log=log, process=process))
        return self.commands[-1]

    def cancel(self) -> None:
        """Type `train-litgpt cancel` twice: after the end it is success too.

        Raises:
            Violation: it was not.
        """
        began = time.monotonic()
        for _ in range(2):
            command = self.start("cancel", self.attempts.run, "--root", self.config.root)
            if (code := self.end_of(command)) != 0:
                raise Violation(f"cancel ended with {code}: {command.text.strip()[-300:]}")
            self.seconds_to_cancel = self.seconds_to_cancel or time.monotonic() - began

    @property
    def text(self) -> str:
        """Everything that the commands have said."""
        return "\n".join(command.text for command in self.commands)

    # --- what is seen ---

    def processes(self, *words: str, rank: bool | None = None) -> list[psutil.Process]:
        """Return the processes of this drill whose command line has these words in a row, the youngest last.

        Args:
            rank: only ranks, which torchrun numbers, or only others.
        """
        found = []
        for process in tagged(MARK, self._mark):
            with suppress(psutil.Error):
                line = process.cmdline()
                there = any(tuple(line[at : at + len(words)]) == words for at in range(len(line)))
                if there and rank in (None, "RANK" in process.environ()):
                    found.append((process.create_time(), process.pid, process))
        return [process for _, _, process in sorted(found, key=lambda one: one[:2])]

    def look(self) -> None:
        """Take in what the run shows now. A bucket or a platform that does not answer shows nothing."""
        if (now := time.monotonic()) - self._looked < _LOOK:
            return
        self._looked = now
        with suppress(TrainLitgptError):
            rows = read_metrics(self.storage)
            self.starts = [int(row["step"]) for row in rows if row["kind"] == "start"]
            self.furthest = max([self.furthest, *(int(row["step"]) for row in rows if row["kind"] == "step")])
        with suppress(TrainLitgptError):
            self.most = max(self.most, self._jobs())

    def _jobs(self) -> int:
        """Return how many attempts are there at this moment; on this machine also those that only processes show."""
        ends = self.index.ends(self.attempts.run)
        count = 0
        for record in self.attempts.records():
            platform = self.attempts.platform_of(record)
            live = record.attempt not in ends and platform.status(record.job_id).state.live
            count += live or (self._here and bool(platform.left(record.job_id)))
        return count

    def until(self, seen: Callable[[Scene], object], what: str, *, seconds: float = PATIENCE) -> None:
        """Return when something is seen.

        Raises:
            Violation: it did not come.
        """
        deadline = time.monotonic() + seconds
        while not _holds(seen, self):
            self.look()
            if time.monotonic() > deadline or all(command.ended is not None for command in self.commands):
                raise Violation(f"{what}: that did not come; the commands said: {self.text.strip()[-600:]}")
            time.sleep(_TIGHT)

    def pause(self, seconds: float) -> None:
        """Look on for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            time.sleep(_LOOK)

    def end_of(self, command: Command, back: Callable[[Scene], object] = lambda scene: False) -> int:
        """Return how a command ended, and note on the way when the run had recovered.

        Raises:
            Violation: it did not end.
        """
        deadline = time.monotonic() + 2 * PATIENCE
        while (code := command.ended) is None:
            self.look()
            self.note(back)
            if time.monotonic() > deadline:
                raise Violation(f"`{' '.join(command.words)}` did not end: {command.text.strip()[-600:]}")
            time.sleep(_LOOK / 4)
        self.note(back)
        return code

    def note(self, back: Callable[[Scene], object]) -> None:
        """Note when the run had recovered."""
        if self.injected is not None and self.recovered is None and _holds(back, self):
            self.recovered = time.monotonic() - self.injected

    def about_to_inject(self) -> None:
        """Remember how far the run is."""
        self._looked = 0.0
        self.look()
        with suppress(TrainLitgptError):
            self.saved = max((found.step for found in committed(self.storage)), default=0)
        self.reached, self.lives, self.injected = self.furthest, len(self.starts), time.monotonic()

    # --- the end ---

    def gone(self) -> list[str]:
        """Return what is left of the drill on this machine, once it has had 10 s to go."""
        deadline = time.monotonic() + 10
        while (left := tagged(MARK, self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"process {one.pid} ({' '.join(_line(one))[:200]})" for one in left]

    def clear(self) -> None:
        """Leave nothing that runs, whatever the drill came to."""
        kill_tagged(MARK, self._mark, grace=0)
        for command in self.commands:
            command.process.wait()
        with suppress(TrainLitgptError):
            self.attempts.cancel()


def kill(processes: list[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Send a signal to each of these.

    Raises:
        Violation: there is none.
    """
    if not processes:
        raise Violation("the process that was to be hit is not there")
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _holds(seen: Callable[[Scene], object], scene: Scene) -> bool:
    with suppress(TrainLitgptError):  # a platform that does not answer shows nothing
        return bool(seen(scene))
    return False


def _line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _without_prefect() -> dict[str, str]:
    """Return this environment without the user's own Prefect: drills leave no trace in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}


def _path_with(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
