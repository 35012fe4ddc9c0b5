"""Kubernetes as a platform: GKE with its GPU networks, or any other cluster."""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from launcher.errors import LauncherError, LoginProblem, PlatformRefused, PlatformUnreachable, finding_of, rival
from launcher.job import RUN_LABEL, UNBUILT, Job, JobId, JobState, JobStatus, LogPage, Submission
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes import states
from launcher.platforms.kubernetes.capacity import spare_machines
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster
from launcher.platforms.kubernetes.connection import connect
from launcher.platforms.kubernetes.informer import JobWatch
from launcher.platforms.kubernetes.logs import Follower
from launcher.platforms.kubernetes.preflight import check_settings, examine_cluster, permissions
from launcher.platforms.kubernetes.reasons import REFUSALS, advice, explain
from launcher.platforms.kubernetes.render import WorkloadObjects, job_id_of, made_of, render
from launcher.platforms.kubernetes.settings import GkePlatformConfig, KubernetesPlatformConfig, KubernetesSettings
from litgpt_demo.errors import Finding, TrainLitgptError
from litgpt_demo.storage import open_storage

_EXPLAIN = 20.0
"""Seconds between two queries why a job waits."""
_REMOVAL = 120.0
"""Seconds, beyond the pods' grace period, that removing a job may take."""

Remaining = dict[api.Resource, list[ApiObject]]

_serves_jobsets: dict[str, bool] = {}
"""The clusters that this process has checked for JobSet. `render` needs the result, but must not use the network."""


class KubernetesPlatform:
    """Runs the nodes of a job as pods: a JobSet, or an Indexed Job. A job's id is `namespace/name`."""

    is_remote_service: ClassVar[bool] = True
    poll_seconds: ClassVar[float] = 5.0  # a look costs little, because a watch follows the pods

    def __init__(self, settings: GkePlatformConfig | KubernetesPlatformConfig, *, removal: float = _REMOVAL) -> None:
        self.name, self._settings, self._removal = settings.kind, settings, removal
        self._rendered: dict[JobId, Job] = {}
        self._jobs: dict[JobId, JobWatch] = {}
        self._key = settings.model_dump_json(include={"cluster", "location", "project", "kubeconfig", "context"})
        self.close = weakref.finalize(self, _stop, self._jobs)
        """Ends all watches. The garbage collection of the platform does the same."""

    @cached_property
    def cluster(self) -> Cluster:
        return connect(self._settings)

    @property
    def workload(self) -> WorkloadObjects:
        """Return the kind of object for jobs: for `auto` a JobSet, unless this process saw a cluster without it."""
        if self._settings.workload != "auto":
            return self._settings.workload
        return "jobset" if _serves_jobsets.get(self._key, True) else "job"

    def render(self, job: Job) -> Submission:
        submission = render(job, self._settings, self.workload)
        self._rendered[submission.job_id] = job
        return submission

    def check_access(self) -> str:
        version = self.cluster.version()
        self._learn()
        finding = permissions(self.cluster, self._settings, self.workload)
        if finding.severity == "error":
            raise LoginProblem(finding.what, fix=finding.fix)
        return f"{self.cluster.where} answers ({version})"

    def check(self, submission: Submission) -> Iterator[Finding]:
        """Yield the problems of the config itself, then those of the cluster."""
        items = submission.body["items"]
        yield from check_settings(self._settings, items)
        try:
            self._learn()
            if self.workload == "job" and submission.job_id in self._rendered:
                # With `auto` it was rendered as a JobSet, before this process knew that the cluster has none.
                items = self.render(self._rendered[submission.job_id]).body["items"]
            yield from examine_cluster(self.cluster, self._settings, items)
        except LauncherError as error:
            yield finding_of(error, "kubernetes.cluster")

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        """Return how many of the cluster's machines this job does not need, None if its pools can grow."""
        pod = states.pod_of(states.workload_of(render(job, self._settings, self.workload).body["items"]))
        try:
            most = spare_machines(self.cluster, self._settings, pod)
        except LauncherError:  # no permission to list machines, or no answer
            most = None
        fix = "have the machine repaired, or cordon it off (kubectl cordon NAME) and add another"
        return most, f"{fix}; or lower platform.nodes"

    def _learn(self) -> None:
        if self._settings.workload == "auto":
            _serves_jobsets[self._key] = self.cluster.serves(api.JOBSETS)

    def submit(self, submission: Submission) -> JobId:
        """Create the job's objects, or reattach to the existing job of that name. The JobSet or Job comes first and
        owns the others, so that none outlives it. An older job that is still being removed is PlatformUnreachable."""
        if f'"{UNBUILT}"' in json.dumps(submission.body):
            raise PlatformRefused("the submission has no image", fix="build it, or set image.kind=prebuilt")
        job, items = states.JobName.parse(submission.job_id), submission.body["items"]
        workload = states.workload_of(items)
        kind = workload["kind"]
        created: list[ApiObject] = []
        try:
            if kind == "JobSet" and not self.cluster.serves(api.JOBSETS):
                _serves_jobsets[self._key] = False
                fix = "install it (docs/platforms/kubernetes.md), or set platform.workload=job"
                raise PlatformRefused(f"{self.cluster.where} has no JobSet", fix=fix)
            self._refuse_rivals(job, kind, workload["metadata"]["labels"][RUN_LABEL])
            # The submission in the attempt's folder identifies the attempt while its pods are waiting.
            command = states.container_of(states.pod_of(workload))["command"]
            directory = command[command.index("--log-uri") + 1].replace("$$", "$")
            try:
                open_storage(directory).write("submission.json", json.dumps(submission.body, indent=1).encode())
            except (TrainLitgptError, OSError) as error:
                raise PlatformRefused(f"{directory} cannot be written: {error}", fix="choose another root") from error
            try:
                owner = self._create(job, workload, created)
                for item in items:
                    if item is not workload:
                        owned = {**item, "metadata": {**item["metadata"], "ownerReferences": [owner]}}
                        self._create(job, owned, created)
            except PlatformRefused:
                for thing in reversed(created):
                    self.cluster.delete_one(api.SENT[thing["kind"]], thing)
                raise
        except api.ApiRefused as error:
            raise PlatformRefused(str(error), fix=advice(error.message)) from error
        return submission.job_id

    def _refuse_rivals(self, job: states.JobName, own_kind: str, run: str) -> None:
        """Refuse a second job of the same run and root: the run index was deleted while the first one ran, or this
        attempt is a JobSet already and would become a Job."""
        for kind, resource in (("JobSet", api.JOBSETS), ("Job", api.JOBS)):
            try:
                found, _ = self.cluster.list(resource, job.namespace, labels=f"{RUN_LABEL}={run}")
            except (api.NotFound, api.Forbidden):
                continue
            for workload in found:
                name = workload["metadata"]["name"]
                if (kind, name) == (own_kind, job.name) or states.owners_of(workload):
                    continue
                # An ended job is in the way only if it is this attempt as the other kind.
                if name != job.name and states.final(workload) is not None:
                    continue
                if workload["metadata"].get("deletionTimestamp"):
                    raise PlatformUnreachable(f"{name}, an older job of the same run, is still being removed")
                end = f"kubectl delete {resource.plural} -n {job.namespace} {name}"
                raise rival(f"job {job.namespace}/{name}", run, end=end)

    def _create(self, job: states.JobName, item: ApiObject, created: list[ApiObject]) -> dict[str, str]:
        """Create an object, or find the same one, and return the reference to it as an owner."""
        kind, resource, meta = item["kind"], api.SENT[item["kind"]], item["metadata"]
        name, owners = meta["name"], meta.get("ownerReferences", [])
        stored: ApiObject | None
        try:
            stored = self.cluster.create(resource, job.namespace, item)
            created.append(stored)
        except api.NotFound as error:
            if owners:
                raise
            # The namespace is missing, for the kind was checked before.
            raise PlatformRefused(str(error), fix="create the namespace, or fix platform.namespace") from error
        except api.AlreadyExists:
            stored = self.cluster.get(resource, job.namespace, name)
        if stored is None or stored["metadata"].get("deletionTimestamp"):
            raise PlatformUnreachable(f"an older {kind} {name} is still being removed", fix="submit again")
        if owners:
            is_own = owners[0]["uid"] in states.owners_of(stored)
        else:
            is_own = (stored["metadata"].get("labels") or {}).get(RUN_LABEL) == meta["labels"][RUN_LABEL]
        if not is_own:
            fix = "remove that object, or give the run another `name`"
            raise PlatformRefused(f"{kind} {name} already exists, and this job did not create it", fix=fix)
        return {"apiVersion": item["apiVersion"], "kind": kind, "name": name, "uid": states.uid_of(stored)}

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        return job_id == job_id_of(self._settings, attempt_name)

    def status(self, job_id: JobId) -> JobStatus:
        """Return the state of the job, and the reason if it waits or has lost a machine."""
        job = states.JobName.parse(job_id)
        watch = self._jobs.setdefault(job_id, JobWatch(self.cluster, job))
        status, workload = watch.status(), watch.workload
        if status.state.is_final or workload is None:
            return status
        pods, now = watch.pods(), time.monotonic()
        reasons = tuple(states.lost_nodes(pods, status.exit_codes))
        if status.state is JobState.PENDING:
            if now - watch.explained >= _EXPLAIN:
                watch.reasons = tuple(explain(self.cluster, job, workload, pods))
                watch.explained = now = time.monotonic()
            reasons += watch.reasons
        status = replace(status, reasons=reasons)
        # The message of a refusal may change from one look to the next: it names pods that are created again.
        refusals = [reason for reason in reasons if reason.code in REFUSALS]
        if not refusals:
            watch.refused_since = math.inf
            return status
        watch.refused_since = min(watch.refused_since, now)
        if now - watch.refused_since <= self._settings.admission_timeout:
            return status
        return replace(status, refused=refusals[0])

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        job, watch = states.JobName.parse(job_id), self._jobs.get(job_id)
        if watch is None or not watch.watched:
            follower = Follower(self.cluster, job, position, once=True)
            pods, _ = self.cluster.list(api.PODS, job.namespace, labels=job.labels)
            try:
                return follower.page(pods, last=True)
            finally:
                follower.stop()
        has_ended = watch.status().state.is_final
        if watch.follower is None or watch.follower.position != position:
            if watch.follower is not None:
                watch.follower.stop()
            watch.follower = Follower(self.cluster, job, position)
        page = watch.follower.page(watch.pods(), last=has_ended)
        if has_ended and not page.more:
            _stop(self._jobs, job_id)
        return page

    def cancel(self, job_id: JobId) -> None:
        """Delete everything that has the job's labels, and list until nothing has. If some of it may not be listed or
        deleted, the rest is deleted nevertheless."""
        _stop(self._jobs, job_id)
        job, limit = states.JobName.parse(job_id), self._settings.grace_period + self._removal
        ends, pause = time.monotonic() + limit, 0.1
        cluster = self.cluster.with_deadline(limit)
        refused: dict[api.Resource, api.Forbidden] = {}
        remaining: Remaining = {}
        try:
            while True:
                remaining = _list_remaining(cluster, job, self._settings, refused)
                if not remaining or not _delete(cluster, job, remaining, refused):
                    break  # nothing remains, or nothing that may be deleted
                if time.monotonic() + pause > ends:
                    raise PlatformUnreachable(f"{limit:.0f} s have passed")
                time.sleep(pause)
                pause = min(2.0, pause * 1.5)
        except PlatformUnreachable as error:
            still = f"is not gone: {_described(remaining)}" if remaining else "may not be gone"
            fix = "cancel it again"
            if any(map(states.unreachable_since, remaining.get(api.PODS, ()))):
                # Only a machine can report that one of its pods has ended.
                machines = "bring the silent machine back, or delete its Node (`kubectl delete node`)"
                fix = f"{machines}; {fix}"
            raise PlatformUnreachable(f"job {job} {still}; {error}", fix=fix) from error
        if refused:
            rest = f"still there: {_described(remaining)}" if remaining else "all that this account can list is gone"
            reasons = "; ".join(error.message for error in refused.values())
            fixes = "; ".join(dict.fromkeys(advice(error.message) for error in refused.values()))
            raise PlatformRefused(f"job {job} may not be gone: {reasons} ({rest})", fix=fixes)

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        job, refused = states.JobName.parse(job_id), dict[api.Resource, api.Forbidden]()
        remaining = _list_remaining(self.cluster, job, self._settings, refused)
        if refused:
            reasons = "; ".join(error.message for error in refused.values())
            raise PlatformRefused(f"the remaining resources of job {job} cannot be listed: {reasons}")
        return tuple(_described({resource: things}) for resource, things in remaining.items())


def _stop(jobs: dict[JobId, JobWatch], *ids: JobId) -> None:
    for job_id in ids or tuple(jobs):
        watch = jobs.pop(job_id, None)
        if watch is not None:
            watch.stop()


def _delete(
    cluster: Cluster, job: states.JobName, remaining: Remaining, refused: dict[api.Resource, api.Forbidden]
) -> bool:
    uids = {states.uid_of(thing) for things in remaining.values() for thing in things}
    is_going = False
    for resource, things in remaining.items():
        staying = [thing for thing in things if not thing["metadata"].get("deletionTimestamp")]
        is_going = is_going or len(staying) < len(things)
        # An owned object goes with its owner. Deleted before it, a controller would create another one.
        unowned = [thing for thing in staying if not states.owners_of(thing) & uids]
        if not unowned or resource in refused:
            continue
        try:
            if resource is api.SERVICES:  # there is one, and it may not have our labels
                cluster.delete_one(resource, unowned[0])
            else:
                cluster.delete(resource, job.namespace, labels=job.labels)
            is_going = True
        except api.Forbidden as error:
            refused[resource] = error
    return is_going


def _list_remaining(
    cluster: Cluster, job: states.JobName, settings: KubernetesSettings, refused: dict[api.Resource, api.Forbidden]
) -> Remaining:
    remaining = {}
    for resource in made_of(settings):
        try:
            if resource is api.SERVICES:  # JobSet does not give our labels to the Service that it creates
                found, _ = cluster.list(resource, job.namespace, fields=f"metadata.name={job.name}")
            else:
                found, _ = cluster.list(resource, job.namespace, labels=job.labels)
        except api.NotFound:
            continue  # a cluster without that kind has no such objects
        except api.Forbidden as error:
            refused[resource] = error
            continue
        if found:
            remaining[resource] = found
    return remaining


def _described(remaining: Remaining) -> str:
    parts = []
    for resource, things in remaining.items():
        examples = ", ".join(map(_located, things[:3]))
        finalizers = {name for thing in things for name in thing["metadata"].get("finalizers", ())}
        if finalizers:
            examples += f"; held by {', '.join(sorted(finalizers))}"
        parts.append(f"{len(things)} {resource} ({examples})")
    return ", ".join(parts)


def _located(thing: ApiObject) -> str:
    name, machine = thing["metadata"]["name"], thing.get("spec", {}).get("nodeName")
    since = states.unreachable_since(thing)
    if since:
        return f"{name} on {machine}, which has not answered since {since}"
    return " on ".join(filter(None, (name, machine)))
