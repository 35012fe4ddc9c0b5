"""Google Cloud Build in a thread: builds of the client's own messages, with their states, refusals, logs and pushes.

It is as strict as the real one where its documentation says what is refused: fields that only the service writes,
machine types, time-outs, steps without an image, a service account without a place for the log, sources that are not
there. A build unpacks its context as the real one does, writes its log into the bucket, and pushes a small image, like
no other, into the stand-in of a registry.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tarfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

import grpc
import httpx
from google.cloud.devtools.cloudbuild_v1 import types
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

from litgpt_demo.storage import open_storage

PROJECT = "my-project"
LOCATIONS = {"global", "europe-west4", "us-central1"}
ACCOUNTS = {f"builder@{PROJECT}.iam.gserviceaccount.com"}
Status = types.Build.Status
FINAL = {Status.SUCCESS, Status.FAILURE, Status.INTERNAL_ERROR, Status.TIMEOUT, Status.CANCELLED, Status.EXPIRED}
_WRITTEN_BY_IT = (
    "name", "id", "status", "status_detail", "results", "create_time", "start_time", "finish_time", "log_url",
    "source_provenance", "build_trigger_id", "timing", "failure_info",
)  # fmt: skip
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class RefusedError(Exception):
    """A call's end, as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def require(holds: object, message: str) -> None:
    if not holds:
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message)


@dataclass
class CloudBuild:
    """The stand-in as tests see it."""

    port: int = 0
    calls: list[str] = field(default_factory=list)
    builds: dict[str, types.Build] = field(default_factory=dict)
    contexts: list[dict[str, bytes]] = field(default_factory=list)
    """The files of each build's context."""
    lines: list[str] = field(default_factory=lambda: ["Step 1/2 : FROM scratch", "Step 2/2 : COPY . /"])
    """The output of every build."""
    ends: Status = Status.SUCCESS
    failure: types.Build.FailureInfo | None = None
    held: threading.Event = field(default_factory=threading.Event)
    """Builds end once this is set."""
    behind: int = 0
    """So many lists do not show the builds yet."""
    commands: list[list[str]] = field(default_factory=list)
    """The arguments of each build's steps, after substitution."""
    faults: list[tuple[str, grpc.StatusCode, bool]] = field(default_factory=list)
    """Method, what is answered, and whether the work is done all the same."""
    pushes: Callable[[str], str] = lambda tag: push(tag)

    def __post_init__(self) -> None:
        self.held.set()
        self._lock = threading.Lock()
        self._running: list[threading.Thread] = []

    def join(self) -> None:
        """Let the builds end, and wait for them: one that goes on would write into the bucket of a later test."""
        self.held.set()
        for build in self._running:
            build.join()

    # --- calls --------------------------------------------------------------------------------------------------------

    def create_build(self, request: types.CreateBuildRequest) -> operations_pb2.Operation:
        location = self._admit_parent(request.parent)
        admit(request.build)
        self.commands += [[substituted(one) for one in step.args] for step in request.build.steps]
        build = types.Build(request.build)
        build.id, build.project_id, build.status = str(uuid.uuid4()), PROJECT, Status.QUEUED
        build.name = f"projects/{PROJECT}/locations/{location}/builds/{build.id}"
        build.log_url = f"https://console.cloud.google.com/cloud-build/builds/{build.id}?project=1"
        build.create_time = datetime.now(UTC)
        self.builds[build.id] = build
        self._running.append(threading.Thread(target=self._run, args=(build,), daemon=True))
        self._running[-1].start()
        meta = any_pb2.Any()
        meta.Pack(types.BuildOperationMetadata.pb(types.BuildOperationMetadata(build=build)))
        return operations_pb2.Operation(name=f"operations/build/{PROJECT}/{build.id}", metadata=meta)

    def get_build(self, request: types.GetBuildRequest) -> types.Build:
        return self._found(request.name, request.id)

    def list_builds(self, request: types.ListBuildsRequest) -> types.ListBuildsResponse:
        """One on a page: whoever asks has to turn it."""
        location = self._admit_parent(request.parent)
        match = re.fullmatch(r'tags="([^"]+)"', request.filter)
        require(match, f"invalid filter {request.filter!r}")
        assert match is not None
        if self.behind > 0:
            self.behind -= 1
            return types.ListBuildsResponse()
        found = [
            build
            for build in reversed(self.builds.values())
            if match[1] in build.tags and f"/locations/{location}/" in build.name
        ]
        start = int(request.page_token or 0)
        more = str(start + 1) if len(found) > start + 1 else ""
        return types.ListBuildsResponse(builds=found[start : start + 1], next_page_token=more)

    def cancel_build(self, request: types.CancelBuildRequest) -> types.Build:
        build = self._found(request.name, request.id)
        if not self._become(build, Status.CANCELLED):
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "cannot cancel a build that has ended")
        return build

    def _become(self, build: types.Build, status: Status) -> bool:
        """Set the state of a build; False where it has ended, which is for good."""
        with self._lock:
            if build.status in FINAL:
                return False
            build.status = status
            return True

    def _admit_parent(self, parent: str) -> str:
        match = re.fullmatch(r"projects/([^/]+)/locations/([^/]+)", parent)
        require(match, f"invalid parent {parent!r}")
        assert match is not None
        if match[1] != PROJECT:
            raise RefusedError(grpc.StatusCode.PERMISSION_DENIED, "The caller does not have permission")
        if match[2] not in LOCATIONS:
            raise RefusedError(grpc.StatusCode.NOT_FOUND, f"Location {match[2]} is not found")
        return match[2]

    def _found(self, name: str, number: str) -> types.Build:
        build = self.builds.get(number)
        if build is None or build.name != name:
            raise RefusedError(grpc.StatusCode.NOT_FOUND, "Requested entity was not found.")
        return build

    # --- a build ------------------------------------------------------------------------------------------------------

    def _run(self, build: types.Build) -> None:
        self._become(build, Status.WORKING)
        source = build.source.storage_source
        try:
            content = open_storage(f"gs://{source.bucket}").read(source.object_)
        except FileNotFoundError:
            self._end(build, Status.FAILURE, types.Build.FailureInfo.FailureType.FETCH_SOURCE_FAILED, "no source")
            return
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
            files = {one.name: tar.extractfile(one).read() for one in tar if one.isfile()}  # type: ignore[union-attr]
        self.contexts.append(files)
        for number in range(1, len(self.lines) + 1, 20):
            self._log(build, self.lines[:number])
        self._log(build, self.lines)
        while not self.held.wait(0.01):
            if build.status is Status.CANCELLED:
                return
        if self.ends is Status.SUCCESS:
            build.results = types.Results(
                images=[types.BuiltImage(name=tag, digest=self.pushes(tag)) for tag in build.images]
            )
        if self.failure is not None:
            build.failure_info = self.failure
        self._become(build, self.ends)

    def _end(self, build: types.Build, status: Status, kind: Any, detail: str) -> None:
        build.failure_info = types.Build.FailureInfo(type_=kind, detail=detail)
        self._become(build, status)

    def _log(self, build: types.Build, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        open_storage(build.logs_bucket).write(f"log-{build.id}.txt", text.encode())

    # --- gRPC ---------------------------------------------------------------------------------------------------------

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "CreateBuild": (self.create_build, types.CreateBuildRequest, None),
            "GetBuild": (self.get_build, types.GetBuildRequest, types.Build),
            "ListBuilds": (self.list_builds, types.ListBuildsRequest, types.ListBuildsResponse),
            "CancelBuild": (self.cancel_build, types.CancelBuildRequest, types.Build),
        }
        made = {
            method: grpc.unary_unary_rpc_method_handler(
                self._answering(method, call),
                request_deserializer=self._reader(asked),
                response_serializer=answer.serialize if answer else operations_pb2.Operation.SerializeToString,
            )
            for method, (call, asked, answer) in methods.items()
        }
        return grpc.method_handlers_generic_handler("google.devtools.cloudbuild.v1.CloudBuild", made)

    def _reader(self, kind: Any) -> Callable[[bytes], Any]:
        def read(content: bytes) -> Any:
            message = kind.deserialize(content)
            assert not len(UnknownFieldSet(kind.pb(message))), "a field that the service does not know"
            return message

        return read

    def _answering(self, method: str, call: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            self.calls.append(method)
            fault = next((one for one in self.faults if one[0] == method), None)
            try:
                if fault is None:
                    return call(request)
                self.faults.remove(fault)
                if fault[2]:
                    call(request)
            except RefusedError as error:
                context.abort(error.code, error.message)
            assert fault is not None
            context.abort(fault[1], f"{method}: injected")
            return empty_pb2.Empty()

        return answer


def admit(build: types.Build) -> None:
    """Refuse what its documentation says is refused.

    Raises:
        RefusedError: Cloud Build would not take it.
    """
    given = [name for name in _WRITTEN_BY_IT if name in build]
    require(not given, f"invalid build: {', '.join(given)} cannot be set")
    require(build.steps, "invalid build: a build must have at least one step")
    for number, step in enumerate(build.steps):
        require(step.name, f"invalid build: build step {number} must specify name")
        require(all("=" in name for name in step.env), "invalid build: invalid env")
    require(timedelta() < build.timeout <= timedelta(hours=24), "invalid build: timeout must be at most 24 hours")
    require(all(re.fullmatch(r"\w[\w.-]{0,127}", tag) for tag in build.tags), "invalid build: invalid tag")
    require(build.options.disk_size_gb <= 4000, "invalid build: disk size must be at most 4000 GB")
    source = build.source.storage_source
    require(source.bucket and source.object_.endswith((".tar.gz", ".zip")), "invalid build: invalid source")
    if build.service_account:
        if build.service_account.rpartition("/")[2] not in ACCOUNTS:
            raise RefusedError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"caller does not have permission to act as service account {build.service_account}",
            )
        logging = types.BuildOptions.LoggingMode
        has_log = build.logs_bucket or build.options.logging in {logging.CLOUD_LOGGING_ONLY, logging.NONE}
        require(has_log, "invalid argument: if 'build.service_account' is specified, the build must have a log")


def substituted(text: str) -> str:
    """
    Raises:
        RefusedError: it names a substitution that there is not.
    """
    unknown = re.search(r"\$\{?[A-Z_]", text.replace("$$", ""))
    require(not unknown, "invalid value for build: key in the template is not a valid substitution")
    return text.replace("$$", "$")


def push(tag: str) -> str:
    """Put an image that is like no other into the registry of this machine that the tag names."""
    host, _, rest = tag.partition("/")
    name, _, label = rest.rpartition(":")
    content = json.dumps({"mediaType": MANIFEST, "annotations": {"for": f"{tag} {uuid.uuid4()}"}}).encode()
    url = f"http://{host}/v2/{name}/manifests/{label}"
    httpx.put(url, content=content, headers={"Content-Type": MANIFEST}, trust_env=False).raise_for_status()
    return f"sha256:{sha256(content).hexdigest()}"


@contextlib.contextmanager
def running_cloud_build() -> Iterator[CloudBuild]:
    """A Cloud Build that answers at `port` of this machine, for CLOUDBUILD_EMULATOR_HOST."""
    cloud = CloudBuild()
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((cloud.handler(),))
    cloud.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield cloud
    finally:
        server.stop(0.2).wait()
        cloud.join()
