"""The comparison of an image with its network's plug-in and the machine: before anything is rented."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.config import RunConfig, ScriptConfig
from launcher.errors import ImageProblem
from launcher.images.oci import read_config
from launcher.images.settings import BuiltImage, Image, PrebuiltImage
from launcher.images.stacks import DEFAULT_STACK, LABELS, STACKS, Contents, Stack
from launcher.machines import Machine
from launcher.networks.profile import Network
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NcclFit, check_nccl_version
from litgpt_demo.node.versions import version, within

TRAINS_FROM = min((stack.torch for stack in STACKS.values()), key=version)
"""The oldest torch that our trainer is tested with."""
LOOK_INSIDE = "docker run --rm {image} python -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())'"
"""The command that prints torch and the NCCL that it was built with, which needs no GPU and nothing of ours."""


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


def image_of(config: RunConfig | ScriptConfig) -> Image:
    """Return a config's image with the stack that its network needs."""
    return with_stack(config.image, config.platform.fabric)


# --- findings ---------------------------------------------------------------------------------------------------------


def check_fitness(config: RunConfig | ScriptConfig) -> Iterator[Finding]:
    """Yield how a config's image fits its network and machines. A registry is asked only of an image that exists, and
    only where nodes need a plug-in to talk to each other."""
    image, network = image_of(config), _network_between(config)
    if isinstance(image, BuiltImage):
        yield from _check_built(image, network)
    elif isinstance(image, PrebuiltImage) and network is not None:
        yield from _check_pinned(config, image.reference, network)
    elif isinstance(image, PrebuiltImage):
        what = f"{image.reference} brings its own torch and NCCL, and its network asks for none in particular"
        yield Finding("info", "image.stack", what)


def check_finished(config: RunConfig | ScriptConfig, reference: str) -> Iterator[Finding]:
    """Yield how an image fits that is there now: by its stack, or by the labels that its registry has.

    Args:
        reference: what the image step has made of its settings; `repository@sha256:…` if it is in a registry.
    """
    image, network = image_of(config), _network_between(config)
    if isinstance(image, BuiltImage) and image.installed is not None:
        yield from check_fitness(config)
    elif network is not None and "@" in reference:
        yield from _check_pinned(config, reference, network)


def _network_between(config: RunConfig | ScriptConfig) -> Network | None:
    """Return the network if NCCL has to load its plug-in: one node talks to nobody."""
    network = config.platform.fabric
    return network if network is not None and network.node.plugged_in and config.platform.nodes > 1 else None


def _check_built(image: BuiltImage, network: Network | None) -> Iterator[Finding]:
    stack = image.installed
    if stack is None:
        if network is not None:
            what = f"the NCCL of an image from {image.dockerfile} is not known before it is built"
            fix = "name the stack that it installs in image.stack; otherwise its labels are read when it is there"
            yield Finding("warning", "image.unknown", what, fix)
        return
    if network is not None:
        better = stack_for(network)
        instead = f"leave image.stack out: stack {better.name} has NCCL {better.nccl}" if better else ""
        instead = instead or network.without_stack
        found = list(_check_contents(image.contents, network, owner=str(stack), instead=instead))
        yield from found
        if any(one.severity == "error" for one in found):
            return
    driver = f"the nodes need GPU driver {stack.driver} or newer"
    yield Finding("info", "image.stack", f"{image.contents}; {_verdict(image.contents, network)}; {driver}")


def _check_pinned(config: RunConfig | ScriptConfig, reference: str, network: Network) -> Iterator[Finding]:
    """Yield how an image that is in its registry fits, by its labels."""
    machine = config.platform.machine_type
    try:
        found = read_config(reference, architecture=machine.arch if machine else "amd64")
    except ImageProblem as error:
        said = Finding.of(error, "image.unread")
        yield replace(said, severity="unknown", what=f"which NCCL the image has is not known: {said.what}")
        return
    contents = Contents.of_labels(found.labels, architecture=found.architecture)
    against = [
        *_check_machine(contents, machine, owner=reference),
        *(_check_trainer(contents, owner=reference) if isinstance(config, RunConfig) else ()),
        *_check_contents(contents, network, owner=reference),
    ]
    yield from against
    if contents.nccl and not against:
        yield Finding("info", "image.stack", f"{reference} has {contents}; {_verdict(contents, network)}")


def _check_machine(contents: Contents, machine: Machine | None, *, owner: str) -> Iterator[Finding]:
    if machine is not None and contents.architecture not in {"", machine.arch}:
        what = f"{owner} is for {contents.architecture}, and a {machine.name} is {machine.arch}"
        yield Finding("error", "image.architecture", what, f"name an image for linux/{machine.arch}")


def _check_trainer(contents: Contents, *, owner: str) -> Iterator[Finding]:
    if contents.torch and version(contents.torch) < version(TRAINS_FROM):
        what = f"{owner} has torch {contents.torch}, and our trainer needs {TRAINS_FROM} or newer"
        yield Finding("error", "image.torch", what, "name a newer image, or run a script of yours in this one")


def _check_contents(contents: Contents, network: Network, *, owner: str, instead: str = "") -> Iterator[Finding]:
    """Yield what the network's plug-in has against an image."""
    node = network.node
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
    """Return what the network makes of an image that may be used."""
    if network is None:
        return "no NCCL plug-in is needed"
    plugin = f"{network.name} {network.pair.plugin}" if network.pair else network.name
    fit = network.node.nccl_fit(contents.nccl)
    return f"{plugin} names no NCCL that it needs" if fit is NcclFit.UNSTATED else f"{fit.value} for {plugin}"
