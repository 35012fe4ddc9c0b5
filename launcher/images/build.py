"""The image of the nodes: built unless it exists already, and pinned by digest before it is used.

Each builder is a module: launcher.images.docker, launcher.images.cloudbuild. This module has their common part: tags,
the digest of the base, the search for an existing image, and the registry's digest of a pushed one.
"""

from __future__ import annotations

import json
import posixpath
import time
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import litgpt_demo
from launcher.errors import ImageProblem
from launcher.images.cloudbuild import CloudBuild
from launcher.images.context import Build, Context, Log, Pause
from launcher.images.docker import build_here
from launcher.images.identity import SoftwareIdentity, software_identity
from launcher.images.oci import ImageReference, find_digest, resolve
from launcher.images.settings import BuiltImage, CloudBuildImage, DockerImage, Image, NoImage, PrebuiltImage
from launcher.images.stacks import LABELS

DOCKERFILE_OF_OURS = Path(litgpt_demo.__file__).parent / "Dockerfile"
STACK_DOCKERFILE = DOCKERFILE_OF_OURS.parent / "stacks" / "Dockerfile"


def prepare_image(image: Image, *, log: Log, root: str = "", pause: Pause = time.sleep) -> SoftwareIdentity:
    """Make sure that the image is in its registry, and pin it; `log` gets the builder's lines. A root in a bucket holds
    contexts for remote builders."""
    match image:
        case NoImage():
            return software_identity()
        case PrebuiltImage():
            return software_identity(resolve(image.reference))
        case DockerImage():
            make = partial(build_here, program=image.engine, log=log, pause=pause)
        case CloudBuildImage():
            make = partial(CloudBuild(image, root, pause).build, log=log)
    # The last build is the image, each one before it the base of the next. Only missing ones are made.
    builds = list(builds_of(image))
    missing: list[Build] = []
    pinned = None
    while builds and pinned is None:
        build = builds.pop()
        digest = find_digest(ImageReference.parse(build.tag))
        if digest is None:
            missing.append(build)
        else:
            log(f"{build.tag} was built before; nothing has changed since")
            pinned = f"{image.repository}@{digest}"
    for build in reversed(missing):
        if pinned is not None:
            build = replace(build, args={**build.args, "BASE": pinned})
        base = f" upon {build.args['BASE']}" if "BASE" in build.args else ""
        log(f"building {build.tag} from {build.context.dockerfile}{base}")
        # The builder's report is not enough: the registry must have the digest.
        pinned = resolve(f"{image.repository}@{make(build)}")
    return software_identity(pinned, checkout=Path(image.context))


def builds_of(image: BuiltImage) -> tuple[Build, ...]:
    """Return the builds, each based on the one before: our own image is its stack's packages, and our code upon them.
    The content hash covers all inputs. A base is pinned by its digest, because a tag can move."""
    folder, args, stack, contents = Path(image.context), dict(image.build_args), image.installed, image.contents
    platform = f"linux/{image.architecture}"
    # In a Dockerfile of the user's own, the build argument BASE may be anything.
    base = image.base or (args.get("BASE") if image.dockerfile is None else None)
    if base is not None:
        try:
            reference = ImageReference.parse(base)
        except ValueError as error:
            raise ImageProblem(f"image.base: {error}") from error
        args["BASE"] = base
        if not reference.digest:
            args["BASE"] = resolve(base)

    def build(context: Context, args: dict[str, str], labels: dict[str, str], *inputs: Any, name: str = "") -> Build:
        """`inputs` are further inputs of the content hash; a user's base is in `args`."""
        hashed = json.dumps([context.digest, platform, args, *inputs], sort_keys=True)
        tag = f"{image.repository}:{name}{sha256(hashed.encode()).hexdigest()[:16]}"
        return Build(tag=tag, context=context, platform=platform, args=args, labels=labels)

    if stack is not None:
        args["STACK"] = stack.stack
    if image.dockerfile is not None or stack is None:
        # No labels: they were not compared with the packages that the user's own Dockerfile installs.
        return (build(Context(folder, Path(str(image.dockerfile))), args, {}),)
    if not (folder / stack.lock).is_file():
        what = f"image.context={image.context!r} is not a checkout of train-litgpt, which its own Dockerfile needs"
        raise ImageProblem(f"{what}; set image.context to one, or image.dockerfile to your own Dockerfile")
    # installed.py compares these with the image, because another base has a C library of its own.
    labels = {name.removeprefix(LABELS): value for name, value in contents.labels.items()}
    if stack.least_glibc and not contents.glibc:
        labels["least-glibc"] = stack.least_glibc
    args["LABELS"] = " ".join(f"{name}={value}" for name, value in labels.items())
    # A change of another stack's packages must not change this image's content hash.
    only = ("*", f"!{stack.lock}", "!litgpt_demo/stacks/installed.py")
    context = Context(folder, STACK_DOCKERFILE, ignored=only, pip_config=image.pip_config)
    packages = build(context, args, contents.labels, contents.labels, name=f"{stack.stack}-")
    # The base is that of the packages, which are this one's.
    own = {name: value for name, value in image.build_args.items() if name != "BASE"}
    context = Context(folder, DOCKERFILE_OF_OURS, ignored=(f"{posixpath.dirname(stack.lock)}/*", f"!{stack.lock}"))
    return packages, build(context, own, {}, packages.content_hash)
