"""The image of the nodes, built unless it was built before, and pinned by digest before anybody uses it.

What builds is a module each: launcher.images.docker, launcher.images.cloudbuild. Here is what they have in common:
keys, the base by its digest, "was it built before", and the registry's own word on what was pushed.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import litgpt_demo
from launcher.errors import ImageProblem
from launcher.images.build import Build, Builder, Log, Site
from launcher.images.cloudbuild import CloudBuild
from launcher.images.context import Context
from launcher.images.docker import Engine
from launcher.images.identity import SoftwareIdentity, software_identity
from launcher.images.oci import ImageReference, find_digest, pin, resolve
from launcher.images.settings import (
    BuiltImage,
    CloudBuildImage,
    DockerImage,
    Image,
    NoImage,
    PrebuiltImage,
)

DOCKERFILE_OF_OURS = Path(litgpt_demo.__file__).parent / "Dockerfile"
STACK_DOCKERFILE = DOCKERFILE_OF_OURS.parent / "stacks" / "Dockerfile"
_INSTALLED = "litgpt_demo/stacks/installed.py"

NOWHERE = Site()


def prepare_image(image: Image, *, log: Log, site: Site = NOWHERE) -> SoftwareIdentity:
    """Make sure that the image is where the nodes will look for it, and pin it; `log` gets the builder's lines.

    Raises:
        ImageProblem: it cannot be built, pushed or found; the message says what to do.
        ImageUnreachable: registry or builder does not answer; trying again is safe.
    """
    match image:
        case NoImage():
            return software_identity()
        case PrebuiltImage():
            return software_identity(resolve(image.reference))
    return software_identity(build(image, log=log, site=site), checkout=Path(image.context))


def builder_of(image: BuiltImage, site: Site) -> Builder:
    """Return what builds the image.

    Raises:
        ImageProblem: it is not here.
    """
    match image:
        case DockerImage():
            return Engine(asked=image.engine, push=image.push, pause=site.pause)
        case CloudBuildImage():
            return CloudBuild(image, site)
    raise AssertionError(f"nothing builds image.kind={image.kind}")


def build_key(image: BuiltImage, site: Site = NOWHERE) -> str:
    """The tag of a built image: a hash of Dockerfile, build arguments, base, platform and the files it can copy.

    Raises:
        ImageProblem: Dockerfile or context cannot be read, or the base cannot be found.
    """
    return recipes(image, site)[-1].key


def build(image: BuiltImage, *, log: Log, site: Site = NOWHERE) -> str:
    """Build and push, unless the same inputs were built before; returns `repository@sha256:…`.

    Without a push it returns the id that this machine's engine gives the image, `sha256:…`.

    Raises:
        ImageProblem: with the last lines of the builder's output and what to do.
        ImageUnreachable: registry or builder does not answer; trying again is safe.
    """
    *below, last = recipes(image, site)
    if known := _known(last, site, log=log):
        return known
    builder, upon = builder_of(image, site), None
    for recipe in below:
        found = _known(recipe, site, log=log) or _built(recipe, builder, upon, log=log)
        upon = found if recipe.pushed else recipe.tag  # BuildKit takes no id for a base
    return _built(last, builder, upon, log=log)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The inputs of one image."""

    image: BuiltImage
    context: Context
    args: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    upon: str = ""
    """The identity of a base that `args` does not pin: the key of our own, or what this machine's engine calls it."""
    name: str = ""
    """The beginning of the tag."""

    @property
    def key(self) -> str:
        labels = dict(self.labels)
        inputs = [self.context.digest, self.image.platform, dict(self.args), *filter(None, [self.upon, labels])]
        return self.name + sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tag(self) -> str:
        return f"{self.image.repository}:{self.key}"

    @property
    def pushed(self) -> bool:
        return not isinstance(self.image, DockerImage) or self.image.push


def recipes(image: BuiltImage, site: Site = NOWHERE) -> tuple[Recipe, ...]:
    """Return what is built, each upon the one before it: our own image is its stack's packages, and our code upon them.

    Raises:
        ImageProblem: Dockerfile or context cannot be read, or the base cannot be found.
    """
    pinned = pin_base(image, site)
    args = {**image.build_args, **({} if pinned.base is None else {"BASE": pinned.base})}
    stack, contents = image.installed, image.contents
    if stack is not None:
        args["STACK"] = stack.name
    if image.dockerfile is not None or stack is None:
        # No labels: nobody has compared them with what a Dockerfile of the user's installs.
        return (_recipe(image, Path(str(image.dockerfile)), args=args, upon=pinned.engine_id),)
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
        args={**args, "LABELS": " ".join(f"{name}={value}" for name, value in stack.expected(contents).items())},
        labels=contents.labels,
        pip_config=None if image.pip_config is None else Path(image.pip_config),
        upon=pinned.engine_id,
        name=f"{stack.name}-",
    )
    own = {name: value for name, value in image.build_args.items() if name != "BASE"}
    ignored = (f"{posixpath.dirname(stack.lock)}/*", f"!{stack.lock}")
    return packages, _recipe(image, DOCKERFILE_OF_OURS, ignored=ignored, args=own, upon=packages.key)


def _recipe(
    image: BuiltImage, dockerfile: Path, *, ignored: tuple[str, ...] = (), pip_config: Path | None = None, **inputs: Any
) -> Recipe:
    context = Context.of(Path(image.context), dockerfile, ignored=ignored, pip_config=pip_config)
    return Recipe(image=image, context=context, **inputs)


def _known(recipe: Recipe, site: Site, *, log: Log) -> str:
    """Return the image as it was built before; empty if it was not."""
    if recipe.pushed:
        known = find_digest(ImageReference.parse(recipe.tag))
    else:
        known = builder_of(recipe.image, site).local_id(recipe.tag)
    if not known:
        return ""
    log(f"{recipe.tag} was built before; nothing has changed since")
    return f"{recipe.image.repository}@{known}" if recipe.pushed else known


def _built(recipe: Recipe, builder: Builder, upon: str | None, *, log: Log) -> str:
    """Build, and push if that is asked for; `upon` is our own image below it."""
    args = {**recipe.args, **({} if upon is None else {"BASE": upon})}
    log(f"building {recipe.tag} from {recipe.context.dockerfile}" + (f" upon {args['BASE']}" if "BASE" in args else ""))
    made = Build(
        tag=recipe.tag, context=recipe.context, platform=recipe.image.platform, args=args, labels=recipe.labels
    )
    digest = builder.build(made, log=log)
    # Nobody's word is taken for it: the registry must have the digest that the builder says it pushed.
    return resolve(f"{recipe.image.repository}@{digest}") if recipe.pushed else digest


@dataclass(frozen=True, kw_only=True)
class PinnedBase:
    """The base of an image, as it is now."""

    base: str | None = None
    """`repository@sha256:…`, None for the Dockerfile's default."""
    engine_id: str = ""
    """The builder's id of a base that is in no registry; then `base` is a name that only this builder knows."""


def pin_base(image: BuiltImage, site: Site = NOWHERE) -> PinnedBase:
    """Find the digest of the image to build upon: two builds from one tag are then two images, if the tag has moved.

    Raises:
        ImageProblem: neither its registry nor the builder has it.
        ImageUnreachable: its registry does not answer.
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
            engine_id = builder_of(image, site).local_id(base)
        except ImageProblem as here:
            raise type(elsewhere)(f"{elsewhere}. This machine's engine may have it: {here}") from elsewhere
        if not engine_id:
            raise
        return PinnedBase(base=base, engine_id=engine_id)
