"""The kubelets of all nodes: a task per pod that starts its containers in order, watches them and reports.

Containers called `node`, and those with the same image as that one, are processes of this machine: their actual
command, with the environment that the pod gives, PYTHONPATH of this checkout and the Python of the test. The names of
other pods and the paths of mounts are written out in both, and a pod has an address of 127/8. Containers of other
images are said to have succeeded (init containers) or to run (the rest). Probes are not made, nothing is restarted in
place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.platforms.kubernetes.pods import PORT

from .controllers import RETRY, TURN, Events, turn
from .environment import ConfigProblem, command, environment
from .errors import ApiError
from .pods import finished, is_sidecar
from .processes import Log, Real, Running, Said
from .store import Change, Object, Store, moment, set_condition

SOURCE = "kubelet"
MAIN = "node"
CHECKOUT = Path(__file__).parents[3]
log = logging.getLogger(__name__)


@dataclass
class Started:
    """What a test can look at: a container that was started, for real or in words."""

    pod: str
    container: str
    image: str
    command: list[str]
    environment: dict[str, str]


@dataclass
class Options:
    """What the cluster's maker and its tests decide."""

    folder: Path
    simulate: bool = False
    """Pods run no processes at all, and are said to run until `Cluster.finish`."""
    image_environment: dict[str, str] = field(default_factory=dict)
    """As set in the image: every real container has it, below what the pod says."""
    unpullable: set[str] = field(default_factory=set)
    """Images that the registry does not give."""


class Kubelet:
    def __init__(self, store: Store, events: Events, options: Options) -> None:
        self.store, self.events, self.options = store, events, options
        self.pods: dict[str, PodRun] = {}
        self.started: list[Started] = []
        self.logs: dict[tuple[str, str], Log] = {}
        """By pod's uid and container; they are gone with the pod, as on a node."""
        self.silent: set[str] = set()
        """Nodes whose machine does nothing any more: nothing is started there, and nothing ends."""
        self._net = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"
        self._numbers = itertools.count(2)
        self._addresses: dict[str, str] = {}
        self._held: dict[str, socket.socket] = {}
        store.listeners.append(self._note)

    def _note(self, change: Change) -> None:
        if change.kind != "pods":
            return
        if change.after is None:
            assert change.before is not None
            uid = change.before["metadata"]["uid"]
            if uid in self.pods:
                self.pods[uid].vanish()
            for key in [key for key in self.logs if key[0] == uid]:
                self.logs.pop(key).end()
            return
        pod, meta = change.after, change.after["metadata"]
        if pod["spec"].get("nodeName") in self.silent:
            return
        if meta["uid"] in self.pods:
            if meta.get("deletionTimestamp"):
                self.pods[meta["uid"]].leave(meta.get("deletionGracePeriodSeconds", 30))
        elif pod["spec"].get("nodeName") and not finished(pod):
            self.pods[meta["uid"]] = PodRun(self, pod)
        elif meta.get("deletionTimestamp") and meta.get("deletionGracePeriodSeconds"):
            asyncio.get_running_loop().call_soon(self.store.change, "pods", pod, let_go)

    def silence(self, node: str) -> None:
        """The power of the machine goes."""
        self.silent.add(node)
        for run in list(self.pods.values()):
            if run.pod["spec"]["nodeName"] == node:
                run.vanish()

    def address(self, hostname: str) -> str:
        """The address of a pod, known before the pod has started."""
        if hostname not in self._addresses:
            self._addresses[hostname] = f"{self._net}.{next(self._numbers) % 250 + 2}"
        return self._addresses[hostname]

    def names(self, namespace: str) -> dict[str, str]:
        """Cluster DNS: the names of pods, with their addresses; and where they meet, with a port of this machine."""
        found = {}
        for pod in self.store.all("pods", namespace):
            if hostname := pod["spec"].get("hostname"):
                name, address = f"{hostname}.{pod['spec']['subdomain']}", self.address(hostname)
                found |= {name: address, f"{name}:{PORT}": f"{address}:{self._port(hostname)}"}
        return found

    def _port(self, hostname: str) -> int:
        """A port that nobody else is given: it is bound here, without listening, which others who reuse it may do."""
        if hostname not in self._held:
            self._held[hostname] = socket.socket()
            self._held[hostname].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held[hostname].bind(("", 0))
        return int(self._held[hostname].getsockname()[1])

    def log(self, pod: Object, container: str) -> Log:
        """`GET …/pods/NAME/log`.

        Raises:
            ApiError: The container has not started, or its machine does not answer.
        """
        name = pod["metadata"]["name"]
        if pod["spec"].get("nodeName") in self.silent:
            raise ApiError(500, f"Get containerLogs of {name}: dial tcp: connect: no route to host")
        found = self.logs.get((pod["metadata"]["uid"], container))
        if found is None:
            raise ApiError(400, f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating')
        return found

    async def stop(self) -> None:
        """Nothing runs on."""
        runs = list(self.pods.values())
        for run in runs:
            run.vanish()
        await asyncio.gather(*(run.task for run in runs), return_exceptions=True)
        for one in self.logs.values():
            one.end()
        for held in self._held.values():
            held.close()


def let_go(pod: Object) -> None:
    """The kubelet has nothing more to do with a pod that is being deleted."""
    pod["metadata"]["deletionGracePeriodSeconds"] = 0


class Gone(Exception):
    """The pod was taken away while it was being set up."""


class PodRun:
    """One pod on its node, from binding to the end."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet, self.store, self.pod = kubelet, kubelet.store, pod
        self.uid, self.name = pod["metadata"]["uid"], pod["metadata"]["name"]
        self.folder = kubelet.options.folder / "pods" / self.uid[:13]
        self.running: dict[str, Running] = {}
        self.reasons: dict[str, str] = {}
        """Why a container was killed, where the kubelet would know better than its exit code (OOMKilled)."""
        self.statuses: dict[str, Object] = {}
        self.grace: float | None = None
        self.failing: tuple[str, str] | None = None
        """(reason, message) of the pod's own failure, such as an eviction."""
        self._leaving = asyncio.Event()
        self._silent = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    # --- what others tell it ------------------------------------------------------------------------------------------

    def leave(self, grace: float) -> None:
        """End the containers: SIGTERM, and SIGKILL after that many seconds."""
        self.grace = grace if self.grace is None else min(self.grace, grace)
        self._leaving.set()

    def evict(self, message: str) -> None:
        """The kubelet itself ends the pod, for which the machine has not enough of something."""
        self.failing = ("Evicted", message)
        self._change(lambda one: set_condition(one, "DisruptionTarget", "True", "TerminationByKubelet", message))
        self.leave(0)

    def vanish(self) -> None:
        """As when the power goes: all is killed, nothing is reported."""
        self._silent = True
        self._kill()
        self.task.cancel()

    # --- its life -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._live()
        except (asyncio.CancelledError, Gone):
            pass
        except Exception as error:
            log.exception("pod %s", self.name)
            self.failing = ("Error", f"the kubelet of this test failed: {error}")
        finally:
            self._kill()
            for process in list(self.running.values()):
                await process.wait()
            # Not before: whoever sees the pod ended may count on nothing of it being left.
            if not self._silent:
                self._report_end()
            self.kubelet.pods.pop(self.uid, None)
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _live(self) -> None:
        spec = self.pod["spec"]
        inits = spec.get("initContainers", [])
        for container in (*inits, *spec["containers"]):
            self.statuses[container["name"]] = {
                "name": container["name"], "image": container["image"], "imageID": "", "ready": False,
                "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": {},
            }  # fmt: skip
        self._report()
        for container in inits:
            await self._start(container)
            if not is_sidecar(container):
                self._terminated(container, await self.running[container["name"]].wait())
        for container in spec["containers"]:
            await self._start(container)
        self._report()
        ends = asyncio.gather(*(self._follow(container) for container in spec["containers"]))
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait({leaving, ends}, return_when=asyncio.FIRST_COMPLETED)
            if not ends.done():
                await self._end([self.running[one["name"]] for one in spec["containers"]])
            await ends
        finally:
            leaving.cancel()
            ends.cancel()
            await asyncio.gather(leaving, ends, return_exceptions=True)

    async def _follow(self, container: Mapping[str, Any]) -> None:
        self._terminated(container, await self.running[container["name"]].wait())
        if not self._leaving.is_set():
            self._report()

    async def _start(self, container: Mapping[str, Any]) -> None:
        name, kubelet = container["name"], self.kubelet
        await self._pull(container)
        variables, line = await self._configure(container)
        out = kubelet.logs[self.uid, name] = Log()
        kubelet.started.append(Started(self.name, name, container["image"], line, variables))
        images = {one["image"] for one in self.pod["spec"]["containers"] if one["name"] == MAIN}
        if not kubelet.options.simulate and container["image"] in images and line:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.running[name] = await Real.start(self._argv(line, variables), self.folder, out)
        else:
            init = container in self.pod["spec"].get("initContainers", []) and not is_sidecar(container)
            self.running[name] = Said(
                out, ends_with=0 if init else None, after_term=0 if is_sidecar(container) else 143
            )
        self.statuses[name] |= {"state": {"running": {"startedAt": moment()}}, "started": True, "ready": True}
        kubelet.events(self.pod, "Started", f"Started container {name}", source=SOURCE)

    def _argv(self, line: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """The command line with its environment, for this machine."""
        known = self.kubelet.names(self.pod["metadata"]["namespace"])
        containers = self.pod["spec"]["containers"]
        paths = {mount["mountPath"]: mount["name"] for one in containers for mount in one.get("volumeMounts") or []}
        for path, volume in paths.items():
            folder = self._volume(volume)
            folder.mkdir(parents=True, exist_ok=True)
            known[path] = str(folder)
        known = {name: value for name, value in known.items() if name not in ("/tmp", "/dev/shm")}
        pairs = sorted(known.items(), key=lambda pair: -len(pair[0]))

        def written_out(text: str) -> str:
            for name, value in pairs:
                text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", value.replace("\\", "\\\\"), text)
            return text

        image = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT),
            "HOME": str(self.folder), "LANG": "C.UTF-8", "HOSTNAME": self.pod["spec"].get("hostname", self.name),
            **self.kubelet.options.image_environment,
        }  # fmt: skip
        given = {name: str(self.folder) if value == "/tmp" else written_out(value) for name, value in variables.items()}
        everything = {**image, **given}
        return ["env", "-i", *(f"{name}={value}" for name, value in everything.items()), *map(written_out, line)]

    def _volume(self, name: str) -> Path:
        (volume,) = (one for one in self.pod["spec"]["volumes"] if one["name"] == name)
        if claim := volume.get("persistentVolumeClaim"):
            return self.kubelet.options.folder / "claims" / claim["claimName"]
        return self.folder / "volumes" / name

    async def _pull(self, container: Mapping[str, Any]) -> None:
        image = container["image"]
        while image in self.kubelet.options.unpullable:
            words = f'failed to resolve reference "{image}": {image}: not found'
            self._wait(container, "ErrImagePull", words)
            self.kubelet.events(self.pod, "Failed", f'Failed to pull image "{image}": {words}', source=SOURCE)
            await self._pause()

    async def _configure(self, container: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
        while True:
            try:
                variables = environment(container, self._now(), self.store)
                return variables, command(container, variables)
            except ConfigProblem as problem:
                self._wait(container, "CreateContainerConfigError", str(problem))
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.wait({asyncio.ensure_future(self._leaving.wait())}, timeout=RETRY)
        if self._leaving.is_set():
            raise Gone

    async def _end(self, processes: Sequence[Running]) -> None:
        """SIGTERM, and SIGKILL when the grace is over, or when it is cut short."""
        for process in processes:
            process.signal(signal.SIGTERM if self.grace else signal.SIGKILL)
        ends = asyncio.gather(*(process.wait() for process in processes))
        waited = 0.0
        while not ends.done() and waited < (self.grace or 0.0):
            await turn()
            waited += TURN
        for process in processes:
            process.signal(signal.SIGKILL)
        await ends

    def _kill(self) -> None:
        for process in self.running.values():
            process.signal(signal.SIGKILL)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _now(self) -> Object:
        return self.store.get("pods", self.pod["metadata"]["namespace"], self.name) or self.pod

    def _change(self, edit: Any) -> None:
        if not self._silent:
            self.store.change("pods", self.pod, edit)

    def _wait(self, container: Mapping[str, Any], reason: str, message: str) -> None:
        self.statuses[container["name"]]["state"] = {"waiting": {"reason": reason, "message": message}}
        self._report()

    def _terminated(self, container: Mapping[str, Any], code: int) -> None:
        status = self.statuses[container["name"]]
        if "terminated" not in status["state"]:
            began = status["state"].get("running", {}).get("startedAt", moment())
            reason = self.reasons.pop(container["name"], "Completed" if code == 0 else "Error")
            ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": moment()}
            status |= {"state": {"terminated": ended}, "ready": False, "started": False}

    def _report(self) -> None:
        mains = [self.statuses[one["name"]] for one in self.pod["spec"]["containers"]]
        up = any("waiting" not in one["state"] for one in mains)
        self._tell("Running" if up else "Pending", all(one["ready"] for one in mains))

    def _tell(self, phase: str, ready: bool) -> None:
        spec = self.pod["spec"]

        def edit(pod: Object) -> None:
            status = pod.setdefault("status", {})
            status |= {"phase": phase, "podIP": self.kubelet.address(spec.get("hostname", self.name))}
            status.setdefault("startTime", moment())
            for field_of, kind in (("containerStatuses", "containers"), ("initContainerStatuses", "initContainers")):
                if spec.get(kind):
                    status[field_of] = [dict(self.statuses[one["name"]]) for one in spec[kind]]
            if phase == "Failed" and self.failing is not None:
                status["reason"], status["message"] = self.failing
            set_condition(pod, "Ready", str(ready))

        self._change(edit)

    def _report_end(self) -> None:
        """The last word: all containers ended, phase Succeeded or Failed; a deleted pod is let go."""
        codes = []
        for container in (*self.pod["spec"].get("initContainers", []), *self.pod["spec"]["containers"]):
            if "running" in self.statuses[container["name"]]["state"]:
                self._terminated(container, 137)
            if not is_sidecar(container):
                ended = self.statuses[container["name"]]["state"].get("terminated", {})
                codes.append(ended.get("exitCode"))
        good = self.failing is None and all(code == 0 for code in codes)
        self._tell("Succeeded" if good else "Failed", ready=False)
        if self._now()["metadata"].get("deletionTimestamp"):
            self._change(let_go)
