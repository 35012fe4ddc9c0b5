"""The image of the nodes: this very environment, an image that exists, or one that is built here.

An image is pinned by digest before anybody uses it.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Self, cast

from pydantic import ConfigDict, Field, field_validator, model_validator

import litgpt_demo
from launcher.errors import ImageProblem
from launcher.images.context import DOCKERFILE, write_context
from launcher.images.docker import Log, run_docker
from launcher.images.oci import ImageReference, find_digest, login_command, pin, resolve
from litgpt_demo.config import Kind, Settings

__all__ = [
    "DockerImage",
    "Image",
    "NoImage",
    "PrebuiltImage",
    "SoftwareIdentity",
    "build",
    "build_key",
    "prepare_image",
    "resolve",
    "software_identity",
]

# --- settings ---------------------------------------------------------------------------------------------------------


class NoImage(Settings):
    """The nodes run this very environment: for `platform: {kind: local}`."""

    model_config = ConfigDict(title="No image")

    kind: Literal["none"] = Kind("none")


class PrebuiltImage(Settings):
    """An image that is in its registry already."""

    model_config = ConfigDict(title="Prebuilt image")

    kind: Literal["prebuilt"] = Kind("prebuilt")
    reference: str
    """`registry/repository:tag` or `registry/repository@sha256:…`. A tag counts as its digest now; no `latest`."""

    @field_validator("reference")
    @classmethod
    def _is_fixed(cls, text: str) -> str:
        ImageReference.parse_fixed(text)
        return text


class DockerImage(Settings):
    """An image that Docker builds here and pushes; not again while nothing that goes into it has changed."""

    model_config = ConfigDict(title="Built with Docker")

    kind: Literal["docker"] = Kind("docker")
    repository: str
    """The repository of the image, without a tag: `europe-west4-docker.pkg.dev/my-project/litgpt/train`."""
    dockerfile: str | None = None
    """Path of a Dockerfile; empty takes the product's own, which needs a checkout of train-litgpt as context.
    What a Dockerfile of yours builds upon is pinned by the digest that you write there, or by `base`."""
    context: str = "."
    """Folder whose files the Dockerfile may copy, less what its .dockerignore names."""
    base: str | None = None
    """Image to build upon (build argument BASE), pinned by digest when it is built; empty takes the Dockerfile's."""
    build_args: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Further build arguments. They can be read in the image's history: no secrets."""
    platform: str = Field("linux/amd64", pattern=r"^[a-z0-9]+/[a-z0-9_]+(/[a-z0-9]+)?$")
    """Operating system and processor of the nodes."""
    push: bool = True
    """Without a push the image stays in this machine's engine: enough to try a Dockerfile, not for nodes elsewhere."""

    @field_validator("repository")
    @classmethod
    def _has_no_tag(cls, text: str) -> str:
        reference = ImageReference.parse(text)
        if reference.tag or reference.digest:
            raise ValueError(
                f"{text!r} has a tag or digest, but the tag of a built image is the hash of what goes into it; "
                f"write {reference.repository}"
            )
        return text

    @model_validator(mode="after")
    def _has_one_base(self) -> Self:
        if self.base is not None and "BASE" in self.build_args:
            raise ValueError(
                f"image.base={self.base!r} and image.build_args.BASE={self.build_args['BASE']!r} set the same thing; "
                "leave one out"
            )
        return self


Image = Annotated[NoImage | PrebuiltImage | DockerImage, Field(discriminator="kind")]


def prepare_image(image: NoImage | PrebuiltImage | DockerImage, *, log: Log) -> SoftwareIdentity:
    """Make sure that the image is where the nodes will look for it, and pin it; `log` gets Docker's lines as they come.

    Raises:
        ImageProblem: it cannot be built, pushed or found; the message says what to do.
    """
    match image:
        case NoImage():
            return software_identity()
        case PrebuiltImage():
            return software_identity(resolve(image.reference))
        case DockerImage():
            return software_identity(build(image, log=log), checkout=Path(image.context))


# --- what a run's code was --------------------------------------------------------------------------------------------

RECORDED = ("torch", "lightning", "litgpt", "gigatoken", "tokenizers", "numpy", "prefect", "train-litgpt")
"""Distributions whose versions are kept with a run that has no image."""


@dataclass(frozen=True, kw_only=True)
class SoftwareIdentity:
    """The identity of a run's code; recorded with every run."""

    image: str | None
    """`repository@sha256:…`; None where nothing is containerised."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Name and version of what matters in this environment, where there is no image that says so."""
    commit: str | None
    """git commit of the checkout; None outside a repository."""
    dirty: bool
    """The checkout had uncommitted changes to tracked files."""

    @property
    def revision(self) -> str:
        """The commit as people name it; empty outside a repository."""
        return f"commit {self.commit[:10]}{' with changes' if self.dirty else ''}" if self.commit else ""

    def listed(self, *names: str) -> list[str]:
        """Name and version of those of the packages that are known."""
        return [f"{name} {self.packages[name]}" for name in names if name in self.packages]


def software_identity(image: str | None = None, *, checkout: Path | None = None) -> SoftwareIdentity:
    """Return our identity: versions are read from the installed metadata, without importing anything.

    `checkout` is the folder whose commit counts; by default the one that litgpt_demo was imported from.
    """
    folder = checkout or Path(litgpt_demo.__file__).parents[1]
    # A site-packages folder lies in a repository too, if its .venv does; but nothing in it is tracked.
    commit = _git(folder, "rev-parse", "HEAD") if _git(folder, "ls-files", ".") else None
    return SoftwareIdentity(
        image=image,
        packages={} if image else _package_versions(),
        commit=commit or None,
        dirty=bool(commit and _git(folder, "status", "--porcelain", "--untracked-files=no", ".")),
    )


def _package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in RECORDED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _git(folder: Path, *arguments: str) -> str:
    """Return what git says in `folder`; nothing where there is no git, no repository or no commit."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- building ---------------------------------------------------------------------------------------------------------


def build_key(image: DockerImage) -> str:
    """The tag of a built image: a hash of Dockerfile, build arguments, base, platform and the files it can copy.

    Raises:
        ImageProblem: Dockerfile or context cannot be read, or the base cannot be found.
    """
    return _key(pin_base(image), _write_context(image, to=None))


def build(image: DockerImage, *, log: Log) -> str:
    """Build and push, unless the same inputs were built before; returns `repository@sha256:…`.

    Without a push it returns the id that this machine's engine gives the image, `sha256:…`.

    Raises:
        ImageProblem: with the last lines of Docker's output and what to do.
    """
    pinned = pin_base(image)
    tag = f"{image.repository}:{_key(pinned, _write_context(image, to=None))}"
    known = find_digest(ImageReference.parse(tag)) if image.push else _local_id(tag)
    if known:
        log(f"{tag} was built before; nothing has changed since")
        return f"{image.repository}@{known}" if image.push else known
    log(f"building {tag} from {_dockerfile(image)}" + (f" upon {pinned.base}" if pinned.base else ""))
    _docker_build(pinned, tag, log=log)
    return _push(tag, log=log) if image.push else _local_id(tag)


@dataclass(frozen=True, kw_only=True)
class PinnedBase:
    """An image to be built, and what its base is now."""

    image: DockerImage
    base: str | None = None
    """`repository@sha256:…`, None for the Dockerfile's default."""
    engine_id: str = ""
    """This machine's id of a base that is in no registry; then `base` is a name that only this machine knows."""

    @property
    def build_args(self) -> dict[str, str]:
        return {**self.image.build_args, **({"BASE": self.base} if self.base is not None else {})}


def pin_base(image: DockerImage) -> PinnedBase:
    """Find the digest of the image to build upon: two builds from one tag are then two images, if the tag has moved.

    Raises:
        ImageProblem: neither its registry nor this machine's engine has it.
    """
    # In a Dockerfile of the user's own, the build argument BASE may be anything.
    base = image.base or (image.build_args.get("BASE") if image.dockerfile is None else None)
    if base is None:
        return PinnedBase(image=image)
    try:
        reference = ImageReference.parse(base)
    except ValueError as error:
        raise ImageProblem(f"image.base: {error}") from error
    if reference.digest:
        return PinnedBase(image=image, base=base)
    try:
        return PinnedBase(image=image, base=pin(reference))
    except ImageProblem as elsewhere:
        try:
            engine_id = _local_id(base)
        except ImageProblem as here:
            raise ImageProblem(f"{elsewhere}. This machine's engine may have it: {here}") from elsewhere
        if not engine_id:
            raise
        return PinnedBase(image=image, base=base, engine_id=engine_id)


def _key(pinned: PinnedBase, context_hash: str) -> str:
    inputs = [context_hash, pinned.image.platform, pinned.build_args, *filter(None, [pinned.engine_id])]
    return sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _dockerfile(image: DockerImage) -> Path:
    return Path(image.dockerfile) if image.dockerfile else Path(litgpt_demo.__file__).parent / "Dockerfile"


def _write_context(image: DockerImage, *, to: BinaryIO | None) -> str:
    context = Path(image.context)
    if image.dockerfile is None and not (context / "litgpt_demo" / "requirements.lock").is_file():
        raise ImageProblem(
            f"image.context={image.context!r} is not a checkout of train-litgpt, which the product's own Dockerfile "
            "copies from; set image.context to a checkout, or image.dockerfile to a Dockerfile of yours"
        )
    try:
        return write_context(context, _dockerfile(image).read_text("utf-8"), to=to)
    except (OSError, ValueError) as error:
        raise ImageProblem(
            f"the build context cannot be read: {error}; fix the path, the permission or the pattern, "
            f"or name the file in {context / '.dockerignore'}"
        ) from error


def _docker_build(pinned: PinnedBase, tag: str, *, log: Log) -> None:
    image = pinned.image
    arguments = [f"--build-arg={name}={value}" for name, value in pinned.build_args.items()]
    with tempfile.TemporaryFile() as file:
        tar = cast("BinaryIO", file)
        if tag != f"{image.repository}:{_key(pinned, _write_context(image, to=tar))}":
            raise ImageProblem(
                f"files in {image.context!r} change while {tag} is built from them; wait, then build again"
            )
        tar.seek(0)
        options = ["--force-rm", f"--platform={image.platform}", f"--tag={tag}", f"--file={DOCKERFILE}", *arguments]
        _docker(["build", *options, "-"], tag, log=log, stdin=tar)


def _push(tag: str, *, log: Log) -> str:
    """Push, and take nobody's word for it: the registry must have the digest that Docker says it pushed."""
    lines = _docker(["push", tag], tag, log=log)
    digests = re.findall(r"digest: (sha256:[0-9a-f]{64})", "\n".join(lines))
    return resolve(f"{ImageReference.parse(tag).repository}@{digests[-1]}" if digests else tag)


def _local_id(tag: str) -> str:
    """The engine's id of an image; empty if it has none of that name."""
    lines = _docker(["image", "ls", "--no-trunc", "--quiet", tag], tag, log=lambda line: None)
    return next((line for line in lines if line.startswith("sha256:")), "")


def _docker(arguments: Sequence[str], tag: str, *, log: Log, stdin: BinaryIO | None = None) -> list[str]:
    login = login_command(ImageReference.parse(tag).host)
    return run_docker(arguments, subject=tag, login=login, log=log, stdin=stdin)
