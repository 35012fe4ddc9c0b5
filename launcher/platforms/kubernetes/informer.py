"""One job as its cluster has it: each look requests its JobSet or Job, and a watch follows its pods.

A look is one small request, whatever the number of pods. Polling the pods would not do: the Job controller deletes
those of a failed job at once, and with them the exit codes and preemptions that the diagnosis needs. A broken watch is
reopened in the background. Until then `status` and `pods` raise PlatformUnreachable.
"""

from __future__ import annotations

import math
import threading
from copy import copy
from dataclasses import replace

from launcher.errors import LauncherError, PlatformUnreachable
from launcher.job import JobState, JobStatus
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes import states
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Expired, Stream
from launcher.platforms.kubernetes.logs import Follower
from litgpt_demo.errors import Finding

_PAUSES = (0.2, 1.0, 5.0, 15.0, 30.0)
"""Seconds before a broken watch is opened again."""


class JobWatch:
    """One job: the first `status` only looks at it, and the second starts to watch it if it was live, until `stop`."""

    def __init__(self, cluster: Cluster, job: states.JobName) -> None:
        self._cluster, self._job = cluster, job
        self.workload: ApiObject | None = None
        """The JobSet or Job as last seen, also after its deletion."""
        self.watched = False
        self.follower: Follower | None = None
        self.explained, self.refused_since = -math.inf, math.inf
        """When `reasons` was found, and since when the cluster refuses to run the job."""
        self.reasons: tuple[Finding, ...] = ()
        """Why the job waits."""
        self._is_live = self._is_deleted = self._is_settled = False
        self._seen: dict[tuple[int, int], states.NodeSeen] = {}
        # The newest pod of each node in each life of the job, with its creation; and the pods that it replaced.
        self._newest, self._replaced = dict[tuple[int, int], tuple[str, str]](), set[str]()
        self._pods: dict[str, ApiObject] = {}
        self._version: str | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._stream: Stream | None = None

    def status(self) -> JobStatus:
        """Return the state of the job. One that is deleted while it is watched was cancelled."""
        if self._is_live and not self.watched:
            self.watched = True
            threading.Thread(target=self._watch, name=f"watch {self._job}", daemon=True).start()
        if not self.watched:
            self.workload, self._seen, self._pods = None, {}, {}
        if not (self._is_deleted or self._is_settled):
            self._look()
        status = states.status_of(self.workload, [] if self._is_deleted else self.pods(), self._seen)
        self._is_live = status.state.is_live
        if self._is_deleted and self._is_live and self.workload is not None:
            return replace(status, state=JobState.CANCELLED, native=f"{self.workload['kind']} was deleted")
        return status

    def _look(self) -> None:
        before, found = self.workload, None
        for kind in ("JobSet", "Job") if before is None else (before["kind"],):
            found = self._cluster.get(api.SENT[kind], self._job.namespace, self._job.name)
            if found is not None:
                self.workload = {"kind": kind, **found}
                break
        self._is_deleted = before is not None and found is None
        if self.workload is not None and (not self.watched or states.final(self.workload) is not None):
            self._refresh()  # the watch may not have delivered the ends of the last pods yet
            self._is_settled = self.watched

    def pods(self) -> list[ApiObject]:
        """Return the present pods. Raises the error that keeps the watch from being up to date."""
        with self._lock:
            if self._error is not None:
                raise copy(self._error)  # the stored one would keep the frames of all callers
            return list(self._pods.values())

    def stop(self) -> None:
        """End the watch and the reading of logs, without waiting for their threads."""
        self._stopped.set()
        stream = self._stream
        if stream is not None:
            stream.close()
        if self.follower is not None:
            self.follower.stop()

    def _refresh(self) -> None:
        pods, self._version = self._cluster.list(api.PODS, self._job.namespace, labels=self._job.labels)
        present = {states.uid_of(pod) for pod in pods}
        for pod in pods:
            self._apply(pod, gone=False)
        for uid, pod in list(self._pods.items()):
            if uid not in present:
                self._apply(pod, gone=True)

    def _watch(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                if self._version is None:
                    self._refresh()
                space, version = self._job.namespace, str(self._version)
                self._stream = self._cluster.watch(api.PODS, space, version, labels=self._job.labels)
                self._error = None
                if self._stopped.is_set():
                    self._stream.close()
                for kind, pod in self._stream.events():
                    if kind != "BOOKMARK":
                        self._apply(pod, gone=kind == "DELETED")
                    self._version = pod["metadata"]["resourceVersion"]
                failures = 0
            except Expired:
                self._version = None
            except Exception as error:  # a watch whose thread has died unnoticed would show the past forever
                self._error = error
                if not isinstance(error, LauncherError):
                    self._error = PlatformUnreachable(f"the watch of {self._job} broke: {error!r}")
                    self._version = None
                self._stopped.wait(_PAUSES[min(failures, len(_PAUSES) - 1)])
                failures += 1

    def _apply(self, pod: ApiObject, *, gone: bool) -> None:
        """A failed job's pods are deleted. A node has a second pod in the same life if Kueue suspended the job and
        started it again; the first stands for the node until the second has begun."""
        node, seen = (states.restart_of(pod), states.index_of(pod)), states.node_seen(pod)
        uid, created = states.uid_of(pod), pod["metadata"].get("creationTimestamp", "")
        with self._lock:
            newest, since = self._newest.get(node, ("", ""))
            has_begun = seen.began is not None or seen.code is not None
            replaces = uid not in self._replaced and created >= since and has_begun
            before = self._seen.get(node)
            if uid == newest and seen.code is None and before is not None:
                seen = seen._replace(code=before.code, eviction=before.eviction)
            if not newest or uid == newest or replaces:
                self._replaced |= {newest} - {uid, ""}
                self._newest[node], self._seen[node] = (uid, created), seen
            self._pods[states.uid_of(pod)] = pod
            if gone:
                del self._pods[states.uid_of(pod)]
