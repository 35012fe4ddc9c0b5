from __future__ import annotations

import itertools
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
from threading import Thread
from typing import Any

import psutil
import pytest
import yaml
from bucket_emulator import bucket_emulator
from kubernetes_cluster import Cluster, running_cluster
from registry_server import registry
from terminal import Terminal
from waiting import collections_of, free_port, until

from cli.foreground import Tracker, cancel_commands, farewell
from launcher.config import RunConfig, ScriptConfig, SweepConfig, validated
from launcher.events import FlowRunStarted, JobChanged, JobPhase, Step, StepDone, StepStarted
from launcher.job import JobId
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import claim_of
from launcher.runs.run import plan_run, plan_script
from launcher.runs.sweeps import sweep_name, trials
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.runs import FINAL

PROGRAM = str(Path(sys.executable).with_name("train-litgpt"))

# A command starts a server of Prefect's, which takes 15 s, and minutes where other tests have the processor.
pytestmark = pytest.mark.timeout(900)

# What a user sees of it: two seconds on a machine that has nothing else to do. Tests run on machines that have.
PATIENCE = 10.0
START = 400.0

NOISE = ("Traceback", "EventsWorker", "Event(", "prefect.", "ERROR", "KeyboardInterrupt", "Aborted", "Exception")


# --- what is said -----------------------------------------------------------------------------------------------------


def job(
    phase: JobPhase = "started", *, run: str = "tiny-1234", root: str = "output", sweep: str | None = None
) -> JobChanged:
    job_id, here = JobId(f"/{run}/attempts/1"), LocalPlatformConfig(kind="local")
    return JobChanged(phase=phase, run=run, sweep=sweep, root=root, job_id=job_id, platform=here)


def said(*events: Any) -> str:
    tracker = Tracker()
    for event in events:
        tracker.receive(event)
    return "\n".join(farewell(tracker, again="train-litgpt run tiny.yaml"))


FLOW = FlowRunStarted(id="0")


def test_a_job_that_goes_on_is_named_with_the_commands_that_take_it_up_and_cancel_it() -> None:
    text = said(FLOW, StepStarted(step=Step.TRAINING), job("submitting"), job())
    assert "the job goes on as tiny-1234 on local" in text
    assert "take up    train-litgpt run tiny.yaml" in text
    assert "cancel tiny-1234" in text


def test_every_job_that_goes_on_is_named() -> None:
    text = said(FLOW, job(run="a-1"), job(run="b-2"), job("ended", run="a-1"), job(run="c-3"))
    assert "as a-1" not in text
    assert text.count("the job goes on as") == 2
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("  cancel")] == ["b-2", "c-3"]


def test_one_command_cancels_all_trials_of_a_sweep() -> None:
    text = said(FLOW, job(run="a-1", sweep="a-9"), job(run="a-2", sweep="a-9"))
    assert text.count("the job goes on as") == 2
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("  cancel")] == ["a-9"]


def test_a_job_whose_submission_was_not_answered_is_not_said_to_go_on() -> None:
    text = said(FLOW, job("submitting"))
    assert "was being submitted to local, and may have been started" in text
    assert "goes on" not in text
    assert "cancel tiny-1234" in text


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((), "nothing was started"),
        ((FLOW, StepStarted(step=Step.DATASET)), "the preparation of the dataset goes on where it was"),
        (
            (FLOW, StepStarted(step=Step.DATASET), StepDone(step=Step.DATASET, what="")),
            "what is done is found by its key",
        ),
        ((FLOW, StepStarted(step=Step.IMAGE)), "a build of the image that goes on elsewhere is taken up"),
        ((FLOW, job(), job("ended"), StepStarted(step=Step.CHECKPOINTS)), "its last checkpoint is collected"),
    ],
    ids=["start-up", "preparation", "between two steps", "image", "collection"],
)
def test_where_no_job_runs_none_is_said_to_go_on(events: tuple[Any, ...], words: str) -> None:
    text = said(*events)
    assert words in text
    assert "the job goes on" not in text
    assert "run again  train-litgpt run tiny.yaml" in text


def test_a_root_that_is_not_the_default_is_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PROGRAM])
    elsewhere, here = cancel_commands([job(root="gs://b/my runs"), job()])
    assert shlex.split(elsewhere)[1:] == ["cancel", "tiny-1234", "--root", "gs://b/my runs"]
    assert shlex.split(here)[1:] == ["cancel", "tiny-1234"]


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

    def writes(self, config: RunConfig | ScriptConfig | SweepConfig) -> str:
        path = self.folder / f"{config.name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return str(path)

    def states(self, name: str) -> list[str]:
        """The states of the flow runs with this name in theirs, as Prefect keeps them, oldest first."""
        with sqlite3.connect(self.home / "prefect.db") as database:
            rows = database.execute("select state_name from flow_run where name like ? order by created", [f"%{name}%"])
            return [str(state) for (state,) in rows]

    def left_behind(self) -> list[psutil.Process]:
        """Processes of this user's commands that are still there, jobs excepted."""
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
            except psutil.Error:
                continue
            if env.get("TRAIN_LITGPT_HOME") == str(self.folder / "jobs") and JOB_TAG not in env:
                found.append(process)
        return found


@pytest.fixture(scope="module")
def home(prefect_home: Callable[[], Path]) -> Path:
    """PREFECT_HOME of all commands without a server."""
    return prefect_home()


@pytest.fixture
def user(tmp_path: Path, home: Path) -> User:
    """One without a server of Prefect's: each command starts its own."""
    return User(tmp_path, home)


@pytest.fixture(scope="module")
def server(prefect_home: Callable[[], Path]) -> Iterator[tuple[Path, str]]:
    """A server of Prefect's that stays: its home and the address of its API."""
    home = prefect_home()
    port = free_port()
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


NUMBERS = itertools.count(1)  # ports follow from names

ENDLESS = {
    "train.max_steps": 1_000_000, "train.evaluate_every": 1_000_000, "train.checkpoint_every": 1_000_000,
}  # fmt: skip


@pytest.fixture
def endless(tiny: Callable[..., RunConfig]) -> Iterator[RunConfig]:
    """A training that does not end by itself; it is cancelled when the test is done."""
    config = tiny({"name": f"endless-{os.getpid()}-{next(NUMBERS)}", **ENDLESS})
    yield config
    claim_of(config).attempts.cancel()


def is_live(config: RunConfig | ScriptConfig) -> bool:
    return claim_of(config).attempts.live() is not None


def ticking(user: User) -> ScriptConfig:
    """A script that prints a line every tenth of a second, for ten minutes."""
    script = user.folder / "tick.py"
    script.write_text("import time\nfor _ in range(6000):\n    print('tick', flush=True)\n    time.sleep(0.1)\n")
    settings = {"name": f"tick-{os.getpid()}-{next(NUMBERS)}", "root": str(user.folder / "out"), "script": str(script)}
    return validated(ScriptConfig, settings, where="ticking")


def assert_ended(terminal: Terminal, user: User, *, code: int = 130, patience: float = PATIENCE) -> None:
    """In time, without noise, with nothing of the command left."""
    ended, seconds = terminal.end()
    assert ended == code, terminal.text
    assert seconds < patience
    assert [word for word in NOISE if word in terminal.text] == []
    assert user.left_behind() == []


def printed(text: str, what: str) -> list[str]:
    """The commands that the last words offer as `what`."""
    return [line.split(maxsplit=len(what.split()))[-1] for line in text.splitlines() if line.startswith(f"  {what} ")]


@pytest.mark.parametrize("verb", ["run", "prepare", "sweep", "benchmark-network", "logs", "status", "plan"])
def test_ctrl_c_while_the_command_line_loads_just_ends(user: User, verb: str) -> None:
    with user.types(verb, "nothing.yaml") as terminal:
        terminal.wait_until_caught(signal.SIGTERM)  # a moment after its start, long before its imports are done
        terminal.press_ctrl_c()
        assert_ended(terminal, user)
    assert terminal.text == "^C\ninterrupted\n"


@pytest.mark.long
def test_ctrl_c_while_the_server_starts_just_ends_and_leaves_no_server(user: User, endless: RunConfig) -> None:
    with user.types("run", user.writes(endless)) as terminal:
        terminal.read_until("starting Prefect's own server", within=60)
        time.sleep(3)  # its process is there by then
        terminal.press_ctrl_c()
        assert_ended(terminal, user)
    assert "interrupted: nothing was started" in terminal.text
    assert not is_live(endless)


@pytest.mark.training
def test_ctrl_c_while_it_trains_leaves_the_job_and_says_how_it_is_taken_up_and_cancelled(
    anyone: User, endless: RunConfig
) -> None:
    path = anyone.writes(endless)
    name = claim_of(endless).attempts.run
    with anyone.types("run", path) as terminal:
        terminal.read_until("submitted", within=START)
        terminal.press_ctrl_c()
        assert_ended(terminal, anyone)
    assert f"interrupted: the job goes on as {name} on local" in terminal.text
    (take_up,), (cancel,) = printed(terminal.text, "take up"), printed(terminal.text, "cancel")
    assert shlex.split(take_up)[1:] == ["run", path]
    assert shlex.split(cancel)[1:] == ["cancel", name, "--root", endless.root]
    assert is_live(endless)
    assert anyone.states(endless.name) == ["Interrupted"]


@pytest.mark.long
@pytest.mark.training
def test_the_printed_command_takes_the_job_up_and_a_second_ctrl_c_cancels_it(anyone: User, endless: RunConfig) -> None:
    with anyone.types("run", anyone.writes(endless)) as terminal:
        terminal.read_until("submitted", within=START)
        terminal.press_ctrl_c()
        assert_ended(terminal, anyone)
    (take_up,) = printed(terminal.text, "take up")
    with Terminal(["sh", "-c", f"exec {take_up}"], env=anyone.env, cwd=anyone.folder) as terminal:
        terminal.read_until("adopted", within=START)
        terminal.press_ctrl_c()
        terminal.read_until("press Ctrl-C once more now to cancel it", within=PATIENCE)
        terminal.press_ctrl_c()
        terminal.read_until("nothing of it is left", within=60)
        assert_ended(terminal, anyone, patience=60 + PATIENCE)  # the job may save before it ends
    assert f"cancelled {claim_of(endless).attempts.run}; nothing of it is left" in terminal.text
    assert not is_live(endless)
    assert anyone.states(endless.name) == ["Interrupted", "Cancelled"]


@pytest.mark.long
def test_ctrl_c_while_a_dataset_is_prepared_just_ends(anyone: User, endless: RunConfig) -> None:
    corpus = anyone.folder / "corpus.txt"
    words = " ".join(f"{number:x}" for number in range(100_000))
    corpus.write_text(f"{words}\n\n" * 200)  # a minute of work
    data = f"data={{corpus: {{kind: files, paths: [{corpus}]}}, tokenizer: {{kind: train}}}}"
    with anyone.types("prepare", anyone.writes(endless), data, "workers={kind: processes, count: 2}") as terminal:
        terminal.read_until("1/5 dataset", within=START)
        terminal.press_ctrl_c()
        assert_ended(terminal, anyone)
    assert "no job was started; run again, the preparation of the dataset goes on where it was" in terminal.text
    assert anyone.states("prepare files") == ["Interrupted"]


@pytest.mark.long
@pytest.mark.training
def test_ctrl_c_in_a_sweep_names_every_job_and_ends_every_trial_in_prefect(anyone: User, endless: RunConfig) -> None:
    grid = {"sweep": {"grid": {"train.seed": [1, 2, 3]}, "max_parallel": 2}}
    sweep = validated(SweepConfig, endless.model_dump(mode="json") | grid, where="sweep")
    configs = [trial.config for trial in trials(sweep)]
    try:
        with anyone.types("sweep", anyone.writes(sweep)) as terminal:
            terminal.read_until("(?s)submitted.*submitted", within=START)
            terminal.press_ctrl_c()
            assert_ended(terminal, anyone)
        names = {claim_of(config).attempts.run for config in configs if is_live(config)}
    finally:
        for config in configs:
            claim_of(config).attempts.cancel()
    assert len(names) == 2
    assert [shlex.split(command)[2] for command in printed(terminal.text, "cancel")] == [sweep_name(sweep)]
    states = anyone.states(sweep.name)
    assert len(states) == 3  # the sweep and its first two trials
    # Prefect's own word for them, where there was no time left for ours.
    assert set(states) <= {"Interrupted", "Crashed"}


def shuts_down(user: User) -> Path:
    """A folder for PATH, in which systemd says that this machine shuts down."""
    (folder := user.folder / "bin").mkdir()
    (folder / "systemctl").write_text('#!/bin/sh\n[ "$1" = is-system-running ] && echo stopping; exit 1\n')
    (folder / "systemctl").chmod(0o755)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("how", ["the machine shuts down", "the window is closed"])
def test_other_ways_to_end_it_leave_the_job_too(user: User, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ticking(user)
    monkeypatch.setenv("PATH", str(shuts_down(user)), prepend=os.pathsep)
    try:
        with user.types("run", user.writes(config)) as terminal:
            terminal.read_until(r"rank0\]: *tick", within=START)
            if how == "the machine shuts down":
                terminal.send(signal.SIGTERM)
                assert_ended(terminal, user, code=128 + signal.SIGTERM)
                assert f"the job goes on as {plan_script(config).name} on local" in terminal.text
            else:
                terminal.close()
                assert_ended(terminal, user, code=128 + signal.SIGHUP)
        assert is_live(config)
    finally:
        claim_of(config).attempts.cancel()
    assert user.states(config.name) == ["Interrupted"]


@pytest.mark.training
def test_sigterm_cancels_the_job_and_proves_that_nothing_is_left(user: User) -> None:
    """`kill`, `timeout`, a batch system and a supervisor mean it so, and some send it more than once."""
    config = ticking(user)
    name = plan_script(config).name
    with user.types("run", user.writes(config)) as terminal:
        terminal.read_until(r"rank0\]: *tick", within=START)
        terminal.send(signal.SIGTERM)
        terminal.read_until(f"terminated: {name} is cancelled", within=PATIENCE)
        terminal.send(signal.SIGTERM)
        assert_ended(terminal, user, code=128 + signal.SIGTERM, patience=30)
    assert f"cancelled {name}; nothing of it is left" in terminal.text
    assert not is_live(config)
    assert user.states(config.name) == ["Cancelled"]
    again = subprocess.run(
        [PROGRAM, "cancel", name, "--root", config.root], env=user.env, capture_output=True, text=True, check=False
    )
    assert (again.returncode, "nothing was running of" in again.stdout) == (0, True), again.stderr


@pytest.mark.long
def test_sigterm_of_a_sweep_asks_all_jobs_to_end_at_once(user: User, endless: RunConfig) -> None:
    grid = {"sweep": {"grid": {"train.seed": [1, 2, 3]}, "max_parallel": 3}}
    sweep = validated(SweepConfig, endless.model_dump(mode="json") | grid, where="sweep")
    with user.types("sweep", user.writes(sweep)) as terminal:
        terminal.read_until("(?s)submitted.*submitted.*submitted", within=START)
        terminal.send(signal.SIGTERM)
        assert_ended(terminal, user, code=128 + signal.SIGTERM, patience=60 + PATIENCE)
    assert terminal.text.count("nothing of it is left") == 3
    assert not any(is_live(trial.config) for trial in trials(sweep))
    assert set(user.states(sweep.name)) == {"Cancelled"}


# --- at every step ----------------------------------------------------------------------------------------------------

LEAVE: dict[str, Callable[[Terminal], object]] = {
    "Ctrl-C": lambda terminal: terminal.press_ctrl_c(),
    "Ctrl-C twice": lambda terminal: (terminal.press_ctrl_c(), time.sleep(0.4), terminal.press_ctrl_c()),
    "SIGTERM": lambda terminal: terminal.send(signal.SIGTERM),
}


def assert_left(terminal: Terminal, user: User, how: str, name: str, *, words: str) -> None:
    """Leave a pipeline that has no job, by one of the ways; Prefect knows what it was."""
    terminated = how == "SIGTERM"
    LEAVE[how](terminal)
    assert_ended(terminal, user, code=128 + (signal.SIGTERM if terminated else signal.SIGINT), patience=30)
    assert f"{'terminated' if terminated else 'interrupted'}: {words}" in terminal.text
    assert user.states(name) == ["Cancelled" if terminated else "Interrupted"]


@pytest.fixture
def on_cluster(user: User, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScriptConfig, Cluster]]:
    """A script for a cluster, with an image that is in its registry."""
    with (
        bucket_emulator("training") as bucket,
        running_cluster(simulate=True) as cluster,
        registry(user.folder) as images,
    ):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket)
        images.push("litgpt/train", "v1")
        platform = {"kind": "gke", "kubeconfig": str(cluster.kubeconfig), "gate": 0}
        given = {
            "name": f"far-{os.getpid()}-{next(NUMBERS)}", "root": "gs://training/far", "script": "/train.py",
            "platform": platform, "image": {"kind": "prebuilt", "reference": f"{images.host}/litgpt/train:v1"},
        }  # fmt: skip
        yield validated(ScriptConfig, given, where="far"), cluster


@pytest.mark.long
@pytest.mark.parametrize("how", LEAVE)
def test_while_a_cluster_that_is_away_is_asked_for_access_it_just_ends(
    user: User, on_cluster: tuple[ScriptConfig, Cluster], how: str
) -> None:
    config, cluster = on_cluster
    cluster.answer(503, verb="create", resource="selfsubjectaccessreviews")
    with user.types("run", user.writes(config)) as terminal:
        terminal.read_until("3/5 credentials", within=START)
        assert_left(terminal, user, how, config.name, words="no job is running; run again, what is done is found")
    assert cluster.objects("jobs") == cluster.objects("jobsets") == []


@pytest.mark.long
@pytest.mark.parametrize("how", LEAVE)
def test_while_a_registry_that_is_away_is_asked_for_the_image_it_just_ends(
    user: User, on_cluster: tuple[ScriptConfig, Cluster], how: str
) -> None:
    config, cluster = on_cluster
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, and never answers
        reference = f"127.0.0.1:{silent.getsockname()[1]}/a/b:v1"
        changed = config.model_dump(mode="json") | {"image": {"kind": "prebuilt", "reference": reference}}
        with user.types("run", user.writes(validated(ScriptConfig, changed, where="far"))) as terminal:
            terminal.read_until("2/5 image", within=START)
            assert_left(terminal, user, how, config.name, words="no job was started; run again, a build of the image")
    assert cluster.objects("jobs") == cluster.objects("jobsets") == []


@pytest.mark.long
@pytest.mark.training
@pytest.mark.parametrize("how", LEAVE)
def test_while_the_model_is_collected_it_just_ends_and_the_next_command_collects(
    user: User, tiny: Callable[..., RunConfig], how: str
) -> None:
    config = tiny({"name": f"collected-{os.getpid()}-{next(NUMBERS)}"})
    path = user.writes(config)
    with user.types("run", path) as terminal:
        holding = Thread(target=lambda: until(lambda: collections_of(config.root), seconds=START)[0].suspend())
        holding.start()
        terminal.read_until("5/5 checkpoints", within=START)
        holding.join()
        assert_left(terminal, user, how, config.name, words="the job has ended; run again, its last checkpoint")
    final = plan_run(config).storage.within(FINAL)
    assert final.list() == []
    with user.types("run", path) as terminal:
        terminal.read_until("✓ 5/5 checkpoints", within=START)
        assert terminal.end(within=START)[0] == 0
    assert final.exists("manifest.json")


@pytest.mark.long
def test_a_mistake_in_the_program_ends_it_at_once_and_its_traceback_is_the_first_thing_that_is_told(user: User) -> None:
    program = user.folder / "wrong.py"
    program.write_text("def divided(by):\n    return 1 / by\n\n\ndivided(0)\n")
    settings = {
        "name": f"wrong-{os.getpid()}-{next(NUMBERS)}", "root": str(user.folder / "out"), "script": str(program),
        "max_restarts": 9,
    }  # fmt: skip
    config = validated(ScriptConfig, settings, where="test")
    command = [PROGRAM, "run", user.writes(config)]
    done = subprocess.run(command, env=user.env, cwd=user.folder, capture_output=True, text=True, timeout=START)
    assert done.returncode == EXIT_CODES[Fault.USER]
    told = done.stderr[done.stderr.index("failed user error") :].splitlines()
    assert told[0] == "failed user error on node 0, rank 0: ZeroDivisionError: division by zero"
    assert told[1].strip() == "Traceback (most recent call last):"
    advice = next(number for number, line in enumerate(told) if "what to do: fix what the message names" in line)
    assert "return 1 / by" in "\n".join(told[2:advice])
    assert told[advice + 1].strip().startswith("logs: ")
    assert [one.number for one in claim_of(config).attempts.all()] == [1]
    # Nothing of Prefect's, and no traceback of ours, hides it.
    assert "prefect" not in done.stderr.lower().replace(str(user.home).lower(), "")
    assert done.stderr.count("Traceback (most recent call last):") == 1


def test_ctrl_c_while_logs_are_followed_just_ends(user: User) -> None:
    config = ticking(user)
    claim = claim_of(config)
    claim.platform.submit(claim.platform.render(claim.make_job(claim.take().attempt)))
    try:
        with user.types("logs", "-f", user.writes(config)) as terminal:
            terminal.read_until(r"rank0\]: *tick", within=START)
            terminal.press_ctrl_c()
            assert_ended(terminal, user)
        assert is_live(config)
    finally:
        claim.attempts.cancel()
    assert terminal.text.endswith("\ninterrupted\n")
