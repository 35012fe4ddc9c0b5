"""The image of the nodes, built unless it was built before, and pinned by digest before anybody uses it.

What builds is a module each: launcher.images.docker, launcher.images.cloudbuild. Here is what they have in common:
keys, the base by its digest, "was it built before", and the registry's own word on what was pushed.
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
    """Make sure that the image is where the nodes will look for it, and pin it; `log` gets the builder's lines.
    The root of the run, if it is in a bucket, holds contexts for builders elsewhere. An ImageProblem has the last lines
    of the builder's output and what to do; after an ImageUnreachable, trying again is safe."""
    match image:
        case NoImage():
            return software_identity()
        case PrebuiltImage():
            return software_identity(resolve(image.reference))
        case DockerImage():
            make = partial(build_here, asked=image.engine, log=log, pause=pause)
        case CloudBuildImage():
            make = partial(CloudBuild(image, root, pause).build, log=log)

    def pinned(*builds: Build) -> str:
        *below, build = builds
        if (found := find_digest(ImageReference.parse(build.tag))) is not None:
            log(f"{build.tag} was built before; nothing has changed since")
            return f"{image.repository}@{found}"
        if below:
            build = replace(build, args={**build.args, "BASE": pinned(*below)})
        base = f" upon {build.args['BASE']}" if "BASE" in build.args else ""
        log(f"building {build.tag} from {build.context.dockerfile}{base}")
        # Nobody's word is taken for it: the registry must have the digest that the builder says it pushed.
        return resolve(f"{image.repository}@{make(build)}")

    return software_identity(pinned(*builds_of(image)), checkout=Path(image.context))


def builds_of(image: BuiltImage) -> tuple[Build, ...]:
    """Return what is built, each upon the one before it: our own image is its stack's packages, and our code upon them.

    Each has a key, a hash of Dockerfile, build arguments, base, platform and the files it can copy. A base is pinned by
    its digest: two builds from one tag are two images, if the tag has moved. An ImageProblem if Dockerfile or context
    cannot be read, or the base cannot be found.
    """
    folder, args, stack, contents = Path(image.context), dict(image.build_args), image.installed, image.contents
    # In a Dockerfile of the user's own, the build argument BASE may be anything.
    base = image.base or (args.get("BASE") if image.dockerfile is None else None)
    if base is not None:
        try:
            reference = ImageReference.parse(base)
        except ValueError as error:
            raise ImageProblem(f"image.base: {error}") from error
        args["BASE"] = base if reference.digest else resolve(reference)

    def build(context: Context, args: dict[str, str], labels: dict[str, str], *keyed: Any, name: str = "") -> Build:
        """`keyed` is what counts besides; what a user names as a base is in `args`."""
        inputs = json.dumps([context.digest, image.platform, args, *keyed], sort_keys=True)
        tag = f"{image.repository}:{name}{sha256(inputs.encode()).hexdigest()[:16]}"
        return Build(tag=tag, context=context, platform=image.platform, args=args, labels=labels)

    if stack is not None:
        args["STACK"] = stack.stack
    if image.dockerfile is not None or stack is None:
        # No labels: nobody has compared them with what a Dockerfile of the user's installs.
        return (build(Context(folder, Path(str(image.dockerfile))), args, {}),)
    if not (folder / stack.lock).is_file():
        what = f"image.context={image.context!r} is no checkout of train-litgpt, which its own Dockerfile copies from"
        raise ImageProblem(f"{what}; set image.context to one, or image.dockerfile to a Dockerfile of yours")
    # What installed.py compares with what it finds: an image on another base has a C library of its own.
    least = {"least-glibc": stack.least_glibc} if stack.least_glibc and not contents.glibc else {}
    said = {name.removeprefix(LABELS): value for name, value in contents.labels.items()}
    args["LABELS"] = " ".join(f"{name}={value}" for name, value in {**said, **least}.items())
    # Another stack's packages are none of this image's: a change of them must not change its key.
    only = ("*", f"!{stack.lock}", "!litgpt_demo/stacks/installed.py")
    context = Context(folder, STACK_DOCKERFILE, ignored=only, pip_config=image.pip_config)
    packages = build(context, args, contents.labels, contents.labels, name=f"{stack.stack}-")
    # The base is that of the packages, which are this one's.
    own = {name: value for name, value in image.build_args.items() if name != "BASE"}
    context = Context(folder, DOCKERFILE_OF_OURS, ignored=(f"{posixpath.dirname(stack.lock)}/*", f"!{stack.lock}"))
    return packages, build(context, own, {}, packages.key)
