"""Google Cloud Build as a builder: the context goes through the run's bucket, the log comes from there.

One build per image: a build carries its key as a tag, and one that is on its way already, of this launcher before it
was killed or of a colleague's, is followed instead of doubled. The API takes no request id that would do this for us.

Sources: https://cloud.google.com/build/docs/api/reference/rest/v1/projects.locations.builds (fields, filters), and
https://cloud.google.com/build/docs/securing-builds/configure-user-specified-service-accounts: a build with a service
account of the user's needs a place for its log that the user names.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from launcher.environment import literal
from launcher.errors import ImageProblem, ImageUnreachable, JobCancelled
from launcher.google import Service, google_errors
from launcher.images.build import Build, Log, Site
from launcher.images.context import TIME
from launcher.images.docker import TAIL, build_command
from launcher.images.oci import ImageReference, find_digest, resolve
from launcher.images.settings import CloudBuildImage
from launcher.platforms.log_files import terminal_text
from litgpt_demo.errors import TrainLitgptError, give_up, words_of
from litgpt_demo.secrets import redacted
from litgpt_demo.storage import Position, bucket_path, open_storage

if TYPE_CHECKING:
    from google.cloud.devtools.cloudbuild_v1 import CloudBuildClient

CLOUD_BUILD = Service(
    extra="cloudbuild",
    # https://cloud.google.com/build/docs/iam-roles-permissions
    roles="enable the Cloud Build API in the project and give yourself roles/cloudbuild.builds.editor, and "
    "roles/iam.serviceAccountUser on image.service_account",
    settings="image's",
    refused=ImageProblem,
    away=ImageUnreachable,
    emulator="CLOUDBUILD_EMULATOR_HOST",
)

BUILDER = "gcr.io/cloud-builders/docker"
"""Google's own image of the docker command for builds (https://github.com/GoogleCloudPlatform/cloud-builders)."""

LOGS = "images/logs"
"""The folder below the root where builds keep their logs."""

_LIVE = {"STATUS_UNKNOWN", "PENDING", "QUEUED", "WORKING"}
_POLL = 5.0
"""Seconds between two looks; quotas allow many more (https://cloud.google.com/build/quotas)."""
_SILENCE = 600.0
"""Seconds for which the API may be unreachable while a build is followed: it goes on by itself."""
_LISTED = (1.0, 2.0, 5.0, 10.0)
"""Seconds between looks for a build whose creation was not answered: lists may be behind."""
_LIMIT = 60.0
"""Seconds for one call."""

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
    """Cloud Build in the image's project."""

    def __init__(self, image: CloudBuildImage, site: Site) -> None:
        site.require_bucket("cloudbuild")
        self._image, self._site = image, site
        self._parent = f"projects/{image.billed}/locations/{image.location}"

    @cached_property
    def _client(self) -> CloudBuildClient:
        with google_errors(CLOUD_BUILD, "signing in"):
            from google.cloud.devtools.cloudbuild_v1 import CloudBuildClient

            return CloudBuildClient(transport=CLOUD_BUILD.transport(CloudBuildClient))

    def build(self, build: Build, *, log: Log) -> str:
        """Build, or follow the build of this image that is on its way; one of ours is cancelled if we are stopped."""
        found = self._live(build.tag)
        if found is not None:
            log(f"{build.tag} is being built already: {found.log_url or found.id}")
            return self._follow(found, build.tag, log)
        if (pushed := find_digest(ImageReference.parse(build.tag))) is not None:
            return pushed  # by a build that has ended since the registry was asked
        asked = request(build, self._image, root=self._site.root, context=build.context.store(self._site.root))
        self._site.pause(0)  # the last moment at which a step that is cancelled leaves nothing behind
        created = self._create(asked, build.tag)
        ours = True
        try:
            log(f"build {created.id} in {self._parent}: {created.log_url}")
            first = self._live(build.tag) or created
            if first.id != created.id:
                log(f"{build.tag} is being built already: {first.log_url or first.id}")
                ours = False
                self._cancel(created, log)
            return self._follow(first, build.tag, log)
        except Exception:
            raise  # it ended by itself, or goes on: the next try takes it up
        except BaseException:
            if ours:
                self._cancel(created, log)
            raise

    def _create(self, asked: dict[str, Any], tag: str) -> Any:
        """Start a build; one that was started although no answer came is found by its tag, and not doubled."""
        try:
            with google_errors(CLOUD_BUILD, f"{tag}: starting a build in {self._parent}"):
                started = self._client.create_build({"parent": self._parent, "build": asked}, timeout=_LIMIT)
                return started.metadata.build
        except ImageUnreachable:
            for seconds in _LISTED:
                if (found := self._live(tag)) is not None:
                    return found
                self._site.pause(seconds)
            raise

    def _cancel(self, build: Any, log: Log) -> None:
        """Cancel a build of ours; where that fails, what we were stopped by is still the reason that is reported."""
        try:
            with google_errors(CLOUD_BUILD, f"cancelling build {build.id}"):
                self._client.cancel_build(name=build.name, id=build.id, project_id=self._image.billed, timeout=_LIMIT)
        except TrainLitgptError as error:
            log(f"build {build.id} could not be cancelled: {words_of(error)}")
        else:
            log(f"cancelled build {build.id}")

    def _live(self, tag: str) -> Any:
        """Return the first build of this image that has not ended; None where there is none."""
        with google_errors(CLOUD_BUILD, f"{tag}: looking for builds in {self._parent}"):
            asked = {"parent": self._parent, "project_id": self._image.billed, "filter": f'tags="{mark_of(tag)}"'}
            listed = self._client.list_builds(request=asked, timeout=_LIMIT)
            live = [one for one in listed if one.status.name in _LIVE and tag in one.images]
            return min(live, key=lambda one: (one.create_time, one.id), default=None)

    def _follow(self, build: Any, tag: str, log: Log) -> str:
        silent, lines = 0.0, _Lines(self._site.root, build.id, log)
        while build.status.name in _LIVE:
            self._site.pause(_POLL)
            try:
                with google_errors(CLOUD_BUILD, f"{tag}: asking after build {build.id}"):
                    build = self._client.get_build(
                        name=build.name, id=build.id, project_id=self._image.billed, timeout=_LIMIT
                    )
                silent = 0.0
            except ImageUnreachable as error:
                silent += _POLL
                if silent > _SILENCE:
                    give_up(error)
                    raise
            lines.pass_on()
        lines.pass_on(last=True)
        if build.status.name == "SUCCESS":
            digests = {one.name: one.digest for one in build.results.images}
            return str(digests.get(tag) or resolve(tag).partition("@")[2])
        raise _failure(build, tag, lines.tail)


def mark_of(tag: str) -> str:
    """Return the tag of Cloud Build's that a build of this image carries: that of a repository has `/` and `:`."""
    return f"train-litgpt-{sha256(tag.encode()).hexdigest()[:16]}"


def request(build: Build, image: CloudBuildImage, *, root: str, context: str) -> dict[str, Any]:
    """Return the build as it is sent: one step that builds; Cloud Build itself pushes, and tells the digest."""
    bucket, _, name = str(bucket_path(context)).partition("/")
    account = image.service_account
    return {
        "source": {"storage_source": {"bucket": bucket, "object_": name}},
        "steps": [
            {
                "id": "build",
                "name": BUILDER,
                # https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values: `$$` stands for `$`
                "args": [literal(one) for one in (*build_command("docker", build), ".")],
                # https://cloud.google.com/build/docs/optimize-builds/building-leaner-containers
                "env": ["DOCKER_BUILDKIT=1", f"SOURCE_DATE_EPOCH={TIME}"],
            }
        ],
        "images": [build.tag],
        "tags": ["train-litgpt", mark_of(build.tag)],
        "timeout": {"seconds": image.timeout},
        "logs_bucket": f"{root.rstrip('/')}/{LOGS}",
        "options": {"logging": "GCS_ONLY", "machine_type": image.machine, "disk_size_gb": image.disk},
        **({"service_account": f"projects/{image.billed}/serviceAccounts/{account}"} if account else {}),
    }


class _Lines:
    """The log of a build, passed on line by line as it grows in the bucket."""

    def __init__(self, root: str, build: str, log: Log) -> None:
        self._storage, self._path, self._log = open_storage(root), f"{LOGS}/log-{build}.txt", log
        self._position = Position()
        self.tail: deque[str] = deque(maxlen=TAIL)

    def pass_on(self, *, last: bool = False) -> None:
        """Pass on the whole lines that are new; the last one need not be whole. A log that cannot be read can wait."""
        try:
            begin, fresh = self._storage.read_on(self._path, self._position)
        except FileNotFoundError:
            return
        except TrainLitgptError as error:
            if last:
                self._tell(f"the build's log cannot be read: {words_of(error)}")
            return
        fresh = fresh if last else fresh[: fresh.rfind(b"\n") + 1]
        self._position = begin.after(fresh)
        for line in fresh.decode(errors="replace").splitlines():
            self._tell(terminal_text(redacted(line)))

    def _tell(self, line: str) -> None:
        self.tail.append(line)
        self._log(line)


def _failure(build: Any, tag: str, tail: deque[str]) -> TrainLitgptError:
    status, failure = build.status.name, build.failure_info
    detail = failure.detail or build.status_detail
    said = "\n".join([*tail, *([words_of(detail)] if detail else [])])
    told = f"{tag}: build {build.id} of Cloud Build ended with {status}:\n{said}\n-> "
    match status:
        case "CANCELLED":
            return JobCancelled(f"{tag}: somebody cancelled build {build.id} of Cloud Build; run again to build it")
        case "TIMEOUT":
            return ImageProblem(f"{told}raise image.timeout, or image.machine")
        case "EXPIRED" | "INTERNAL_ERROR":
            return ImageUnreachable(f"{told}run again; if it comes back, see {build.log_url}")
    return ImageProblem(told + _FIXES.get(failure.type_.name, "see the lines above"))
