"""Google Cloud Build as a builder: the context goes through the run's bucket, the log comes from there.

One build per image: a build carries its content hash as a tag. A build that is on its way already, of this launcher
before it was killed or of a colleague's, is followed instead of doubled: the API takes no request id.

Fields and filters: https://cloud.google.com/build/docs/api/reference/rest/v1/projects.locations.builds
"""

from __future__ import annotations

from collections import deque
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from launcher.environment import literal
from launcher.errors import ImageProblem, ImageUnreachable, JobCancelled
from launcher.formatting import terminal_text
from launcher.google import Service, google_errors
from launcher.images.context import TIME, Build, Log, Pause
from launcher.images.docker import TAIL, build_command
from launcher.images.oci import resolve
from launcher.images.settings import CloudBuildImage
from litgpt_demo.errors import TrainLitgptError, mark_no_retry, one_line
from litgpt_demo.secrets import redacted
from litgpt_demo.storage import ReadCursor, bucket_path, open_storage

if TYPE_CHECKING:
    from google.cloud.devtools.cloudbuild_v1 import CloudBuildClient

CLOUD_BUILD = Service(
    extra="cloudbuild",
    # https://cloud.google.com/build/docs/iam-roles-permissions
    roles="enable the Cloud Build API in the project and give yourself roles/cloudbuild.builds.editor, and "
    "roles/iam.serviceAccountUser on image.service_account",
    denied_error=ImageProblem,
    unavailable_error=ImageUnreachable,
    emulator="CLOUDBUILD_EMULATOR_HOST",
)

LOGS = "images/logs"
"""The folder below the root where builds keep their logs."""

_LIVE = {"STATUS_UNKNOWN", "PENDING", "QUEUED", "WORKING"}
# In seconds: between two queries (quotas allow many more, https://cloud.google.com/build/quotas); how long the API may
# be unreachable while a build is followed, because the build continues by itself; for one call.
_POLL, _SILENCE, _LIMIT = 5.0, 600.0, 60.0

# FailureInfo.FailureType of the API, and what to do.
_FIXES = {
    "PUSH_NOT_AUTHORIZED": "give the build's service account roles/artifactregistry.writer on image.repository",
    "PUSH_FAILED": "see the last lines; image.repository may not exist",
    "PUSH_IMAGE_NOT_FOUND": "see the last lines: the build made no such image",
    "LOGGING_FAILURE": "give the build's service account roles/storage.objectUser on the root's bucket",
    "FETCH_SOURCE_FAILED": "give the build's service account roles/storage.objectUser on the root's bucket",
    "USER_BUILD_STEP": "fix that step of the Dockerfile and run again",
}


class CloudBuild:
    def __init__(self, image: CloudBuildImage, root: str, pause: Pause) -> None:
        self._image, self._root, self._pause = image, root, pause
        self._parent = f"projects/{image.billed}/locations/{image.location}"

    @cached_property
    def _client(self) -> CloudBuildClient:
        client: CloudBuildClient = CLOUD_BUILD.client("google.cloud.devtools.cloudbuild_v1:CloudBuildClient")
        return client

    def build(self, build: Build, *, log: Log) -> str:
        """Build and push, or follow a build of this image that is already running. A build that this call started is
        cancelled if the call is interrupted. Returns the digest that Cloud Build reports."""
        image, root = self._image, self._root
        if bucket_path(root) is None:
            fix = "set root to gs://bucket/prefix, or image.kind to docker"
            raise ImageProblem(f"image.kind=cloudbuild needs a root in a bucket, not root={root!r}; {fix}")
        running = self._live(build.tag)
        if running is not None:
            return self._follow(running, build.tag, log)
        bucket, _, name = str(bucket_path(build.context.store(root))).partition("/")
        account = image.service_account
        # The context is stored. One step builds it, then Cloud Build itself pushes, and reports the digest.
        request = {
            "source": {"storage_source": {"bucket": bucket, "object_": name}},
            "steps": [
                {
                    "id": "build",
                    # Google's own image of the docker command: https://github.com/GoogleCloudPlatform/cloud-builders
                    "name": "gcr.io/cloud-builders/docker",
                    # `$$` stands for `$`:
                    # https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values
                    "args": [literal(word) for word in (*build_command("docker", build), ".")],
                    # https://cloud.google.com/build/docs/optimize-builds/building-leaner-containers
                    "env": ["DOCKER_BUILDKIT=1", f"SOURCE_DATE_EPOCH={TIME}"],
                }
            ],
            "images": [build.tag],
            "tags": ["train-litgpt", _mark(build.tag)],
            "timeout": {"seconds": image.timeout},
            # A build with a service account of the user's needs a place that the user names:
            # https://cloud.google.com/build/docs/securing-builds/configure-user-specified-service-accounts
            "logs_bucket": f"{root.rstrip('/')}/{LOGS}",
            "options": {"logging": "GCS_ONLY", "machine_type": image.machine, "disk_size_gb": image.disk},
            **({"service_account": f"projects/{image.billed}/serviceAccounts/{account}"} if account else {}),
        }
        self._pause(0)  # the last moment at which a step that is cancelled leaves nothing behind
        created = first = self._create(request, build.tag)
        try:
            first = self._live(build.tag) or created
            if first.id != created.id:
                self._cancel(created, log)
            return self._follow(first, build.tag, log)
        except BaseException as stopped:
            # After any other error the build has ended or still runs, and the next try follows it.
            if not isinstance(stopped, Exception) and first.id == created.id:
                self._cancel(created, log)
            raise

    def _create(self, request: dict[str, Any], tag: str) -> Any:
        """Start a build; one that was started although no answer came is found by its tag, and not doubled."""
        try:
            with google_errors(CLOUD_BUILD, f"{tag}: starting a build in {self._parent}"):
                started = self._client.create_build({"parent": self._parent, "build": request}, timeout=_LIMIT)
                return started.metadata.build
        except ImageUnreachable:
            for seconds in (1.0, 2.0, 5.0, 10.0):  # lists may be behind
                started = self._live(tag)
                if started is not None:
                    return started
                self._pause(seconds)
            raise

    def _cancel(self, build: Any, log: Log) -> None:
        try:
            with google_errors(CLOUD_BUILD, f"cancelling build {build.id}"):
                self._client.cancel_build(name=build.name, id=build.id, project_id=self._image.billed, timeout=_LIMIT)
        except TrainLitgptError as error:
            log(f"build {build.id} could not be cancelled: {one_line(error)}")
        else:
            log(f"cancelled build {build.id}")

    def _live(self, tag: str) -> Any:
        with google_errors(CLOUD_BUILD, f"{tag}: looking for builds in {self._parent}"):
            request = {"parent": self._parent, "project_id": self._image.billed, "filter": f'tags="{_mark(tag)}"'}
            builds = self._client.list_builds(request=request, timeout=_LIMIT)
            live = [build for build in builds if build.status.name in _LIVE and tag in build.images]
            return min(live, key=lambda build: (build.create_time, build.id), default=None)

    def _follow(self, build: Any, tag: str, log: Log) -> str:
        log(f"{tag} is built by {build.id} in {self._parent}: {build.log_url}")
        silent, storage, path, position = 0.0, open_storage(self._root), f"{LOGS}/log-{build.id}.txt", ReadCursor()
        tail, live = deque[str](maxlen=TAIL), True
        while live:
            self._pause(_POLL)
            request = {"name": build.name, "id": build.id, "project_id": self._image.billed}
            try:
                with google_errors(CLOUD_BUILD, f"{tag}: querying build {build.id}"):
                    build, silent = self._client.get_build(**request, timeout=_LIMIT), 0.0
            except ImageUnreachable as error:
                silent += _POLL
                if silent > _SILENCE:
                    mark_no_retry(error)
                    raise
            live = build.status.name in _LIVE
            # Pass on the whole lines that are new; at the end the last need not be whole. A log that cannot be read can
            # wait until then.
            try:
                begin, fresh = storage.read_from(path, position)
                fresh = fresh[: fresh.rfind(b"\n") + 1] if live else fresh
                position, lines = begin.after(fresh), fresh.decode(errors="replace").splitlines()
            except (FileNotFoundError, TrainLitgptError) as error:
                lines = [] if live else [f"the build's log cannot be read: {one_line(error)}"]
            for line in lines:
                tail.append(terminal_text(redacted(line)))
                log(tail[-1])
        status, failure = build.status.name, build.failure_info
        if status == "SUCCESS":
            digests = {pushed.name: pushed.digest for pushed in build.results.images}
            return str(digests.get(tag) or resolve(tag).partition("@")[2])
        output = "\n".join(filter(None, [*tail, one_line(failure.detail or build.status_detail)]))
        what = f"{tag}: build {build.id} of Cloud Build ended with {status}:\n{output}\n-> "
        if status == "CANCELLED":
            raise JobCancelled(f"{tag}: build {build.id} of Cloud Build was cancelled; run again to build it")
        if status == "TIMEOUT":
            raise ImageProblem(f"{what}raise image.timeout, or image.machine")
        if status in {"EXPIRED", "INTERNAL_ERROR"}:
            raise ImageUnreachable(f"{what}run again; if it comes back, see {build.log_url}")
        raise ImageProblem(what + _FIXES.get(failure.type_.name, "see the lines above"))


def _mark(tag: str) -> str:
    """Return the tag of Cloud Build's that a build of this image carries: that of a repository has `/` and `:`."""
    return f"train-litgpt-{sha256(tag.encode()).hexdigest()[:16]}"
