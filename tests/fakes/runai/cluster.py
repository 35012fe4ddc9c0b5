"""What a Run:ai cluster has: projects, volumes, and workloads whose pods an operator runs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.platforms.local.supervisor import reserved_ports

CHECKOUT = Path(__file__).parents[3]
SCRATCH = "/tmp/litgpt"
"""What pods write to beside their volumes: each has its own, because each has its own file system."""


class Refused(Exception):
    """The cluster says no."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Lost(Exception):
    """The answer to a submission does not arrive: what the client has instead, a key of its table."""


@dataclass(kw_only=True)
class Training:
    """A PyTorch training as the cluster has understood it."""

    name: str
    project: str
    workers: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    pvcs: Mapping[str, str] = field(default_factory=dict)
    phase: str = "Running"
    wanted: str = ""
    """The operator is to `delete` or `preempt` it."""
    pods: list[subprocess.Popen[bytes]] = field(default_factory=list)


@dataclass
class Cluster:
    """Tests change what they like at any time. PVCs are the folders that they are."""

    folder: Path
    pods: bool = True
    """Without, they are only said to run."""
    projects: Sequence[str] = ("team-a",)
    pvcs: Mapping[str, str] = field(default_factory=dict)
    version: str = "2.18"
    told_gpus: int = 0
    grace_period: float = 30
    fault: str = ""
    """Of the network or the login: what the program ends with."""
    lost: list[tuple[str, bool]] = field(default_factory=list)
    """What the client has instead of the answers to the next submissions, and whether their workloads are made."""
    submissions: list[str] = field(default_factory=list)
    trainings: dict[tuple[str, str], Training] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    operators: list[threading.Thread] = field(default_factory=list)

    def submit(self, training: Training) -> None:
        """Start a training as `create` does, and lose the answer where that is asked for."""
        self.submissions.append(training.name)
        answer, made = self.lost.pop(0) if self.lost else ("", True)
        if made:
            self.create(training)
        if answer:
            raise Lost(answer)

    def create(self, training: Training, *, dry: bool = False) -> None:
        """Start it, unless the real one would not."""
        self._require(training.project)
        for pvc, path in training.pvcs.items():
            if pvc not in self.pvcs:
                raise Refused(f'persistentvolumeclaim "{pvc}" not found')
            assert self.pvcs[pvc] == path, "pods here see the machine's folders, and no others"
        if (training.project, training.name) in self.trainings:
            raise Refused(f'workload "{training.name}" already exists in project "{training.project}"')
        if dry:
            return
        self.trainings[training.project, training.name] = training
        if self.pods:
            training.phase = "Pending"
            self.operators.append(threading.Thread(target=self._operate, args=[training], name="operator of Run:ai"))
            self.operators[-1].start()

    def phases(self, project: str) -> dict[str, str]:
        """Name to phase."""
        self._require(project)
        return {name: training.phase for (where, name), training in [*self.trainings.items()] if where == project}

    def delete(self, project: str, name: str) -> None:
        """Ask for it to be gone; the operator, if there is one, sees to it."""
        self._require(project)
        if (project, name) not in self.trainings:
            raise Refused(f'workload "{name}" was not found in project "{project}"')
        self.trainings[project, name].wanted = "delete"
        if not self.pods:
            del self.trainings[project, name]

    def live(self) -> list[str]:
        """Workloads that hold machines, or wait for some."""
        return [
            training.name for training in [*self.trainings.values()] if training.phase not in {"Completed", "Failed"}
        ]

    def _require(self, project: str) -> None:
        if project not in self.projects:
            raise Refused(f'project "{project}" was not found or you have no access to it')

    # --- pods ---------------------------------------------------------------------------------------------------------

    def _operate(self, training: Training) -> None:
        """What Kubeflow's operator does: a training is done when its master is, and has failed when any pod has.

        Then pods that still run are ended (cleanPodPolicy Running). A preempted training comes back as new pods.
        """
        while True:
            with reserved_ports() as port:
                training.pods = list(self._start(training, port))
                training.phase = "Running"
                while not training.wanted and not self.over.wait(0.05):
                    codes = [pod.poll() for pod in training.pods]
                    if training.phase == "Running" and (any(codes) or codes[0] == 0):
                        training.phase = "Failed" if any(codes) else "Completed"
                        self._end(training)
                self._end(training)
            if training.wanted != "preempt":
                break
            training.phase, training.wanted = "Pending", ""
        del self.trainings[training.project, training.name]

    def _start(self, training: Training, port: int) -> Iterator[subprocess.Popen[bytes]]:
        Path(SCRATCH).mkdir(exist_ok=True)
        for rank in range(training.workers + 1):
            own = self.folder / training.project / training.name / f"scratch-{rank}"
            own.mkdir(parents=True, exist_ok=True)
            environment = {
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
                "HOME": str(own),
                # What the image brings: the package, and gloo's way where a pod's host name resolves to nothing.
                "PYTHONPATH": str(CHECKOUT),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                **training.environment,
                **self._told(training, rank, port),
            }
            with own.with_name(f"{rank}.log").open("ab") as log:
                yield subprocess.Popen(
                    [*_container(own), *training.command],
                    env=environment, cwd=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip

    def _told(self, training: Training, rank: int, port: int) -> dict[str, str]:
        """2.13 tells how many pods there are, 2.18 how many GPUs."""
        pods, gpus = training.workers + 1, self.told_gpus
        variables = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(pods)}
        if self.version == "2.13":
            return variables
        variables |= {"WORLD_SIZE": str(pods * (gpus or 1)), "PET_NNODES": str(pods), "PET_NODE_RANK": str(rank)}
        return {**variables, "LOCAL_RANK": "0", "RUNAI_NUM_OF_GPUS": str(gpus)}

    def _end(self, training: Training) -> None:
        for pod in training.pods:
            signal_pod(pod, signal.SIGKILL if self.over.is_set() else signal.SIGTERM)
        for pod in training.pods:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.wait(self.grace_period)
            signal_pod(pod, signal.SIGKILL)
            pod.wait()


def signal_pod(pod: subprocess.Popen[bytes], number: int) -> None:
    """To number 1 in the container that `unshare` has made, whose end is all's, as runtimes do."""
    if pod.poll() is None:
        with contextlib.suppress(OSError):
            for first in Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split():
                os.kill(int(first), number)


def _container(own: Path) -> list[str]:
    """Processes of its own, of which the first one's end is the end of all, and a SCRATCH of its own."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = f'mount -t proc proc /proc && mount --bind "{own}" {SCRATCH} && exec "$@"'
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *user, "sh", "-c", script, "pod"]


@contextlib.contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Cluster]:
    """A cluster, of which nothing is left afterwards."""
    cluster = Cluster(folder, **settings)
    try:
        yield cluster
    finally:
        cluster.over.set()
        for operator in cluster.operators:
            operator.join()
