"""Google Cloud Build in place of its client: builds of the client's own messages, with their states, logs and pushes.

A build goes on when somebody asks after it: it unpacks its context, writes its log into the bucket, and pushes a small
image, like no other, into the stand-in of a registry.
"""

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from google.api_core import exceptions
from google.cloud.devtools.cloudbuild_v1 import types

from litgpt_demo.storage import open_storage

PROJECT = "my-project"
Status = types.Build.Status


@dataclass
class CloudBuild:
    """The methods of the client that we call, and what tests may set."""

    push: Callable[[str], str]
    """Pushes an image under a tag and returns its digest."""
    builds: dict[str, types.Build] = field(default_factory=dict)
    contexts: list[dict[str, bytes]] = field(default_factory=list)
    """The files of each build's context."""
    lines: list[str] = field(default_factory=lambda: ["Step 1/2 : FROM scratch", "Step 2/2 : COPY . /"])
    """The output of every build."""
    ends: Status = Status.SUCCESS
    held: bool = False
    """Builds do not end."""
    behind: int = 0
    """So many lists do not show the builds yet."""
    silent: bool = False
    """No look at a build is answered."""

    def create_build(self, request: dict[str, Any], timeout: float) -> Any:
        build = types.Build(request["build"])
        assert build.logs_bucket or not build.service_account, "a build with service_account must have a log"
        build.id, build.project_id, build.status = str(uuid4()), PROJECT, Status.QUEUED
        build.name, build.create_time = f"{request['parent']}/builds/{build.id}", datetime.now(UTC)
        self.builds[build.id] = build
        return SimpleNamespace(metadata=types.BuildOperationMetadata(build=build))

    def get_build(self, *, name: str, id: str, project_id: str, timeout: float) -> types.Build:
        if self.silent:
            raise exceptions.InternalServerError("it does not answer")
        build = self.builds[id]
        if build.status is Status.QUEUED:
            self._begin(build)
        elif build.status is Status.WORKING and not self.held:
            self._end(build)
        return types.Build(build)

    def list_builds(self, *, request: dict[str, Any], timeout: float) -> list[types.Build]:
        self.behind -= 1
        found = [
            build for build in self.builds.values() if request["filter"] in {f'tags="{tag}"' for tag in build.tags}
        ]
        return [] if self.behind >= 0 else found

    def cancel_build(self, *, name: str, id: str, project_id: str, timeout: float) -> None:
        self.builds[id].status = Status.CANCELLED

    def _begin(self, build: types.Build) -> None:
        source = build.source.storage_source
        content = open_storage(f"gs://{source.bucket}").read(source.object_)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
        self.contexts.append(files)
        self._write_log(build, self.lines[:1])
        build.status = Status.WORKING

    def _end(self, build: types.Build) -> None:
        self._write_log(build, self.lines)
        if self.ends is Status.SUCCESS:
            build.results = types.Results(images=[{"name": tag, "digest": self.push(tag)} for tag in build.images])
        if self.ends is Status.FAILURE:
            kind = types.Build.FailureInfo.FailureType.USER_BUILD_STEP
            build.failure_info = types.Build.FailureInfo(type_=kind, detail="Build step failure: exit status 2")
        build.status = self.ends

    def _write_log(self, build: types.Build, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        open_storage(build.logs_bucket).write(f"log-{build.id}.txt", text.encode())
