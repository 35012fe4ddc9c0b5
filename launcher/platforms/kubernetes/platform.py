"""Kubernetes as a platform: GKE with its GPU networks, or any other cluster."""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any, ClassVar

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
from launcher.platforms.kubernetes.render import PLATFORM, WorkloadObjects, job_id_of, made_of, render
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import Finding, TrainLitgptError
from litgpt_demo.storage import open_storage

DIGEST = "train-litgpt/submission"
"""Annotation of the JobSet or Job: a checksum of what was sent. What is stored differs from that, by defaults and by
what controllers change."""

_EXPLAIN = 20.0
"""Seconds between two questions why a job waits."""
_GONE = 120.0
"""Seconds, beyond the pods' grace period, that removing a job may take."""

Left = dict[api.Resource, list[ApiObject]]

_serves_jobsets: dict[tuple[str | None, ...], bool] = {}
"""Facts that this process has learned of clusters. `render` must not ask, and has to know."""


class GkePlatform:
    """Runs the nodes of a job as pods: a JobSet, or an Indexed Job. A job's id is `namespace/name`."""

    name: ClassVar[str] = PLATFORM
    is_remote_service: ClassVar[bool] = True
    poll_seconds: ClassVar[float] = 5.0  # a look costs little, for pods are watched

    def __init__(self, settings: GkePlatformConfig, *, gone: float = _GONE) -> None:
        self._settings, self._gone = settings, gone
        self._rendered: dict[JobId, Job] = {}
        self._jobs: dict[JobId, JobWatch] = {}
        self._key = (settings.cluster, settings.location, settings.project, settings.kubeconfig, settings.context)
        self.close = weakref.finalize(self, _stop, self._jobs)
        """Ends all watches, as is done too when the platform is no longer used."""

    @cached_property
    def cluster(self) -> Cluster:
        """Connected to when it is first needed."""
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
        if (found := permissions(self.cluster, self._settings, self.workload)).severity == "error":
            raise LoginProblem(found.what, fix=found.fix)
        return f"{self.cluster.where} answers ({version})"

    def check(self, submission: Submission) -> Iterator[Finding]:
        """Yield what the config alone shows to be wrong, then what the cluster lacks for the job."""
        items = submission.body["items"]
        yield from check_settings(self._settings, items)
        try:
            self._learn()
            if self.workload == "job" and submission.job_id in self._rendered:
                # `auto`, rendered before the cluster was seen to have no JobSet: it is rendered as a Job from now on.
                items = self.render(self._rendered[submission.job_id]).body["items"]
            yield from examine_cluster(self.cluster, self._settings, items)
        except LauncherError as error:
            yield finding_of(error, "gke.cluster")

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        """Return how many of the cluster's machines this job does not need; pools that grow have others."""
        pod = states.pod_of(states.workload_of(render(job, self._settings, self.workload).body["items"]))
        try:
            most = spare_machines(self.cluster, self._settings, pod)
        except LauncherError:  # machines may not be looked at, or nobody answers
            most = None
        fix = "have the machine mended, or cordon it off (kubectl cordon NAME) and add another"
        return most, f"{fix}; or take fewer platform.nodes"

    def _learn(self) -> None:
        if self._settings.workload == "auto":
            _serves_jobsets[self._key] = self.cluster.serves(api.JOBSETS)

    def submit(self, submission: Submission) -> JobId:
        """Create the job's objects, or adopt a job of that name that was made of the very same ones.

        The JobSet or Job comes first, and owns what else there is: nothing outlives it, also if another removes it.
        Refused too is one without an image; an older job of that name that is still being removed is
        PlatformUnreachable.
        """
        if f'"{UNBUILT}"' in json.dumps(submission.body):
            raise PlatformRefused("the submission has no image", fix="build it first (image.kind=docker), or name one")
        job, items = states.JobName.parse(submission.job_id), submission.body["items"]
        workload = states.workload_of(items)
        kind, meta = workload["kind"], workload["metadata"]
        made: list[ApiObject] = []
        try:
            if kind == "JobSet" and not self.cluster.serves(api.JOBSETS):
                _serves_jobsets[self._key] = False
                fix = "install it (docs/gke.md), or set platform.workload=job"
                raise PlatformRefused(f"{self.cluster.where} has no JobSet", fix=fix)
            self._refuse_rivals(job, meta.get("labels", {}).get(RUN_LABEL))
            other = "Job" if kind == "JobSet" else "JobSet"
            if self.cluster.get(api.SENT[other], job.namespace, job.name) is not None:
                what = f"a {other} {job} is there, and this would be a {kind}: two jobs would write over each other"
                raise PlatformRefused(what, fix="cancel it first")
            # The submission's file in the attempt's folder identifies the attempt while its pods are still waiting.
            command = states.container_of(states.pod_of(workload))["command"]
            directory = command[command.index("--log-uri") + 1].replace("$$", "$")
            try:
                open_storage(directory).write("submission.json", json.dumps(submission.body, indent=1).encode())
            except (TrainLitgptError, OSError) as error:
                raise PlatformRefused(f"{directory} cannot be written: {error}", fix="choose another root") from error
            annotations = {**meta.get("annotations", {}), DIGEST: digest_of(items)}
            try:
                owner = self._create(job, {**workload, "metadata": {**meta, "annotations": annotations}}, made)
                for item in items:
                    if item is not workload:
                        self._create(job, {**item, "metadata": {**item["metadata"], "ownerReferences": [owner]}}, made)
            except PlatformRefused:
                for thing in reversed(made):
                    self.cluster.delete_one(api.SENT[thing["kind"]], thing)
                raise
        except api.ApiRefused as error:
            raise PlatformRefused(str(error), fix=advice(error.message)) from error
        return submission.job_id

    def _refuse_rivals(self, job: states.JobName, run: str | None) -> None:
        """Refuse to submit beside a job of the same run and root: the run index was deleted while that job ran."""
        for resource in (api.JOBSETS, api.JOBS) if run else ():
            try:
                found, _ = self.cluster.list(resource, job.namespace, labels=f"{RUN_LABEL}={run}")
            except (api.NotThere, api.Forbidden):
                continue
            for workload in found:
                name = workload["metadata"]["name"]
                if name == job.name or states.owners_of(workload) or states.final(workload) is not None:
                    continue
                if workload["metadata"].get("deletionTimestamp"):
                    raise PlatformUnreachable(f"{name}, an older job of the same run, is still being removed")
                end = f"kubectl delete {resource.plural} -n {job.namespace} {name}"
                raise rival(f"job {job.namespace}/{name}", str(run), end=end)

    def _create(self, job: states.JobName, item: ApiObject, made: list[ApiObject]) -> dict[str, str]:
        """Create an object, or find the very same there; return the reference for what it owns."""
        kind, resource, meta = item["kind"], api.SENT[item["kind"]], item["metadata"]
        name, owners, there = meta["name"], meta.get("ownerReferences", []), None
        try:
            there = self.cluster.create(resource, job.namespace, item)
            made.append(there)
        except api.NotThere as error:
            if owners:
                raise
            # The namespace, for the kind was looked for before.
            raise PlatformRefused(str(error), fix="create the namespace, or fix platform.namespace") from error
        except api.AlreadyThere:
            there = self.cluster.get(resource, job.namespace, name)
        if there is None or there["metadata"].get("deletionTimestamp"):
            raise PlatformUnreachable(f"an older {kind} {name} is still being removed", fix="submit again")
        found = there["metadata"]
        if owners and owners[0]["uid"] not in states.owners_of(there):
            fix = "remove it, or give the run another name"
            raise PlatformRefused(f"{kind} {name} is there, and belongs to something else", fix=fix)
        if not owners and found.get("annotations", {}).get(DIGEST) != meta["annotations"][DIGEST]:
            fix = "cancel it, or give the run another name"
            raise PlatformRefused(f"{kind} {job} is there, and was made of something else", fix=fix)
        return {"apiVersion": item["apiVersion"], "kind": kind, "name": name, "uid": str(found["uid"])}

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        return job_id == job_id_of(self._settings, attempt_name)

    def status(self, job_id: JobId) -> JobStatus:
        """Return the state of the job, and if it waits or has lost a machine, the reason."""
        job = states.JobName.parse(job_id)
        watch = self._jobs.setdefault(job_id, JobWatch(self.cluster, job))
        told, workload = watch.status(), watch.workload
        if told.state.is_final or workload is None:
            return told
        pods, now = watch.pods(), time.monotonic()
        reasons = tuple(states.losses(pods, told.exit_codes))
        if told.state is JobState.PENDING:
            if now - watch.asked >= _EXPLAIN:
                watch.reasons = tuple(explain(self.cluster, job, workload, pods))
                watch.asked = now = time.monotonic()
            reasons += watch.reasons
        # What keeps the job from running, once something of that kind has for longer than the settings allow. It may
        # change its words from one look to the next: they name pods that are made anew.
        refusal = next((reason for reason in reasons if reason.code in REFUSALS), None)
        watch.refused_since = min(watch.refused_since, now) if refusal else math.inf
        waited_enough = now - watch.refused_since > self._settings.refused_after
        return replace(told, reasons=reasons, refused=refusal if waited_enough else None)

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        job, watch = states.JobName.parse(job_id), self._jobs.get(job_id)
        if watch is None or not watch.watched:
            once, follower = JobWatch(self.cluster, job), Follower(self.cluster, job, position, once=True)
            once.status()
            try:
                return follower.page(once.pods(), last=True)
            finally:
                follower.stop()
        over = watch.status().state.is_final
        if watch.follower is None or watch.follower.position != position:
            if watch.follower is not None:
                watch.follower.stop()
            watch.follower = Follower(self.cluster, job, position)
        told = watch.follower.page(watch.pods(), last=over)
        if over and not told.more:
            _stop(self._jobs, job_id)
        return told

    def cancel(self, job_id: JobId) -> None:
        """Delete everything that has the job's labels, and list until nothing has.

        Where some of it may not be listed or deleted, the rest is deleted all the same; what does not go is named, with
        what holds it.
        """
        _stop(self._jobs, job_id)
        job, limit = states.JobName.parse(job_id), self._settings.grace + self._gone
        ends, pause = time.monotonic() + limit, 0.1
        cluster = self.cluster.within(limit)
        refused: dict[api.Resource, api.Forbidden] = {}
        left: Left = {}
        try:
            while left := _left(cluster, job, self._settings, refused):
                there = {states.uid_of(one) for things in left.values() for one in things}
                going = False
                for resource, things in left.items():
                    staying = [one for one in things if not one["metadata"].get("deletionTimestamp")]
                    going = going or len(staying) < len(things)
                    # What has an owner goes with it, or a controller would put another in its place.
                    free = [one for one in staying if not states.owners_of(one) & there]
                    if not free or resource in refused:
                        continue
                    try:
                        if resource is api.SERVICES:  # of which there is one, maybe without our labels
                            cluster.delete_one(resource, free[0])
                        else:
                            cluster.delete(resource, job.namespace, labels=job.labels)
                        going = True
                    except api.Forbidden as error:
                        refused[resource] = error
                if not going:
                    break  # nothing of what is left may be deleted
                if time.monotonic() + pause > ends:
                    raise PlatformUnreachable(f"it had {limit:.0f} s")
                time.sleep(pause)
                pause = min(2.0, pause * 1.5)
        except PlatformUnreachable as error:
            still = f"is not gone: {_told(left)}" if left else "may not be gone"
            # Only a machine can say that a pod of it has ended.
            silent = any(map(states.silent_since, left.get(api.PODS, ())))
            fix = "a silent machine's pods go when it is back, or with its Node (`kubectl delete node`); " * silent
            raise PlatformUnreachable(f"job {job} {still}; {error}", fix=f"{fix}cancel it again") from error
        if refused:
            rest = f"still there: {_told(left)}" if left else "what may be seen of it is gone"
            words = "; ".join(error.message for error in refused.values())
            fixes = "; ".join(dict.fromkeys(advice(error.message) for error in refused.values()))
            raise PlatformRefused(f"job {job} is not proved to be gone: {words} ({rest})", fix=fixes)

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        job, refused = states.JobName.parse(job_id), dict[api.Resource, api.Forbidden]()
        left = _left(self.cluster, job, self._settings, refused)
        if words := "; ".join(error.message for error in refused.values()):
            raise PlatformRefused(f"what is left of job {job} cannot be listed: {words}")
        return tuple(_told({resource: things}) for resource, things in left.items())


def _stop(jobs: dict[JobId, JobWatch], *ids: JobId) -> None:
    for job_id in ids or tuple(jobs):
        if (watch := jobs.pop(job_id, None)) is not None:
            watch.stop()


def digest_of(items: Any) -> str:
    """A checksum of what is sent, but for labels, which tell who has sent it and change nothing."""
    text = json.dumps(items)
    sent = json.loads(text, object_pairs_hook=lambda pairs: {name: one for name, one in pairs if name != "labels"})
    return sha256(json.dumps(sent, sort_keys=True).encode()).hexdigest()[:32]


def _left(
    cluster: Cluster, job: states.JobName, settings: GkePlatformConfig, refused: dict[api.Resource, api.Forbidden]
) -> Left:
    left = {}
    for resource in made_of(settings):
        # JobSet does not hand our labels on to the Service that it makes.
        which = {"fields": f"metadata.name={job.name}"} if resource is api.SERVICES else {"labels": job.labels}
        try:
            found, _ = cluster.list(resource, job.namespace, **which)
        except api.NotThere:
            continue  # a cluster without that kind has nothing of it
        except api.Forbidden as error:
            refused[resource] = error
            continue
        if found:
            left[resource] = found
    return left


def _told(left: Left) -> str:
    """Return what is left, and what holds it: a finalizer that nobody serves, or the machine that a pod is on."""
    parts = []
    for resource, things in left.items():
        held = sorted({one for thing in things for one in thing["metadata"].get("finalizers", ())})
        some = []
        for thing in things[:3]:
            machine, since = thing.get("spec", {}).get("nodeName"), states.silent_since(thing)
            silent = f", which has not answered since {since}" if since else ""
            some.append(thing["metadata"]["name"] + (f" on {machine}{silent}" if machine else ""))
        parts.append(f"{len(things)} {resource} ({', '.join(some)}" + f"; held by {', '.join(held)}" * bool(held) + ")")
    return ", ".join(parts)
