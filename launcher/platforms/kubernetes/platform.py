"""Kubernetes as a platform: GKE with its GPU networks, or any other cluster."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar

from launcher.errors import ConfigProblem, LauncherError, PlatformRefused, PlatformUnreachable
from launcher.findings import finding_of
from launcher.job import UNBUILT, Job, JobId, JobState, JobStatus, LogPage, Submission
from launcher.platforms.base import Avoidable, Capability
from launcher.platforms.kubernetes.access import missing, require_permissions
from launcher.platforms.kubernetes.checks import Submitted, check_settings
from launcher.platforms.kubernetes.cluster import (
    JOBSETS,
    NAMESPACES,
    SENT,
    AlreadyThere,
    ApiObject,
    ApiRefused,
    Cluster,
    Forbidden,
    NotThere,
    Resource,
)
from launcher.platforms.kubernetes.connection import connect
from launcher.platforms.kubernetes.deletion import listed, remove
from launcher.platforms.kubernetes.informer import JobName, JobWatch, Snapshot, snapshot
from launcher.platforms.kubernetes.logs import Follower, log_page
from launcher.platforms.kubernetes.losses import losses
from launcher.platforms.kubernetes.machines import spare_machines
from launcher.platforms.kubernetes.pending import REFUSALS, explain
from launcher.platforms.kubernetes.preflight import examine_cluster
from launcher.platforms.kubernetes.refusals import advice
from launcher.platforms.kubernetes.render import WorkloadObjects, job_id_of, made_of, render
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.findings import Finding
from litgpt_demo.storage import open_storage

DIGEST = "train-litgpt/submission"
"""Annotation of the JobSet or Job: a checksum of what was sent. What is stored differs from that, by defaults and by
what controllers change."""

_BAD_MACHINE = (
    "have the machine mended, or cordon it off (kubectl cordon NAME) and add another; or take fewer platform.nodes"
)
_EXPLAIN = 20.0
"""Seconds between two questions why a job waits."""
_GONE = 120.0
"""Seconds, beyond the pods' grace period, that removing a job may take."""

_serves_jobsets: dict[tuple[str | None, ...], bool] = {}
"""Facts that this process has learned of clusters. `render` must not ask, and has to know."""


class GkePlatform:
    """Runs the nodes of a job as pods: a JobSet, or an Indexed Job. A job's id is `namespace/name`.

    Who asks for a job's status or logs once gets an answer by asking the cluster; who asks again is taken to wait, and
    gets a watch.
    """

    name: ClassVar[str] = "gke"
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.IMAGES, Capability.ANYWHERE})
    poll_seconds: ClassVar[float] = 5.0  # a look costs nothing, for jobs are watched

    def __init__(self, settings: GkePlatformConfig, *, gone: float = _GONE) -> None:
        self._settings, self._gone = settings, gone
        self._connected: Cluster | None = None
        self._rendered: dict[JobId, Job] = {}
        self._snapshots: dict[JobId, Snapshot] = {}
        self._watches: dict[JobId, JobWatch] = {}
        self._followers: dict[JobId, Follower] = {}
        self._reasons: dict[JobId, tuple[float, tuple[Finding, ...]]] = {}
        self._refused_since: dict[JobId, float] = {}
        weakref.finalize(self, _stop, self._followers, self._watches)

    @property
    def cluster(self) -> Cluster:
        """Connected to when it is first needed.

        Raises:
            LauncherError: it cannot be reached, by its name or with these credentials.
        """
        if self._connected is None:
            self._connected = connect(self._settings)
        return self._connected

    @property
    def workload(self) -> WorkloadObjects:
        """Return the kind of object for jobs: for `auto` a JobSet, unless this process saw a cluster without it."""
        if self._settings.workload != "auto":
            return self._settings.workload
        return "jobset" if _serves_jobsets.get(self._key, True) else "job"

    @property
    def _key(self) -> tuple[str | None, ...]:
        settings = self._settings
        return settings.cluster, settings.location, settings.project, settings.kubeconfig, settings.context

    def close(self) -> None:
        """End all watches, as is done too when the platform is no longer used."""
        _stop(self._followers, self._watches)

    # --- before it starts ---------------------------------------------------------------------------------------------

    def render(self, job: Job) -> Submission:
        """The objects that would be created.

        Raises:
            ConfigProblem: names do not fit, variables clash, or the network is not to be had.
        """
        submission = render(job, self._settings, self.workload)
        self._rendered[submission.job_id] = job
        return submission

    def check_access(self) -> str:
        """Prove that the cluster answers, and lets us do what a run does.

        Raises:
            LoginProblem: no credentials, or refused ones, or permissions that are missing; all are named.
            ConfigProblem: there is no such namespace, in which nobody would have any permission.
        """
        version = self.cluster.version()
        self._require_namespace()
        self._learn()
        lacking = missing(self.cluster, self._settings, self.workload)
        require_permissions(lacking, self.cluster.where)
        return f"{self.cluster.where} answers ({version})"

    def _require_namespace(self) -> None:
        name = self._settings.namespace
        try:
            there = self.cluster.get(NAMESPACES, None, name) is not None
        except Forbidden:
            return  # namespaces may not be looked at; the permissions in it will tell
        if not there:
            raise ConfigProblem(
                f"platform.namespace={name}: {self.cluster.where} has no such namespace",
                fix=f"create it with `kubectl create namespace {name}`, or fix platform.namespace",
            )

    def check(self, submission: Submission) -> Iterator[Finding]:
        """Yield what the config alone shows to be wrong, then what the cluster lacks for the job."""
        items = submission.body["items"]
        yield from check_settings(Submitted(items, self._settings))
        try:
            self._learn()
            if self.workload == "job" and submission.job_id in self._rendered:
                # `auto`, rendered before the cluster was seen to have no JobSet: it is rendered as a Job from now on.
                items = self.render(self._rendered[submission.job_id]).body["items"]
            yield from examine_cluster(self.cluster, self._settings, items)
        except LauncherError as error:
            fix = "without the cluster, nothing in it can be checked; `train-litgpt doctor` says how to get to it"
            yield Finding(finding_of(error, "gke.cluster").severity, "gke.cluster", str(error), fix)

    def avoidable(self, job: Job) -> Avoidable:
        """Return how many of the cluster's machines this job does not need; pools that grow have others."""
        items = render(job, self._settings, self.workload).body["items"]
        try:
            most = spare_machines(self.cluster, Submitted(items=items, settings=self._settings))
        except LauncherError:  # machines may not be looked at, or nobody answers
            most = None
        return Avoidable(most, _BAD_MACHINE)

    def _learn(self) -> None:
        if self._settings.workload == "auto":
            _serves_jobsets[self._key] = self.cluster.serves(JOBSETS)

    # --- submit -------------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> JobId:
        """Create the job's objects, or adopt a job of that name that was made of the very same ones.

        The JobSet or Job comes first, and owns what else there is: nothing outlives it, also if another removes it.

        Raises:
            PlatformRefused: rendered for another platform, without an image, another job has that name, or the cluster
                says no; nothing is left behind.
            PlatformUnreachable: no answer, or an older job of that name is still being removed.
        """
        self._require_ready(submission)
        try:
            self._send(submission)
        except ApiRefused as error:
            raise PlatformRefused(f"{error}; {advice(error.message)}") from error
        return submission.job_id

    def _send(self, submission: Submission) -> None:
        job, items = JobName.parse(submission.job_id), submission.body["items"]
        body = next(item for item in items if item["kind"] in {"JobSet", "Job"})
        self._require_kind(job, body["kind"])
        self._leave_a_mark(submission, body)
        made: list[tuple[Resource, ApiObject]] = []
        try:
            workload = self._create_workload(job, body, digest_of(items), made)
            for item in items:
                if item is not body:
                    self._create_owned(job, item, workload, made)
        except PlatformRefused:
            for resource, thing in reversed(made):
                self.cluster.delete_one(resource, thing)
            raise

    def _require_ready(self, submission: Submission) -> None:
        if submission.platform != self.name:
            raise PlatformRefused(f"this was rendered for {submission.platform}; render it for {self.name}")
        if f'"{UNBUILT}"' in json.dumps(submission.body):
            raise PlatformRefused("the submission has no image; build it first (image.kind=docker), or name one")

    def _require_kind(self, job: JobName, kind: str) -> None:
        if kind == "JobSet" and not self.cluster.serves(JOBSETS):
            _serves_jobsets[self._key] = False
            raise PlatformRefused(
                f"{self.cluster.where} has no JobSet; install it (docs/gke.md), or set platform.workload=job"
            )
        other = "Job" if kind == "JobSet" else "JobSet"
        if self.cluster.get(SENT[other], job.namespace, job.name) is not None:
            raise PlatformRefused(
                f"a {other} {job.namespace}/{job.name} is there, and this would be a {kind}: two jobs would write over "
                "each other; cancel it first"
            )

    def _leave_a_mark(self, submission: Submission, body: ApiObject) -> None:
        """The submission's file in the attempt's folder: it identifies the attempt while its pods are still waiting."""
        spec = body["spec"]["replicatedJobs"][0]["template"]["spec"] if body["kind"] == "JobSet" else body["spec"]
        command = spec["template"]["spec"]["containers"][0]["command"]
        directory = command[command.index("--log-uri") + 1].replace("$$", "$")
        try:
            open_storage(directory).write("submission.json", json.dumps(submission.body, indent=1).encode())
        except (TrainLitgptError, OSError) as error:
            raise PlatformRefused(f"{directory} cannot be written: {error}; choose another root") from error

    def _create_workload(
        self, job: JobName, body: ApiObject, digest: str, made: list[tuple[Resource, ApiObject]]
    ) -> ApiObject:
        resource = SENT[body["kind"]]
        meta = body["metadata"]
        marked = {**body, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), DIGEST: digest}}}
        try:
            created = self._create(resource, job, marked)
        except AlreadyThere:
            there = self.cluster.get(resource, job.namespace, job.name)
            if there is None or there["metadata"].get("deletionTimestamp"):
                raise PlatformUnreachable(
                    f"an older {body['kind']} {job.name} is still being removed; submit again"
                ) from None
            if there["metadata"].get("annotations", {}).get(DIGEST) != digest:
                raise PlatformRefused(
                    f"{body['kind']} {job.namespace}/{job.name} is there, and was made of something else; cancel it, "
                    "or give the run another name"
                ) from None
            return there
        made.append((resource, created))
        return created

    def _create_owned(
        self, job: JobName, item: ApiObject, workload: ApiObject, made: list[tuple[Resource, ApiObject]]
    ) -> None:
        owner = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2" if workload["spec"].get("replicatedJobs") else "batch/v1",
            "kind": "JobSet" if workload["spec"].get("replicatedJobs") else "Job",
            "name": job.name,
            "uid": workload["metadata"]["uid"],
        }
        resource = SENT[item["kind"]]
        try:
            created = self._create(
                resource, job, {**item, "metadata": {**item["metadata"], "ownerReferences": [owner]}}
            )
        except AlreadyThere:
            there = self.cluster.get(resource, job.namespace, item["metadata"]["name"])
            owners = (there or {}).get("metadata", {}).get("ownerReferences", ())
            if there is not None and not any(one["uid"] == owner["uid"] for one in owners):
                raise PlatformRefused(
                    f"{item['kind']} {item['metadata']['name']} is there, and belongs to something else; remove it, "
                    "or give the run another name"
                ) from None
        else:
            made.append((resource, created))

    def _create(self, resource: Resource, job: JobName, body: ApiObject) -> ApiObject:
        try:
            return self.cluster.create(resource, job.namespace, body)
        except NotThere as error:  # the namespace, for the kind was looked for before
            raise PlatformRefused(f"{error}; create the namespace, or fix platform.namespace") from error

    # --- while it runs ------------------------------------------------------------------------------------------------

    def gave(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        """The id is namespace and name."""
        return job_id == job_id_of(self._settings, attempt_name)

    def status(self, job_id: JobId) -> JobStatus:
        """Return the state of the job, and if it waits or has lost a machine, the reason.

        Raises:
            PlatformUnreachable: no answer, or a watch that is not up to date.
        """
        watch = self._watched(job_id)
        pods: Callable[[], list[ApiObject]]
        if watch is None:
            found = self._snapshots[job_id] = snapshot(self.cluster, JobName.parse(job_id))
            told, workload = found.status(), found.workload
            if not told.state.live:
                del self._snapshots[job_id]
            pods = partial(list, found.pods)
        else:
            told, workload, pods = watch.status(), watch.workload, watch.pods
        if told.state.final or workload is None:
            return told
        missing = losses(pods(), told.exit_codes)
        if told.state is not JobState.PENDING:
            self._refused_since.pop(job_id, None)
            return replace(told, reasons=tuple(missing))
        reasons = (*missing, *self._why(job_id, workload, pods))
        return replace(told, reasons=reasons, refused=self._refused(job_id, reasons))

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        """Return the lines that the nodes have logged since `position`.

        Raises:
            PlatformUnreachable: no answer, or a watch that is not up to date.
        """
        job, watch = JobName.parse(job_id), self._watches.get(job_id)
        if watch is None:
            found = self._snapshots.get(job_id) or snapshot(self.cluster, job)
            return log_page(self.cluster, job, found.pods, position)
        over = watch.status().state.final
        follower = self._followers.get(job_id)
        if follower is None or not follower.knows(position):
            if follower is not None:
                follower.stop()
            follower = self._followers[job_id] = Follower(self.cluster, watch, position)
        told = follower.page(position, last=over)
        if over:
            self._forget(job_id)
        return told

    def _watched(self, job_id: JobId) -> JobWatch | None:
        """The job's watch; started for who has asked before and found it alive."""
        if job_id not in self._watches and (found := self._snapshots.pop(job_id, None)) is not None:
            self._watches[job_id] = JobWatch(self.cluster, JobName.parse(job_id), found)
        return self._watches.get(job_id)

    def _why(self, job_id: JobId, workload: ApiObject, pods: Callable[[], list[ApiObject]]) -> tuple[Finding, ...]:
        asked, known = self._reasons.get(job_id, (-_EXPLAIN, ()))
        if time.monotonic() - asked >= _EXPLAIN:
            known = tuple(explain(self.cluster, JobName.parse(job_id), workload, pods()))
            self._reasons[job_id] = (time.monotonic(), known)
        return known

    def _refused(self, job_id: JobId, reasons: tuple[Finding, ...]) -> Finding | None:
        """Return what keeps the job from running, once something of that kind has for longer than the settings allow.

        What it is may change its words from one look to the next: they name pods that are made anew.
        """
        refusal = next((reason for reason in reasons if reason.code in REFUSALS), None)
        if refusal is None:
            self._refused_since.pop(job_id, None)
            return None
        since = self._refused_since.setdefault(job_id, time.monotonic())
        return refusal if time.monotonic() - since > self._settings.refused_after else None

    def _forget(self, job_id: JobId) -> None:
        if (follower := self._followers.pop(job_id, None)) is not None:
            follower.stop()
        if (watch := self._watches.pop(job_id, None)) is not None:
            watch.stop()
        self._snapshots.pop(job_id, None)
        self._reasons.pop(job_id, None)
        self._refused_since.pop(job_id, None)

    # --- cancel -------------------------------------------------------------------------------------------------------

    def cancel(self, job_id: JobId) -> None:
        """Delete everything that has the job's labels, and list until nothing has.

        Raises:
            PlatformRefused: some of it may not be listed or deleted; the rest is deleted all the same.
            PlatformUnreachable: no answer, or something does not go; it is named.
        """
        self._forget(job_id)
        limit = self._settings.grace + self._gone
        remove(self.cluster, JobName.parse(job_id), made_of(self._settings), limit=limit)

    def left(self, job_id: JobId) -> tuple[str, ...]:
        """Return everything that has the job's labels, by kind."""
        return listed(self.cluster, JobName.parse(job_id), made_of(self._settings))


def _stop(followers: dict[JobId, Follower], watches: dict[JobId, JobWatch]) -> None:
    for follower in followers.values():
        follower.stop()
    for watch in watches.values():
        watch.stop()
    followers.clear()
    watches.clear()


def digest_of(items: list[ApiObject]) -> str:
    """A checksum of what is sent, but for labels, which tell who has sent it and change nothing."""
    return sha256(json.dumps(_unlabelled(items), sort_keys=True).encode()).hexdigest()[:32]


def _unlabelled(thing: Any) -> Any:
    if isinstance(thing, list):
        return [_unlabelled(one) for one in thing]
    if isinstance(thing, dict):
        return {name: _unlabelled(value) for name, value in thing.items() if name != "labels"}
    return thing
