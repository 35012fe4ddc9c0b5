"""What Kubeflow's operator does with one PyTorch training: pods, their end, and what follows from it.

    python -m runai.operator CLUSTER WORKLOAD

The training is done when its master is; it has failed when any pod has. Then pods that still run are ended
(cleanPodPolicy Running).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from .cluster import CHECKOUT, Cluster, first_process, told, write_state

SCRATCH = "/tmp/litgpt"
"""What pods write to beside their volumes: each has its own, because each has its own file system."""

_LOOK = 0.05


class Operator:
    def __init__(self, cluster: Cluster, place: Path) -> None:
        self.cluster, self.place = cluster, place
        self.training = cluster.training(place.parent.name, place.name)
        self.settings = cluster.settings
        self.pods: list[subprocess.Popen[bytes]] = []
        self.phase = "Pending"

    @property
    def names(self) -> list[str]:
        name = self.place.name
        return [f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(self.training["workers"]))]

    def run(self) -> None:
        """Until somebody deletes the workload."""
        while not self._asked("delete"):
            if not self.pods and self.phase == "Pending":
                self._start()
            self._look()
            if self._asked("preempt"):
                (self.place / "preempt").unlink()
                self._end()
                self.pods, self.phase = [], "Pending"
                self._write()
                time.sleep(0.5)
            time.sleep(_LOOK)
        self.phase = "Deleting"
        self._write()
        self._end()
        shutil.rmtree(self.place, ignore_errors=True)

    def _asked(self, what: str) -> bool:
        return (self.place / what).exists()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank, name in enumerate(self.names):
            own = self.place / f"{name}.scratch"
            own.mkdir(exist_ok=True)
            Path(SCRATCH).mkdir(exist_ok=True)
            environment = {
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
                "HOME": str(own),
                # What the image brings: the package, and gloo's way where a pod's host name resolves to nothing.
                "PYTHONPATH": str(CHECKOUT),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "HOSTNAME": name,
                **self.training["environment"],
                **dict(told(self.training, rank, settings=self.settings, port=port)),
            }
            argv = [*_container(own), *self.training["command"]]
            with (self.place / f"{name}.log").open("ab") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.pods.append(subprocess.Popen(argv, env=environment, cwd=own, start_new_session=True, **streams))
        self.phase = "Running"
        self._write()

    def _look(self) -> None:
        if self.phase != "Running":
            return
        codes = [pod.poll() for pod in self.pods]
        if any(codes):
            self.phase = "Failed"
        elif codes[0] == 0:
            self.phase = "Completed"
        else:
            return
        self._write()
        if self.phase == "Completed":
            time.sleep(0.3)  # an operator is told of a pod's end a little later
        self._end()
        self._write()

    def _end(self) -> None:
        """SIGTERM, and SIGKILL after the grace period, to all that still run."""
        for pod in self.pods:
            _signal(pod, signal.SIGTERM)
        deadline = time.monotonic() + min(self.settings["grace"], self.training["grace"])
        for pod in self.pods:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.wait(max(0.0, deadline - time.monotonic()))
            _signal(pod, signal.SIGKILL)
            pod.wait()

    def _write(self) -> None:
        pods = [
            {"name": name, "pid": pod.pid, "exit_code": pod.poll()}
            for name, pod in zip(self.names, self.pods, strict=False)
        ]
        write_state(self.place, phase=self.phase, pods=pods)


def _signal(pod: subprocess.Popen[bytes], number: int) -> None:
    """To the container's first process, as runtimes do: with it all others end."""
    first = first_process(pod.pid) if pod.poll() is None else None
    if first is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, number)


def _container(own: Path) -> list[str]:
    """Processes of its own, of which the first one's end is the end of all, and a SCRATCH of its own."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = f'mount -t proc proc /proc && mount --bind "{own}" {SCRATCH} && exec "$@"'
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *user, "sh", "-c", script, "pod"]


if __name__ == "__main__":
    Operator(Cluster(Path(sys.argv[1])), Path(sys.argv[2])).run()
