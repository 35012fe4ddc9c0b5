"""The comparison of an image with its network's plug-in and the machine: before anything is rented."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.errors import ImageProblem
from launcher.images.oci import read_config
from launcher.images.settings import BuiltImage, Image, PrebuiltImage
from launcher.images.stacks import DEFAULT_STACK, LABELS, STACKS, Contents, Stack
from launcher.machines import Machine
from launcher.networks.profile import Network
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NcclFit, check_nccl_version
from litgpt_demo.node.versions import within

LOOK_INSIDE = "docker run --rm {image} python -m litgpt_demo.node.nccl"
"""The command that prints torch and NCCL of an image."""


def stack_for(network: Network | None) -> Stack | None:
    """Return the first stack that a network's plug-in is qualified for; None where it is qualified for none of them."""
    if network is None:
        return DEFAULT_STACK
    return next((stack for stack in STACKS.values() if _fits(stack, network)), None)


def _fits(stack: Stack, network: Network) -> bool:
    return network.node.nccl_fit(stack.nccl) in {NcclFit.QUALIFIED, NcclFit.UNSTATED}


def with_stack(image: Image, network: Network | None) -> Image:
    """Return an image's settings with the stack that its network needs, unless they name one or a Dockerfile."""
    if not isinstance(image, BuiltImage) or image.stack is not None or image.dockerfile is not None:
        return image
    return image.model_copy(update={"stack": (stack_for(network) or DEFAULT_STACK).name})


# --- findings ---------------------------------------------------------------------------------------------------------


def check_fitness(image: Image, network: Network | None, machine: Machine | None = None) -> Iterator[Finding]:
    """Yield how an image fits its network and machine. A registry is asked only of an image that exists, and only
    where the network has a plug-in."""
    image = with_stack(image, network)
    if isinstance(image, BuiltImage):
        yield from _check_built(image, network)
    elif isinstance(image, PrebuiltImage):
        if network is None or not network.node.plugged_in:
            what = f"{image.reference} brings its own torch and NCCL, and its network asks for none in particular"
            yield Finding("info", "image.stack", what)
        else:
            yield from check_pinned(image.reference, network, machine)


def check_finished(image: Image, reference: str, network: Network | None, machine: Machine | None) -> Iterator[Finding]:
    """Yield how an image fits that is there now: by its stack, or by the labels that its registry has.

    Args:
        reference: what the image step has made of its settings; `repository@sha256:…` if it is in a registry.
    """
    if isinstance(image, BuiltImage) and image.installed is not None:
        yield from check_fitness(image, network, machine)
    elif network is not None and network.node.plugged_in and "@" in reference:
        yield from check_pinned(reference, network, machine)


def _check_built(image: BuiltImage, network: Network | None) -> Iterator[Finding]:
    stack = image.installed
    if stack is None:
        if network is not None and network.node.plugged_in:
            what = f"the NCCL of an image from {image.dockerfile} is not known before it is built"
            fix = "name the stack that it installs in image.stack; otherwise its labels are read when it is there"
            yield Finding("warning", "image.unknown", what, fix)
        return
    better = stack_for(network)
    instead = f"leave image.stack out: stack {better.name} has NCCL {better.nccl}" if better else ""
    if network is not None:
        found = list(
            _check_contents(image.contents, network, owner=f"{stack}", instead=instead or network.without_stack)
        )
        yield from found
        if any(one.severity == "error" for one in found):
            return
    driver = f"the nodes need GPU driver {stack.driver} or newer"
    yield Finding("info", "image.stack", f"{image.contents}{_verdict(image.contents, network)}; {driver}")


def check_pinned(reference: str, network: Network, machine: Machine | None = None) -> Iterator[Finding]:
    """Yield how an image that is in its registry fits, by its labels."""
    architecture = machine.arch if machine else ""
    try:
        config = read_config(reference, architecture=architecture or "amd64")
    except ImageProblem as error:
        found = Finding.of(error, "image.unread")
        yield replace(found, severity="unknown", what=f"which NCCL the image has is not known: {found.what}")
        return
    contents = Contents.of_labels(config.labels, architecture=config.architecture)
    if architecture and contents.architecture not in {"", architecture}:
        what = f"{reference} is for {contents.architecture}, and a {machine.name if machine else ''} is {architecture}"
        yield Finding("error", "image.architecture", what, f"name an image for linux/{architecture}")
        return
    against = list(_check_contents(contents, network, owner=reference))
    yield from against
    if contents.nccl and not against:
        yield Finding("info", "image.stack", f"{reference} has {contents}{_verdict(contents, network)}")


def _check_contents(contents: Contents, network: Network, *, owner: str, instead: str = "") -> Iterator[Finding]:
    """Yield what the network's plug-in has against an image."""
    node = network.node
    if not node.plugged_in:
        return
    if contents.nccl:
        yield from check_nccl_version(node, contents.nccl, owner=owner, instead=instead)
    elif node.nccl_versions:
        what = (
            f"{owner} has no label {LABELS}nccl that says which NCCL it has, and the {node.name} plug-in is qualified "
            f"for {' or '.join(node.nccl_versions)}"
        )
        yield Finding("warning", "image.unlabelled", what, f"ask its torch: {LOOK_INSIDE.format(image=owner)}")
    if node.glibc and contents.glibc and not within(contents.glibc, (f">={node.glibc}",)):
        what = f"{owner} has glibc {contents.glibc}, and the {node.name} plug-in needs {node.glibc}"
        yield Finding("error", "image.glibc", what, "build the image on Ubuntu 22.04, Debian 12 or newer")


def _verdict(contents: Contents, network: Network | None) -> str:
    """Return what the network makes of an image that may be used, to follow what the image has."""
    if network is None or not network.node.plugged_in:
        return "; its network loads no NCCL plug-in"
    plugin = f"{network.name} {network.pair.plugin}" if network.pair else network.name
    fit = network.node.nccl_fit(contents.nccl)
    return f"; {plugin} names no NCCL that it needs" if fit is NcclFit.UNSTATED else f"; {fit.value} for {plugin}"
