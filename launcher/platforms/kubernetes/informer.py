"""A job as its cluster has it, kept up to date by two watches: one of the JobSet or Job, one of all its pods.

Nobody is asked again and again: whatever the number of nodes, a job costs two connections that are opened anew every
few minutes. A connection that breaks, a token that expires, a version that is too old and a server that is busy are
got over in the background; who asks meanwhile is told that the cluster does not answer, not what it said last.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

from launcher.errors import LauncherError, PlatformUnreachable
from launcher.job import JobState, JobStatus
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes import states
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Expired, NotThere, Resource, Stream
from launcher.platforms.kubernetes.logs import Follower
from litgpt_demo.findings import Finding

_PAUSES = (0.2, 1.0, 5.0, 15.0, 30.0)
"""Seconds before a broken watch is opened again."""


class Informer:
    """The objects of a selection as the cluster has them: listed at once, and watched until `stop`.

    Args:
        changed: told of every object that comes, changes or (then with True) goes.
    """

    def __init__(
        self, cluster: Cluster, resource: Resource, namespace: str, changed: Callable[[ApiObject, bool], None],
        **selection: str,
    ) -> None:  # fmt: skip
        self._cluster, self._resource, self._namespace = cluster, resource, namespace
        self._selection, self._changed = selection, changed
        self._objects: dict[str, ApiObject] = {}
        self._trouble: Exception | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._stream: Stream | None = None
        self._version: str | None = self.refresh()
        threading.Thread(target=self._run, name=f"watch {resource.plural}", daemon=True).start()

    def objects(self) -> list[ApiObject]:
        """All of them, as of now; raises what keeps the watch from being up to date."""
        with self._lock:
            if self._trouble is not None:
                raise self._trouble
            return list(self._objects.values())

    def refresh(self) -> str:
        """Ask the cluster once more, for what a watch has not told yet; return the version to watch from."""
        objects, version = self._cluster.list(self._resource, self._namespace, **self._selection)
        there = {states.uid_of(one) for one in objects}
        for thing in objects:
            self._apply(thing, gone=False)
        for uid, thing in list(self._objects.items()):
            if uid not in there:
                self._apply(thing, gone=True)
        return version

    def stop(self) -> None:
        """End the watch; does not wait for it."""
        self._stopped.set()
        if (stream := self._stream) is not None:
            stream.close()

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                if self._version is None:
                    self._version = self.refresh()
                self._stream = self._cluster.watch(self._resource, self._namespace, self._version, **self._selection)
                self._trouble = None
                if self._stopped.is_set():
                    self._stream.close()
                for kind, thing in self._stream.events():
                    if kind != "BOOKMARK":
                        self._apply(thing, gone=kind == "DELETED")
                    self._version = thing["metadata"]["resourceVersion"]
                failures = 0
            except Expired:
                self._version = None
            except Exception as error:  # whatever it is: a watch that has died unseen would show the past forever
                self._trouble = error
                if not isinstance(error, LauncherError):
                    self._trouble = PlatformUnreachable(f"the watch of {self._resource} broke: {error!r}")
                    self._version = None
                self._stopped.wait(_PAUSES[min(failures, len(_PAUSES) - 1)])
                failures += 1

    def _apply(self, thing: ApiObject, *, gone: bool) -> None:
        with self._lock:
            if gone:
                self._objects.pop(states.uid_of(thing), None)
            else:
                self._objects[states.uid_of(thing)] = thing
            self._changed(thing, gone)


class JobWatch:
    """One job: listed when it is asked for first, and watched from the second time on if it was alive, until `stop`."""

    def __init__(self, cluster: Cluster, job: states.JobName) -> None:
        self._cluster, self._job = cluster, job
        self.workload: ApiObject | None = None
        """The JobSet or Job as last seen, also after its deletion."""
        self.pods: Callable[[], list[ApiObject]] = list
        """Those that are there; raises PlatformUnreachable where the watch is not up to date."""
        self.informers: tuple[Informer, ...] = ()
        self.follower: Follower | None = None
        self.asked, self.refused_since = -math.inf, math.inf
        """When the cluster was last asked why the job waits, and since when it refuses to run it."""
        self.reasons: tuple[Finding, ...] = ()
        self._live = self._deleted = self._settled = False
        self._seen: dict[tuple[int, int], states.NodeSeen] = {}

    def status(self) -> JobStatus:
        """Return the state of the job; one that is deleted while it is watched was cancelled."""
        if self.workload is None or not (self.informers or self._live):
            return self._list()
        named = {"fields": f"metadata.name={self._job.name}"}
        if not self.informers:
            resource, space = api.SENT[self.workload["kind"]], self._job.namespace
            pods = Informer(self._cluster, api.PODS, space, self._pod_changed, labels=self._job.labels)
            try:
                workloads = Informer(self._cluster, resource, space, self._workload_changed, **named)
            except LauncherError:
                pods.stop()
                raise
            self.informers, self.pods = (workloads, pods), pods.objects
            self._deleted = states.uid_of(self.workload) not in map(states.uid_of, workloads.objects())
        workloads, pods = self.informers
        if not self._settled:
            workloads.objects()
            deleted, over = self._deleted, states.final(self.workload) is not None
            if over:
                # The two watches are not in step: the last pods' ends may still be on their way.
                pods.refresh()
            self._settled = deleted or over
        told = states.status_of(self.workload, [] if self._settled and self._deleted else self.pods(), self._seen)
        if self._deleted and not told.state.final:
            return replace(told, state=JobState.CANCELLED, native=f"{self.workload['kind']} was deleted")
        return told

    def stop(self) -> None:
        for one in (*self.informers, self.follower):
            if one is not None:
                one.stop()

    def _list(self) -> JobStatus:
        """Two calls, or three where the cluster has no JobSets or the job is none."""
        self.workload, self.pods, self._seen = None, list, {}
        for kind in ("JobSet", "Job"):
            try:
                found, _ = self._cluster.list(
                    api.SENT[kind], self._job.namespace, fields=f"metadata.name={self._job.name}"
                )
            except NotThere:  # no such kind in this cluster
                continue
            if found:
                pods, _ = self._cluster.list(api.PODS, self._job.namespace, labels=self._job.labels)
                for pod in pods:
                    self._pod_changed(pod, gone=False)
                self.workload, self.pods = {"kind": kind, **found[0]}, pods.copy  # lists leave the kind out
                break
        told = states.status_of(self.workload, self.pods(), self._seen)
        self._live = told.state.live
        return told

    def _workload_changed(self, workload: ApiObject, gone: bool) -> None:
        if self.workload is None or states.uid_of(workload) != states.uid_of(self.workload):
            return  # another of the same name, after ours was deleted
        self.workload = {"kind": self.workload["kind"], **workload}
        self._deleted = self._deleted or gone

    def _pod_changed(self, pod: ApiObject, gone: bool) -> None:
        """Keep when a pod began and how it ended: the pods of a failed job are deleted."""
        node, seen = (states.restart_of(pod), states.index_of(pod)), states.node_seen(pod)
        if seen.code is None and (before := self._seen.get(node)) is not None:
            seen = seen._replace(code=before.code, eviction=before.eviction)
        self._seen[node] = seen
