"""Kueue, as far as a single queue goes: a Workload per queued object, quota by flavor, suspension and preemption.

Wording of conditions after kueue's pkg/workload and pkg/scheduler; which of them a given release writes is INFERRED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from .admission import QUEUE
from .controllers import Events, Queue
from .pods import owner_reference, requests_of
from .quantities import amount
from .store import Change, Object, Store, holds, labels_of, set_condition

SOURCE = "kueue-admission"


class Kueue:
    def __init__(self, store: Store, queue: Queue, events: Events) -> None:
        self.store, self.events = store, events
        self.held: set[str] = set()
        """Names of jobs that are not let in again, whatever is free (see `Cluster.suspend`)."""
        self._stale = True
        store.listeners.append(self._note)
        queue.always.append(self.review)

    def _note(self, change: Change) -> None:
        self._stale = self._stale or change.kind in ("jobs", "jobsets", "localqueues", "clusterqueues")

    def review(self) -> None:
        if not self._stale:
            return
        self._stale = False
        for plural in ("jobsets", "jobs"):
            for thing in self.store.all(plural):
                if QUEUE in labels_of(thing) and not thing["metadata"].get("ownerReferences"):
                    self._consider(plural, thing)

    def preempt(self, plural: str, thing: Object) -> None:
        """Something more urgent takes the quota: the job is suspended, which no pod condition tells."""
        self.held.add(thing["metadata"]["name"])
        workload = self._workload(plural, thing)
        text = "Preempted to accommodate a workload (UID: 7e57, JobUID: 7e57) due to prioritization in the ClusterQueue"

        def edit(one: Object) -> None:
            set_condition(one, "QuotaReserved", "False", "Pending", text)
            set_condition(one, "Admitted", "False", "NoReservation", "The workload has no reservation")
            set_condition(one, "Evicted", "True", "Preempted", text)

        self.store.change("workloads", workload, edit)
        self.events(workload, "EvictedDueToPreempted", text, source=SOURCE)
        self.store.change(plural, thing, lambda one: one["spec"].__setitem__("suspend", True))

    def let_in(self, name: str) -> None:
        self.held.discard(name)
        self._stale = True

    def _consider(self, plural: str, thing: Object) -> None:
        workload = self._workload(plural, thing)
        ended = holds(thing, "Complete") or holds(thing, "Completed") or holds(thing, "Failed")
        if ended:
            self.store.change(
                "workloads", workload, lambda one: set_condition(one, "Finished", "True", "JobFinished", "Job finished")
            )
            return
        if holds(workload, "Admitted") or thing["metadata"]["name"] in self.held:
            return
        problem = self._problem(thing)
        if problem is not None:
            reason, message = problem

            def wait(one: Object) -> None:
                set_condition(one, "QuotaReserved", "False", reason, message)

            self.store.change("workloads", workload, wait)
            self.events(workload, "Pending", message, source=SOURCE, kind="Warning")
            return
        queue = self._cluster_queue(thing)

        def admit(one: Object) -> None:
            text = f"Quota reserved in ClusterQueue {queue}"
            set_condition(one, "QuotaReserved", "True", "QuotaReserved", text)
            set_condition(one, "Admitted", "True", "Admitted", "The workload is admitted")

        self.store.change("workloads", workload, admit)
        self.events(workload, "Admitted", f"Admitted by ClusterQueue {queue}", source=SOURCE)
        self.store.change(plural, thing, lambda one: one["spec"].__setitem__("suspend", False))

    def _workload(self, plural: str, thing: Object) -> Object:
        meta = thing["metadata"]
        ending = sha256(f"{meta['name']}{meta['uid']}".encode()).hexdigest()[:5]
        name = f"{plural[:-1]}-{meta['name']}-{ending}"[:253]
        found = self.store.get("workloads", meta["namespace"], name)
        if found is not None:
            return found
        return self.store.add("workloads", {
            "kind": "Workload", "spec": {"queueName": labels_of(thing)[QUEUE], "active": True},
            "metadata": {"name": name, "namespace": meta["namespace"], "ownerReferences": [owner_reference(thing)]},
        })  # fmt: skip

    def _cluster_queue(self, thing: Object) -> str | None:
        local = self.store.get("localqueues", thing["metadata"]["namespace"], labels_of(thing)[QUEUE])
        return None if local is None else str(local["spec"]["clusterQueue"])

    def _problem(self, thing: Object) -> tuple[str, str] | None:
        name = self._cluster_queue(thing)
        if name is None:
            return "Inadmissible", f"LocalQueue {labels_of(thing)[QUEUE]} doesn't exist"
        queue = self.store.get("clusterqueues", None, name)
        if queue is None:
            return "Inadmissible", f"ClusterQueue {name} doesn't exist"
        used: Counter[str] = Counter()
        for plural in ("jobsets", "jobs"):
            for other in self.store.all(plural):
                mine = QUEUE in labels_of(other) and not other["metadata"].get("ownerReferences")
                if (
                    mine
                    and not other["spec"].get("suspend")
                    and self._cluster_queue(other) == name
                    and not _over(other)
                ):
                    used.update(_wants(other))
        for resource, wanted in sorted(_wants(thing).items()):
            for flavor, quota in _quotas(queue, resource):
                stem = "couldn't assign flavors to pod set nodes: insufficient "
                if wanted > quota:
                    text = (
                        f"quota for {resource} in flavor {flavor}, request > maximum capacity ({wanted:g} > {quota:g})"
                    )
                    return "Pending", stem + text
                if wanted + used[resource] > quota:
                    more = wanted + used[resource] - quota
                    return "Pending", stem + f"unused quota for {resource} in flavor {flavor}, {more:g} more needed"
        return None


def _over(thing: Object) -> bool:
    return holds(thing, "Complete") or holds(thing, "Completed") or holds(thing, "Failed")


def _quotas(queue: Mapping[str, Any], resource: str) -> list[tuple[str, float]]:
    """(flavor, nominal quota) of the resource; one flavor per resource is what this stand-in knows."""
    return [
        (flavor["name"], amount(row["nominalQuota"]))
        for group in queue["spec"].get("resourceGroups", [])
        for flavor in group["flavors"]
        for row in flavor["resources"]
        if row["name"] == resource
    ][:1]


def _wants(thing: Object) -> Counter[str]:
    if thing["kind"] == "Job":
        jobs = [(1, thing["spec"])]
    else:
        jobs = [(one["replicas"], one["template"]["spec"]) for one in thing["spec"]["replicatedJobs"]]
    total: Counter[str] = Counter()
    for replicas, spec in jobs:
        for name, value in requests_of(spec["template"]).items():
            total[name] += value * replicas * spec.get("parallelism", 1)
    return total
