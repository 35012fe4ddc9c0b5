"""The interface between what an image is made of and what makes it: a build, and a builder of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from launcher.errors import ImageProblem
from launcher.images.context import Context
from litgpt_demo.storage import bucket_path

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Build:
    """One image to be built: every builder makes the same of it."""

    tag: str
    """`repository:key`."""
    context: Context
    platform: str
    """Operating system and processor: linux/amd64."""
    target: str = ""
    """The stage of the Dockerfile; empty is its last."""
    args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """Return target, arguments and labels as the options that Docker and Podman share."""
        named = {"build-arg": self.args, "label": self.labels}
        return (
            *([f"--target={self.target}"] if self.target else []),
            *(f"--{option}={name}={value}" for option, given in named.items() for name, value in given.items()),
        )


class Builder(Protocol):
    """Something that builds images and pushes them."""

    def build(self, build: Build, *, log: Log) -> str:
        """Build and push; returns the digest, `sha256:…`, that the registry is said to have now.

        Raises:
            ImageProblem: with the last lines of the builder's output and what to do.
            ImageUnreachable: the builder does not answer; building again is safe.
        """


@dataclass(frozen=True, kw_only=True)
class Site:
    """The surroundings of a build."""

    root: str = ""
    """The root of the run; a bucket holds contexts for builders elsewhere."""
    pause: Callable[[float], None] = time.sleep
    """Wait so many seconds; raises where the build is to stop."""

    def require_bucket(self, kind: str) -> None:
        """Refuse a root through which a builder elsewhere cannot be sent its files.

        Raises:
            ImageProblem: it is in no bucket.
        """
        if bucket_path(self.root) is None:
            raise ImageProblem(
                f"image.kind={kind} sends the build's files through a bucket, and root={self.root!r} is none; set root "
                "to gs://bucket/prefix, or image.kind to docker"
            )
