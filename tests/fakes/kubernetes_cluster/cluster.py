"""The whole cluster, in a thread of its own, and what a test does to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, TypeVar

import yaml
from certificates import certificate_in
from kmock import Server

from .access import Access, Rule
from .admission import Admission
from .controllers import Events, Garbage, Queue, Timing, compute_domains
from .disruption import Disruption
from .isolation import Isolation, Namespaces, Plain, namespaces_work
from .jobs import JobController
from .jobsets import JobSetController
from .kubelet import MAIN, Kubelet, Options, Started
from .kueue import Kueue
from .nodes import Nodes, post_status
from .pods import finished
from .podsecurity import PREFIX
from .processes import Said
from .scheduler import Scheduler, wording
from .server import ApiServer, Call, Traffic, Trouble
from .store import KINDS, KUEUE, Change, Object, Store, set_condition

T = TypeVar("T")


def node_info(name: str, version: str) -> dict[str, str]:
    """What a node says of itself; clients want all of it."""
    return {
        "kubeletVersion": version, "kubeProxyVersion": version, "containerRuntimeVersion": "containerd://2.1.3",
        "architecture": "amd64", "operatingSystem": "linux", "kernelVersion": "6.12.46+",
        "osImage": "Container-Optimized OS from Google", "bootID": name, "machineID": name, "systemUUID": name,
    }  # fmt: skip


NAMESPACE = "default"
KUEUE_VERSION = "v0.14.2"


class Cluster:
    """A running cluster; made by `running_cluster`. Every method may be called from any thread."""

    def __init__(self, folder: Path, *, shared: Sequence[Path], jobset: str | None, kueue: bool, simulate: bool,
                 isolation: Isolation, version: str, timing: Timing) -> None:  # fmt: skip
        self.folder = folder
        self.options = Options(folder, simulate=simulate)
        self.access = Access()
        self._shared, self._timing, self._version = shared, timing, version
        self.isolation = isolation
        self._has_kueue, self._jobset = kueue, jobset
        self._forwarders: list[asyncio.Server] = []

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
    def gateway(self) -> str:
        """This machine's address as the pods see it."""
        return self.isolation.gateway

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
        address = self.call(lambda: self._forward(self._server.port, host="127.0.0.1", context=context))
        return f"https://{address}", certificate.read_text()

    def check_access(self, port: int) -> str:
        """An address (host:port) under which pods reach a server that listens on this machine's 127.0.0.1:port."""
        if self.gateway == "127.0.0.1":
            return f"127.0.0.1:{port}"
        return self.call(lambda: self._forward(port))

    # --- what is in it ------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """Calls and bytes by (verb, resource) since the start, or since `traffic.clear()`."""
        return self.api.traffic

    @property
    def started(self) -> list[Started]:
        """Every container that was started, in order."""
        return self.kubelet.started

    def objects(
        self, plural: str, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Object]:
        wanted = (labels or {}).items()
        return self.call(lambda: [
            one for one in self.store.all(plural, namespace) if wanted <= (one["metadata"].get("labels") or {}).items()
        ])  # fmt: skip

    def pods(self, text: str = "", *, live: bool = True) -> list[Object]:
        """Pods whose name contains the text, sorted; `live` leaves out those that have ended."""
        found = [one for one in self.objects("pods") if text in one["metadata"]["name"]]
        return sorted((one for one in found if not (live and finished(one))), key=lambda one: one["metadata"]["name"])

    def processes(self) -> int:
        """How many pods have something running on this machine."""
        return self.call(lambda: len(self.kubelet.pods))

    def apply(self, plural: str, thing: Mapping[str, Any]) -> Object:
        """Create an object as an administrator: admission applies, access does not.

        Raises:
            ApiError: It is refused.
        """
        made = dict(thing)
        if KINDS[plural].namespaced:
            made["metadata"] = {"namespace": NAMESPACE, **made["metadata"]}
        made.setdefault("kind", KINDS[plural].name)
        made.setdefault("apiVersion", KINDS[plural].api_versions[0])
        return self.call(lambda: self.store.add(plural, self.admission.create(plural, made)))

    def add_namespace(self, name: str, *, labels: Mapping[str, str] | None = None) -> None:
        self.apply("namespaces", {"metadata": {"name": name, "labels": dict(labels or {})}})

    def secure(self, level: str, *, warn: str | None = None, namespace: str = NAMESPACE) -> None:
        """Label the namespace for Pod Security: `privileged`, `baseline` or `restricted` is enforced there."""
        modes = {"enforce": level} | ({"warn": warn} if warn else {})
        labels = {f"{PREFIX}/{mode}": value for mode, value in modes.items()}
        thing = self.objects("namespaces", labels={"kubernetes.io/metadata.name": namespace})[0]
        self.call(lambda: self.store.change("namespaces", thing, lambda one: one["metadata"]["labels"].update(labels)))

    def install(self) -> None:
        """The Deployments of the controllers, whose images tell their versions."""
        for name, version, there in (
            ("jobset", f"v{self._jobset}", self._jobset), ("kueue", KUEUE_VERSION, self._has_kueue),
        ):  # fmt: skip
            if there:
                self.add_namespace(f"{name}-system")
                labels = {"app.kubernetes.io/name": name, "control-plane": "controller-manager"}
                image = f"registry.k8s.io/{name}/{name}:{version}"
                self.apply("deployments", {
                    "metadata": {
                        "name": f"{name}-controller-manager", "namespace": f"{name}-system", "labels": labels,
                    },
                    "spec": {"selector": {"matchLabels": labels}, "template": {
                        "metadata": {"labels": labels}, "spec": {"containers": [{"name": "manager", "image": image}]},
                    }},
                    "status": {"replicas": 1, "readyReplicas": 1, "availableReplicas": 1},
                })  # fmt: skip

    def add_nodes(
        self, count: int = 1, *, gpus: int = 0, machine: str = "e2-standard-8", labels: Mapping[str, str] | None = None,
        taints: Sequence[Mapping[str, str]] | None = None, cpu: int = 208, memory: str = "1800Gi", prefix: str = "node",
        extended: Mapping[str, str] | None = None,
    ) -> list[str]:  # fmt: skip
        """Nodes with that capacity each; with GPUs they carry GKE's taint `nvidia.com/gpu=present:NoSchedule`."""

        def make() -> list[str]:
            names = []
            for _ in range(count):
                number = len(self.store.objects["nodes"])
                name = f"{prefix}-{number}"
                names.append(name)
                room = {"cpu": str(cpu), "memory": memory, "pods": "110", "ephemeral-storage": "1000Gi"}
                room |= {**({"nvidia.com/gpu": str(gpus)} if gpus else {}), **(extended or {})}
                given = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}] if gpus else []
                node: Object = {
                    "metadata": {"name": name, "labels": {
                        "kubernetes.io/hostname": name, "node.kubernetes.io/instance-type": machine,
                        "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", **(labels or {}),
                    }},
                    "spec": {"taints": [*given, *map(dict, taints or ())], "providerID": f"gce://test/zone/{name}"},
                    "status": {
                        "capacity": room, "allocatable": dict(room),
                        "addresses": [{"type": "InternalIP", "address": f"10.128.{number // 250}.{number % 250 + 2}"}],
                        "nodeInfo": node_info(name, self._version),
                    },
                }  # fmt: skip
                post_status(node)
                self.store.add("nodes", node)
            return names

        return self.call(make)

    def add_queue(self, name: str = "research", *, quota: Mapping[str, int], namespace: str = NAMESPACE) -> None:
        """A LocalQueue with its ClusterQueue (`<name>-cluster`), one flavor, and that nominal quota."""
        self.apply("clusterqueues", {"metadata": {"name": f"{name}-cluster"}, "spec": {"resourceGroups": [{
            "coveredResources": list(quota),
            "flavors": [{"name": "default-flavor", "resources": [
                {"name": key, "nominalQuota": str(value)} for key, value in quota.items()
            ]}],
        }]}})  # fmt: skip
        spec = {"clusterQueue": f"{name}-cluster"}
        self.apply("localqueues", {"metadata": {"name": name, "namespace": namespace}, "spec": spec})

    def wait(self, what: Callable[[], T], *, seconds: float = 20.0) -> T:
        """The first true answer.

        Raises:
            TimeoutError: There was none in that time; the message lists the pods.
        """
        ends = time.monotonic() + seconds
        while not (found := what()):
            if time.monotonic() > ends:
                rows = [f"{one['metadata']['name']}: {one.get('status')}" for one in self.pods(live=False)]
                raise TimeoutError("\n".join(["not in time; the pods:", *rows]))
            time.sleep(0.02)
        return found

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def kill(self, pod: str, *, container: str = MAIN, signal: int = SIGKILL, out_of_memory: bool = False) -> None:
        """The container's processes get a signal; `out_of_memory`: and the kubelet says OOMKilled."""

        def strike() -> None:
            run = self._run_of(pod)
            if out_of_memory:
                run.reasons[container] = "OOMKilled"
            run.running[container].signal(signal)

        self.call(strike)

    def delete_pod(self, pod: str, *, grace: int | None = None) -> None:
        """As `kubectl delete pod`: no DisruptionTarget."""
        options = {} if grace is None else {"gracePeriodSeconds": grace}
        self.call(lambda: self._delete("pods", self._pod(pod), options))

    def preempt(self, pod: str) -> None:
        """The scheduler makes room for a pod of higher priority."""
        text = "default-scheduler: preempting to accommodate a higher priority pod"

        def strike() -> None:
            thing = self._pod(pod)
            self.store.change(
                "pods", thing, lambda one: set_condition(one, "DisruptionTarget", "True", "PreemptionByScheduler", text)
            )
            self._delete("pods", thing, {})

        self.call(strike)

    def evict(self, pod: str) -> None:
        """Somebody drains the node.

        Raises:
            ApiError: A PodDisruptionBudget forbids it.
        """
        self.call(lambda: self.api.disruption.evict(self._pod(pod), lambda one: self._delete("pods", one, {})))

    def shut_down(self, node: str) -> None:
        """A spot machine is taken back: the kubelet ends its pods, with their grace, and the node becomes not ready."""

        def strike() -> None:
            self.nodes.not_ready(node, "KubeletNotReady", "node is shutting down")
            text = "Pod was terminated in response to imminent node shutdown."
            for run in list(self.kubelet.pods.values()):
                if run.pod["spec"]["nodeName"] == node:
                    run.fail("Terminated", text, grace=run.pod["spec"].get("terminationGracePeriodSeconds", 30))

        self.call(strike)

    def lose(self, node: str) -> None:
        """The machine is gone from one moment to the next, and its cloud says so: Unknown after `timing.node_grace`,
        removed, and PodGC takes what was on it (DeletionByPodGC)."""
        self.call(lambda: (self.kubelet.silence(node), self.nodes.hush(node, removed=True)))

    def hang(self, node: str) -> None:
        """Nothing is heard of the machine, which its cloud takes for running: Unknown after `timing.node_grace`, its
        pods marked and deleted after `timing.unreachable` (DeletionByTaintManager). They stay, Terminating, until
        `recover`, `remove_node` or a deletion by force."""
        self.call(lambda: (self.kubelet.silence(node), self.nodes.hush(node)))

    def recover(self, node: str) -> None:
        """The machine that was hung has been restarted: what ran on it has failed, and the node is ready."""
        self.call(lambda: (self.kubelet.restart(node), self.nodes.hear(node)))

    def remove_node(self, node: str) -> None:
        """As `kubectl delete node`."""
        self.call(lambda: self.store.remove("nodes", self.store.get("nodes", None, node)))

    def outage(self) -> Callable[[], None]:
        """The control plane is away: no call is answered, no controller works, and pods run on. The returned function
        ends it; after more than `timing.node_grace` all nodes are Unknown until their kubelets have posted again."""
        began = time.monotonic()

        def stop() -> None:
            self.api.down = True
            self.api.break_streams()
            self.queue.pause()
            self.nodes.pause()

        def end() -> None:
            self.api.down = False
            self.nodes.resume(away=time.monotonic() - began)
            self.queue.resume()

        self.call(stop)
        return lambda: self.call(end)

    def run_out(self, pod: str, resource: str = "memory") -> None:
        """The pod's node has too little memory (or `ephemeral-storage`) left, and the kubelet evicts the pod."""
        text = (
            f"The node was low on resource: {resource}. Threshold quantity: 100Mi, available: 52Mi. "
            f"Container {MAIN} was using 900Mi, request is 0, has larger consumption of {resource}. "
        )

        def strike() -> None:
            self._run_of(pod).fail("Evicted", text, grace=0)
            self.events(self._pod(pod), "Evicted", text, source="kubelet", kind="Warning")

        self.call(strike)

    def break_image(self, image: str) -> None:
        """From now on the image cannot be pulled; `mend_image` ends it."""
        self.call(lambda: self.options.unpullable.add(image))

    def lock_image(self, image: str) -> None:
        """From now on its registry wants a login."""
        self.call(lambda: self.options.private.add(image))

    def mend_image(self, image: str) -> None:
        self.call(lambda: self.options.unpullable.discard(image))

    def tell(self, pod: str, reason: str, message: str, *, source: str, kind: str = "Warning") -> None:
        """An event about a pod that something outside has written: the autoscaler, a CSI driver."""
        self.call(lambda: self.events(self._pod(pod), reason, message, source=source, kind=kind))

    def suspend(self, job: str) -> None:
        """Kueue preempts the job (a JobSet or Job with a queue label); `let_in` admits it again."""
        plural, thing = self._job(job)
        self.call(lambda: self._kueue().preempt(plural, thing))

    def let_in(self, job: str) -> None:
        self.call(lambda: (self._kueue().let_in(job), self.queue.wake()))

    def answer(
        self,
        status: int,
        *,
        times: float = float("inf"),
        verb: str | None = None,
        resource: str | None = None,
        retry_after: int | None = None,
    ) -> Callable[[], None]:
        """The API answers the next calls (all, or those of the verb and resource: `list`, `pods`, `pods/log`) with
        this status; 0: the connection breaks instead. The returned function ends it."""

        def applies(call: Call) -> bool:
            return verb in (None, call.verb) and resource in (None, call.what)

        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        trouble = Trouble(status, applies, times, headers)
        self.call(lambda: self.api.troubles.append(trouble))

        def end() -> None:
            trouble.times = 0

        return end

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

    def finish(self, text: str = "", *, code: int = 0, container: str = MAIN, last_word: str = "") -> int:
        """Containers that are only said to run end, in pods whose name contains the text; how many did.

        Their last word is what they write to their terminationMessagePath.
        """

        def end() -> int:
            found = [
                (run, process)
                for run in self.kubelet.pods.values() if text in run.name
                for name, process in run.running.items() if name == container and isinstance(process, Said)
            ]  # fmt: skip
            for run, process in found:
                if last_word:
                    (run.folder / "containers" / container).mkdir(parents=True, exist_ok=True)
                    (run.folder / "containers" / container / "termination-log").write_text(last_word)
                process.end(code)
            return len(found)

        return self.call(end)

    def say(self, pod: str, line: str, *, container: str = MAIN) -> None:
        """A line in the log of a container that is only said to run."""
        self.call(lambda: self._run_of(pod).running[container].log.write(line.encode()))  # type: ignore[attr-defined]

    # --- inside -------------------------------------------------------------------------------------------------------

    def call(self, work: Callable[[], Any]) -> Any:
        """Run it where the cluster's state lives, and return what it returns (or what it awaits)."""

        async def there() -> Any:
            result = work()
            return await result if isinstance(result, Coroutine) else result

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(60)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.store = Store()
        self.queue = Queue(self.store)
        self.events = Events(self.store)
        if not self.options.simulate:
            await self.isolation.start()
        major, minor = (int(part) for part in (self._jobset or "0.12").split(".")[:2])
        self.admission = Admission(self.store, kueue=self._has_kueue, jobset=(major, minor))
        self.kubelet = Kubelet(self.store, self.events, self.isolation, self._timing, self.options)
        disruption = Disruption(self.store, self.events)
        self.api = ApiServer(
            self.store, self.admission, self.access, disruption, self.kubelet.log, version=self._version
        )
        self._delete = self.api.delete
        self.nodes = Nodes(self.store, self.events, self._delete, self._timing, self.kubelet.post)
        JobController(self.store, self.queue, self.admission, self.events, self._delete, self._timing)
        self.queue.controllers["computedomains"] = compute_domains(self.store)
        if self._jobset:
            JobSetController(self.store, self.queue, self.admission, self.events, self._delete, self._timing)
        else:
            self.api.missing.add("jobsets")
        if self._has_kueue:
            self.kueue = Kueue(self.store, self.queue, self.events)
        else:
            self.api.missing |= {kind.plural for kind in KINDS.values() if kind.group == KUEUE}
        self.api.declare()
        self._crds()
        Garbage(self.store, self.queue, self._delete)
        scheduler = Scheduler(self.store, self.events, wording(self._version))
        self.queue.always += [scheduler.schedule, self.kubelet.resolve, self.admission.quotas.review, disruption.review]
        self.store.listeners += [self._route, self._furnish]
        self._work = asyncio.create_task(self.queue.run())
        await self.api.__aenter__()
        self._server = Server(self.api)
        await self._server.__aenter__()

    async def stop(self) -> None:
        self.api.close_streams()
        self._work.cancel()
        await self.kubelet.stop()
        for server in self._forwarders:
            server.close()
        # Clients come back until the server is closed, and aiohttp would wait a minute for each of them.
        closing = asyncio.ensure_future(self._server.__aexit__(None, None, None))
        while not closing.done():
            self.api.break_streams()
            await asyncio.wait({closing}, timeout=0.1)
        closing.result()
        await self.api.__aexit__(None, None, None)
        if not self.options.simulate:
            await self.isolation.stop()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0.02)  # pipes of processes that have ended are closed in a later turn of the loop

    def _route(self, change: Change) -> None:
        """Tell the controllers whose objects, or whose children, have changed."""
        some = change.after or change.before
        assert some is not None
        meta = some["metadata"]
        if change.kind in ("jobs", "jobsets", "computedomains") and change.after is not None:
            self.queue.look(change.kind, meta.get("namespace"), meta["name"])
        plurals = {"Job": "jobs", "JobSet": "jobsets"}
        for owner in meta.get("ownerReferences", []):
            if owner["kind"] in plurals:
                wait = self._timing.batch if change.kind == "pods" else 0.0
                self.queue.look(plurals[owner["kind"]], meta.get("namespace"), owner["name"], after=wait)
        self.queue.wake()

    def _furnish(self, change: Change) -> None:
        """The controller of service accounts: a new namespace has one."""
        if change.kind == "namespaces" and change.before is None and change.after is not None:
            name = change.after["metadata"]["name"]
            self.store.add("serviceaccounts", {"metadata": {"name": "default", "namespace": name}})

    def _crds(self) -> None:
        for kind in KINDS.values():
            if kind.custom and kind.plural not in self.api.missing:
                versions = [{"name": one, "served": True, "storage": True} for one in kind.versions]
                names = {"plural": kind.plural, "kind": kind.name}
                self.store.add("customresourcedefinitions", {
                    "metadata": {"name": kind.qualified},
                    "spec": {"group": kind.group, "names": names, "versions": versions},
                })  # fmt: skip

    def _pod(self, name: str) -> Object:
        return next(one for one in self.store.all("pods") if one["metadata"]["name"] == name)

    def _run_of(self, pod: str) -> Any:
        return self.kubelet.pods[self._pod(pod)["metadata"]["uid"]]

    def _job(self, name: str) -> tuple[str, Object]:
        for plural in ("jobsets", "jobs"):
            for thing in self.objects(plural):
                if thing["metadata"]["name"] == name:
                    return plural, thing
        raise LookupError(name)

    def _kueue(self) -> Kueue:
        return self.kueue

    async def _forward(self, port: int, *, host: str | None = None, context: ssl.SSLContext | None = None) -> str:
        """A listener (on the gateway) that hands everything on to 127.0.0.1."""

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while chunk := await source.read(65536):
                    target.write(chunk)
                    await target.drain()
            target.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, back), copy(there, writer))

        where = host or self.gateway
        server = await asyncio.start_server(serve, where, 0, ssl=context)
        self._forwarders.append(server)
        return f"{where}:{server.sockets[0].getsockname()[1]}"


@contextlib.contextmanager
def running_cluster(
    *, shared: Sequence[Path] = (), nodes: int = 2, gpus: int = 0, jobset: str | None = "0.12.0", kueue: bool = False,
    simulate: bool = False, isolation: Isolation | None = None, version: str = "v1.36.2-gke.1034000",
    timing: Timing | None = None,
) -> Iterator[Cluster]:  # fmt: skip
    """A cluster with namespace and service account `default` and that many nodes; nothing of it is left afterwards.

    Args:
        shared: Folders that all pods see in their place and may write, such as the test's `tmp_path`.
        nodes: How many of 208 cores; `add_nodes` adds other ones.
        gpus: Per node.
        jobset: Which JobSet is installed; None: none.
        kueue: Whether Kueue is.
        simulate: Pods run no processes; see `Cluster.finish` and `Cluster.say`.
        isolation: What pods run in; by default namespaces of their own where root makes it possible.
        version: What /version says.
        timing: Of the controllers; by default far shorter than a real cluster's.
    """
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))
    made = Cluster(
        folder, shared=tuple(shared), jobset=jobset, kueue=kueue, simulate=simulate,
        isolation=isolation or (Namespaces(shared) if namespaces_work() else Plain()),
        version=version, timing=timing or Timing(),
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kubernetes-cluster", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        return asyncio.run_coroutine_threadsafe(work, loop)

    try:
        run(made.start()).result(60)
        try:
            made.add_namespace(NAMESPACE)
            made.install()
            if nodes:
                made.add_nodes(nodes, gpus=gpus)
            yield made
        finally:
            run(made.stop()).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
        shutil.rmtree(folder, ignore_errors=True)
