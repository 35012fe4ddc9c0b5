"""What a Run:ai cluster has: projects, volumes, and workloads on disk, each under an operator that runs its pods."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[3]

_POST = 'Post "https://runai.example/api/v1/workloads/distributed": '
# Words of Go 1.22's net/http, net and context packages, which the program prints as they come.
UNANSWERED = {
    "EOF": f"{_POST}EOF",
    "reset": f"{_POST}read tcp 10.0.0.5:40112->10.0.0.1:443: read: connection reset by peer",
    "deadline": "context deadline exceeded",
    "headers": f"{_POST}context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
    "handshake": f"{_POST}net/http: TLS handshake timeout",
    "gateway": "unexpected status code 502: Bad Gateway",
    "look-alike": f'{_POST[:-3]}/projects/conflict is forbidden: "x" not found": EOF',
    "unheard of": "the flux capacitor is empty",
    "nothing": "",
}


class Refused(Exception):
    """The cluster says no."""


class Lost(Exception):
    """The answer to a submission does not arrive. It holds what the client has instead, a key of its table."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A PyTorch training as the cluster has understood it."""

    name: str
    project: str
    workers: int
    command: tuple[str, ...]
    """As the container is given it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: float = 0
    claims: tuple[tuple[str, str], ...] = ()
    """Name and mount path."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    backoff_limit: int = 6
    grace: float = 30.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else was asked for, as it was asked."""


class Cluster:
    """On disk, so that a program that ends after each command and a server can both be its front."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._workloads = folder / "workloads"

    @classmethod
    def made(cls, folder: Path, **settings: Any) -> Cluster:
        """A new one.

        Args:
            settings: `projects`, `claims` (claim to the folder it is), `version` (2.13 tells pods how many pods there
                are, 2.18 how many GPUs), `told_gpus` (per pod, where the training asks for none), `grace`,
                `room` (for that many workloads), `lost` (see `lose_answers`).
        """
        folder.mkdir(parents=True)
        defaults = {"projects": ["team-a"], "claims": {}, "version": "2.18", "told_gpus": 0, "grace": 30.0, "fault": ""}
        defaults |= {"room": 1000, "lost": [], "behind": 0}
        (folder / "cluster.json").write_text(json.dumps({**defaults, **settings}))
        return cls(folder)

    @property
    def settings(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.folder / "cluster.json").read_text())
        return read

    def change(self, **settings: Any) -> None:
        """From now on."""
        (self.folder / "cluster.json").write_text(json.dumps({**self.settings, **settings}))

    # --- workloads ---

    def lose_answers(self, *answers: str, made: bool = False, behind: int = 0) -> None:
        """Lose the answers to the next submissions.

        Args:
            answers: what the client has instead, submission by submission: keys of its table.
            made: whether the workloads are made all the same.
            behind: how many lists after that do not have them yet.
        """
        self.change(lost=[[answer, made] for answer in answers], behind=behind)

    def submit(self, training: Training) -> None:
        """Start a training as `create` does, and lose the answer where that is asked for.

        Raises:
            Refused: as the real one would.
            Lost: nobody hears what came of it.
        """
        (self.folder / "submissions").open("a").write(f"{training.name}\n")
        answers = self.settings["lost"]
        if not answers:
            self.create(training)
            return
        (answer, made), *others = answers
        self.change(lost=others)
        if made:
            with contextlib.suppress(Refused):
                self.create(training)
        raise Lost(answer)

    def submissions(self) -> list[str]:
        """The names that were asked for, in order."""
        path = self.folder / "submissions"
        return path.read_text().split() if path.exists() else []

    def create(self, training: Training, *, dry: bool = False) -> None:
        """Start it.

        Raises:
            Refused: as the real one would.
        """
        self.require_project(training.project)
        name = training.name
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 63 - len("-master-0"):
            raise Refused(f'invalid workload name "{name}": a lowercase RFC 1035 label must consist of …')
        if training.workers < 0:
            raise Refused(f"workers {training.workers} must not be negative")
        if training.gpus % 1 and training.workers:
            raise Refused("fractional GPUs are not supported for distributed workloads with workers")
        for claim, path in training.claims:
            folder = self.settings["claims"].get(claim)
            if folder is None:
                raise Refused(f'persistentvolumeclaim "{claim}" not found')
            if folder != path:
                raise AssertionError(f"pods here see the machine's folders: mount {claim} at {folder}, not {path}")
        if "rdma/rdma" in training.resources and not training.annotations.get("k8s.v1.cni.cncf.io/networks"):
            raise Refused("rdma/rdma without a network")
        place = self._workloads / training.project / name
        # Admission comes before the name is looked for.
        if len(self.live()) >= self.settings["room"]:
            raise Refused('admission webhook "workload-controller.runai.io" denied the request: quota exceeded')
        if place.exists():
            raise Refused(f'workload "{name}" already exists in project "{training.project}"')
        if dry:
            return
        place.mkdir(parents=True)
        (place / "training.json").write_text(json.dumps(asdict(training)))
        write_state(place, phase="Pending", pods=[])
        with (place / "operator.log").open("wb") as log:
            subprocess.Popen(
                [sys.executable, "-S", "-m", "runai.operator", str(self.folder), str(place)],
                env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests/fakes'}"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def require_project(self, project: str) -> None:
        if project not in self.settings["projects"]:
            raise Refused(f'project "{project}" was not found or you have no access to it')

    def phases(self, project: str) -> dict[str, str]:
        """Name to phase."""
        self.require_project(project)
        if behind := self.settings["behind"]:
            self.change(behind=behind - 1)
            return {}
        found = {}
        for place in sorted((self._workloads / project).glob("*")):
            if state := read_state(place):
                found[place.name] = state["phase"]
        return found

    def pods(self, project: str, name: str) -> list[dict[str, Any]]:
        pods: list[dict[str, Any]] = read_state(self._workloads / project / name).get("pods", [])
        return pods

    def training(self, project: str, name: str) -> dict[str, Any]:
        """As it was understood."""
        read: dict[str, Any] = json.loads((self._workloads / project / name / "training.json").read_text())
        return read

    def log(self, project: str, name: str, pod: str) -> str:
        """What a pod has printed, while it is there."""
        path = self._workloads / project / name / f"{pod}.log"
        if not path.exists():
            raise Refused(f'pods "{pod}" not found')
        return path.read_text(errors="replace")

    def delete(self, project: str, name: str) -> None:
        """Ask for it to be gone; its operator sees to it."""
        self.require_project(project)
        place = self._workloads / project / name
        if not place.exists():
            raise Refused(f'workload "{name}" was not found in project "{project}"')
        (place / "delete").touch()

    def live(self) -> list[str]:
        """Workloads that hold machines, or wait for some."""
        every = (place for place in self._workloads.glob("*/*"))
        return [place.name for place in every if read_state(place).get("phase") not in {None, "Completed", "Failed"}]

    def end(self) -> None:
        """Delete all, and wait until nothing is left."""
        deadline = time.monotonic() + 30
        for place in self._workloads.glob("*/*"):
            (place / "delete").touch()
        while list(self._workloads.glob("*/*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- fate ---

    def kill_pod(self, project: str, name: str, node: int) -> None:
        """As when its machine is gone."""
        first = first_process(self.pods(project, name)[node]["pid"])
        assert first is not None, "the pod is gone already"
        os.kill(first, signal.SIGKILL)

    def preempt(self, project: str, name: str) -> None:
        """Take its machines for another workload; it waits, and comes back as new pods."""
        (self._workloads / project / name / "preempt").touch()


def first_process(pid: int) -> int | None:
    """Number 1 in the container that `unshare` with this pid has made: what is signalled, and whose end is all's."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def write_state(place: Path, **state: Any) -> None:
    aside = place / ".state.json"
    aside.write_text(json.dumps(state))
    aside.replace(place / "state.json")


def read_state(place: Path) -> dict[str, Any]:
    """{} where there is none, or no longer."""
    try:
        state: dict[str, Any] = json.loads((place / "state.json").read_text())
    except FileNotFoundError:
        return {}
    return state


def told(
    training: Mapping[str, Any], rank: int, *, settings: Mapping[str, Any], port: int
) -> Iterator[tuple[str, str]]:
    """What a version of Run:ai has in a pod's environment."""
    pods = training["workers"] + 1
    yield "RANK", str(rank)
    yield "MASTER_ADDR", "127.0.0.1"
    yield "MASTER_PORT", str(port)
    if settings["version"] == "2.13":
        yield "WORLD_SIZE", str(pods)
        yield "JOB_UUID", "5a3c7d0e"
        return
    gpus = int(training["gpus"]) or settings["told_gpus"]
    yield "WORLD_SIZE", str(pods * (gpus or 1))
    yield "PET_NNODES", str(pods)
    yield "PET_NODE_RANK", str(rank)
    yield "LOCAL_RANK", "0"
    yield "RUNAI_NUM_OF_GPUS", str(gpus)
