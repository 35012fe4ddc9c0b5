"""The whole cluster, in a thread of its own, and what a test does to it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

import yaml
from aiohttp import web
from certificates import certificate_in
from kmock import Server

from .access import Access, Rule
from .admission import Admission
from .controllers import Events, Garbage, Queue, turn
from .jobs import JobController
from .jobsets import JobSetController
from .kubelet import MAIN, Kubelet, Options, PodRun, Started
from .pods import finished, owner_reference
from .processes import Said
from .scheduler import Scheduler
from .server import ApiServer, Call, Traffic, Trouble
from .store import KINDS, KUEUE, Change, Object, Store, set_condition

NAMESPACE = "default"


class Cluster:
    """A running cluster; made by `running_cluster`. Every method may be called from any thread."""

    def __init__(self, folder: Path, *, jobset: str | None, kueue: bool, simulate: bool, version: str) -> None:
        self.folder, self.options, self.access = folder, Options(folder, simulate=simulate), Access()
        self._version, self._has_kueue, self._jobset = version, kueue, jobset
        self._runners: list[web.ServerRunner] = []

    # --- how to reach it ----------------------------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """The API's address."""
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def token(self) -> str:
        """The bearer token that is good now."""
        return self.access.token

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
        return f"https://127.0.0.1:{self.call(lambda: self._serve(context))}", certificate.read_text()

    def check_access(self, port: int) -> str:
        """An address (host:port) under which pods reach a server that listens on this machine's 127.0.0.1:port."""
        return f"127.0.0.1:{port}"

    # --- what is in it ------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """Calls by (verb, resource) since the start, or since `traffic.clear()`."""
        return self.api.traffic

    @property
    def started(self) -> list[Started]:
        """Every container that was started, in order."""
        return self.kubelet.started

    def objects(self, plural: str) -> list[Object]:
        return list(self.call(lambda: list(self.store.all(plural))))

    def pods(self, text: str = "", *, live: bool = True) -> list[Object]:
        """Pods whose name contains the text, sorted; `live` leaves out those that have ended."""
        found = [one for one in self.objects("pods") if text in one["metadata"]["name"]]
        return sorted((one for one in found if not (live and finished(one))), key=lambda one: one["metadata"]["name"])

    def apply(self, plural: str, thing: Mapping[str, Any]) -> Object:
        """Create an object as an administrator: admission applies, access does not.

        Raises:
            ApiError: It is refused.
        """
        kind, made = KINDS[plural], dict(thing)
        if kind.namespaced:
            made["metadata"] = {"namespace": NAMESPACE, **made["metadata"]}
        made = {"kind": kind.name, "apiVersion": kind.api_versions[0], **made}
        return self.call(lambda: self.store.add(plural, self.admission.create(plural, made)))  # type: ignore[no-any-return]

    def change(self, plural: str, name: str, edit: Callable[[Object], Any]) -> None:
        """Edit an object, its status too: what no controller here would ever write."""
        thing = next(one for one in self.objects(plural) if one["metadata"]["name"] == name)
        self.call(lambda: self.store.change(plural, thing, edit))

    def remove(self, plural: str, name: str) -> None:
        """Take an object away at once."""
        thing = next(one for one in self.objects(plural) if one["metadata"]["name"] == name)
        self.call(lambda: self.store.remove(plural, thing))

    def add_namespace(self, name: str) -> None:
        self.apply("namespaces", {"metadata": {"name": name}})

    def add_nodes(
        self, count: int = 1, *, gpus: int = 0, machine: str = "e2-standard-8", labels: Mapping[str, str] | None = None,
        taints: Sequence[Mapping[str, str]] = (), cpu: int = 208, memory: str = "1800Gi", prefix: str = "node",
    ) -> list[str]:  # fmt: skip
        """Nodes with that capacity each; with GPUs they carry GKE's taint `nvidia.com/gpu=present:NoSchedule`."""
        begin = len(self.objects("nodes"))
        names = [f"{prefix}-{begin + number}" for number in range(count)]
        room = {"cpu": str(cpu), "memory": memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
        given = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}] if gpus else []
        for name in names:
            marks = {"kubernetes.io/hostname": name, "node.kubernetes.io/instance-type": machine, **(labels or {})}
            node: Object = {
                "metadata": {"name": name, "labels": marks},
                "spec": {"taints": [*given, *map(dict, taints)]},
                "status": {"capacity": room, "allocatable": room},
            }
            set_condition(node, "Ready", "True")
            self.call(lambda node=node: self.store.add("nodes", node))
        return names

    def add_queue(self, name: str = "research", *, covers: Sequence[str] = ("cpu", "nvidia.com/gpu")) -> None:
        """A LocalQueue with its ClusterQueue. Jobs in it are suspended until `let_in`."""
        flavors = [{"name": "default-flavor", "resources": [{"name": one, "nominalQuota": "64"} for one in covers]}]
        groups = [{"coveredResources": list(covers), "flavors": flavors}]
        self.apply("clusterqueues", {"metadata": {"name": f"{name}-cluster"}, "spec": {"resourceGroups": groups}})
        self.apply("localqueues", {"metadata": {"name": name}, "spec": {"clusterQueue": f"{name}-cluster"}})

    def let_in(self, job: str) -> None:
        """Kueue admits a JobSet."""
        self.change("jobsets", job, lambda thing: thing["spec"].update(suspend=False))

    def workload(self, job: str, **conditions: tuple[str, str, str]) -> None:
        """Kueue's Workload of a JobSet, with conditions: type=(status, reason, message)."""
        owner = next(one for one in self.objects("jobsets") if one["metadata"]["name"] == job)
        thing: Object = {"metadata": {"name": f"jobset-{job}", "ownerReferences": [owner_reference(owner)]}, "spec": {}}
        for kind, words in conditions.items():
            set_condition(thing, kind, *words)
        self.apply("workloads", thing)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def kill(self, pod: str, *, out_of_memory: bool = False) -> None:
        """The node's processes are killed; `out_of_memory`: and the kubelet says OOMKilled."""

        def strike() -> None:
            run = self._run_of(pod)
            if out_of_memory:
                run.reasons[MAIN] = "OOMKilled"
            run.running[MAIN].signal(SIGKILL)

        self.call(strike)

    def preempt(self, pod: str) -> None:
        """The scheduler makes room for a pod of higher priority."""
        self.call(lambda: self._disrupt(self._pod(pod), "PreemptionByScheduler"))

    def run_out(self, pod: str, resource: str = "memory") -> None:
        """The pod's node has too little memory (or `ephemeral-storage`) left, and the kubelet evicts the pod."""
        text = f"The node was low on resource: {resource}. Threshold quantity: 100Mi, available: 52Mi."
        self.call(lambda: self._run_of(pod).evict(text))

    def silence(self, node: str) -> None:
        """Nothing runs on the machine any more, and nobody has noticed yet."""
        self.call(lambda: self.kubelet.silence(node))

    def hang(self, node: str) -> None:
        """Nothing is heard of the machine, and the control plane says so. Its pods stay, also when they are deleted."""
        self.silence(node)
        self.change("nodes", node, lambda one: set_condition(one, "Ready", "Unknown", "NodeStatusUnknown"))
        for pod in self._pods_on(node):
            self.change("pods", pod["metadata"]["name"], lambda one: set_condition(one, "Ready", "False"))

    def give_up(self, node: str) -> None:
        """The taint manager deletes the pods of a silent machine, as it does after five minutes."""
        for pod in self._pods_on(node):
            self.call(lambda pod=pod: self._disrupt(pod, "DeletionByTaintManager"))

    def remove_node(self, node: str) -> None:
        """As `kubectl delete node`; the pods of a node that is no more have failed, and are deleted by force."""
        pods = self._pods_on(node)
        self.remove("nodes", node)

        def fail(pod: Object) -> None:
            set_condition(pod, "DisruptionTarget", "True", "DeletionByPodGC")
            pod["status"]["phase"] = "Failed"

        for pod in pods:
            self.change("pods", pod["metadata"]["name"], fail)
            self.call(lambda pod=pod: self.api.delete("pods", pod, {"gracePeriodSeconds": 0}))

    def outage(self) -> Callable[[], None]:
        """The API does not answer, and pods run on. The returned function ends it."""
        self.call(lambda: setattr(self.api, "down", True))
        self.break_streams()
        return lambda: self.call(lambda: setattr(self.api, "down", False))

    def break_image(self, image: str) -> None:
        """From now on the image cannot be pulled."""
        self.call(lambda: self.options.unpullable.add(image))

    def tell(self, pod: str, reason: str, message: str, *, source: str) -> None:
        """An event about a pod that something outside has written: the autoscaler, a CSI driver."""
        self.call(lambda: self.events(self._pod(pod), reason, message, source=source))

    def answer(
        self, status: int, *, times: float = float("inf"), verb: str | None = None, resource: str | None = None,
        retry_after: int | None = None, message: str = "said by the test",
    ) -> Callable[[], None]:  # fmt: skip
        """The API answers the next calls (all, or those of the verb and resource: `list`, `pods`, `pods/log`) with
        this status; 0: the connection breaks instead. The returned function ends it."""

        def applies(call: Call) -> bool:
            return verb in (None, call.verb) and resource in (None, call.what)

        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        trouble = Trouble(status, applies, times, message, headers)
        self.call(lambda: self.api.troubles.append(trouble))
        return lambda: setattr(trouble, "times", 0)

    def expire_watches(self) -> None:
        """Every watch gets 410, and none can start again from before now."""
        self.call(self.api.expire_watches)

    def break_streams(self) -> None:
        """All watches and followed logs lose their connection, without a word."""
        self.call(self.api.break_streams)

    def expire_token(self) -> None:
        """Requests with the old token get 401; `token` is the new one."""
        self.call(self.access.expire)

    def cut_logs(self, *after_bytes: int) -> None:
        """The next log connections break, each after that many bytes."""
        self.call(lambda: self.api.cut_logs_after.extend(after_bytes))

    def allow(self, rules: Sequence[Rule] | None) -> None:
        """What the user may do from now on: the rules of a Role; None is everything."""
        self.call(lambda: setattr(self.access, "rules", rules))

    def finish(self, text: str = "", *, code: int = 0) -> int:
        """Nodes that are only said to run end, in pods whose name contains the text; how many did."""

        def end() -> int:
            runs = [run.running.get(MAIN) for run in self.kubelet.pods.values() if text in run.name]
            found = [process for process in runs if isinstance(process, Said)]
            for process in found:
                process.end(code)
            return len(found)

        return int(self.call(end))

    def say(self, pod: str, line: str, *, container: str = MAIN) -> None:
        """A line in the log of a container that is only said to run."""
        self.call(lambda: self._run_of(pod).running[container].log.write(line.encode()))

    # --- inside -------------------------------------------------------------------------------------------------------

    def call(self, work: Callable[[], Any]) -> Any:
        """Run it where the cluster's state lives, and return what it returns (or what it awaits)."""

        async def there() -> Any:
            result = work()
            return await result if isinstance(result, Coroutine) else result

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.store = Store()
        self.queue, self.events = Queue(self.store), Events(self.store)
        self.admission = Admission(self.store)
        self.kubelet = Kubelet(self.store, self.events, self.options)
        self.api = ApiServer(self.store, self.admission, self.access, self.kubelet.log, version=self._version)
        JobController(self.store, self.queue, self.admission, self.events, self.api.delete)
        if self._jobset:
            JobSetController(self.store, self.queue, self.admission, self.events, self.api.delete)
        else:
            self.api.missing.add("jobsets")
        if not self._has_kueue:
            self.api.missing |= {kind.plural for kind in KINDS.values() if kind.group == KUEUE}
        self.api.declare()
        Garbage(self.store, self.queue, self.api.delete)
        self.queue.always.append(Scheduler(self.store, self.events).schedule)
        self.store.listeners.append(self._route)
        self._work = asyncio.create_task(self.queue.run())
        await self.api.__aenter__()
        self._server = Server(self.api)
        await self._server.__aenter__()

    async def stop(self) -> None:
        self.api.close_streams()
        self._work.cancel()
        await self.kubelet.stop()
        for runner in self._runners:
            await runner.cleanup()
        # Clients come back until the server is closed, and aiohttp would wait a minute for each of them.
        closing = asyncio.ensure_future(self._server.__aexit__(None, None, None))
        while not closing.done():
            self.api.break_streams()
            await turn()
        await self.api.__aexit__(None, None, None)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await turn()  # pipes of processes that have ended are closed in a later turn of the loop

    def _route(self, change: Change) -> None:
        """Tell the controllers whose objects, or whose children, have changed."""
        some = change.after or change.before
        assert some is not None
        meta = some["metadata"]
        if change.kind == "namespaces" and change.before is None:
            self.store.add("serviceaccounts", {"metadata": {"name": "default", "namespace": meta["name"]}})
        if change.kind in ("jobs", "jobsets"):
            self.queue.look(change.kind, meta["namespace"], meta["name"])
        plurals = {"Job": "jobs", "JobSet": "jobsets"}
        for owner in meta.get("ownerReferences", []):
            if owner["kind"] in plurals:
                self.queue.look(plurals[owner["kind"]], meta["namespace"], owner["name"])
        self.queue.wake()

    def furnish(self, nodes: int) -> None:
        """Make the namespace, the nodes and the CRDs."""
        self.add_namespace(NAMESPACE)
        self.add_nodes(nodes)
        for kind in KINDS.values():
            if kind.custom and kind.plural not in self.api.missing:
                versions = [{"name": one, "served": True, "storage": True} for one in kind.versions]
                crd = {"group": kind.group, "names": {"plural": kind.plural, "kind": kind.name}, "versions": versions}
                self.call(lambda kind=kind, crd=crd: self.store.add(
                    "customresourcedefinitions", {"metadata": {"name": kind.qualified}, "spec": crd}
                ))  # fmt: skip

    def _disrupt(self, pod: Object, reason: str) -> None:
        self.store.change("pods", pod, lambda one: set_condition(one, "DisruptionTarget", "True", reason))
        self.api.delete("pods", pod, {})

    def _pods_on(self, node: str) -> list[Object]:
        return [one for one in self.pods() if one["spec"].get("nodeName") == node]

    def _pod(self, name: str) -> Object:
        return next(one for one in self.store.all("pods") if one["metadata"]["name"] == name)

    def _run_of(self, pod: str) -> PodRun:
        return self.kubelet.pods[self._pod(pod)["metadata"]["uid"]]

    async def _serve(self, context: ssl.SSLContext) -> int:
        """Serve with a certificate too; on this port."""
        runner = web.ServerRunner(web.Server(self.api), shutdown_timeout=0)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        return int(runner.addresses[0][1])


@contextlib.contextmanager
def running_cluster(
    *, nodes: int = 2, jobset: str | None = "0.12.0", kueue: bool = False, simulate: bool = False,
    version: str = "v1.36.2-gke.1034000", shared: Sequence[Path] = (),
) -> Iterator[Cluster]:  # fmt: skip
    """A cluster with namespace and service account `default` and that many nodes; nothing of it is left afterwards.

    Args:
        nodes: How many of 208 cores; `add_nodes` adds other ones.
        jobset: Which JobSet is installed; None: none.
        kueue: Whether Kueue's kinds are there; see `Cluster.add_queue`.
        simulate: Pods run no processes; see `Cluster.finish` and `Cluster.say`.
        version: What /version says.
        shared: Folders that pods see in their place, which all of this machine's are.
    """
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))
    made = Cluster(folder, jobset=jobset, kueue=kueue, simulate=simulate, version=version)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kubernetes-cluster", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        run(made.start())
        try:
            made.furnish(nodes)
            yield made
        finally:
            run(made.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        shutil.rmtree(folder, ignore_errors=True)
