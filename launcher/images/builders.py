"""The image of the nodes, built unless it was built before, and pinned by digest before anybody uses it."""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

import litgpt_demo
from launcher.errors import ImageProblem
from launcher.images.context import DOCKERFILE, append_file, write_context
from launcher.images.docker import Log, run_docker
from launcher.images.identity import SoftwareIdentity, software_identity
from launcher.images.oci import ImageReference, find_digest, login_command, pin, resolve
from launcher.images.settings import DockerImage, NoImage, PrebuiltImage

DOCKERFILE_OF_OURS = Path(litgpt_demo.__file__).parent / "Dockerfile"
STACK_DOCKERFILE = DOCKERFILE_OF_OURS.parent / "stacks" / "Dockerfile"
_INSTALLED = "litgpt_demo/stacks/installed.py"


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
    return recipes(image)[-1].key


def build(image: DockerImage, *, log: Log) -> str:
    """Build and push, unless the same inputs were built before; returns `repository@sha256:…`.

    Without a push it returns the id that this machine's engine gives the image, `sha256:…`.

    Raises:
        ImageProblem: with the last lines of Docker's output and what to do.
    """
    *below, last = recipes(image)
    known = _known(last, log=log)
    if known:
        return known
    upon = None
    for recipe in below:
        found = _known(recipe, log=log) or _built(recipe, upon, log=log)
        upon = found if image.push else recipe.tag  # BuildKit takes no id for a base
    return _built(last, upon, log=log)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The inputs of one image."""

    image: DockerImage
    dockerfile: Path
    context_hash: str
    ignored: tuple[str, ...] = ()
    """Lines after those of the context's .dockerignore."""
    args: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    pip_config: Path | None = None
    upon: str = ""
    """The identity of a base that `args` does not pin: the key of our own, or what this machine's engine calls it."""
    name: str = ""
    """The beginning of the tag."""

    @property
    def key(self) -> str:
        labels = dict(self.labels)
        inputs = [self.context_hash, self.image.platform, dict(self.args), *filter(None, [self.upon, labels])]
        return self.name + sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tag(self) -> str:
        return f"{self.image.repository}:{self.key}"


def recipes(image: DockerImage) -> tuple[Recipe, ...]:
    """Return what is built, each upon the one before it: our own image is its stack's packages, and our code upon them.

    Raises:
        ImageProblem: Dockerfile or context cannot be read, or the base cannot be found.
    """
    pinned = pin_base(image)
    args = {**image.build_args, **({} if pinned.base is None else {"BASE": pinned.base})}
    stack, contents = image.installed, image.contents
    labels = contents.labels if stack else {}
    if stack is not None:
        args["STACK"] = stack.name
    if image.dockerfile is not None or stack is None:
        return (_recipe(image, Path(str(image.dockerfile)), args=args, labels=labels, upon=pinned.engine_id),)
    if not (Path(image.context) / stack.lock).is_file():
        raise ImageProblem(
            f"image.context={image.context!r} is not a checkout of train-litgpt, which the product's own Dockerfile "
            "copies from; set image.context to a checkout, or image.dockerfile to a Dockerfile of yours"
        )
    # Another stack's packages are none of this image's: a change of them must not change its key.
    packages = _recipe(
        image,
        STACK_DOCKERFILE,
        ignored=("*", f"!{stack.lock}", f"!{_INSTALLED}"),
        args={**args, "LABELS": json.dumps(contents.said)},
        labels=labels,
        pip_config=None if image.pip_config is None else Path(image.pip_config),
        upon=pinned.engine_id,
        name=f"{stack.name}-",
    )
    own = {name: value for name, value in image.build_args.items() if name != "BASE"}
    ignored = (f"{posixpath.dirname(stack.lock)}/*", f"!{stack.lock}")
    return packages, _recipe(image, DOCKERFILE_OF_OURS, ignored=ignored, args=own, upon=packages.key)


def _recipe(image: DockerImage, dockerfile: Path, *, ignored: tuple[str, ...] = (), **inputs: Any) -> Recipe:
    hashed = _write_context(image, dockerfile, ignored, to=None)
    return Recipe(image=image, dockerfile=dockerfile, context_hash=hashed, ignored=ignored, **inputs)


@dataclass(frozen=True, kw_only=True)
class PinnedBase:
    """What an image's base is now."""

    base: str | None = None
    """`repository@sha256:…`, None for the Dockerfile's default."""
    engine_id: str = ""
    """This machine's id of a base that is in no registry; then `base` is a name that only this machine knows."""


def pin_base(image: DockerImage) -> PinnedBase:
    """Find the digest of the image to build upon: two builds from one tag are then two images, if the tag has moved.

    Raises:
        ImageProblem: neither its registry nor this machine's engine has it.
    """
    # In a Dockerfile of the user's own, the build argument BASE may be anything.
    base = image.base or (image.build_args.get("BASE") if image.dockerfile is None else None)
    if base is None:
        return PinnedBase()
    try:
        reference = ImageReference.parse(base)
    except ValueError as error:
        raise ImageProblem(f"image.base: {error}") from error
    if reference.digest:
        return PinnedBase(base=base)
    try:
        return PinnedBase(base=pin(reference))
    except ImageProblem as elsewhere:
        try:
            engine_id = _local_id(base)
        except ImageProblem as here:
            raise ImageProblem(f"{elsewhere}. This machine's engine may have it: {here}") from elsewhere
        if not engine_id:
            raise
        return PinnedBase(base=base, engine_id=engine_id)


def _write_context(image: DockerImage, dockerfile: Path, ignored: Sequence[str], *, to: BinaryIO | None) -> str:
    context = Path(image.context)
    try:
        return write_context(context, dockerfile.read_text("utf-8"), ignored=ignored, to=to)
    except (OSError, ValueError) as error:
        raise ImageProblem(
            f"the build context cannot be read: {error}; fix the path, the permission or the pattern, "
            f"or name the file in {context / '.dockerignore'}"
        ) from error


def _known(recipe: Recipe, *, log: Log) -> str:
    """Return the image as it was built before; empty if it was not."""
    image = recipe.image
    known = find_digest(ImageReference.parse(recipe.tag)) if image.push else _local_id(recipe.tag)
    if not known:
        return ""
    log(f"{recipe.tag} was built before; nothing has changed since")
    return f"{image.repository}@{known}" if image.push else known


def _built(recipe: Recipe, upon: str | None, *, log: Log) -> str:
    """Build, and push if that is asked for; `upon` is our own image below it."""
    image, tag = recipe.image, recipe.tag
    args = {**recipe.args, **({} if upon is None else {"BASE": upon})}
    log(f"building {tag} from {recipe.dockerfile}" + (f" upon {args['BASE']}" if "BASE" in args else ""))
    arguments = [f"--build-arg={name}={value}" for name, value in args.items()]
    arguments += [f"--label={name}={value}" for name, value in recipe.labels.items()]
    with tempfile.TemporaryFile() as file:
        tar = cast("BinaryIO", file)
        if recipe.context_hash != _write_context(image, recipe.dockerfile, recipe.ignored, to=tar):
            raise ImageProblem(
                f"files in {image.context!r} change while {tag} is built from them; wait, then build again"
            )
        if recipe.pip_config is not None:
            append_file(tar, "pip.conf", _read_pip_config(recipe.pip_config))
        tar.seek(0)
        options = ["--force-rm", f"--platform={image.platform}", f"--tag={tag}", f"--file={DOCKERFILE}", *arguments]
        _docker(["build", *options, "-"], tag, log=log, stdin=tar)
    return _push(tag, log=log) if image.push else _local_id(tag)


def _read_pip_config(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageProblem(f"image.pip_config={str(path)!r} cannot be read: {error.strerror}; fix the path") from error


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
