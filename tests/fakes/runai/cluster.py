"""What a Run:ai cluster has: projects, volumes, and workloads on disk, whose pods an operator runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[3]
SCRATCH = "/tmp/litgpt"
"""What pods write to beside their volumes: each has its own, because each has its own file system."""

_POST = 'Post "https://runai.example/api/v1/workloads/distributed": '
# Words of Go 1.22's net/http, net and context packages, which the program prints as they come.
UNANSWERED = {
    "EOF": f"{_POST}EOF",
    "look-alike": f'{_POST[:-3]}/projects/conflict is forbidden: "x" not found": EOF',
    "gateway": "unexpected status code 502: Bad Gateway",
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
    labels: Mapping[str, str] = field(default_factory=dict)


class Cluster:
    """On disk, so that a program that ends after each command and a server can both be its front."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workloads = folder / "workloads"

    @property
    def settings(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.folder / "cluster.json").read_text())
        return read

    def change(self, **settings: Any) -> None:
        """From now on."""
        _write(self.folder / "cluster.json", {**self.settings, **settings})

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
        with (self.folder / "submissions").open("a") as names:
            names.write(f"{training.name}\n")
        if refusal := self.settings["refusal"]:
            raise Refused(refusal)
        if not (answers := self.settings["lost"]):
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
        return (self.folder / "submissions").read_text().split()

    def create(self, training: Training, *, dry: bool = False) -> None:
        """Start it.

        Raises:
            Refused: as the real one would.
        """
        self.require_project(training.project)
        name, place = training.name, self.workloads / training.project / training.name
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 63 - len("-master-0"):
            raise Refused(f'invalid workload name "{name}": a lowercase RFC 1035 label must consist of …')
        for claim, path in training.claims:
            if (folder := self.settings["claims"].get(claim)) is None:
                raise Refused(f'persistentvolumeclaim "{claim}" not found')
            assert folder == path, f"pods here see the machine's folders: mount {claim} at {folder}, not {path}"
        # Admission comes before the name is looked for.
        if len(self.live()) >= self.settings["room"]:
            raise Refused('admission webhook "workload-controller.runai.io" denied the request: quota exceeded')
        if place.exists():
            raise Refused(f'workload "{name}" already exists in project "{training.project}"')
        if not dry:
            place.mkdir(parents=True)
            _write(place / "training.json", asdict(training))
            _write(place / "state.json", {"phase": "Pending" if self.settings["pods"] else "Running"})

    def require_project(self, project: str) -> None:
        if project not in self.settings["projects"]:
            raise Refused(f'project "{project}" was not found or you have no access to it')

    def phases(self, project: str) -> dict[str, str]:
        """Name to phase."""
        self.require_project(project)
        if behind := self.settings["behind"]:
            self.change(behind=behind - 1)
            return {}
        found = {place.name: _phase(place) for place in sorted((self.workloads / project).glob("*"))}
        return {name: phase for name, phase in found.items() if phase}

    def training(self, project: str, name: str) -> dict[str, Any]:
        """As it was understood."""
        read: dict[str, Any] = json.loads((self.workloads / project / name / "training.json").read_text())
        return read

    def delete(self, project: str, name: str) -> None:
        """Ask for it to be gone; the operator, if there is one, sees to it."""
        self.require_project(project)
        place = self.workloads / project / name
        if not place.exists():
            raise Refused(f'workload "{name}" was not found in project "{project}"')
        if self.settings["pods"]:
            (place / "delete").touch()
        else:
            shutil.rmtree(place)

    def live(self) -> list[str]:
        """Workloads that hold machines, or wait for some."""
        return [one.name for one in self.workloads.glob("*/*") if _phase(one) not in {"", "Completed", "Failed"}]

    # --- fate ---

    def kill_pod(self, project: str, name: str, node: int) -> None:
        """As when its machine is gone."""
        state = json.loads((self.workloads / project / name / "state.json").read_text())
        _signal(state["pods"][node], signal.SIGKILL)

    def preempt(self, project: str, name: str) -> None:
        """Take its machines for another workload; it comes back as new pods."""
        (self.workloads / project / name / "preempt").touch()


def _write(path: Path, document: Any) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(document))
    aside.replace(path)


def _phase(place: Path) -> str:
    """Nothing where there is no such workload, or no longer."""
    with contextlib.suppress(FileNotFoundError):
        return str(json.loads((place / "state.json").read_text())["phase"])
    return ""


# --- pods -------------------------------------------------------------------------------------------------------------


@dataclass
class Operator:
    """What Kubeflow's operator does with PyTorch trainings: pods, their end, and what follows from it.

    A training is done when its master is; it has failed when any pod has. Then pods that still run are ended
    (cleanPodPolicy Running).
    """

    cluster: Cluster
    over: threading.Event = field(default_factory=threading.Event)
    pods: dict[Path, list[subprocess.Popen[bytes]]] = field(default_factory=dict)

    def run(self) -> None:
        while not self.over.wait(0.05):
            for place in list(self.cluster.workloads.glob("*/*")):
                self._look(place)
        for place in self.pods:
            self._end(place, signal.SIGKILL)

    def _look(self, place: Path) -> None:
        phase = _phase(place)
        if (place / "delete").exists():
            self._end(place)
            shutil.rmtree(place)
        elif phase == "Pending":
            self.pods[place] = list(self._start(place))
            _write(place / "state.json", {"phase": "Running", "pods": [pod.pid for pod in self.pods[place]]})
        elif (place / "preempt").exists():
            (place / "preempt").unlink()
            self._end(place)
            _write(place / "state.json", {"phase": "Pending"})
        elif phase == "Running":
            codes = [pod.poll() for pod in self.pods[place]]
            if any(codes) or codes[0] == 0:
                _write(place / "state.json", {"phase": "Failed" if any(codes) else "Completed"})
                self._end(place)

    def _start(self, place: Path) -> Iterator[subprocess.Popen[bytes]]:
        training, settings = self.cluster.training(place.parent.name, place.name), self.cluster.settings
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        Path(SCRATCH).mkdir(exist_ok=True)
        for rank in range(training["workers"] + 1):
            own = place / f"scratch-{rank}"
            own.mkdir(exist_ok=True)
            environment = {
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
                "HOME": str(own),
                # What the image brings: the package, and gloo's way where a pod's host name resolves to nothing.
                "PYTHONPATH": str(CHECKOUT),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                **training["environment"],
                **_told(training, rank, settings=settings, port=port),
            }
            with (place / f"{rank}.log").open("ab") as log:
                yield subprocess.Popen(
                    [*_container(own), *training["command"]],
                    env=environment, cwd=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip

    def _end(self, place: Path, number: int = signal.SIGTERM) -> None:
        for pod in self.pods.get(place, []):
            if pod.poll() is None:
                _signal(pod.pid, number)
        for pod in self.pods.get(place, []):
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.wait(self.cluster.settings["grace"])
            _signal(pod.pid, signal.SIGKILL)
            pod.kill()
            pod.wait()


def _signal(pid: int, number: int) -> None:
    """To number 1 in the container that `unshare` with this pid has made, whose end is all's, as runtimes do."""
    with contextlib.suppress(OSError):
        for first in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(first), number)


def _container(own: Path) -> list[str]:
    """Processes of its own, of which the first one's end is the end of all, and a SCRATCH of its own."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = f'mount -t proc proc /proc && mount --bind "{own}" {SCRATCH} && exec "$@"'
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *user, "sh", "-c", script, "pod"]


def _told(training: Mapping[str, Any], rank: int, *, settings: Mapping[str, Any], port: int) -> dict[str, str]:
    """What a version of Run:ai has in a pod's environment: 2.13 tells how many pods there are, 2.18 how many GPUs."""
    pods = training["workers"] + 1
    told = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if settings["version"] == "2.13":
        return {**told, "WORLD_SIZE": str(pods)}
    gpus = int(training["gpus"]) or settings["told_gpus"]
    told |= {"WORLD_SIZE": str(pods * (gpus or 1)), "PET_NNODES": str(pods), "PET_NODE_RANK": str(rank)}
    return {**told, "LOCAL_RANK": "0", "RUNAI_NUM_OF_GPUS": str(gpus)}


@contextlib.contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Cluster]:
    """A cluster, of which nothing is left afterwards.

    Args:
        settings: `projects`, `claims` (claim to the folder it is), `version`, `told_gpus` (per pod, where the training
            asks for none), `grace`, `room` (for that many workloads), `pods` (False: they are only said to run),
            `fault` (of the network or the login).
    """
    folder.mkdir(parents=True)
    defaults = {"projects": ["team-a"], "claims": {}, "version": "2.18", "told_gpus": 0, "grace": 30.0, "fault": ""}
    _write(
        folder / "cluster.json",
        {**defaults, "room": 1000, "lost": [], "behind": 0, "refusal": "", "pods": True, **settings},
    )
    cluster = Cluster(folder)
    operator = Operator(cluster)
    thread = threading.Thread(target=operator.run, name="operator of Run:ai")
    if cluster.settings["pods"]:
        thread.start()
    try:
        yield cluster
    finally:
        operator.over.set()
        if cluster.settings["pods"]:
            thread.join()
