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


def build_key(image: BuiltImage) -> str:
    """The tag of a built image: a hash of Dockerfile, build arguments, base, platform and the files it can copy.

    Raises:
        ImageProblem: Dockerfile or context cannot be read, or the base cannot be found.
    """
    return recipes(image)[-1].key


def build(image: BuiltImage, *, log: Log, site: Site = NOWHERE) -> str:
    """Build and push, unless the same inputs were built before; returns `repository@sha256:…`.

    Raises:
        ImageProblem: with the last lines of the builder's output and what to do.
        ImageUnreachable: registry or builder does not answer; trying again is safe.
    """
    *below, last = recipes(image)
    if known := _known(last, log=log):
        return known
    match image:
        case DockerImage():
            builder: Builder = Engine(asked=image.engine, pause=site.pause)
        case CloudBuildImage():
            builder = CloudBuild(image, site)
        case _:
            raise AssertionError(f"nothing builds image.kind={image.kind}")
    upon = None
    for recipe in below:
        upon = _known(recipe, log=log) or _built(recipe, builder, upon, log=log)
    return _built(last, builder, upon, log=log)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The inputs of one image."""

    image: BuiltImage
    context: Context
    args: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    upon: str = ""
    """The key of our own image below this one; what a user names as a base is in `args`, by its digest."""
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


def recipes(image: BuiltImage) -> tuple[Recipe, ...]:
    """Return what is built, each upon the one before it: our own image is its stack's packages, and our code upon them.

    Raises:
        ImageProblem: Dockerfile or context cannot be read, or the base cannot be found.
    """
    base = pin_base(image)
    args = {**image.build_args, **({} if base is None else {"BASE": base})}
    stack, contents = image.installed, image.contents
    if stack is not None:
        args["STACK"] = stack.name
    if image.dockerfile is not None or stack is None:
        # No labels: nobody has compared them with what a Dockerfile of the user's installs.
        return (_recipe(image, Path(str(image.dockerfile)), args=args),)
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


def _known(recipe: Recipe, *, log: Log) -> str:
    """Return the image as it was built before; empty if it was not."""
    known = find_digest(ImageReference.parse(recipe.tag))
    if known is None:
        return ""
    log(f"{recipe.tag} was built before; nothing has changed since")
    return f"{recipe.image.repository}@{known}"


def _built(recipe: Recipe, builder: Builder, upon: str | None, *, log: Log) -> str:
    """Build and push; `upon` is our own image below it."""
    args = {**recipe.args, **({} if upon is None else {"BASE": upon})}
    log(f"building {recipe.tag} from {recipe.context.dockerfile}" + (f" upon {args['BASE']}" if "BASE" in args else ""))
    made = Build(
        tag=recipe.tag, context=recipe.context, platform=recipe.image.platform, args=args, labels=recipe.labels
    )
    digest = builder.build(made, log=log)
    # Nobody's word is taken for it: the registry must have the digest that the builder says it pushed.
    return resolve(f"{recipe.image.repository}@{digest}")


def pin_base(image: BuiltImage) -> str | None:
    """Return the image to build upon as `repository@sha256:…`, None for the Dockerfile's default.

    Two builds from one tag are two images, if the tag has moved.

    Raises:
        ImageProblem: its registry does not have it.
        ImageUnreachable: its registry does not answer.
    """
    # In a Dockerfile of the user's own, the build argument BASE may be anything.
    base = image.base or (image.build_args.get("BASE") if image.dockerfile is None else None)
    if base is None:
        return None
    try:
        reference = ImageReference.parse(base)
    except ValueError as error:
        raise ImageProblem(f"image.base: {error}") from error
    return base if reference.digest else pin(reference)
