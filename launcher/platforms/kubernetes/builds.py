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

import re
import time
from collections import deque
from typing import Any

from launcher.errors import ImageProblem, ImageUnreachable, JobCancelled, PlatformRefused, PlatformUnreachable
from launcher.images.build import Build, Log, Site
from launcher.images.context import DOCKERFILE
from launcher.images.docker import TAIL
from launcher.images.oci import ImageReference, is_local
from launcher.images.settings import ClusterImage
from launcher.platforms.kubernetes.cluster import JOBS, PODS, AlreadyThere, ApiObject, ApiRefused, Cluster
from launcher.platforms.kubernetes.connection import connect
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from launcher.platforms.log_files import terminal_text
from litgpt_demo.errors import words_of
from litgpt_demo.secrets import redacted
from litgpt_demo.storage import bucket_path

CONTAINER = "builder"
_PULLS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
_POLL = 5.0
"""Seconds between two looks."""
_WAITING = 900.0
"""Seconds for which a builder may wait for a machine; autoscalers need some minutes."""
_KEPT = 3600
"""Seconds for which the cluster keeps an ended Job."""

# Steps of a Dockerfile change owners and users; kaniko itself writes the base's files with the owners that they have.
# All of them are in the set that Pod Security's baseline allows to be added.
# https://kubernetes.io/docs/concepts/security/pod-security-standards/#baseline
# INFERRED: that these suffice for apt-get and pip; nobody has run this Job on a real cluster.
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETFCAP", "SETGID", "SETUID")


def build_job(
    build: Build, image: ClusterImage, *, context: str, namespace: str, service_account: str | None
) -> dict[str, Any]:
    """Return the Job that builds. Its pod tells the digest as its last word (terminationMessagePath)."""
    named = {"build-arg": build.args, "label": build.labels}
    size = {"cpu": image.cpus, "memory": image.memory, "ephemeral-storage": image.disk}
    registry = ImageReference.parse(build.tag).host
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image.builder,
        "args": [
            f"--context={context}",
            f"--dockerfile={DOCKERFILE}",
            f"--destination={build.tag}",
            f"--custom-platform={build.platform}",
            *([f"--target={build.target}"] if build.target else []),
            *(f"--{option}={name}={value}" for option, given in named.items() for name, value in given.items()),
            *([f"--insecure-registry={registry}"] if is_local(registry) else []),
            "--digest-file=/dev/termination-log",
            "--image-download-retry=3",
            "--push-retry=3",
            "--log-format=text",
            "--log-timestamp=false",
        ],
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
        "containers": [container],
    }
    if image.push_secret:
        container["volumeMounts"] = [{"name": "push", "mountPath": "/kaniko/.docker", "readOnly": True}]
        items = [{"key": ".dockerconfigjson", "path": "config.json"}]
        spec["volumes"] = [{"name": "push", "secret": {"secretName": image.push_secret, "items": items}}]
    labels = {"app.kubernetes.io/managed-by": "train-litgpt", "app.kubernetes.io/component": "image"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(build.tag), "namespace": namespace, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": image.timeout,
            "ttlSecondsAfterFinished": _KEPT,
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def job_name(tag: str) -> str:
    """Return the name of the Job that builds an image: one per repository and key, so that nobody builds it twice."""
    reference = ImageReference.parse(tag)
    where = re.sub(r"[^a-z0-9]+", "-", reference.path.rpartition("/")[2]).strip("-")[:24].strip("-")
    return f"image-{where}-{reference.tag}"


class ClusterBuilds:
    """Jobs that build, in the namespace of the platform."""

    def __init__(self, settings: GkePlatformConfig, image: ClusterImage, site: Site) -> None:
        if bucket_path(site.root) is None:
            raise ImageProblem(
                f"image.kind=cluster sends the build's files through a bucket, and root={site.root!r} is none; set "
                "root to gs://bucket/prefix, or image.kind to docker"
            )
        self._image, self._site, self._settings = image, site, settings

    def local_id(self, reference: str) -> str:
        """Nothing: a pod starts without any image but its own."""
        return ""

    def build(self, build: Build, *, log: Log) -> str:
        """Start the Job, or follow the one that is there; it is deleted if we are stopped."""
        cluster = connect(self._settings)
        try:
            job, ours = self._start(cluster, build, log)
            try:
                return self._follow(cluster, job, build.tag, log)
            except (ImageProblem, JobCancelled, PlatformUnreachable):
                raise
            except BaseException:
                if ours:
                    cluster.delete_one(JOBS, job)
                    log(f"deleted Job {job['metadata']['name']}")
                raise
        except PlatformUnreachable as error:
            raise ImageUnreachable(f"{build.tag}: {error}") from error
        except PlatformRefused as error:
            raise ImageProblem(
                f"{build.tag}: {error}; deployments/rbac.yaml has the roles that are needed, and Pod Security's "
                "`restricted` takes no builder that is root in its container: see image.kind=cloudbuild"
            ) from error

    def _start(self, cluster: Cluster, build: Build, log: Log) -> tuple[ApiObject, bool]:
        name, place = job_name(build.tag), self._settings
        found = cluster.get(JOBS, place.namespace, name)
        if found is not None and _ended(found) is None:
            log(f"Job {name} builds {build.tag} already")
            return found, False
        if found is not None:  # it failed, or its image has been removed from the registry
            cluster.delete_one(JOBS, found)
            self._until_gone(cluster, name)
        job = build_job(
            build, self._image, context=build.context.store(self._site.root), namespace=place.namespace,
            service_account=place.service_account,
        )  # fmt: skip
        try:
            made = cluster.create(JOBS, place.namespace, job)
        except AlreadyThere:
            return self._start(cluster, build, log)
        log(f"Job {name} in namespace {place.namespace} builds {build.tag}")
        return made, True

    def _until_gone(self, cluster: Cluster, name: str) -> None:
        while cluster.get(JOBS, self._settings.namespace, name) is not None:
            self._site.pause(_POLL)

    def _follow(self, cluster: Cluster, job: ApiObject, tag: str, log: Log) -> str:
        name = job["metadata"]["name"]
        lines = _Lines(cluster, self._settings.namespace, name, log)
        begun = time.monotonic()
        while True:
            pod, waits = lines.pass_on()
            found = cluster.get(JOBS, self._settings.namespace, name)
            if found is None:
                raise ImageProblem(f"{tag}: somebody deleted Job {name}; run again to build it")
            if (end := _ended(found)) is not None:
                pod, _ = lines.pass_on()
                return _digest(tag, name, pod, end, lines.tail)
            if waits and (waits.startswith(_PULLS) or time.monotonic() - begun > _WAITING):
                raise ImageProblem(
                    f"{tag}: the pod of Job {name} does not start: {waits}; fix image.builder, image.cpus, "
                    f"image.memory or image.disk, then kubectl delete job {name} --namespace {self._settings.namespace}"
                )
            self._site.pause(_POLL)


def _ended(job: ApiObject) -> str | None:
    """Return the words of a Job that has ended, empty for a good end; None for one that goes on."""
    for one in job.get("status", {}).get("conditions") or ():
        if one["status"] == "True" and one["type"] in {"Complete", "Failed"}:
            return "" if one["type"] == "Complete" else f"{one.get('reason', '')}: {one.get('message', '')}"
    return None


def _digest(tag: str, name: str, pod: ApiObject | None, end: str, tail: deque[str]) -> str:
    states = (pod or {}).get("status", {}).get("containerStatuses") or ()
    told = next((one["state"].get("terminated", {}).get("message", "") for one in states), "")
    if not end and (found := re.search(r"sha256:[0-9a-f]{64}", told)):
        return found[0]
    said = "\n".join(tail)
    if not end:
        raise ImageProblem(f"{tag}: Job {name} ended well and told no digest:\n{said}\n-> see image.builder")
    lowered = said.lower()
    fix = "fix that step of the Dockerfile and run again"
    if "unauthorized" in lowered or "denied" in lowered:
        fix = "let it push: name a secret in image.push_secret, or give platform.service_account's Google account "
        fix += "roles/artifactregistry.writer on image.repository"
    elif "storage: " in lowered:
        fix = "let it read the bucket: give platform.service_account's Google account roles/storage.objectUser on it"
    elif "DeadlineExceeded" in end:
        fix = "raise image.timeout, or image.cpus"
    raise ImageProblem(f"{tag}: Job {name} failed ({words_of(end)}):\n{said}\n-> {fix}")


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
        self._seen = 0
        self.tail: deque[str] = deque(maxlen=TAIL)

    def pass_on(self) -> tuple[ApiObject | None, str]:
        """Pass on the lines that are new; returns the pod, and why it waits if it has not started."""
        pods, _ = self._cluster.list(PODS, self._namespace, labels=f"batch.kubernetes.io/job-name={self._job}")
        if not pods:
            return None, "it was not created"
        pod = pods[0]
        state: ApiObject = next((one["state"] for one in pod.get("status", {}).get("containerStatuses") or ()), {})
        if not state.keys() & {"running", "terminated"}:
            return pod, _waits(pod, state.get("waiting", {}))
        try:
            lines = list(self._cluster.log(self._namespace, pod["metadata"]["name"], CONTAINER, follow=False))
        except ApiRefused:
            return pod, ""  # the container has only just started, or is gone
        for line in lines[self._seen :]:
            self._tell(line)
        self._seen = len(lines)
        return pod, ""

    def _tell(self, line: bytes) -> None:
        text = terminal_text(redacted(line.decode(errors="replace").partition(" ")[2]))
        self.tail.append(text)
        self._log(text)
