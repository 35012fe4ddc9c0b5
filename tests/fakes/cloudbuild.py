"""Google Cloud Build in a thread: builds of the client's own messages, with their states, logs and pushes.

A build unpacks its context as the real one does, writes its log into the bucket, and pushes a small image, like no
other, into the stand-in of a registry.
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
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import grpc
import httpx
from google.cloud.devtools.cloudbuild_v1 import types
from google.longrunning import operations_pb2
from google.protobuf import any_pb2

from litgpt_demo.storage import open_storage

PROJECT = "my-project"
Status = types.Build.Status
FINAL = {Status.SUCCESS, Status.FAILURE, Status.INTERNAL_ERROR, Status.TIMEOUT, Status.CANCELLED, Status.EXPIRED}
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class RefusedError(Exception):
    """A call's end, as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


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
        require_project(request.parent)
        build = types.Build(request.build)
        if build.service_account and not build.logs_bucket:
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "a build with service_account must have a log")
        self.commands += [[substituted(one) for one in step.args] for step in build.steps]
        build.id, build.project_id, build.status = str(uuid.uuid4()), PROJECT, Status.QUEUED
        build.name = f"{request.parent}/builds/{build.id}"
        build.log_url = f"https://console.cloud.google.com/cloud-build/builds/{build.id}?project=1"
        build.create_time = datetime.now(UTC)
        self.builds[build.id] = build
        self._running.append(threading.Thread(target=self._run, args=(build,), daemon=True))
        self._running[-1].start()
        meta = any_pb2.Any()
        meta.Pack(types.BuildOperationMetadata.pb(types.BuildOperationMetadata(build=build)))
        return operations_pb2.Operation(name=f"operations/build/{PROJECT}/{build.id}", metadata=meta)

    def get_build(self, request: types.GetBuildRequest) -> types.Build:
        return self.builds[request.id]

    def list_builds(self, request: types.ListBuildsRequest) -> types.ListBuildsResponse:
        """One on a page: whoever asks has to turn it."""
        require_project(request.parent)
        if self.behind > 0:
            self.behind -= 1
            return types.ListBuildsResponse()
        found = [
            one for one in reversed(self.builds.values()) if request.filter in {f'tags="{tag}"' for tag in one.tags}
        ]
        start = int(request.page_token or 0)
        more = str(start + 1) if len(found) > start + 1 else ""
        return types.ListBuildsResponse(builds=found[start : start + 1], next_page_token=more)

    def cancel_build(self, request: types.CancelBuildRequest) -> types.Build:
        build = self.builds[request.id]
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

    # --- a build ------------------------------------------------------------------------------------------------------

    def _run(self, build: types.Build) -> None:
        self._become(build, Status.WORKING)
        source = build.source.storage_source
        content = open_storage(f"gs://{source.bucket}").read(source.object_)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
            files = {one.name: tar.extractfile(one).read() for one in tar if one.isfile()}  # type: ignore[union-attr]
        self.contexts.append(files)
        for number in (*range(1, len(self.lines) + 1, 20), len(self.lines)):
            text = "".join(f"{line}\n" for line in self.lines[:number])
            open_storage(build.logs_bucket).write(f"log-{build.id}.txt", text.encode())
        while not self.held.wait(0.01):
            if build.status is Status.CANCELLED:
                return
        if self.ends is Status.SUCCESS:
            pushed = [types.BuiltImage(name=tag, digest=self.pushes(tag)) for tag in build.images]
            build.results = types.Results(images=pushed)
        if self.failure is not None:
            build.failure_info = self.failure
        self._become(build, self.ends)

    # --- gRPC ---------------------------------------------------------------------------------------------------------

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "CreateBuild": (self.create_build, types.CreateBuildRequest, operations_pb2.Operation.SerializeToString),
            "GetBuild": (self.get_build, types.GetBuildRequest, types.Build.serialize),
            "ListBuilds": (self.list_builds, types.ListBuildsRequest, types.ListBuildsResponse.serialize),
            "CancelBuild": (self.cancel_build, types.CancelBuildRequest, types.Build.serialize),
        }
        made = {
            method: grpc.unary_unary_rpc_method_handler(
                self._answering(method, call), request_deserializer=asked.deserialize, response_serializer=answer
            )
            for method, (call, asked, answer) in methods.items()
        }
        return grpc.method_handlers_generic_handler("google.devtools.cloudbuild.v1.CloudBuild", made)

    def _answering(self, method: str, call: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            self.calls.append(method)
            fault = next((one for one in self.faults if one[0] == method), None)
            try:
                done = call(request) if fault is None or fault[2] else None
            except RefusedError as error:
                context.abort(error.code, error.message)
            if fault is not None:
                self.faults.remove(fault)
                context.abort(fault[1], f"{method}: injected")
            return done

        return answer


def require_project(parent: str) -> None:
    if parent.split("/")[1] != PROJECT:
        raise RefusedError(grpc.StatusCode.PERMISSION_DENIED, "The caller does not have permission")


def substituted(text: str) -> str:
    assert not re.search(r"\$\{?[A-Z_]", text.replace("$$", "")), "a substitution that there is not"
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
