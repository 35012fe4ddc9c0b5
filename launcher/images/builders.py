"""The image of the nodes, built unless it was built before, and pinned by digest before anybody uses it."""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, cast

import litgpt_demo
from launcher.errors import ImageProblem
from launcher.images.context import DOCKERFILE, write_context
from launcher.images.docker import Log, run_docker
from launcher.images.identity import SoftwareIdentity, software_identity
from launcher.images.oci import ImageReference, find_digest, login_command, pin, resolve
from launcher.images.settings import DockerImage, NoImage, PrebuiltImage


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
        stack = self.image.installed
        return {
            **self.image.build_args,
            **({"BASE": self.base} if self.base is not None else {}),
            **({"STACK": stack.name} if stack is not None else {}),
        }

    @property
    def labels(self) -> dict[str, str]:
        """Return what the image says of itself; nothing where a Dockerfile of the user's decides what it holds."""
        return self.image.contents.labels if self.image.installed else {}


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
    inputs = [context_hash, pinned.image.platform, pinned.build_args, *filter(None, [pinned.engine_id, pinned.labels])]
    return sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _dockerfile(image: DockerImage) -> Path:
    return Path(image.dockerfile) if image.dockerfile else Path(litgpt_demo.__file__).parent / "Dockerfile"


def _write_context(image: DockerImage, *, to: BinaryIO | None) -> str:
    context = Path(image.context)
    own = image.installed if image.dockerfile is None else None
    if own and not (context / own.lock).is_file():
        raise ImageProblem(
            f"image.context={image.context!r} is not a checkout of train-litgpt, which the product's own Dockerfile "
            "copies from; set image.context to a checkout, or image.dockerfile to a Dockerfile of yours"
        )
    try:
        # Another stack's packages are none of this image's: a change of them must not change its key.
        ignored = [f"{posixpath.dirname(own.lock)}/*", f"!{own.lock}"] if own else []
        return write_context(context, _dockerfile(image).read_text("utf-8"), ignored=ignored, to=to)
    except (OSError, ValueError) as error:
        raise ImageProblem(
            f"the build context cannot be read: {error}; fix the path, the permission or the pattern, "
            f"or name the file in {context / '.dockerignore'}"
        ) from error


def _docker_build(pinned: PinnedBase, tag: str, *, log: Log) -> None:
    image = pinned.image
    arguments = [f"--build-arg={name}={value}" for name, value in pinned.build_args.items()]
    arguments += [f"--label={name}={value}" for name, value in pinned.labels.items()]
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
