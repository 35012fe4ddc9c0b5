from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from terminal import Terminal

from flows.foreground import Tracker, cancel_command, farewell
from launcher.attempts import attempts_of
from launcher.config import LocalPlatformConfig, RunConfig, SweepConfig
from launcher.events import FlowRunStarted, JobChanged, JobPhase, StepDone, StepStarted
from launcher.job import JobId
from launcher.platforms.supervisor import MARK
from launcher.sweeps import trials

PROGRAM = str(Path(sys.executable).with_name("train-litgpt"))

# What a user sees of it: two seconds on a machine that has nothing else to do. Tests run on machines that have.
PATIENCE = 10.0

NOISE = ("Traceback", "EventsWorker", "Event(", "prefect.", "ERROR", "KeyboardInterrupt", "Aborted", "Exception")


# --- what is said -----------------------------------------------------------------------------------------------------


def job(phase: JobPhase = "started", *, run: str = "tiny-1234", root: str = "output") -> JobChanged:
    return JobChanged(
        phase=phase, run=run, root=root, job_id=JobId(f"/{run}/attempts/1"), platform=LocalPlatformConfig(kind="local")
    )


def said(*events: Any) -> str:
    tracker = Tracker()
    for event in events:
        tracker.receive(event)
    return "\n".join(farewell(tracker, again="train-litgpt run tiny.yaml"))


FLOW = FlowRunStarted(id="0")


def test_a_job_that_goes_on_is_named_with_the_commands_that_take_it_up_and_cancel_it() -> None:
    text = said(FLOW, StepStarted(step="training"), job("submitting"), job())
    assert "the job goes on as tiny-1234 on local" in text
    assert "take up    train-litgpt run tiny.yaml" in text
    assert "cancel tiny-1234" in text


def test_every_job_of_a_sweep_is_named() -> None:
    text = said(FLOW, job(run="a-1"), job(run="b-2"), job("ended", run="a-1"), job(run="c-3"))
    assert "as a-1" not in text
    assert text.count("the job goes on as") == 2
    assert {"cancel b-2", "cancel c-3"} <= {line.partition("train-litgpt ")[2] for line in text.splitlines()} | {
        line[line.rindex("cancel ") :] for line in text.splitlines() if "cancel " in line
    }


def test_a_job_whose_submission_was_not_answered_is_not_said_to_go_on() -> None:
    text = said(FLOW, job("submitting"))
    assert "was being submitted to local, and may have been started" in text
    assert "goes on" not in text
    assert "cancel tiny-1234" in text


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((), "nothing was started"),
        ((FLOW, StepStarted(step="dataset")), "the preparation of the dataset goes on where it was"),
        ((FLOW, StepStarted(step="dataset"), StepDone(step="dataset", what="")), "what is done is found by its key"),
        ((FLOW, job(), job("ended"), StepStarted(step="checkpoints")), "its last checkpoint is collected"),
    ],
    ids=["start-up", "preparation", "between two steps", "collection"],
)
def test_where_no_job_runs_none_is_said_to_go_on(events: tuple[Any, ...], words: str) -> None:
    text = said(*events)
    assert words in text
    assert "the job goes on" not in text
    assert "run again  train-litgpt run tiny.yaml" in text


def test_a_root_that_is_not_the_default_is_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PROGRAM])
    assert shlex.split(cancel_command(job(root="gs://b/my runs")))[1:] == [
        "cancel", "tiny-1234", "--root", "gs://b/my runs",
    ]  # fmt: skip
    assert shlex.split(cancel_command(job()))[1:] == ["cancel", "tiny-1234"]


# --- in a terminal ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class User:
    """Somebody with a folder, a terminal and their own Prefect."""

    folder: Path
    home: Path
    api: str = ""

    @property
    def env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        mine = {"PREFECT_HOME": str(self.home), "TRAIN_LITGPT_HOME": str(self.folder / "jobs")}
        return env | mine | ({"PREFECT_API_URL": self.api} if self.api else {})

    def types(self, *words: str) -> Terminal:
        return Terminal([PROGRAM, *words], env=self.env, cwd=self.folder)

    def calls(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROGRAM, *words], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False
        )

    def writes(self, config: RunConfig | SweepConfig) -> str:
        path = self.folder / f"{config.name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return str(path)

    def flow_runs(self) -> dict[str, str]:
        """Name to state of every flow run, as Prefect keeps them."""
        with sqlite3.connect(self.home / "prefect.db") as database:
            return dict(database.execute("select name, state_name from flow_run"))

    def left_behind(self) -> list[psutil.Process]:
        """Processes of this user's commands that are still there, jobs excepted."""
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
            except psutil.Error:
                continue
            if env.get("TRAIN_LITGPT_HOME") == str(self.folder / "jobs") and MARK not in env:
                found.append(process)
        return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PREFECT_HOME of all commands without a server: the database is migrated once."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture
def user(tmp_path: Path, home: Path) -> User:
    """One without a server of Prefect's: each command starts its own."""
    return User(tmp_path, home)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A server of Prefect's that stays: its home and the address of its API."""
    home = tmp_path_factory.mktemp("served")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    env = {**os.environ, "PREFECT_HOME": str(home)}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(360):
                try:
                    urllib.request.urlopen(f"{api}/health", timeout=2).close()
                    break
                except (urllib.error.URLError, OSError):
                    assert process.poll() is None
                    time.sleep(0.5)
            yield home, api
        finally:
            process.terminate()


@pytest.fixture
def served_user(tmp_path: Path, server: tuple[Path, str]) -> User:
    home, api = server
    return User(tmp_path, home, api)


@pytest.fixture(params=["without a server", pytest.param("with a server", marks=pytest.mark.long)])
def anyone(request: pytest.FixtureRequest) -> User:
    found: User = request.getfixturevalue("user" if request.param == "without a server" else "served_user")
    return found


ENDLESS = {
    "train.max_steps": 1_000_000, "train.evaluate_every": 1_000_000, "train.checkpoint_every": 1_000_000,
}  # fmt: skip


@pytest.fixture
def endless(tiny: Callable[..., RunConfig], request: pytest.FixtureRequest) -> Iterator[RunConfig]:
    """A training that does not end by itself; it is cancelled when the test is done."""
    config = tiny({"name": f"endless-{os.getpid()}-{abs(hash(request.node.name)) % 9999}", **ENDLESS})
    yield config
    attempts_of(config).cancel()


def without_noise(text: str) -> None:
    assert [word for word in NOISE if word in text] == []


def is_live(config: RunConfig) -> bool:
    return attempts_of(config).live() is not None


@pytest.mark.parametrize("verb", ["run", "prepare", "sweep", "benchmark-network", "logs", "status", "plan"])
def test_ctrl_c_while_the_command_line_loads_just_ends(user: User, verb: str) -> None:
    with user.types(verb, "nothing.yaml") as terminal:
        time.sleep(0.3)
        terminal.press_ctrl_c()
        code, seconds = terminal.end()
    assert terminal.text == "^C\ninterrupted\n"
    assert (code, seconds < PATIENCE) == (130, True)


def test_ctrl_c_while_the_server_starts_just_ends_and_leaves_no_server(user: User, endless: RunConfig) -> None:
    with user.types("run", user.writes(endless)) as terminal:
        terminal.read_until("starting Prefect's own server", within=60)
        time.sleep(3)  # its process is there by then
        terminal.press_ctrl_c()
        code, seconds = terminal.end()
    assert "interrupted: nothing was started" in terminal.text
    assert (code, seconds < PATIENCE) == (130, True)
    without_noise(terminal.text)
    assert user.left_behind() == []
    assert not is_live(endless)


@pytest.mark.training
def test_ctrl_c_leaves_the_job_and_its_command_takes_it_up_until_a_second_one_cancels_it(
    anyone: User, endless: RunConfig
) -> None:
    path = anyone.writes(endless)
    with anyone.types("run", path) as terminal:
        terminal.read_until(r"submitted(.|\n)*loss \d", within=200)
        terminal.press_ctrl_c()
        code, seconds = terminal.end()
    name = attempts_of(endless).make_job(1).name
    assert f"interrupted: the job goes on as {name} on local" in terminal.text
    assert (code, seconds < PATIENCE) == (130, True)
    without_noise(terminal.text)
    assert anyone.left_behind() == []
    assert is_live(endless)
    assert anyone.flow_runs()[endless.name] == "Interrupted"
    (take_up,) = [line.split(maxsplit=2)[2] for line in terminal.text.splitlines() if line.startswith("  take up")]
    (cancel,) = [line.split(maxsplit=1)[1] for line in terminal.text.splitlines() if line.startswith("  cancel")]
    assert shlex.split(cancel)[1:] == ["cancel", name, "--root", endless.root]

    with Terminal(["sh", "-c", f"exec {take_up}"], env=anyone.env, cwd=anyone.folder) as terminal:
        terminal.read_until(r"adopted(.|\n)*loss \d", within=200)
        terminal.press_ctrl_c()
        terminal.read_until("press Ctrl-C once more now to cancel it", within=PATIENCE)
        terminal.press_ctrl_c()
        code, _ = terminal.end()
    assert f"cancelled {name}; nothing of it is left" in terminal.text
    assert code == 130
    without_noise(terminal.text)
    assert not is_live(endless)
    assert anyone.left_behind() == []
    assert "Cancelled" in anyone.flow_runs()[endless.name]
