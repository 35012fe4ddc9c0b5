"""The comparison of an image with its network's plug-in and the machine: before anything is rented."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from launcher.config import RunConfig, ScriptConfig
from launcher.errors import ImageProblem, finding_of
from launcher.images.oci import read_config
from launcher.images.settings import BuiltImage, Image, PrebuiltImage
from launcher.images.stacks import DEFAULT_STACK, LABELS, STACKS, Contents, Stack
from launcher.networks.profile import Network
from litgpt_demo import timeouts
from litgpt_demo.errors import Finding
from litgpt_demo.node.network import NcclFit, check_nccl_version, version, within

TRAINS_FROM = min((stack.torch for stack in STACKS.values()), key=version)
"""The oldest torch that our trainer is tested with."""


def stack_for(network: Network | None) -> Stack | None:
    """Return the first stack that a network's plug-in is qualified for; None where it is qualified for none of them."""
    if network is None:
        return DEFAULT_STACK
    for stack in STACKS.values():
        fit = network.node.nccl_fit(stack.nccl)
        # Of a release that we do not know, what holds for the newest one that we do is the best guess.
        guessed = fit is NcclFit.UNKNOWN and within(stack.nccl, network.node.nccl_elsewhere)
        if guessed or fit in {NcclFit.QUALIFIED, NcclFit.UNSTATED}:
            return stack
    return None


def chosen_image(config: RunConfig | ScriptConfig) -> Image:
    """Return a config's image with the stack that its network needs, unless it names one or a Dockerfile."""
    image = config.image
    if not isinstance(image, BuiltImage) or image.stack is not None or image.dockerfile is not None:
        return image
    return image.model_copy(update={"stack": (stack_for(config.platform.fabric) or DEFAULT_STACK).stack})


def check_fitness(config: RunConfig | ScriptConfig, pinned: str | None = None) -> Iterator[Finding]:
    """Yield how a config's image fits its network and machines. A registry is asked only of an image that exists, and
    only where nodes need a plug-in to talk to each other.

    Once it is there as `pinned`, what another Dockerfile has made of it is read in its labels. An image of our own is
    what its settings say: what it has was compared with that when it was built.
    """
    image, fabric = chosen_image(config), config.platform.fabric
    network = fabric if fabric is not None and fabric.node.plugged_in else None
    reference = pinned or (image.reference if isinstance(image, PrebuiltImage) else None)
    if isinstance(image, BuiltImage) and (pinned is None or image.dockerfile is None):
        yield from _check_built(config, image, network)
    elif reference is not None and network is not None:
        yield from _softened(config, network, _check_pinned(config, reference, network))
    elif isinstance(image, PrebuiltImage):
        what = f"{image.reference} brings its own torch and NCCL, and its network asks for none in particular"
        yield Finding("info", "image.stack", what)


def _softened(config: RunConfig | ScriptConfig, network: Network, found: Iterable[Finding]) -> Iterator[Finding]:
    # One node talks to nobody: a wrong NCCL is a warning, and only where it is told a network by name, which stops it.
    for finding in found:
        if config.platform.nodes > 1 or (finding.severity, finding.code) != ("error", "nccl.version"):
            yield finding
        elif any(variable.name == "NCCL_NET" for variable in network.environment):
            what = f"{finding.what}; NCCL stops, on one node too, if it cannot load the network that NCCL_NET names"
            yield replace(finding, severity="warning", what=what, fix="one node needs no fabric: set network=plain")


def _check_built(config: RunConfig | ScriptConfig, image: BuiltImage, network: Network | None) -> Iterator[Finding]:
    stack = image.installed
    if stack is None:
        if network is not None:
            what = f"the NCCL of an image from {image.dockerfile} is not known before it is built"
            fix = "name the stack that it installs in image.stack; otherwise its labels are read when it is there"
            yield Finding("warning", "image.unknown", what, fix)
        return
    found: list[Finding] = []
    if network is not None:
        instead = network.without_stack
        if better := stack_for(network):
            instead = f"leave image.stack out: stack {better.stack} has NCCL {better.nccl}"
        found += _softened(config, network, _check_contents(image.contents, network, owner=str(stack), instead=instead))
        if image.dockerfile is not None:
            what = f"that {image.dockerfile} installs {stack} is what image.stack says: nobody has looked"
            fix = "let it write labels (docs/images.md), which are read when the image is there"
            found.append(Finding("warning", "image.unproved", what, fix))
    yield from found
    if any(one.severity == "error" for one in found):
        return
    floors = filter(None, (stack.driver, network.pair.driver if network and network.pair else None))
    said = [str(image.contents), *([] if found else [_verdict(image.contents, network)])]
    if least := max(floors, key=version, default=None):
        given = config.platform.driver  # that the platform is asked to install
        if given is not None and re.match(r"\d", given) and version(given) < version(least):
            what = f"platform.gpu_driver={given} is too old for the image, which needs {least} or newer"
            yield Finding("error", "image.driver", what, "leave platform.gpu_driver out, or name a newer one")
        said.append(f"the nodes need GPU driver {least} or newer")
    yield Finding("info", "image.stack", "; ".join(said))


def _check_pinned(config: RunConfig | ScriptConfig, reference: str, network: Network) -> Iterator[Finding]:
    machine = config.platform.machine_type
    try:
        said = read_config(reference, architecture=machine.arch if machine else "amd64", patience=timeouts.INTERACTIVE)
    except ImageProblem as error:
        found = finding_of(error, "image.unread")
        yield replace(found, what=f"which NCCL the image has is not known: {found.what}")
        return
    contents = Contents.of_labels(said.labels, architecture=said.architecture)
    against: list[Finding] = []
    if machine is not None and contents.architecture not in {"", machine.arch}:
        what = f"{reference} is for {contents.architecture}, and a {machine.name} is {machine.arch}"
        against.append(Finding("error", "image.architecture", what, f"name an image for linux/{machine.arch}"))
    if isinstance(config, RunConfig) and contents.torch and version(contents.torch) < version(TRAINS_FROM):
        what = f"{reference} has torch {contents.torch}, and our trainer is tested with {TRAINS_FROM} and newer"
        fix = "name a newer image, or run a script of yours in this one"
        against.append(Finding("error", "image.torch", what, fix))
    against += _check_contents(contents, network, owner=reference)
    yield from against
    if contents.nccl and not against:
        yield Finding("info", "image.stack", f"{reference} has {contents}; {_verdict(contents, network)}")


def _check_contents(contents: Contents, network: Network, *, owner: str, instead: str = "") -> Iterator[Finding]:
    node = network.node
    if contents.nccl:
        yield from check_nccl_version(node, contents.nccl, owner=owner, instead=instead)
    elif ranges := node.nccl_versions or node.nccl_elsewhere:
        what = f"{owner} has no label {LABELS}nccl, and the {node.name} plug-in is qualified for {' or '.join(ranges)}"
        # This needs no GPU and nothing of ours.
        command = "import torch; print(torch.__version__, torch.cuda.nccl.version())"
        fix = f"ask its torch: docker run --rm --entrypoint python {owner} -c '{command}'"
        yield Finding("warning", "image.unlabelled", what, fix)
    if node.glibc and contents.glibc and not within(contents.glibc, (f">={node.glibc}",)):
        what = f"{owner} has glibc {contents.glibc}, and the {node.name} plug-in needs {node.glibc}"
        yield Finding("error", "image.glibc", what, "build the image on Ubuntu 22.04, Debian 12 or newer")


def _verdict(contents: Contents, network: Network | None) -> str:
    if network is None:
        return "no NCCL plug-in is needed"
    plugin = f"{network.node.name} {network.pair.plugin}" if network.pair else network.node.name
    fit = network.node.nccl_fit(contents.nccl)
    return f"{plugin} names no NCCL that it needs" if fit is NcclFit.UNSTATED else f"{fit.value} for {plugin}"
