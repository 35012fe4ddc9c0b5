"""The whole cluster, in a thread of its own, and what a test does to it."""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from signal import SIGKILL
from ssl import SSLContext
from threading import Thread
from typing import Any

import yaml
from certificates import certificate_in

from .api import Api, Rule, Trouble
from .control_plane import ControlPlane, owner_of
from .kubelet import Kubelet, PodRun
from .store import KINDS, KUEUE, ApiError, Kind, Object, Store, finished, set_condition

NAMESPACE = "default"


class Cluster:
    """A running cluster; made by `running_cluster`. Every method may be called from any thread."""

    def __init__(self, folder: Path, known: Mapping[str, Kind], *, simulate: bool) -> None:
        self.folder, self.store = folder, Store()
        self._plane = ControlPlane(self.store)
        self._kubelet = Kubelet(self._plane, folder, simulate=simulate)
        self._api = Api(self._plane, self._kubelet, known)
        self._servers: list[asyncio.Server] = []
        self.traffic, self.image_environment = self._api.traffic, self._kubelet.image_environment

    # --- how to reach it ----------------------------------------------------------------------------------------------

    @property
    def token(self) -> str:
        """The bearer token that is good now."""
        return self._api.token

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig file with the present token, context `test`."""
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.host}}],
            "users": [{"name": "test", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
        }))  # fmt: skip
        return path

    def tls(self) -> tuple[str, str]:
        """The API over TLS, as GKE serves it: (https address, PEM of the certificate to trust)."""
        context, certificate = certificate_in(self.folder)
        return f"https://{self._wait(self._serve(context))}", certificate.read_text()

    # --- what is in it ------------------------------------------------------------------------------------------------

    def objects(self, plural: str) -> list[Object]:
        return self.store.all(plural)

    def pods(self, text: str = "") -> list[Object]:
        """Pods that have not ended, whose name contains the text, sorted."""
        found = [pod for pod in self.objects("pods") if text in pod["metadata"]["name"] and not finished(pod)]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def apply(self, plural: str, thing: Mapping[str, Any]) -> None:
        """Create an object as an administrator: admission applies, access does not."""
        space = {"namespace": NAMESPACE} if KINDS[plural].namespaced else {}
        made: Object = {**thing, "metadata": {**space, **thing["metadata"]}}
        self.call(lambda: self._plane.create(plural, made))

    def change(self, plural: str, name: str, edit: Callable[[Object], Any]) -> None:
        """Edit an object, its status too: what no controller here would ever write."""
        self.call(lambda: self.store.change(plural, self._one(plural, name), edit))

    def remove(self, plural: str, name: str) -> None:
        """Take an object away at once."""
        self.call(lambda: self.store.remove(plural, self._one(plural, name)))

    def add_nodes(
        self, count: int = 1, *, gpus: int = 0, machine: str = "e2-standard-8", labels: Mapping[str, str] | None = None,
        taints: Sequence[Mapping[str, str]] = (), cpu: int = 208, memory: str = "1800Gi",
    ) -> None:  # fmt: skip
        """Nodes with that room each; with GPUs they carry GKE's taint `nvidia.com/gpu=present:NoSchedule`."""
        room = {"cpu": str(cpu), "memory": memory, "pods": "110", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
        tainted = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}] if gpus else []
        begin = len(self.objects("nodes"))
        for name in (f"node-{number}" for number in range(begin, begin + count)):
            marks = {"kubernetes.io/hostname": name, "node.kubernetes.io/instance-type": machine, **(labels or {})}
            node: Object = {"metadata": {"name": name, "labels": marks}, "spec": {"taints": [*tainted, *taints]}}
            set_condition(node, "Ready")
            node["status"] |= {"capacity": room, "allocatable": room}
            self.call(lambda: self.store.add("nodes", node))  # noqa: B023  it is called at once

    def add_queue(self, name: str) -> None:
        """A LocalQueue with its ClusterQueue. Jobs in it stay suspended."""
        groups = [{"coveredResources": ["cpu", "nvidia.com/gpu"]}]
        self.apply("clusterqueues", {"metadata": {"name": f"{name}-cluster"}, "spec": {"resourceGroups": groups}})
        self.apply("localqueues", {"metadata": {"name": name}, "spec": {"clusterQueue": f"{name}-cluster"}})

    def workload(self, job: str, *, active: bool = True, **conditions: tuple[str, str, str]) -> None:
        """Kueue's Workload of a JobSet, with conditions: type=(status, reason, message)."""
        owner = owner_of(self._one("jobsets", job))
        thing: Object = {"metadata": {"name": f"jobset-{job}", "ownerReferences": [owner]}, "spec": {"active": active}}
        for kind, values in conditions.items():
            set_condition(thing, kind, *values)
        self.apply("workloads", thing)

    # --- what becomes of pods and nodes -------------------------------------------------------------------------------

    def finish(self, text: str = "", *, code: int = 0) -> None:
        """Pods that are only said to run end, whose name contains the text."""

        def end() -> None:
            for run in self._kubelet.runs.values():
                if text in run.name:
                    run.end(code)

        self.call(end)

    def say(self, pod: str, line: str) -> None:
        """A line in the log of a pod that is only said to run."""
        self.call(lambda: self._run_of(pod).write(line.encode()))

    def kill(self, pod: str, *, out_of_memory: bool = False) -> None:
        """The node's processes are killed; `out_of_memory`: and the kubelet says OOMKilled."""
        self._run_of(pod).reason = "OOMKilled" if out_of_memory else ""
        self.call(lambda: self._run_of(pod).signal(SIGKILL))

    def preempt(self, pod: str) -> None:
        """The scheduler makes room for a pod of higher priority."""
        self._disrupt(self._one("pods", pod), "PreemptionByScheduler")

    def run_out(self, pod: str, resource: str) -> None:
        """The pod's node has too little memory (or `ephemeral-storage`) left, and the kubelet evicts the pod."""
        text = f"The node was low on resource: {resource}. Threshold quantity: 100Mi, available: 52Mi."
        self.call(lambda: setattr(self._run_of(pod), "evicted", text))

    def silence(self, node: str) -> None:
        """Nothing runs on the machine any more, and nobody has noticed yet."""
        self.call(lambda: self._kubelet.silence(node))

    def hang(self, node: str) -> None:
        """Nothing is heard of the machine, and the control plane says so. Its pods stay, also when they are deleted."""
        self.silence(node)
        self.change("nodes", node, lambda thing: set_condition(thing, "Ready", "Unknown"))
        for pod in self._pods_on(node):
            self.change("pods", pod["metadata"]["name"], lambda thing: set_condition(thing, "Ready", "False"))

    def give_up(self, node: str) -> None:
        """The taint manager deletes the pods of a silent machine, as it does after five minutes."""
        for pod in self._pods_on(node):
            self._disrupt(pod, "DeletionByTaintManager")

    def remove_node(self, node: str) -> None:
        """As `kubectl delete node`; the pods of a node that is no more have failed, and are deleted by force."""
        pods = self._pods_on(node)
        self.remove("nodes", node)
        for pod in pods:
            self.change("pods", pod["metadata"]["name"], lambda thing: thing["status"].update(phase="Failed"))
            self._disrupt(pod, "DeletionByPodGC", gracePeriodSeconds=0)

    def break_image(self, image: str) -> None:
        """From now on the image cannot be pulled."""
        self._kubelet.unpullable.add(image)

    def tell(self, pod: str, reason: str, message: str, *, source: str) -> None:
        """An event about a pod that something outside has written: the autoscaler, a CSI driver."""
        self.call(lambda: self._plane.event(self._one("pods", pod), reason, message, source={"component": source}))

    # --- what becomes of calls ----------------------------------------------------------------------------------------

    def outage(self) -> Callable[[], None]:
        """The API does not answer, and pods run on. The returned function ends it."""
        end = self._trouble(ConnectionAbortedError())
        self.call(self._api.break_connections)
        return end

    def answer(
        self, status: int, *, times: float = float("inf"), verb: str | None = None, resource: str | None = None,
        retry_after: int | None = None, message: str = "said by the test",
    ) -> Callable[[], None]:  # fmt: skip
        """The API answers the next calls (all, or those of the verb and resource: `list`, `pods`, `pods/log`) with
        this status. The returned function ends it."""
        headers = {} if retry_after is None else {"Retry_After": str(retry_after)}
        return self._trouble(ApiError(status, message, **headers), verb, resource, times)

    def expire_watches(self) -> None:
        """Every watch gets 410, and none can start again from before now."""
        self.call(self.store.forget)

    def expire_token(self) -> None:
        """Requests with the old token get 401, and `token` is a new one; streams stay open, as on a real server."""
        self._api.token += "-renewed"

    def cut_logs(self, *after_bytes: int) -> None:
        """The next log connections break, each after that many bytes."""
        self._api.cut_logs_after.extend(after_bytes)

    def allow(self, rules: Sequence[Rule] | None) -> None:
        """What the user may do from now on: the rules of a Role; None is everything."""
        self._api.rules = rules

    # --- inside -------------------------------------------------------------------------------------------------------

    def call(self, work: Callable[[], Any]) -> None:
        """Run it where the cluster's state lives, and let the controllers act."""

        async def there() -> None:
            work()
            self._plane.settle()

        self._wait(there())

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, ready: Future[None]) -> None:
        """Serve until `stop`."""
        self._loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        self.host = f"http://{await self._serve()}"
        ready.set_result(None)
        await self.stop.wait()
        for listening in (socket for server in self._servers for socket in server.sockets):
            self._loop.remove_reader(listening.fileno())
        for _ in range(4):  # turns in which what was accepted comes to the API; a closed server would leave it open
            turn = self._loop.create_future()
            self._loop.call_soon(turn.set_result, None)
            await turn
        for server in self._servers:
            server.close()
        self._api.break_connections()
        await self._kubelet.stop()

    async def _serve(self, context: SSLContext | None = None) -> str:
        """Serve, also with a certificate; at this address."""
        self._servers.append(await asyncio.start_server(self._api.serve, "127.0.0.1", 0, ssl=context))
        return f"127.0.0.1:{self._servers[-1].sockets[0].getsockname()[1]}"

    def _disrupt(self, pod: Object, reason: str, **options: int) -> None:
        def strike() -> None:
            self.store.change("pods", pod, lambda thing: set_condition(thing, "DisruptionTarget", reason=reason))
            self._plane.delete("pods", pod, options)

        self.call(strike)

    def _trouble(
        self, error: Exception, verb: str | None = None, resource: str | None = None, times: float = float("inf")
    ) -> Callable[[], None]:
        trouble = Trouble(error, verb, resource, times)
        self._api.troubles.append(trouble)
        return lambda: setattr(trouble, "times", 0)

    def _pods_on(self, node: str) -> list[Object]:
        return [pod for pod in self.pods() if pod["spec"].get("nodeName") == node]

    def _one(self, plural: str, name: str) -> Object:
        return next(thing for thing in self.store.all(plural) if thing["metadata"]["name"] == name)

    def _run_of(self, pod: str) -> PodRun:
        return self._kubelet.runs[self._one("pods", pod)["metadata"]["uid"]]


@contextlib.contextmanager
def running_cluster(
    *, nodes: int = 2, jobset: str | None = "0.12.0", kueue: bool = False, simulate: bool = False
) -> Iterator[Cluster]:
    """A cluster with namespace and service account `default` and that many nodes; nothing of it is left afterwards.

    Args:
        nodes: How many of 208 cores; `add_nodes` adds other ones.
        jobset: Which JobSet is installed; None: none.
        kueue: Whether Kueue's kinds are there; see `Cluster.add_queue`.
        simulate: Pods run no processes; see `Cluster.finish` and `Cluster.say`.
    """
    known = {
        plural: kind
        for plural, kind in KINDS.items()
        if (kueue or kind.group != KUEUE) and (jobset or plural != "jobsets")
    }
    with tempfile.TemporaryDirectory(prefix="cluster-", ignore_cleanup_errors=True) as folder:
        ready = Future[None]()
        made = Cluster(Path(folder), known, simulate=simulate)
        thread = Thread(target=lambda: asyncio.run(made.run(ready)), name="kubernetes-cluster", daemon=True)
        thread.start()
        try:
            ready.result()
            made.apply("namespaces", {"metadata": {"name": NAMESPACE}})
            made.add_nodes(nodes)
            yield made
        finally:
            made.call(made.stop.set)
            thread.join()
