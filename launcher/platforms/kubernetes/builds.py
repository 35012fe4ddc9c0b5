"""A Job in the platform's cluster as a builder, for where no container engine is at hand.

It runs kaniko, which unpacks the base image into its own container and runs the Dockerfile's steps there: no daemon, no
namespaces, no mounts. Google archived the project in June 2025; the fork that is kept up, and publishes images, is
https://github.com/osscontainertools/kaniko (its README; woodpecker-ci/plugin-kaniko#76 and renovatebot/renovate#40203
compare it with Chainguard's, which takes no changes and has no public images). The others, as of 2026:

* Rootless BuildKit needs seccomp and AppArmor "Unconfined" for its user namespace
  (https://github.com/moby/buildkit/blob/master/docs/rootless.md), which Pod Security's baseline forbids.
* Buildah in a container needs either the same or chroot isolation with more capabilities than kaniko's.

The cost: the builder is root in its container, so that Pod Security's `restricted` refuses it, as `baseline` does not.
Kaniko reads contexts from buckets and pushes to Artifact Registry with the pod's own identity.
"""

from __future__ import annotations

import json
import re
from collections import deque
from contextlib import suppress
from hashlib import sha256
from math import inf
from typing import Any

from launcher.environment import literal
from launcher.errors import ImageProblem, ImageUnreachable, PlatformRefused, PlatformUnreachable
from launcher.images.build import Build, Log, Site
from launcher.images.context import DOCKERFILE
from launcher.images.docker import TAIL
from launcher.images.oci import ImageReference, is_local
from launcher.images.settings import ClusterImage
from launcher.platforms.kubernetes.cluster import (
    EVENTS,
    JOBS,
    PODS,
    AlreadyThere,
    ApiObject,
    ApiRefused,
    Cluster,
    Forbidden,
)
from launcher.platforms.kubernetes.connection import connect
from launcher.platforms.kubernetes.logs import Place, read
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import TrainLitgptError, give_up, was_given_up, words_of
from litgpt_demo.secrets import redacted

CONTAINER = "builder"
SETTINGS = "train-litgpt/image-settings"
"""The annotation that tells Jobs apart which build one image with other resources, secrets or builders."""
LOGIN_TYPE = "kubernetes.io/dockerconfigjson"
_PULLS = ("ErrImagePull", "ImagePullBackOff")
_BROKEN = ("InvalidImageName", "CreateContainerConfigError", "it was refused")
_POLL = 5.0
"""Seconds between two looks."""
_WAITING = 900.0
"""Seconds for which a builder may wait for a machine; autoscalers need some minutes."""
_PULLING = 120.0
"""Seconds for which a pull of the builder's image may fail: the kubelet tries again after 10, 20, 40 and 80."""
_SILENCE = 600.0
"""Seconds for which the API may be away while a Job goes on: an upgrade of a zonal control plane takes minutes."""
_DELETING = 120.0
"""Seconds for which a Job may take to disappear; its pod has 30 to end."""
_KEPT = 3600
"""Seconds for which the cluster keeps an ended Job."""

# Steps of a Dockerfile change owners and users; kaniko itself writes the base's files with the owners that they have.
# All of them are in the set that Pod Security's baseline allows to be added.
# https://kubernetes.io/docs/concepts/security/pod-security-standards/#baseline
# INFERRED: that these suffice for apt-get and pip; nobody has run this Job on a real cluster.
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETFCAP", "SETGID", "SETUID")

# https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md: no node is emptied under a build
_UNMOVED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def build_job(
    build: Build, image: ClusterImage, *, context: str, namespace: str, service_account: str | None
) -> dict[str, Any]:
    """Return the Job that builds. Its pod reports the digest in its termination message (terminationMessagePath)."""
    labels = {"app.kubernetes.io/managed-by": "train-litgpt", "app.kubernetes.io/component": "image"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(build.tag),
            "namespace": namespace,
            "labels": labels,
            "annotations": {SETTINGS: _settings_mark(image, service_account)},
        },
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": image.timeout,
            "ttlSecondsAfterFinished": _KEPT,
            # Without it a Job says BackoffLimitExceeded of a pod that was preempted, and the pod is gone by then.
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "template": {
                "metadata": {"labels": labels, "annotations": _UNMOVED},
                "spec": _pod_spec(build, image, context, service_account),
            },
        },
    }


def _pod_spec(build: Build, image: ClusterImage, context: str, service_account: str | None) -> dict[str, Any]:
    size = {"cpu": image.cpus, "memory": image.memory, "ephemeral-storage": image.disk}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image.builder,
        "args": _arguments(build, context),
        "resources": {"requests": size, "limits": {"memory": image.memory}},
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(_CAPABILITIES)},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        **({"serviceAccountName": service_account} if service_account else {}),
        # Workload Identity asks the metadata server, not the API server with a token of this pod's.
        "automountServiceAccountToken": False,
        # Kaniko runs the steps itself and emulates nothing. GKE tolerates its taint of arm64 for pods that select it.
        # https://cloud.google.com/kubernetes-engine/docs/how-to/prepare-arm-workloads-for-deployment
        "nodeSelector": {"kubernetes.io/arch": build.platform.split("/")[1]},
        "containers": [container],
    }
    if image.push_secret:
        container["volumeMounts"] = [{"name": "push", "mountPath": "/kaniko/.docker", "readOnly": True}]
        items = [{"key": ".dockerconfigjson", "path": "config.json"}]
        spec["volumes"] = [{"name": "push", "secret": {"secretName": image.push_secret, "items": items}}]
    return spec


def _arguments(build: Build, context: str) -> list[str]:
    registry = ImageReference.parse(build.tag).host
    given = [
        f"--context={context}",
        f"--dockerfile={DOCKERFILE}",
        f"--destination={build.tag}",
        f"--custom-platform={build.platform}",
        *build.options,
        *([f"--insecure-registry={registry}"] if is_local(registry) else []),
        "--digest-file=/dev/termination-log",
        "--image-download-retry=3",
        "--push-retry=3",
        "--log-format=text",
        "--log-timestamp=false",
    ]
    return [literal(one) for one in given]


def job_name(tag: str) -> str:
    """Return the name of the Job that builds an image: one per repository and key, so that nobody builds it twice."""
    reference = ImageReference.parse(tag)
    where = re.sub(r"[^a-z0-9]+", "-", reference.path.rpartition("/")[2]).strip("-")[:22].strip("-")
    return f"image-{where}-{reference.tag}-{sha256(tag.encode()).hexdigest()[:8]}"


def _settings_mark(image: ClusterImage, service_account: str | None) -> str:
    given = image.model_dump(include={"builder", "cpus", "memory", "disk", "push_secret", "timeout"})
    return sha256(json.dumps([given, service_account], sort_keys=True).encode()).hexdigest()[:16]


class _NotStarted(ImageProblem):
    """The pod of a Job does not start; the Job would only be in the way of the next try."""


class ClusterBuilds:
    """Jobs that build, in the namespace of the platform."""

    def __init__(self, settings: GkePlatformConfig, image: ClusterImage, site: Site) -> None:
        site.require_bucket("cluster")
        self._image, self._site, self._settings = image, site, settings

    @property
    def _account(self) -> str | None:
        return self._image.service_account or self._settings.service_account

    def local_id(self, reference: str) -> str:
        """Nothing: a pod starts without any image but its own."""
        return ""

    def build(self, build: Build, *, log: Log) -> str:
        """Start the Job, or follow the one that is there; ours is deleted if we are stopped or it cannot start."""
        cluster = connect(self._settings)
        try:
            self._check_push_secret(cluster, build.tag)
            job, ours = self._start(cluster, build, log)
            name = job["metadata"]["name"]
            try:
                where = f"in namespace {self._settings.namespace}"
                log(f"Job {name} {where} builds {build.tag}{'' if ours else ' already'}")
                return self._follow(cluster, name, build.tag, log)
            except BaseException as error:
                # A Job whose end is not known yet goes on, and the next try follows it.
                if ours and (isinstance(error, _NotStarted) or not isinstance(error, Exception)):
                    _withdraw(cluster, job, log)
                raise
        except PlatformUnreachable as error:
            raise ImageUnreachable(f"{build.tag}: {error}", given_up=was_given_up(error)) from error
        except PlatformRefused as error:
            fix = "; deployments/rbac.yaml has the roles that are needed" if isinstance(error, Forbidden) else ""
            raise ImageProblem(f"{build.tag}: {error}{fix}") from error

    def _check_push_secret(self, cluster: Cluster, tag: str) -> None:
        """Refuse a secret that no pod could mount: it would wait for it without an end."""
        name, namespace = self._image.push_secret, self._settings.namespace
        if name is None:
            return
        with suppress(Forbidden):
            kind = cluster.secret_type(namespace, name)
            if kind != LOGIN_TYPE:
                what = "does not exist" if kind is None else f"is of type {kind}, not {LOGIN_TYPE}"
                raise ImageProblem(
                    f"{tag}: Secret {name} in namespace {namespace}, which image.push_secret names, {what}; kubectl "
                    f"create secret docker-registry {name} --namespace {namespace} --docker-server=HOST "
                    "--docker-username=NAME --docker-password=…"
                )

    def _start(self, cluster: Cluster, build: Build, log: Log) -> tuple[ApiObject, bool]:
        """Return the Job that builds the image, and whether we have created it."""
        name, place = job_name(build.tag), self._settings
        found = cluster.get(JOBS, place.namespace, name)
        if found is not None and self._goes_on(cluster, found, build.tag):
            return found, False
        if found is not None:
            log(f"Job {name} is replaced: it has ended, or does not start and has other settings")
            cluster.delete_one(JOBS, found)
            self._until_gone(cluster, found)
        job = build_job(
            build, self._image, context=build.context.store(self._site.root), namespace=place.namespace,
            service_account=self._account,
        )  # fmt: skip
        self._site.pause(0)  # the last moment at which a step that is cancelled leaves nothing behind
        try:
            return cluster.create(JOBS, place.namespace, job), True
        except AlreadyThere:
            return self._start(cluster, build, log)

    def _goes_on(self, cluster: Cluster, job: ApiObject, tag: str) -> bool:
        """Tell whether a Job that was found is worth following: it has not ended, and could start as it is."""
        if f"--destination={tag}" not in job["spec"]["template"]["spec"]["containers"][0].get("args", ()):
            name = job["metadata"]["name"]
            raise ImageProblem(f"{tag}: Job {name} builds another image; delete it, or wait until it has ended")
        if _ended(job) is not None:
            return False
        ours = _settings_mark(self._image, self._account)
        if (job["metadata"].get("annotations") or {}).get(SETTINGS) == ours:
            return True
        pod = _pod(cluster, self._settings.namespace, job["metadata"]["name"])
        return pod is not None and bool(_state(pod).keys() & {"running", "terminated"})

    def _until_gone(self, cluster: Cluster, job: ApiObject) -> None:
        name, waited = job["metadata"]["name"], 0.0
        while (found := cluster.get(JOBS, self._settings.namespace, name)) is not None:
            if found["metadata"]["uid"] != job["metadata"]["uid"]:
                return
            if waited >= _DELETING:
                raise ImageProblem(
                    f"Job {name} in namespace {self._settings.namespace} was deleted {waited:.0f} s ago and is still "
                    "there; see why its pod does not end, for example on a node that is gone"
                )
            self._site.pause(_POLL)
            waited += _POLL

    def _follow(self, cluster: Cluster, name: str, tag: str, log: Log) -> str:
        lines = _Lines(cluster, self._settings.namespace, name, log)
        waits, waited, limit, silent = "", 0.0, inf, 0.0
        while True:
            try:
                waits = lines.pass_on()
                found = cluster.get(JOBS, self._settings.namespace, name)
                if found is None:
                    raise ImageProblem(f"{tag}: somebody deleted Job {name}; run again to build it")
                if (end := _ended(found)) is not None:
                    lines.pass_on()
                    return _digest(tag, name, lines.pod, end, lines.tail)
                silent, before, limit = 0.0, limit, _patience(waits)
                waited = waited + _POLL if limit == before else 0.0
            except PlatformUnreachable as error:
                silent += _POLL
                if silent > _SILENCE:
                    give_up(error)
                    raise
            if waited >= limit:
                fix = (
                    "fix image.builder"
                    if waits.startswith((*_PULLS, *_BROKEN))
                    else ("fix image.cpus, image.memory or image.disk, which no machine may have, or image.push_secret")
                )
                raise _NotStarted(f"{tag}: the pod of Job {name} does not start: {waits}; {fix}, and run again")
            self._site.pause(_POLL)


def _withdraw(cluster: Cluster, job: ApiObject, log: Log) -> None:
    """Delete a Job of ours; where that fails, what we were stopped by is still the reason that is reported."""
    name = job["metadata"]["name"]
    try:
        cluster.delete_one(JOBS, job)
    except TrainLitgptError as error:
        log(f"Job {name} could not be deleted: {words_of(error)}")
    else:
        log(f"deleted Job {name}")


def _patience(waits: str) -> float:
    """Return the seconds for which a pod may wait for such a reason; infinitely many for one that has started."""
    if waits.startswith(_BROKEN):
        return 0.0
    if waits.startswith(_PULLS):
        return _PULLING
    return _WAITING if waits else inf


def _pod(cluster: Cluster, namespace: str, job: str) -> ApiObject | None:
    pods, _ = cluster.list(PODS, namespace, labels=f"batch.kubernetes.io/job-name={job}")
    return pods[0] if pods else None


def _state(pod: ApiObject) -> ApiObject:
    """Return the state of a pod's only container: waiting, running or terminated."""
    state: ApiObject = next((one["state"] for one in pod.get("status", {}).get("containerStatuses") or ()), {})
    return state


def _ended(job: ApiObject) -> str | None:
    """Return the words of a Job that has ended, empty for a good end; None for one that goes on."""
    for one in job.get("status", {}).get("conditions") or ():
        if one["status"] == "True" and one["type"] in {"Complete", "Failed"}:
            return "" if one["type"] == "Complete" else f"{one.get('reason', '')}: {one.get('message', '')}"
    return None


def _digest(tag: str, name: str, pod: ApiObject | None, end: str, tail: deque[str]) -> str:
    """Return what the pod reports.

    Raises:
        ImageProblem: it failed.
        ImageUnreachable: it was stopped from outside, and may be built again as it is.
    """
    said = "\n".join(tail)
    if not end:
        if found := re.search(r"sha256:[0-9a-f]{64}", _state(pod or {}).get("terminated", {}).get("message", "")):
            return found[0]
        raise ImageProblem(f"{tag}: Job {name} ended well and reported no digest:\n{said}\n-> see image.builder")
    status = (pod or {}).get("status", {})
    if "DisruptionTarget" in end and status.get("reason") != "Evicted":
        raise ImageUnreachable(f"{tag}: the pod of Job {name} was stopped from outside ({words_of(end)}); run again")
    words = filter(None, (words_of(end), status.get("reason"), status.get("message")))
    raise ImageProblem(f"{tag}: Job {name} failed ({': '.join(words)}):\n{said}\n-> {_fix(pod or {}, end, said)}")


def _fix(pod: ApiObject, end: str, said: str) -> str:
    """Return what to do; what the kubelet says of the pod is surer than the builder's last lines."""
    status, lowered = pod.get("status", {}), said.lower()
    if _state(pod).get("terminated", {}).get("reason") == "OOMKilled":
        return "it ran out of memory: raise image.memory"
    if status.get("reason") == "Evicted":
        short = "image.disk" if "ephemeral" in status.get("message", "") else "image.memory"
        return f"its node ran short: raise {short}, so that it gets a machine with enough"
    if "DeadlineExceeded" in end:
        return "raise image.timeout, or image.cpus"
    if "unauthorized" in lowered or "denied" in lowered:
        return (
            "let it push: name a secret in image.push_secret, or give image.service_account's Google account "
            "roles/artifactregistry.writer on image.repository"
        )
    if "storage: " in lowered:
        return "let it read the bucket: give image.service_account's Google account roles/storage.objectViewer on it"
    return "fix that step of the Dockerfile and run again"


def _waits(pod: ApiObject, waiting: ApiObject) -> str:
    """Return why a pod has not started, beginning with the reason of its container where that has one."""
    conditions = pod.get("status", {}).get("conditions") or ()
    unmet = [str(one["message"]) for one in conditions if one["status"] == "False" and one.get("message")]
    told = [waiting.get("reason", ""), waiting.get("message", "")] if waiting else unmet
    return " ".join(filter(None, told)) or "it is being scheduled"


class _Lines:
    """The log of a Job's only pod, passed on line by line."""

    def __init__(self, cluster: Cluster, namespace: str, job: str, log: Log) -> None:
        self._cluster, self._namespace, self._job, self._log = cluster, namespace, job, log
        self._place = Place()
        self.pod: ApiObject | None = None
        """The pod as it was last seen."""
        self.tail: deque[str] = deque(maxlen=TAIL)

    def pass_on(self) -> str:
        """Pass on the lines that are new; returns why the pod waits, empty if it has started."""
        pod = _pod(self._cluster, self._namespace, self._job)
        if pod is None:
            return "" if self.pod else self._refusal()
        self.pod, state = pod, _state(pod)
        if not state.keys() & {"running", "terminated"}:
            return _waits(pod, state.get("waiting", {}))
        try:
            for text, place in read(self._cluster, self._namespace, pod, self._place, CONTAINER, follow=False):
                self._place = place
                self._tell(text)
        except ApiRefused:
            pass  # the container has only just started, or is gone
        return ""

    def _refusal(self) -> str:
        """Return why there is no pod. Pod Security refuses pods, not their Jobs."""
        asked = f"involvedObject.kind=Job,involvedObject.name={self._job},reason=FailedCreate"
        events, _ = self._cluster.list(EVENTS, self._namespace, fields=asked)
        words = events[-1]["message"] if events else ""
        if "PodSecurity" in words:
            return (
                f"it was refused: {words}: `restricted` allows no root, which a builder is: see image.kind=cloudbuild"
            )
        return f"it was not created: {words}" if words else "it was not created"

    def _tell(self, line: str) -> None:
        text = redacted(line)
        self.tail.append(text)
        self._log(text)
