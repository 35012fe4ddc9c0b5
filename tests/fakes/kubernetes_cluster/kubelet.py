"""The kubelets of all nodes: a task per pod that starts its containers in order, watches them and reports.

Containers called `node`, and those with the same image as that one, are started for real: their actual command, with
the environment that the pod gives, PYTHONPATH of this checkout and the Python of the test. Others have images that only
exist in the cloud: they are recorded, and said to have succeeded (init containers) or to run (the rest); `outcomes`
says otherwise. Probes are not made: a container that runs is ready, and has started.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .controllers import Events, Timing
from .environment import ConfigProblem, command, contents, environment
from .environment import field as downward
from .errors import ApiError
from .isolation import Identity, Isolation, Mount, Program, Sandbox
from .pods import finished, is_sidecar, ready
from .processes import Log, Real, Running, Said
from .quantities import amount
from .selectors import matches
from .store import Change, Object, Store, holds, moment, set_condition

SOURCE = "kubelet"
MAIN = "node"
log = logging.getLogger(__name__)
SERVICES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@dataclass
class Started:
    """What a test can look at: a container that was started, for real or in words."""

    pod: str
    container: str
    image: str
    command: list[str]
    environment: dict[str, str]
    real: bool


@dataclass
class Options:
    """What the cluster's maker and its tests decide."""

    folder: Path
    simulate: bool = False
    """Pods run no processes at all, and are said to run until `Cluster.finish`."""
    image_environment: dict[str, str] = field(default_factory=dict)
    """As set in the image: every real container has it, below what the pod says."""
    buckets: dict[str, Path] = field(default_factory=dict)
    """Folders that stand for buckets which GCS FUSE mounts."""
    unpullable: set[str] = field(default_factory=set)
    """Images that the registry does not give."""
    private: set[str] = field(default_factory=set)
    """Images that their registries give to whoever has a login there, and to nobody else."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """Exit codes, by container name, of those that are only said to run."""


class Kubelet:
    def __init__(self, store: Store, events: Events, isolation: Isolation, timing: Timing, options: Options) -> None:
        self.store, self.events, self.isolation = store, events, isolation
        self.timing, self.options = timing, options
        self.pods: dict[str, PodRun] = {}
        self.started: list[Started] = []
        self.logs: dict[tuple[str, str], Log] = {}
        """By pod's uid and container; they are gone with the pod, as on a node."""
        self.previous: dict[tuple[str, str], Log] = {}
        self.silent: set[str] = set()
        """Nodes whose machine does nothing any more: nothing is started there, and nothing ends."""
        self._node_sandboxes: dict[str, Sandbox] = {}
        self._names_are_old = False
        store.listeners.append(self._note)

    def _note(self, change: Change) -> None:
        if change.kind == "services":
            self._names_are_old = True
        if change.kind != "pods":
            return
        self._names_are_old = True
        if change.after is None:
            assert change.before is not None
            uid = change.before["metadata"]["uid"]
            if uid in self.pods:
                self.pods[uid].vanish()
            for key in [key for key in self.logs if key[0] == uid]:
                self.logs.pop(key).end()
            return
        pod, uid = change.after, change.after["metadata"]["uid"]
        if pod["spec"].get("nodeName") in self.silent:
            return
        if uid in self.pods:
            if pod["metadata"].get("deletionTimestamp"):
                self.pods[uid].leave(pod["metadata"].get("deletionGracePeriodSeconds", 30))
        elif pod["spec"].get("nodeName") and not finished(pod):
            self.pods[uid] = PodRun(self, pod)
        elif pod["metadata"].get("deletionTimestamp") and pod["metadata"].get("deletionGracePeriodSeconds"):
            self._let_go(pod)

    def silence(self, node: str) -> None:
        """The power of the machine goes."""
        self.silent.add(node)
        for run in list(self.pods.values()):
            if run.pod["spec"]["nodeName"] == node:
                run.vanish()

    def restart(self, node: str) -> None:
        """The machine is up again: what ran there has failed, what was never started is."""
        self.silent.discard(node)
        for pod in [one for one in self.store.all("pods") if one["spec"].get("nodeName") == node]:
            if not finished(pod):
                if pod.get("status", {}).get("containerStatuses") or pod["metadata"].get("deletionTimestamp"):
                    self.store.change("pods", pod, _lost)
                else:
                    self.pods[pod["metadata"]["uid"]] = PodRun(self, pod)

    def post(self, node: str) -> None:
        """Say again how the node's pods are, which others have called not ready meanwhile."""
        for run in list(self.pods.values()):
            if run.pod["spec"]["nodeName"] == node:
                run.repeat()

    def _let_go(self, pod: Object) -> None:
        """A pod that had ended before it was deleted has nothing to wait for."""
        asyncio.get_running_loop().call_soon(
            self.store.change, "pods", pod, lambda thing: thing["metadata"].__setitem__("deletionGracePeriodSeconds", 0)
        )

    def resolve(self) -> None:
        """Cluster DNS: write the names of each namespace into the hosts files of its pods."""
        if not self._names_are_old or self.options.simulate:
            return
        self._names_are_old = False
        records: list[tuple[str, str, str]] = []  # namespace, host.service, address
        for service in self.store.all("services"):
            space, spec = service["metadata"]["namespace"], service["spec"]
            if spec.get("clusterIP") != "None":
                continue
            for pod in self.store.all("pods", space):
                host, labels = pod["spec"].get("hostname"), pod["metadata"].get("labels") or {}
                named = pod["spec"].get("subdomain") == service["metadata"]["name"] and host
                address = pod.get("status", {}).get("podIP") or (named and self.isolation.promised(host))
                shown = spec.get("publishNotReadyAddresses") or ready(pod)
                if (
                    named
                    and address
                    and shown
                    and not finished(pod)
                    and matches({"matchLabels": spec.get("selector")}, labels)
                ):
                    records.append((space, f"{pod['spec']['hostname']}.{service['metadata']['name']}", address))
        for run in list(self.pods.values()):
            run.write_hosts(records)

    async def log(self, pod: Object, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """`GET …/pods/NAME/log`."""
        spec, meta = pod["spec"], pod["metadata"]
        mains = [one["name"] for one in spec["containers"]]
        inits = [one["name"] for one in spec.get("initContainers", [])]
        name = query.get("container")
        if name is None:
            if len(mains) + len(inits) > 1:
                also = f" or one of the init containers: [{' '.join(inits)}]" if inits else ""
                raise ApiError(
                    400,
                    f"a container name must be specified for pod {meta['name']}, "
                    f"choose one of: [{' '.join(mains)}]{also}",
                )
            name = mains[0]
        if name not in (*mains, *inits):
            raise ApiError(400, f"container {name} is not valid for pod {meta['name']}")
        node = self.store.get("nodes", None, spec.get("nodeName", ""))
        if node is not None and node["metadata"]["name"] in self.silent:
            where = f"{_address(node)}:10250"
            url = f"https://{where}/containerLogs/{meta['namespace']}/{meta['name']}/{name}"
            raise ApiError(500, f'Get "{url}": dial tcp {where}: connect: no route to host')
        logs = self.previous if query.get("previous", "").lower() == "true" else self.logs
        found = logs.get((meta["uid"], name))
        if found is None and logs is self.previous:
            raise ApiError(400, f'previous terminated container "{name}" in pod "{meta["name"]}" not found')
        if found is None:
            if not spec.get("nodeName"):
                raise ApiError(400, f"pod {meta['name']} does not have a host assigned")
            raise ApiError(400, f'container "{name}" in pod "{meta["name"]}" is waiting to start: {_why(pod, name)}')
        async for chunk in found.read(query):
            yield chunk

    async def node_sandbox(self, node: str) -> Sandbox:
        """The network of a node, which its hostNetwork pods share."""
        if node not in self._node_sandboxes:
            thing = self.store.get("nodes", None, node)
            nics = ((thing or {}).get("metadata", {}).get("annotations") or {}).get("test/nics", "").split()
            self._node_sandboxes[node] = await self.isolation.open(
                self.options.folder / "nodes" / node, node, nics=nics, memory={}, network_of=None
            )
        return self._node_sandboxes[node]

    async def stop(self) -> None:
        """Nothing runs on."""
        runs = list(self.pods.values())
        for run in runs:
            run.vanish()
        await asyncio.gather(*(run.task for run in runs), return_exceptions=True)
        for sandbox in self._node_sandboxes.values():
            await self.isolation.close(sandbox)
        for one in self.logs.values():
            one.end()


def _lost(pod: Object) -> None:
    """The kubelet finds a pod of before the machine's restart: its containers are no more."""
    ended = {
        "exitCode": 137, "reason": "ContainerStatusUnknown",
        "message": "The container could not be located when the pod was terminated",
    }  # fmt: skip
    status = pod.setdefault("status", {})
    for one in status.get("containerStatuses", []):
        if "terminated" not in one["state"]:
            one |= {"state": {"terminated": ended}, "ready": False, "started": False}
    status["phase"] = "Failed"
    if pod["metadata"].get("deletionTimestamp"):
        pod["metadata"]["deletionGracePeriodSeconds"] = 0


def _why(pod: Object, name: str) -> str:
    for one in (
        *pod.get("status", {}).get("containerStatuses", []),
        *pod.get("status", {}).get("initContainerStatuses", []),
    ):
        if one["name"] == name and "waiting" in one["state"]:
            return str(one["state"]["waiting"]["reason"])
    return "ContainerCreating"


def identity_of(spec: Mapping[str, Any], container: Mapping[str, Any]) -> Identity:
    """Return the identity that a container has by its security context and its pod's. The image's own user is root.

    https://kubernetes.io/docs/tasks/configure-pod-container/security-context/

    Raises:
        ConfigProblem: It must not be root, and is.
    """
    of_pod = spec.get("securityContext") or {}
    context = {**of_pod, **(container.get("securityContext") or {})}
    uid, rights = context.get("runAsUser", 0), context.get("capabilities") or {}
    if context.get("runAsNonRoot") and not uid:
        raise ConfigProblem("container has runAsNonRoot and image will run as root")
    dropped = "ALL" in (rights.get("drop") or ()) and not context.get("privileged")
    return Identity(
        uid=uid,
        gid=context.get("runAsGroup", 0),
        groups=(of_pod["fsGroup"],) if "fsGroup" in of_pod else (),
        capabilities=tuple(rights.get("add") or ()) if dropped else None,
        confined=context.get("allowPrivilegeEscalation") is False,
        read_only=bool(context.get("readOnlyRootFilesystem")),
    )


def _give(folder: Path, group: int) -> None:
    """Let a group write to a volume, and to all that is in it (fsGroup)."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))


class Gone(Exception):
    """The pod was taken away while it was being set up."""


class PodRun:
    """One pod on its node, from binding to the end."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet, self.store, self.pod = kubelet, kubelet.store, pod
        self.uid, self.name = pod["metadata"]["uid"], pod["metadata"]["name"]
        self.folder = kubelet.options.folder / "pods" / self.uid[:13]
        self.sandbox: Sandbox | None = None
        self.running: dict[str, Running] = {}
        self.reasons: dict[str, str] = {}
        """Why a container was killed, where the kubelet would know better than its exit code (OOMKilled)."""
        self.statuses: dict[str, Object] = {}
        self.grace: float | None = None
        self.failing: tuple[str, str] | None = None
        """(reason, message) of the pod's own failure: a node that shuts down, an eviction."""
        self._leaving = asyncio.Event()
        self._silent = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    # --- what others tell it ------------------------------------------------------------------------------------------

    def leave(self, grace: float) -> None:
        """End the containers: SIGTERM, and SIGKILL after that many seconds."""
        self.grace = grace if self.grace is None else min(self.grace, grace)
        self._leaving.set()

    def fail(self, reason: str, message: str, *, grace: float) -> None:
        """The kubelet itself ends the pod, which has failed for that reason."""
        self.failing = (reason, message)
        self.store.change(
            "pods",
            self.pod,
            lambda one: set_condition(one, "DisruptionTarget", "True", "TerminationByKubelet", message),
        )
        self.leave(grace)

    def vanish(self) -> None:
        """As when the power goes: all is killed, nothing is reported."""
        self._silent = True
        for process in self.running.values():
            process.signal(signal.SIGKILL)
        self.task.cancel()

    def write_hosts(self, records: Sequence[tuple[str, str, str]]) -> None:
        if self.sandbox is None or not self.sandbox.address:
            return
        spec, space = self.pod["spec"], self.pod["metadata"]["namespace"]
        lines = ["127.0.0.1 localhost", f"{self.sandbox.address} {self.hostname}"]
        # With hostNetwork, ClusterFirst means the node's own resolver; and Default means it always.
        cluster = spec["dnsPolicy"] == "ClusterFirstWithHostNet" or (
            spec["dnsPolicy"] == "ClusterFirst" and not spec.get("hostNetwork")
        )
        for there, name, address in records if cluster else ():
            long = [f"{name}.{there}", f"{name}.{there}.svc", f"{name}.{there}.svc.cluster.local"]
            lines.append(" ".join([address, *([name] if there == space else []), *long]))
            # torch asks who is behind an IPv4 address in IPv6 clothes; cluster DNS has the answer (PTR).
            lines.append(f"::ffff:{address} {address.replace('.', '-')}.{there}.pod.cluster.local")
        self.sandbox.hosts.write_text("\n".join(lines) + "\n")

    # --- its life -----------------------------------------------------------------------------------------------------

    @property
    def hostname(self) -> str:
        spec = self.pod["spec"]
        return str(spec["nodeName"] if spec.get("hostNetwork") else spec.get("hostname") or self.name)[:63]

    async def _run(self) -> None:
        try:
            await self._live()
        except (asyncio.CancelledError, Gone):
            pass
        except Exception as error:
            log.exception("pod %s", self.name)
            self.failing = ("Error", f"the kubelet of this test failed: {error}")
        finally:
            for process in self.running.values():
                process.signal(signal.SIGKILL)
            for process in list(self.running.values()):
                await process.wait()
            if self.sandbox is not None:
                await self.kubelet.isolation.close(self.sandbox)
            # Not before: whoever sees the pod ended may count on nothing of it being left.
            if not self._silent:
                self._report_end()
            self.kubelet.pods.pop(self.uid, None)
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _live(self) -> None:
        spec = self.pod["spec"]
        inits = spec.get("initContainers", [])
        for container in (*inits, *spec["containers"]):
            self.statuses[container["name"]] = self._waiting(
                container, "PodInitializing" if inits else "ContainerCreating"
            )
        self._report()
        mounts = await self._patiently(self._volumes)
        await self._open(mounts)
        self._report(Initialized=not inits)
        for container in inits:
            if not await self._initialize(container, mounts):
                return
        self._report(Initialized=True)
        for container in spec["containers"]:
            await self._start(container, mounts)
        self._report(Initialized=True)
        mains = asyncio.gather(*(self._keep(container, mounts) for container in spec["containers"]))
        await self._or_leaving(mains)
        if not mains.done():
            await self._end([one["name"] for one in spec["containers"]], self.grace or 0.0)
            mains.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await mains
        # Sidecars end after the others, last started first; they have what is left of the grace period.
        for container in reversed(inits):
            if is_sidecar(container):
                await self._end([container["name"]], 2.0)

    async def _open(self, mounts: Mapping[str, Sequence[Mount]]) -> None:
        if self.kubelet.options.simulate:
            self.sandbox = None
        else:
            spec, options = self.pod["spec"], self.kubelet.options
            memory = {
                options.folder / "pods" / self.uid[:13] / "volumes" / volume["name"]: _bytes(
                    volume["emptyDir"].get("sizeLimit")
                )
                for volume in spec.get("volumes") or []
                if (volume.get("emptyDir") or {}).get("medium") == "Memory"
            }
            node = await self.kubelet.node_sandbox(spec["nodeName"]) if spec.get("hostNetwork") else None
            self.sandbox = await self.kubelet.isolation.open(
                self.folder, self.hostname, nics=_nics(self.pod), memory=memory, network_of=node
            )

        def edit(pod: Object) -> None:
            pod["status"]["podIP"] = self.sandbox.address if self.sandbox else "10.0.0.2"
            pod["status"]["podIPs"] = [{"ip": pod["status"]["podIP"]}]

        self._change(edit)
        self.kubelet._names_are_old = True
        self.kubelet.resolve()

    async def _patiently(self, attempt: Any) -> Any:
        """Until what the pod needs is there, or it is taken away."""
        while True:
            try:
                return await attempt()
            except FileNotFoundError as error:
                self.kubelet.events(self.pod, "FailedMount", str(error), source=SOURCE, kind="Warning")
            await self._pause(self.kubelet.timing.retry_create)

    async def _or_leaving(self, work: asyncio.Future[Any]) -> None:
        """Until the work is done, or the pod has to go."""
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait({leaving, work}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise
        finally:
            leaving.cancel()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), seconds)
        if self._leaving.is_set():
            raise Gone

    async def _initialize(self, container: Mapping[str, Any], mounts: Mapping[str, Sequence[Mount]]) -> bool:
        """Whether the pod goes on after this init container."""
        name = container["name"]
        await self._start(container, mounts)
        self._report()
        if is_sidecar(container):
            await self._settled(container, mounts)
            return True
        done = asyncio.ensure_future(self.running[name].wait())
        await self._or_leaving(done)
        if not done.done():
            await self._end([name], self.grace or 0.0)
        self._terminated(container, await done)
        self._report()
        if self._leaving.is_set():
            return False
        if self.statuses[name]["state"]["terminated"]["exitCode"] and self.pod["spec"].get("restartPolicy") != "Never":
            await self._pause(self.kubelet.timing.crash_backoff)
            self.statuses[name]["restartCount"] += 1
            return await self._initialize(container, mounts)
        return bool(self.statuses[name]["state"]["terminated"]["exitCode"] == 0)

    async def _settled(self, container: Mapping[str, Any], mounts: Mapping[str, Sequence[Mount]]) -> None:
        """A sidecar that ends at once (see `outcomes`) is restarted, and its pod goes no further."""
        name, restarts = container["name"], 0
        while name in self.kubelet.options.outcomes:
            self._terminated(container, await self.running[name].wait())
            restarts += 1
            text = f"back-off 10s restarting failed container={name} pod={self.name}"
            last = self.statuses[name]["state"]
            self.statuses[name] |= {"restartCount": restarts, "lastState": last, "ready": False, "started": False}
            self._wait(container, "CrashLoopBackOff", text)
            event = f"Back-off restarting failed container {name} in pod {self.name}"
            self.kubelet.events(self.pod, "BackOff", event, source=SOURCE, kind="Warning")
            await self._pause(self.kubelet.timing.crash_backoff)
            await self._start(container, mounts)

    async def _keep(self, container: Mapping[str, Any], mounts: Mapping[str, Sequence[Mount]]) -> None:
        """Wait for a main container, and start it again where the pod's restartPolicy says so."""
        name, policy = container["name"], self.pod["spec"].get("restartPolicy", "Always")
        while True:
            code = await self.running[name].wait()
            self._terminated(container, code)
            self._report(Initialized=True)
            if self._leaving.is_set() or policy == "Never" or (policy == "OnFailure" and code == 0):
                return
            await asyncio.sleep(self.kubelet.timing.crash_backoff)
            if self._leaving.is_set():
                return
            status = self.statuses[name]
            last = status["state"]
            self.kubelet.previous[self.uid, name] = self.kubelet.logs[self.uid, name]
            await self._start(container, mounts)
            self.statuses[name] |= {"restartCount": status["restartCount"] + 1, "lastState": last}
            self._report(Initialized=True)

    async def _start(self, container: Mapping[str, Any], mounts: Mapping[str, Sequence[Mount]]) -> None:
        name, kubelet = container["name"], self.kubelet
        await self._pull(container)
        variables, line, identity = await self._configure(container)
        out = kubelet.logs[self.uid, name] = Log()
        real = not kubelet.options.simulate and self._is_real(container) and bool(line)
        kubelet.started.append(Started(self.name, name, container["image"], line, variables, real))
        if real:
            assert self.sandbox is not None
            given = {**kubelet.options.image_environment, **variables}
            folder = self.folder / "containers" / name
            program = Program(container["image"], line, given, container.get("workingDir"), identity)
            argv = kubelet.isolation.argv(self.sandbox, folder, mounts[name], program)
            self.running[name] = await Real.start(argv, folder, out, nested=kubelet.isolation.nested)
        else:
            code = kubelet.options.outcomes.get(name)
            init = container in self.pod["spec"].get("initContainers", []) and not is_sidecar(container)
            self.running[name] = Said(
                out, ends_with=0 if init and code is None else code, after_term=0 if is_sidecar(container) else 143
            )
        status = self._waiting(container, "")
        status |= {"state": {"running": {"startedAt": moment()}}, "started": True, "ready": True}
        status |= {
            "containerID": f"containerd://{self.uid}-{name}",
            "restartCount": self.statuses[name]["restartCount"],
        }
        self.statuses[name] = status
        kubelet.events(self.pod, "Started", f"Started container {name}", source=SOURCE)

    def _is_real(self, container: Mapping[str, Any]) -> bool:
        images = {one["image"] for one in self.pod["spec"]["containers"] if one["name"] == MAIN}
        return container["name"] == MAIN or container["image"] in images

    async def _pull(self, container: Mapping[str, Any]) -> None:
        image, events = container["image"], self.kubelet.events
        first = True
        while (refusal := self._refusal(image)) is not None:
            code, why = refusal
            text = f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": {why}'
            if first:
                message = f'Failed to pull image "{image}": rpc error: code = {code} desc = {text}'
                events(self.pod, "Failed", message, source=SOURCE, kind="Warning")
                events(self.pod, "Failed", "Error: ErrImagePull", source=SOURCE, kind="Warning")
                self._wait(container, "ErrImagePull", f"rpc error: code = {code} desc = {text}")
            else:
                events(self.pod, "BackOff", f'Back-off pulling image "{image}"', source=SOURCE)
                events(self.pod, "Failed", "Error: ImagePullBackOff", source=SOURCE, kind="Warning")
                self._wait(container, "ImagePullBackOff", f'Back-off pulling image "{image}": ErrImagePull: {text}')
            first = False
            await self._pause(self.kubelet.timing.image_backoff)

    def _refusal(self, image: str) -> tuple[str, str] | None:
        """Code and words of a registry that does not give the image; a pull secret that is not there stops nothing."""
        if image in self.kubelet.options.unpullable:
            return "NotFound", f"{image}: not found"
        host = image.partition("/")[0]
        if image not in self.kubelet.options.private or host in self._registries():
            return None
        anonymous = f"failed to fetch anonymous token: unexpected status from GET request to {host}: 401 Unauthorized"
        return "Unknown", f"failed to authorize: {anonymous}"

    def _registries(self) -> set[str]:
        """The registries that the pod's pull secrets have logins of; a secret of another type has none."""
        space, found = self.pod["metadata"]["namespace"], set[str]()
        for one in self.pod["spec"].get("imagePullSecrets", []):
            secret = self.kubelet.store.get("secrets", space, one["name"])
            if secret is None:
                words = f"Unable to retrieve some image pull secrets ({one['name']}); "
                words += "attempting to pull the image may not succeed."
                self.kubelet.events(self.pod, "FailedToRetrieveImagePullSecret", words, source=SOURCE, kind="Warning")
            elif secret.get("type") == "kubernetes.io/dockerconfigjson":
                found |= set(json.loads(base64.b64decode(secret["data"][".dockerconfigjson"]))["auths"])
        return found

    async def _configure(self, container: Mapping[str, Any]) -> tuple[dict[str, str], list[str], Identity]:
        while True:
            pod = self._now()
            try:
                variables = environment(container, pod, self.store, SERVICES)
                return variables, command(container, variables), identity_of(pod["spec"], container)
            except ConfigProblem as problem:
                self._wait(container, "CreateContainerConfigError", str(problem))
                self.kubelet.events(self.pod, "Failed", f"Error: {problem}", source=SOURCE, kind="Warning")
            await self._pause(self.kubelet.timing.retry_create)

    async def _end(self, names: Sequence[str], grace: float) -> None:
        """SIGTERM, and SIGKILL when the grace is over, or when it is cut short."""
        processes = [self.running[name] for name in names if name in self.running]
        for process in processes:
            process.signal(signal.SIGTERM if grace else signal.SIGKILL)
        ends = asyncio.gather(*(process.wait() for process in processes))
        waited = 0.0
        while not ends.done() and waited < min(grace, self.grace if self.grace is not None else grace):
            await asyncio.wait({ends}, timeout=0.05)
            waited += 0.05
        for process in processes:
            process.signal(signal.SIGKILL)
        codes = await ends
        containers = {
            one["name"]: one for one in (*self.pod["spec"]["containers"], *self.pod["spec"].get("initContainers", []))
        }
        for name, code in zip([name for name in names if name in self.running], codes, strict=True):
            self._terminated(containers[name], code)

    # --- volumes ------------------------------------------------------------------------------------------------------

    async def _volumes(self) -> dict[str, list[Mount]]:
        """The mounts of each container.

        Raises:
            FileNotFoundError: A volume cannot be made yet; the message is the event's.
        """
        if self.kubelet.options.simulate:
            for volume in self.pod["spec"].get("volumes") or []:
                if "secret" in volume or "configMap" in volume:
                    self._volume(volume)
            return {}
        sources = {volume["name"]: self._volume(volume) for volume in self.pod["spec"].get("volumes") or []}
        found = {}
        for container in (*self.pod["spec"]["containers"], *self.pod["spec"].get("initContainers", [])):
            rows = []
            for mount in container.get("volumeMounts") or []:
                source = sources[mount["name"]]
                if mount.get("subPath"):
                    source = source / mount["subPath"]
                    source.mkdir(parents=True, exist_ok=True)
                rows.append(Mount(source, mount["mountPath"].rstrip("/"), bool(mount.get("readOnly"))))
            found[container["name"]] = rows
        return found

    def _volume(self, volume: Mapping[str, Any]) -> Path:
        kind = next(name for name in volume if name != "name")
        given = volume[kind] or {}
        own = self.folder / "volumes" / volume["name"]
        if kind == "hostPath":
            node = self.kubelet.options.folder / "nodes" / self.pod["spec"]["nodeName"] / "files"
            path = node / given["path"].strip("/")
            if given.get("type") in ("Directory", "File", "Socket") and not path.exists():
                raise FileNotFoundError(
                    f'MountVolume.SetUp failed for volume "{volume["name"]}" : hostPath type check failed: '
                    f"{given['path']} is not a {given['type'].lower()}"
                )
            path.mkdir(parents=True, exist_ok=True)
            return path
        if kind in ("configMap", "secret"):
            return self._files(volume["name"], kind, given, own)
        if kind == "csi" and given.get("driver") == "gcsfuse.csi.storage.gke.io":
            bucket = (given.get("volumeAttributes") or {}).get("bucketName", "")
            if bucket not in self.kubelet.options.buckets:
                raise FileNotFoundError(
                    f'MountVolume.SetUp failed for volume "{volume["name"]}" : rpc error: code = NotFound desc = '
                    f"failed to get GCS bucket {bucket!r}: storage: bucket doesn't exist"
                )
            return self.kubelet.options.buckets[bucket]
        if kind == "persistentVolumeClaim":
            own = self.kubelet.options.folder / "claims" / self.pod["metadata"]["namespace"] / given["claimName"]
        if kind == "downwardAPI":
            own.mkdir(parents=True, exist_ok=True)
            for item in given.get("items") or []:
                (own / item["path"]).write_text(downward(self._now(), item["fieldRef"]["fieldPath"]))
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o777)
        if (group := (self.pod["spec"].get("securityContext") or {}).get("fsGroup")) is not None:
            _give(own, group)
        return own

    def _files(self, name: str, kind: str, given: Mapping[str, Any], folder: Path) -> Path:
        plural, wanted = (
            ("configmaps", given.get("name")) if kind == "configMap" else ("secrets", given.get("secretName"))
        )
        found = self.store.get(plural, self.pod["metadata"]["namespace"], str(wanted))
        if found is None and not given.get("optional"):
            what = "configmap" if kind == "configMap" else "secret"
            raise FileNotFoundError(f'MountVolume.SetUp failed for volume "{name}" : {what} "{wanted}" not found')
        folder.mkdir(parents=True, exist_ok=True)
        for key, text in (contents(found) if found else {}).items():
            (folder / key).write_text(text)
        return folder

    # --- reports ------------------------------------------------------------------------------------------------------

    def _now(self) -> Object:
        return self.store.get("pods", self.pod["metadata"]["namespace"], self.name) or self.pod

    def _change(self, edit: Any) -> None:
        if not self._silent:
            self.store.change("pods", self.pod, edit)

    def _waiting(self, container: Mapping[str, Any], reason: str) -> Object:
        return {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": False, "started": False,
            "restartCount": 0, "state": {"waiting": {"reason": reason}}, "lastState": {},
        }  # fmt: skip

    def _wait(self, container: Mapping[str, Any], reason: str, message: str) -> None:
        self.statuses[container["name"]]["state"] = {"waiting": {"reason": reason, "message": message}}
        self._report()

    def _terminated(self, container: Mapping[str, Any], code: int) -> None:
        name = container["name"]
        status = self.statuses[name]
        if "terminated" in status["state"]:
            return
        began = status["state"].get("running", {}).get("startedAt", moment())
        reason = self.reasons.pop(name, "Completed" if code == 0 else "Error")
        ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": moment()}
        file = self.folder / "containers" / name / "termination-log"
        if file.is_file() and (text := file.read_text()):
            ended["message"] = text[-4096:]
        ended["containerID"] = status.get("containerID", "")
        sidecar = is_sidecar(container)
        self.statuses[name] = {
            **status,
            "state": {"terminated": ended},
            "ready": code == 0 and not sidecar and self._init(name),
            "started": False,
        }

    def _init(self, name: str) -> bool:
        return any(one["name"] == name for one in self.pod["spec"].get("initContainers", []))

    def repeat(self) -> None:
        if self.statuses:
            self._report(Initialized=holds(self._now(), "Initialized"))

    def _report(self, *, Initialized: bool = False) -> None:  # noqa: N803
        spec = self.pod["spec"]
        mains = [self.statuses[one["name"]] for one in spec["containers"]]
        up = any("running" in one["state"] or "terminated" in one["state"] for one in mains)
        all_ready = all(one["ready"] for one in mains)

        def edit(pod: Object) -> None:
            status = pod.setdefault("status", {})
            status["phase"] = "Running" if up else "Pending"
            status.setdefault("startTime", moment())
            status["hostIP"] = _address(self.store.get("nodes", None, spec["nodeName"]))
            status["containerStatuses"] = [dict(one) for one in mains]
            if spec.get("initContainers"):
                status["initContainerStatuses"] = [dict(self.statuses[one["name"]]) for one in spec["initContainers"]]
            set_condition(pod, "Initialized", str(Initialized))
            unready = "" if all_ready else "ContainersNotReady"
            for kind in ("ContainersReady", "Ready"):
                set_condition(pod, kind, str(all_ready), unready)

        self._change(edit)

    def _report_end(self) -> None:
        """The last word: all containers ended, phase Succeeded or Failed; a deleted pod is let go."""
        spec = self.pod["spec"]
        codes = []
        for container in (*spec.get("initContainers", []), *spec["containers"]):
            state = self.statuses.setdefault(container["name"], self._waiting(container, "PodInitializing"))["state"]
            if "running" in state:
                self._terminated(container, 137)
                state = self.statuses[container["name"]]["state"]
            ended = state.get("terminated")
            if not is_sidecar(container):
                codes.append(None if ended is None else ended["exitCode"])
        good = self.failing is None and all(code == 0 for code in codes)

        def edit(pod: Object) -> None:
            status = pod.setdefault("status", {})
            status["phase"] = "Succeeded" if good else "Failed"
            status["containerStatuses"] = [{**self.statuses[one["name"]], "ready": False} for one in spec["containers"]]
            if spec.get("initContainers"):
                status["initContainerStatuses"] = [dict(self.statuses[one["name"]]) for one in spec["initContainers"]]
            if self.failing is not None:
                status["reason"], status["message"] = self.failing
            for kind in ("ContainersReady", "Ready"):
                set_condition(pod, kind, "False", "PodCompleted" if good else "PodFailed")

        self._change(edit)
        if self._now()["metadata"].get("deletionTimestamp"):
            self._change(lambda pod: pod["metadata"].__setitem__("deletionGracePeriodSeconds", 0))


def _address(node: Object | None) -> str:
    addresses = (node or {}).get("status", {}).get("addresses", [])
    return next((one["address"] for one in addresses if one["type"] == "InternalIP"), "")


def _bytes(limit: str | None) -> str:
    return f"{amount(limit):.0f}" if limit else ""


def _nics(pod: Object) -> list[str]:
    """The interfaces besides eth0 that GKE's multi-networking annotation asks for."""
    text = (pod["metadata"].get("annotations") or {}).get("networking.gke.io/interfaces")
    return [one["interfaceName"] for one in json.loads(text) if one["interfaceName"] != "eth0"] if text else []
