"""Cause the failures that the verdict is scored on, and write down what they left.

    python -m tests.faults.make [NAME …]

Each is a real job of two to four nodes on this machine, through the local platform and its nodes' entry point. A
kernel's own killings need the memory controller of cgroup version 1 and root; full disks need root. What names this
machine is replaced in what is written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from launcher.job import Job, JobStatus, LogLine, Submission
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.supervisor import JOB_TAG
from litgpt_demo.node.agent import tagged
from tests.faults import documented
from tests.faults.case import CASES, Case, Status
from tests.faults.scenarios import SCENARIOS, Scenario

_LINES, _LONGEST = 200, 400  # of a log, as the launcher keeps them
_LIMIT = 180.0  # seconds that a job may take
_HERE = Path(__file__).parents[2]
_CGROUP = Path("/sys/fs/cgroup/memory/train-litgpt-faults")


@dataclass
class Running:
    """A job while it runs."""

    job_id: str
    ready: Path

    def wait_for(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.02)

    def agents(self) -> dict[int, psutil.Process]:
        """Return the process of each node's agent."""
        found = {}
        for process in tagged(JOB_TAG, self.job_id):
            words = process.cmdline()
            if "node" in words and "--node-rank" in words:
                found[int(words[words.index("--node-rank") + 1])] = process
        return found

    def ranks(self, node: int) -> list[psutil.Process]:
        """Return the processes of a node's ranks, the first one first."""
        mine = [one for one in tagged(JOB_TAG, self.job_id) if one.environ().get("GROUP_RANK") == str(node)]
        return sorted((one for one in mine if "RANK" in one.environ()), key=lambda one: int(one.environ()["RANK"]))


def kill_node(running: Running, node: int) -> None:
    """Take a node away at once: its agent and whatever it started."""
    agent = running.agents()[node]
    for process in [agent, *agent.children(recursive=True)]:
        process.kill()


def at_start(running: Running, node: int) -> None:
    running.wait_for(lambda: node in running.agents())
    kill_node(running, node)


def at_rendezvous(running: Running, node: int) -> None:
    running.wait_for(lambda: any("litgpt_demo.node.torchrun" in word for word in _words(running, node)))
    time.sleep(1.0)
    kill_node(running, node)


def _words(running: Running, node: int) -> list[str]:
    agent = running.agents().get(node)
    return [word for child in (agent.children() if agent else ()) for word in child.cmdline()]


def while_training(running: Running, node: int) -> None:
    running.wait_for(running.ready.exists)
    kill_node(running, node)


def agent_alone(running: Running, node: int) -> None:
    running.wait_for(running.ready.exists)
    running.agents()[node].kill()


def torchrun_alone(running: Running, node: int) -> None:
    running.wait_for(running.ready.exists)
    running.agents()[node].children()[0].kill()


def rank_from_outside(running: Running, node: int) -> None:
    running.wait_for(running.ready.exists)
    running.ranks(node)[0].kill()


def asked_to_leave(running: Running, node: int) -> None:
    running.wait_for(running.ready.exists)
    running.agents()[node].send_signal(signal.SIGTERM)


def stopped(running: Running, node: int) -> None:
    running.wait_for(running.ready.exists)
    running.ranks(node)[0].suspend()


def into_cgroup(running: Running, node: int) -> None:
    """Bound a node's memory before its ranks begin to take it."""
    running.wait_for(lambda: len(running.ranks(node)) > 0)
    agent = running.agents()[node]
    _CGROUP.mkdir(exist_ok=True)
    (_CGROUP / "memory.limit_in_bytes").write_text(str(3 << 29))
    for process in [agent, *agent.children(recursive=True)]:
        (_CGROUP / "cgroup.procs").write_text(str(process.pid))


OUTSIDE: dict[str, Callable[[Running, int], None]] = {
    action.__name__: action
    for action in (
        at_start, at_rendezvous, while_training, agent_alone, torchrun_alone, rank_from_outside, asked_to_leave,
        stopped, into_cgroup,
    )
}  # fmt: skip


# --- before the job ---------------------------------------------------------------------------------------------------


def with_late_name(body: dict[str, Any]) -> dict[str, Any]:
    """Let the nodes but node 0 look for a name that nobody knows, for 4 seconds instead of minutes."""
    shim = (
        "import sys; from litgpt_demo.node import rendezvous as r; r.await_name.__kwdefaults__['limit'] = 4.0; "
        "from litgpt_demo.node.main import main; sys.exit(main(sys.argv[1:]))"
    )
    for node in body["nodes"][1:]:
        words = node["argv"][4:]
        words[words.index("--master") + 1] = f"gpt-0.gpt.train.svc:{body['port']}"
        node["argv"] = [sys.executable, "-c", shim, *words]
    return body


@contextmanager
def port_taken(port: int) -> Iterator[None]:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        yield other.listen()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def damaged_dataset(root: Path) -> str:
    """Return the address of a dataset one of whose files lost a byte."""
    sys.path.insert(0, str(_HERE / "tests" / "litgpt_demo"))
    from corpora import corpus_in, prepared

    _, folder = prepared(corpus_in(root / "texts"), root / "datasets")
    path = next(folder.glob("train*.bin"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    return str(folder)


# --- one failure ------------------------------------------------------------------------------------------------------


def cause(scenario: Scenario) -> Case:
    """Cause a failure, and return what it left."""
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        with _disk(scenario, root):
            return _caused(scenario, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        if _CGROUP.exists():
            _CGROUP.rmdir()


@contextmanager
def _disk(scenario: Scenario, root: Path) -> Iterator[None]:
    if not scenario.disk:
        yield
        return
    with small_disk(root / "disk", scenario.disk):
        yield


def _caused(scenario: Scenario, root: Path) -> Case:
    directory, ready = root / ("disk/attempt" if scenario.disk else "attempt"), root / "ready"
    platform = LocalPlatform(grace=4)
    submission = _submission(scenario, platform, directory, ready, root)
    running = Running(job_id=str(submission.job_id), ready=ready)
    if scenario.port_taken:
        _start_with_port_taken(platform, submission)
    else:
        platform.submit(submission)
    if scenario.outside:
        action, node = scenario.outside
        OUTSIDE[action](running, node)
    status, lines = _followed(platform, submission)
    reports = {path.name: json.loads(path.read_text()) for path in directory.glob("node-*.json")}
    clean = _cleaner(root)
    return Case(
        name=scenario.name,
        about=scenario.about,
        how="made",
        source=f"python -m tests.faults.make {scenario.name}",
        held_out=scenario.held_out,
        nodes=scenario.nodes,
        processes=scenario.processes,
        fault=scenario.fault,
        culprits=scenario.culprits,
        status=Status(native=clean(status.native), exit_codes=dict(status.exit_codes)),
        reports=json.loads(clean(json.dumps(reports))),
        logs=tuple((line.node, clean(line.text)[:_LONGEST]) for line in lines[-_LINES:]),
    )


def _submission(scenario: Scenario, platform: LocalPlatform, directory: Path, ready: Path, root: Path) -> Submission:
    here = Path(__file__).with_name("failing.py")
    arguments = [word.replace("{disk}", str(root / "disk")) for word in scenario.program]
    program = arguments if arguments[0].endswith(".py") else [str(here), *arguments, "--ready", str(ready)]
    if program[0] == "syntax.py":
        program[0] = str(root / "syntax.py")
        Path(program[0]).write_text("def train(:\n    pass\n")
    job = Job(
        name=f"faults-{scenario.name}",
        attempt=1,
        nodes=scenario.nodes,
        processes=scenario.processes,
        program=tuple(program),
        directory=str(directory),
        stage=(damaged_dataset(root),) if scenario.damaged_dataset else (),
        env={"OMP_NUM_THREADS": "1"},
    )
    submission = platform.render(job)
    if scenario.late_name:
        submission = replace(submission, body=with_late_name(dict(submission.body)))
    return submission


def _start_with_port_taken(platform: LocalPlatform, submission: Submission) -> None:
    """Take the port between the platform's look and the node's."""
    platform.submit(submission)
    with port_taken(submission.body["port"]):
        while platform.status(submission.job_id).state.live:
            time.sleep(0.1)


def _followed(platform: LocalPlatform, submission: Submission) -> tuple[JobStatus, list[LogLine]]:
    lines: list[LogLine] = []
    position, deadline = "", time.monotonic() + _LIMIT
    while True:
        status = platform.status(submission.job_id)
        page = platform.logs(submission.job_id, position)
        position = page.position
        lines += page.lines
        if status.state.final and not page.more:
            return status, lines
        if time.monotonic() > deadline:
            platform.cancel(submission.job_id)
            raise SystemExit(f"{submission.job_id} does not end")
        time.sleep(0.1)


def _cleaner(root: Path) -> Callable[[str], str]:
    """Return what replaces the names of this machine's folders and of itself."""
    names = {str(root): "/runs/faults", str(_HERE): "/app", sys.prefix: "/venv", sys.base_prefix: "/usr/local"}

    def clean(text: str) -> str:
        for name, other in names.items():
            text = text.replace(name, other)
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "machine", text)

    return clean


def main(names: Sequence[str]) -> int:
    """Make the failures of these names; without any, those that are not there yet."""
    os.chdir(tempfile.mkdtemp(prefix="faults-cwd-"))
    os.environ["PYTHONPATH"] = str(_HERE)
    chosen = [one for one in SCENARIOS if one.name in names or not (names or (CASES / f"{one.name}.json").exists())]
    for scenario in chosen:
        began = time.monotonic()
        case = cause(scenario)
        _write(case)
        print(f"{scenario.name}: {case.status.native} ({time.monotonic() - began:.0f} s)", flush=True)
    for case in (*documented.tuned(), *documented.held_out()):
        if case.name in names or not names:
            _write(case)
    return 0


def _write(case: Case) -> None:
    (CASES / f"{case.name}.json").write_text(case.model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
