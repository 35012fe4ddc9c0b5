"""The `image` section of a config: this very environment, an image that exists, or one that is built."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from launcher.images.oci import ImageReference
from launcher.images.stacks import DEFAULT_STACK, STACKS, Contents, Stack
from litgpt_demo.config import Count, Settings, WholeSeconds, discriminator


class NoImage(Settings, title="No image"):
    """The nodes run this very environment: for `platform: {kind: local}`."""

    kind: Literal["none"] = discriminator("none")


class PrebuiltImage(Settings, title="Prebuilt image"):
    """An image that is in its registry already."""

    kind: Literal["prebuilt"] = discriminator("prebuilt")
    reference: str
    """`registry/repository:tag` or `registry/repository@sha256:…`. A tag counts as its digest now; no `latest`."""

    @field_validator("reference")
    @classmethod
    def _is_fixed(cls, text: str) -> str:
        reference = ImageReference.parse(text)
        if reference.digest is None and reference.tag in {None, "latest"}:
            fix = f"write {reference.repository}:<version> or {reference.repository}@sha256:<digest>"
            raise ValueError(f"{text!r} has no tag or the tag latest, which can be another image tomorrow; {fix}")
        return text


class BuiltImage(Settings):
    """The settings of every image that is built; not again while nothing that goes into it has changed."""

    kind: str
    repository: str
    """The repository of the image, without a tag: `europe-west4-docker.pkg.dev/my-project/litgpt/train`."""
    dockerfile: str | None = None
    """Path of a Dockerfile; empty takes the product's own, which needs a checkout of train-litgpt as context.
    The base of your own Dockerfile is pinned by the digest that you write there, or by `base`."""
    context: str = "."
    """Folder whose files the Dockerfile may copy, less what its .dockerignore names."""
    base: str | None = None
    """Image of a registry to build upon (build argument BASE), pinned by digest when it is built; empty takes the
    Dockerfile's."""
    build_args: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Further build arguments. They can be read in the image's history: no secrets."""
    pip_config: str | None = None
    """Path of a pip.conf for the build: your mirror, its certificate or password. No layer of the image contains it.
    Packages must match their hashes, so another file does not change the image. For the product's own Dockerfile."""
    architecture: Literal["amd64", "arm64"] = "amd64"
    """Processor architecture of the nodes."""
    stack: str | None = None
    """Software stack of the product's own Dockerfile (docs/reference/stacks.md lists them); empty is the first that
    `platform.network` is qualified for. Your own Dockerfile gets it as the build argument STACK."""

    @field_validator("repository")
    @classmethod
    def _has_no_tag(cls, text: str) -> str:
        reference = ImageReference.parse(text)
        if reference.tag or reference.digest:
            raise ValueError(f"{text!r} has a tag, but a built image gets its hash; write {reference.repository}")
        return text

    @property
    def installed(self) -> Stack | None:
        """The stack that the image gets, None for a Dockerfile of the user's that installs what it likes."""
        if self.stack is not None:
            return STACKS[self.stack]
        return DEFAULT_STACK if self.dockerfile is None else None

    @property
    def contents(self) -> Contents:
        """Return the contents of the image, as far as they are known before it is built."""
        if self.installed is None:
            return Contents(architecture=self.architecture)
        return self.installed.contents(self.architecture, own_base=self.base is None and self.dockerfile is None)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.stack is not None and self.stack not in STACKS:
            raise ValueError(f"image.stack={self.stack!r} is unknown; choose one of {', '.join(STACKS)}")
        if self.pip_config is not None and self.dockerfile is not None:
            raise ValueError("image.pip_config and image.dockerfile exclude each other; leave one out")
        for name in ("STACK", "LABELS"):
            is_set_by_stack = self.dockerfile is None or (name == "STACK" and self.stack is not None)
            if is_set_by_stack and name in self.build_args:
                raise ValueError(f"image.build_args.{name} follows from image.stack: leave it out, and set image.stack")
        if self.base is not None and "BASE" in self.build_args:
            raise ValueError("image.base and image.build_args.BASE set the same thing; leave one out")
        return self


class DockerImage(BuiltImage, title="Built here, with Docker or Podman"):
    """An image that a container engine builds here and pushes."""

    kind: Literal["docker"] = discriminator("docker")
    engine: Literal["auto", "docker", "podman"] = "auto"
    """The program that builds; auto takes the first of docker and podman that is installed."""


class CloudBuildImage(BuiltImage, title="Built with Google Cloud Build"):
    """An image that Google Cloud Build builds and pushes. The context goes through the run's bucket."""

    kind: Literal["cloudbuild"] = discriminator("cloudbuild")
    project: str | None = Field(None, pattern=r"^[a-z][a-z0-9.:-]{4,}[a-z0-9]$")
    """Google Cloud project of the build; empty is that of the repository in Artifact Registry."""
    location: str = Field("global", pattern=r"^[a-z]+(-[a-z]+[0-9])?$")
    """Region of the build: `europe-west4`, or `global`."""
    service_account: str | None = Field(None, pattern=r"^[^@/\s]+@[^@/\s]+$")
    """Service account that the build runs as; empty is the one that the project gives to builds."""
    machine: Literal["E2_MEDIUM", "E2_STANDARD_2", "E2_HIGHCPU_8", "E2_HIGHCPU_32"] = "E2_HIGHCPU_8"
    """Machine type of the build."""
    disk: Count = Field(200, ge=10, le=4000)
    """Gigabytes of disk; an image with CUDA and torch takes some 30 of them while it is built."""
    timeout: WholeSeconds = Field(7200, ge=60, le=86_400)
    """Seconds that the build may take; Cloud Build allows 24 hours."""

    @property
    def billed(self) -> str:
        """Return the project of the build; empty where neither `project` nor an Artifact Registry says it."""
        reference = ImageReference.parse(self.repository)
        # https://cloud.google.com/artifact-registry/docs/transition/setup-gcr-repo: gcr.io is served by it since 2025
        google = re.fullmatch(r".*-docker\.pkg\.dev|([a-z]+\.)?gcr\.io", reference.host)
        return self.project or (reference.path.partition("/")[0] if google else "")

    @model_validator(mode="after")
    def _can_be_built_there(self) -> Self:
        if self.pip_config is not None:
            what = "image.pip_config may hold a password, and would be stored in the root's bucket for the builder"
            raise ValueError(f"{what}; set image.kind=docker, or leave it out")
        if not self.billed:
            raise ValueError(f"image.repository={self.repository!r} has no project for the build; set image.project")
        return self


Image = Annotated[NoImage | PrebuiltImage | DockerImage | CloudBuildImage, Field(discriminator="kind")]
