from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import until

from deployments.daemons import Daemon

SLEEP = "import sys, time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(name="sleeper", folder=tmp_path / "daemons")
    yield made
    made.stop()


def start(daemon: Daemon, program: str = SLEEP) -> None:
    daemon.start([sys.executable, "-c", program], env=os.environ, cwd=Path.cwd())


def until_it_says(daemon: Daemon, words: str) -> None:
    until(lambda: words in daemon.last_words())


def test_a_daemon_is_found_by_whoever_comes_later_and_is_stopped_once(daemon: Daemon) -> None:
    start(daemon)
    later = Daemon(name=daemon.name, folder=daemon.folder)
    process = later.process()
    assert process is not None
    assert later.stop() is True
    assert not process.is_running()
    assert (later.process(), later.stop()) == (None, False)


def test_a_daemon_is_in_no_terminals_reach(daemon: Daemon) -> None:
    start(daemon)
    process = daemon.process()
    assert process is not None
    assert os.getsid(process.pid) == process.pid != os.getsid(0)


def test_one_that_ignores_being_asked_is_killed(daemon: Daemon) -> None:
    start(daemon, f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}")
    until_it_says(daemon, "up")
    assert Daemon(name=daemon.name, folder=daemon.folder, grace=0.2).stop() is True
    assert daemon.process() is None


def test_another_process_with_the_recorded_pid_is_left_alone(daemon: Daemon) -> None:
    start(daemon)
    mine = psutil.Process()
    (record,) = daemon.folder.glob("*.json")
    actual = json.loads(record.read_text())
    record.write_text(json.dumps(actual | {"pid": mine.pid}))
    assert daemon.process() is None
    assert daemon.stop() is False
    record.write_text(json.dumps(actual))  # for the fixture, which stops it


def test_a_daemon_is_found_after_the_machines_clock_was_set(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    start(daemon)
    real = psutil.Process.create_time  # which is made of the clock, as btime of /proc/stat is
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: real(process) + 3600)
    assert daemon.stop() is True


def test_a_daemon_that_an_older_version_started_is_found(daemon: Daemon) -> None:
    start(daemon)
    process = daemon.process()
    assert process is not None
    (record,) = daemon.folder.glob("*.json")
    record.write_text(json.dumps({"pid": process.pid, "created": process.create_time()}))
    assert daemon.process() == process


def test_its_last_words_are_at_hand_when_it_died(daemon: Daemon) -> None:
    start(daemon, "print('no more disk'); raise SystemExit(1)")
    until_it_says(daemon, "no more disk")
    until(lambda: daemon.process() is None)


STOP = "import sys; from deployments import bootstrap; bootstrap.CHECKOUT = sys.argv[1]; bootstrap.stop()"


@pytest.mark.long
def test_stopping_tells_of_jobs_that_a_damaged_record_hides(tmp_path: Path) -> None:
    record = tmp_path / "output" / "index" / "cut-0123456789" / "1.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"format":')
    env = {**os.environ, "PREFECT_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", STOP, str(tmp_path)], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "job          unknown      1 records of the run index could not be read" in done.stdout
