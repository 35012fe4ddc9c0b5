"""Cause the failures that the verdict is scored on, and write down what they left.

    python -m tests.faults.make [NAME …]

tests/faults/cases.jsonl has a line for each failure. A new one is written there without its status, reports and logs,
which this adds; without names it does so for those that have no status. What only others have seen is written there by
hand. Each one made is a real job of two to four nodes on this machine, through the local platform and its nodes' entry
point. A kernel's own killings need the memory controller of cgroup version 1 and root; full disks need root. What names
this machine is replaced in what is written.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.verdict import first_rank, last_traceback
from launcher.job import Job, LogLine, Submission
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.supervisor import JOB_TAG
from litgpt_demo.node.agent import tagged
from tests.faults.case import CASES, Case, Status, cases, judged

_LINES, _LONGEST = 60, 400  # of a log; characters of a line
_TRACEBACK = 15  # lines
_HERE = Path(__file__).parents[2]
_CGROUP = Path("/sys/fs/cgroup/memory/train-litgpt-faults")


# --- while the job runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node of a job that runs, which something is done to."""

    job_id: str
    number: int
    ready: Path

    @property
    def agent(self) -> psutil.Process | None:
        mine = ["--node-rank", str(self.number)]
        for process in tagged(JOB_TAG, self.job_id):
            words = process.cmdline()
            if "node" in words and mine in (words[place : place + 2] for place in range(len(words))):
                return process
        return None

    @property
    def tree(self) -> list[psutil.Process]:
        """The agent and whatever it started."""
        return [self.agent, *self.agent.children(recursive=True)] if self.agent else []

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks, the first one first."""
        of_ranks = [one for one in self.tree if "RANK" in one.environ()]
        return sorted(of_ranks, key=lambda one: int(one.environ()["RANK"]))

    @property
    def meets(self) -> bool:
        return any("litgpt_demo.node.torchrun" in word for one in self.tree for word in one.cmdline())

    def bound(self) -> None:
        """Bound its memory before its ranks begin to take it."""
        _CGROUP.mkdir(exist_ok=True)
        (_CGROUP / "memory.limit_in_bytes").write_text(str(3 << 29))
        for process in self.tree:
            (_CGROUP / "cgroup.procs").write_text(str(process.pid))


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.kill()


def _trains(node: Node) -> bool:
    return node.ready.exists()


# A disturbance of a node: what it waits for, and what is done then.
_OF_NODES: dict[str, tuple[Callable[[Node], object], Callable[[Node], None]]] = {
    "at_start": (lambda node: node.agent, lambda node: _kill(node.tree)),
    "at_rendezvous": (lambda node: node.meets, lambda node: _kill(node.tree)),
    "while_training": (_trains, lambda node: _kill(node.tree)),
    "agent_alone": (_trains, lambda node: _kill(node.tree[:1])),
    "torchrun_alone": (_trains, lambda node: _kill(node.tree[1:2])),
    "rank_from_outside": (_trains, lambda node: _kill(node.ranks[:1])),
    "asked_to_leave": (_trains, lambda node: node.tree[0].send_signal(signal.SIGTERM)),
    "stopped": (_trains, lambda node: node.ranks[0].suspend()),
    "into_cgroup": (lambda node: node.ranks, Node.bound),
}


# --- before the job ---------------------------------------------------------------------------------------------------


def with_late_name(submission: Submission) -> Submission:
    """Let the nodes but node 0 look for a name that nobody knows, for 4 seconds instead of minutes."""
    shim = (
        "import sys; from litgpt_demo.node import rendezvous as r; r.await_name.__kwdefaults__['limit'] = 4.0; "
        "from litgpt_demo.node.main import main; sys.exit(main(sys.argv[1:]))"
    )
    body = dict(submission.body)
    for node in body["nodes"][1:]:
        words = node["argv"][4:]
        words[words.index("--master") + 1] = f"gpt-0.gpt.train.svc:{body['port']}"
        node["argv"] = [sys.executable, "-c", shim, *words]
    return replace(submission, body=body)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def damaged_dataset(root: Path) -> str:
    """Return the address of a dataset one of whose files lost a byte."""
    sys.path.insert(0, str(_HERE / "tests"))
    from corpora import corpus_in, prepared

    _, folder = prepared(corpus_in(root / "texts"), root / "datasets")
    path = next(folder.glob("train*.bin"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    return str(folder)


# --- one failure ------------------------------------------------------------------------------------------------------


def caused(case: Case, root: Path) -> Case:
    """Cause a failure below a folder, and return the case with what it left."""
    words = case.source.split()
    disturbance, _, node = ("" if words[0].endswith(".py") else words.pop(0)).partition(":")
    disk, ready = root / "disk", root / "ready"
    directory = disk / "attempt" if disturbance == "small_disk" else root / "attempt"
    if words[0] == "syntax.py":
        (root / "syntax.py").write_text("def train(:\n    pass\n")
        program = [str(root / "syntax.py")]
    else:
        program = [str(Path(__file__).with_name(words[0])), *words[1:], "--ready", str(ready)]
    port = _free_port() if disturbance in {"port_taken", "late_name"} else None
    platform = LocalPlatform(grace=4, port=port)
    with ExitStack() as stack:
        job = Job(
            name=f"faults-{case.name}",
            attempt=1,
            nodes=case.nodes,
            processes=case.processes,
            program=tuple(word.replace("{disk}", str(disk)) for word in program),
            directory=str(directory),
            stage=(damaged_dataset(root),) if disturbance == "damaged_dataset" else (),
            env={"OMP_NUM_THREADS": "1"},
        )
        submission = platform.render(job)
        if disturbance == "late_name":
            submission = with_late_name(submission)
        if disturbance == "small_disk":
            stack.enter_context(small_disk(disk))
        platform.submit(submission)
        if disturbance == "port_taken":  # after the platform's look and before the node's
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        if disturbance in _OF_NODES:
            awaited, act = _OF_NODES[disturbance]
            disturbed = Node(str(submission.job_id), int(node), ready)
            while not awaited(disturbed) and platform.status(submission.job_id).state.live:
                time.sleep(0.02)
            act(disturbed)
        lines: list[LogLine] = []
        position, ended = "", False
        while not ended:
            status, page = platform.status(submission.job_id), platform.logs(submission.job_id, position)
            position, ended = page.position, status.state.final and not page.more
            lines += page.lines
            time.sleep(0.1)
        reports = {path.name: json.loads(path.read_text()) for path in directory.glob("node-*.json")}
    changes = {
        "status": Status(native=status.native, exit_codes=dict(status.exit_codes)),
        "reports": reports,
        "logs": tuple((line.node, line.text[:_LONGEST]) for line in lines[-200:]),
    }
    return Case.model_validate_json(_cleaned(case.model_copy(update=changes).model_dump_json(), root))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _cleaned(text: str, root: Path) -> str:
    """Replace the names of this machine's folders and of itself."""
    names = {str(root): "/runs/faults", str(_HERE): "/app", sys.prefix: "/venv", sys.base_prefix: "/usr/local"}
    for name, other in names.items():
        text = text.replace(name, other)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "machine", text)


# --- all of them ------------------------------------------------------------------------------------------------------


def shortened(case: Case) -> Case:
    """Leave out what no judge reads of the logs but their last lines, and of the tracebacks."""

    def same(other: Case) -> bool:
        return all(judge(other) == judge(case) for judge in (first_rank, last_traceback, judged))

    short = case
    for place in range(len(case.logs) - _LINES - 1, -1, -1):
        less = short.model_copy(update={"logs": (*short.logs[:place], *short.logs[place + 1 :])})
        short = less if same(less) else short
    for name, report in case.reports.items():
        cut: Any = json.loads(json.dumps(report))
        for rank in cut.get("ranks", []):
            rank["traceback"] = rank.get("traceback", [])[-_TRACEBACK:]
        less = short.model_copy(update={"reports": {**short.reports, name: cut}})
        short = less if same(less) else short
    return short


def saved_line(case: Case) -> str:
    return json.dumps(case.model_dump(mode="json", exclude_defaults=True))


def main(names: Sequence[str]) -> int:
    """Make the failures of these names; without any, those that are not there yet."""
    os.environ["PYTHONPATH"] = str(_HERE)
    known = {case.name: case for case in cases()}
    for name in names or [name for name, case in known.items() if not case.status.native]:
        os.chdir(root := Path(tempfile.mkdtemp(prefix="faults-")))
        known[name] = shortened(caused(known[name], root))
        shutil.rmtree(root)
        CASES.write_text("".join(f"{saved_line(known[each])}\n" for each in sorted(known)))
        print(f"{name}: {known[name].status.native}", flush=True)
    if _CGROUP.exists():
        _CGROUP.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
