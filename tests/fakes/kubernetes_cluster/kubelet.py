"""The kubelets of all nodes. A pod has one container beside init containers, which are taken to have succeeded.

It is a process of this machine: its actual command, with the environment that the pod gives, PYTHONPATH of this
checkout and the Python of the test; folders of its own, and where pods meet, are written out in both. Where nothing
runs, it is said to run. Probes are not made, nothing is restarted in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from launcher.platforms.kubernetes.render import DIRECTORY, PORT, TEMPORARY

from .control_plane import ControlPlane, leaving
from .environment import environment, expand
from .store import ApiError, Object, finished, moment, set_condition

CHECKOUT = Path(__file__).parents[3]


class PodRun:
    """One pod on its node."""

    def __init__(self, kubelet: Kubelet, name: str) -> None:
        self.kubelet, self.name = kubelet, name
        self.lines: list[tuple[datetime, bytes]] = []
        """What it wrote, with the time when the kubelet saw it."""
        self.began, self.ended = "", ""
        self.code: int | None = None
        self.reason = ""
        """Why it ended, where the kubelet knows better than by its exit code (OOMKilled)."""
        self.evicted = ""
        """Why the kubelet itself ends the pod, for which the machine has not enough of something."""
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._grace: float | None = None

    def step(self, pod: Object) -> None:
        """Bring it as far as it comes now, and report."""
        (container,) = pod["spec"]["containers"]
        image = container["image"]
        if not self.began and not leaving(pod) and image not in self.kubelet.unpullable:
            self.began = moment()
            if not self.kubelet.simulate:
                self._task = asyncio.get_running_loop().create_task(self._follow(*self.kubelet.process(pod)))
                self.kubelet.tasks.append(self._task)
        if leaving(pod) or self.evicted:
            self.leave(0 if self.evicted else pod["metadata"]["deletionGracePeriodSeconds"])
        # Not before its process is gone: whoever sees the pod ended may count on nothing of it being left.
        over = self.code is not None or (leaving(pod) and not self.began)
        running = bool(self.began) and not over

        def report(thing: Object) -> None:
            ended = "Succeeded" if self.code == 0 and not self.evicted else "Failed"
            container_status = {
                "name": container["name"],
                "image": image,
                "ready": running,
                "state": self._state(image),
            }
            phase = ended if over else "Running" if self.began else "Pending"
            thing["status"] |= {"phase": phase, "containerStatuses": [container_status]}
            set_condition(thing, "Ready", str(running))
            if self.evicted:
                thing["status"] |= {"reason": "Evicted", "message": self.evicted}
                set_condition(thing, "DisruptionTarget", reason="TerminationByKubelet", message=self.evicted)
            if over and leaving(thing):
                thing["metadata"]["deletionGracePeriodSeconds"] = 0  # the kubelet has nothing more to do with it

        self.kubelet.store.change("pods", pod, report)

    def write(self, line: bytes) -> None:
        self.lines.append((datetime.now(UTC), line.rstrip(b"\n") + b"\n"))
        self.kubelet.store.wake()

    def signal(self, number: int) -> None:
        """To the container's first process, as runtimes do; a kill reaches all."""
        if self._task is None:
            self.end(128 + number)
        elif self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self._process.pid, number)

    def end(self, code: int) -> None:
        if self.began and self.code is None:
            self.code, self.ended = code, moment()

    def leave(self, grace: float) -> None:
        """SIGTERM, and SIGKILL after that many seconds."""
        if self._grace is None or grace < self._grace:
            self._grace = grace
            self.signal(signal.SIGTERM if grace else signal.SIGKILL)
            asyncio.get_running_loop().call_later(grace, self.signal, signal.SIGKILL)

    def _state(self, image: str) -> Object:
        if not self.began:
            message = f'failed to resolve reference "{image}": {image}: not found'
            return {"waiting": {"reason": "ErrImagePull", "message": message}}
        if self.code is None:
            return {"running": {"startedAt": self.began}}
        reason = self.reason or ("Completed" if self.code == 0 else "Error")
        ended = {"exitCode": self.code, "reason": reason, "startedAt": self.began, "finishedAt": self.ended}
        return {"terminated": ended}

    async def _follow(self, argv: Sequence[str], folder: Path) -> None:
        """A process of this machine, in its own group, to its end."""
        self._process = process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, cwd=folder, limit=2**24,
        )  # fmt: skip
        if self._grace is not None:
            self.signal(signal.SIGTERM if self._grace else signal.SIGKILL)
        async for line in process.stdout:
            self.write(line)
        code = await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self.end(128 - code if code < 0 else code)
        self.kubelet.plane.settle()


class Kubelet:
    """Without processes (`simulate`), pods are said to run until they are told to end."""

    def __init__(self, plane: ControlPlane, folder: Path, *, simulate: bool) -> None:
        self.plane, self.store, self.folder, self.simulate = plane, plane.store, folder, simulate
        self.image_environment: dict[str, str] = {}
        """As set in the image: every process has it, below what the pod says."""
        self.unpullable: set[str] = set()
        """Images that the registry does not give."""
        self.runs: dict[str, PodRun] = {}
        """By pod's uid, whose log is gone with the pod, as on a node."""
        self.tasks: list[asyncio.Task[None]] = []
        self.silent: set[str] = set()
        """Nodes whose machine does nothing any more: nothing is started there, and nothing ends."""
        self._ports: dict[str, socket.socket] = {}
        plane.steps.append(self._step)

    def _step(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in self.store.all("pods")}
        for uid in self.runs.keys() - pods.keys():
            self.runs.pop(uid).leave(0)
        for uid, pod in pods.items():
            node = pod["spec"].get("nodeName")
            if node and node not in self.silent and not finished(pod):
                self.runs.setdefault(uid, PodRun(self, pod["metadata"]["name"])).step(pod)

    def silence(self, node: str) -> None:
        """The power of the machine goes."""
        self.silent.add(node)
        for pod in self.store.all("pods"):
            if pod["spec"].get("nodeName") == node:
                self.runs[pod["metadata"]["uid"]].leave(0)

    def run_of(self, pod: Object) -> PodRun:
        """What has a log; an ApiError where it has not started."""
        run = self.runs.get(pod["metadata"]["uid"])
        if run is None or not run.began:
            raise ApiError(400, f'container "node" in pod "{pod["metadata"]["name"]}" is waiting to start')
        return run

    def process(self, pod: Object) -> tuple[list[str], Path]:
        """The command line with its environment, for this machine, and the folder to start it in."""
        (container,) = pod["spec"]["containers"]
        folder = self.folder / "pods" / pod["metadata"]["uid"]
        (folder / "run").mkdir(parents=True)

        def placed(text: str) -> str:
            where = self._meeting(text) if text.endswith(f":{PORT}") else text.replace(DIRECTORY, f"{folder}/run")
            return str(folder) if text == TEMPORARY else where

        variables = environment(container, pod)
        everything = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT),
            "HOME": str(folder), "LANG": "C.UTF-8", "HOSTNAME": pod["spec"]["hostname"], **self.image_environment,
            **{name: placed(value) for name, value in variables.items()},
        }  # fmt: skip
        command = [placed(expand(argument, variables)) for argument in container["command"]]
        return ["env", "-i", *(f"{name}={value}" for name, value in everything.items()), *command], folder

    def _meeting(self, name: str) -> str:
        """Where pods meet: a port of this machine that nobody else is given.

        It is bound here, without listening, which others who reuse it may do.
        """
        if name not in self._ports:
            held = self._ports[name] = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{self._ports[name].getsockname()[1]}"

    async def stop(self) -> None:
        """Nothing runs on."""
        self.plane.steps.clear()
        for run in self.runs.values():
            run.leave(0)
        await asyncio.gather(*self.tasks)
        for held in self._ports.values():
            held.close()
