"""The image of the nodes, built unless it was built before, and pinned by digest before anybody uses it.

What builds is a module each: launcher.images.docker, launcher.images.cloudbuild, launcher.platforms.kubernetes.builds.
Here is what they have in common: keys, the base by its digest, "was it built before", and the registry's own word on
what was pushed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import litgpt_demo
from launcher.errors import ImageProblem
from launcher.images.build import Build, Builder, Log, Site
from launcher.images.choice import chosen_builder
from launcher.images.cloudbuild import CloudBuild
from launcher.images.context import Context
from launcher.images.docker import Engine
from launcher.images.identity import SoftwareIdentity, software_identity
from launcher.images.oci import ImageReference, find_digest, pin, resolve
from launcher.images.settings import (
    AutoImage,
    BuiltImage,
    CloudBuildImage,
    ClusterImage,
    DockerImage,
    Image,
    NoImage,
    PrebuiltImage,
)
from launcher.images.stacks import DEFAULT_STACK

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
        case AutoImage():
            return builder_of(chosen_builder(image, site)[0], site)
        case DockerImage():
            return Engine(asked=image.engine, push=image.push, pause=site.pause)
        case CloudBuildImage():
            return CloudBuild(image, site)
        case ClusterImage():
            if site.in_cluster is None:
                raise ImageProblem(
                    "image.kind=cluster needs a platform whose cluster takes Jobs, as kind: gke does; set "
                    "image.kind to docker or cloudbuild"
                )
            return site.in_cluster(image, site)
    raise AssertionError(f"nothing builds image.kind={image.kind}")


def build_key(image: BuiltImage, site: Site = NOWHERE) -> str:
    """The tag of a built image: a hash of Dockerfile, build arguments, base, platform and the files it can copy.

    Raises:
        ImageProblem: Dockerfile or context cannot be read, or the base cannot be found.
    """
    return _key(pin_base(image, site), context_of(image))


def build(image: BuiltImage, *, log: Log, site: Site = NOWHERE) -> str:
    """Build and push, unless the same inputs were built before; returns `repository@sha256:…`.

    Without a push it returns the id that this machine's engine gives the image, `sha256:…`.

    Raises:
        ImageProblem: with the last lines of the builder's output and what to do.
        ImageUnreachable: registry or builder does not answer; trying again is safe.
    """
    context, pinned = context_of(image), pin_base(image, site)
    tag = f"{image.repository}:{_key(pinned, context)}"
    pushed = not isinstance(image, DockerImage) or image.push
    known = find_digest(ImageReference.parse(tag)) if pushed else builder_of(image, site).local_id(tag)
    if known:
        log(f"{tag} was built before; nothing has changed since")
        return f"{image.repository}@{known}" if pushed else known
    if isinstance(image, AutoImage):
        image, why = chosen_builder(image, site)
        log(f"image.kind=auto builds with {image.kind}: {why}")
    log(f"building {tag} from {context.dockerfile}" + (f" upon {pinned.base}" if pinned.base else ""))
    digest = builder_of(image, site).build(
        Build(tag=tag, context=context, platform=image.platform, args=pinned.build_args), log=log
    )
    # Nobody's word is taken for it: the registry must have the digest that the builder says it pushed.
    return resolve(f"{image.repository}@{digest}") if pushed else digest


@dataclass(frozen=True, kw_only=True)
class PinnedBase:
    """An image to be built, and what its base is now."""

    image: BuiltImage
    base: str | None = None
    """`repository@sha256:…`, None for the Dockerfile's default."""
    engine_id: str = ""
    """The builder's id of a base that is in no registry; then `base` is a name that only this builder knows."""

    @property
    def build_args(self) -> Mapping[str, str]:
        return {**self.image.build_args, **({"BASE": self.base} if self.base is not None else {})}


def pin_base(image: BuiltImage, site: Site = NOWHERE) -> PinnedBase:
    """Find the digest of the image to build upon: two builds from one tag are then two images, if the tag has moved.

    Raises:
        ImageProblem: neither its registry nor the builder has it.
        ImageUnreachable: its registry does not answer.
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
            engine_id = builder_of(image, site).local_id(base)
        except ImageProblem as here:
            raise type(elsewhere)(f"{elsewhere}. This machine's engine may have it: {here}") from elsewhere
        if not engine_id:
            raise
        return PinnedBase(image=image, base=base, engine_id=engine_id)


def _key(pinned: PinnedBase, context: Context) -> str:
    inputs = [context.digest, pinned.image.platform, pinned.build_args, *filter(None, [pinned.engine_id])]
    return sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def context_of(image: BuiltImage) -> Context:
    """Hash what the Dockerfile may copy.

    Raises:
        ImageProblem: Dockerfile or context cannot be read.
    """
    folder = Path(image.context)
    if image.dockerfile is None and not (folder / DEFAULT_STACK.lock).is_file():
        raise ImageProblem(
            f"image.context={image.context!r} is not a checkout of train-litgpt, which the product's own Dockerfile "
            "copies from; set image.context to a checkout, or image.dockerfile to a Dockerfile of yours"
        )
    dockerfile = Path(image.dockerfile) if image.dockerfile else Path(litgpt_demo.__file__).parent / "Dockerfile"
    return Context.of(folder, dockerfile)
