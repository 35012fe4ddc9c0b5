"""The comparison of an image with its network's plugin and the machine: before anything is rented."""

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
    """Return the first stack that a network's plugin is qualified for, or None."""
    if network is None:
        return DEFAULT_STACK
    for stack in STACKS.values():
        fit = network.node.nccl_fit(stack.nccl)
        # For an unknown release, the best guess is that it needs the NCCL of the newest known one.
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
    """Yield how a config's image fits its network and machines. Once a user's own image exists as `pinned`, its labels
    are compared; those of our images were compared with the settings when they were built."""
    image, fabric = chosen_image(config), config.platform.fabric
    network = fabric if fabric is not None and fabric.node.plugged_in else None
    reference = pinned
    if reference is None and isinstance(image, PrebuiltImage):
        reference = image.reference
    if isinstance(image, BuiltImage) and (pinned is None or image.dockerfile is None):
        yield from _check_built(config, image, network)
    elif reference is not None and network is not None:
        yield from _softened(config, network, _check_pinned(config, reference, network))
    elif isinstance(image, PrebuiltImage):
        what = f"{image.reference} has its own torch and NCCL, and platform.network needs no particular version of them"
        yield Finding("info", "image.stack", what)


def _softened(config: RunConfig | ScriptConfig, network: Network, found: Iterable[Finding]) -> Iterator[Finding]:
    # One node uses no network: a wrong NCCL is only a warning, and only if NCCL_NET names a network, which stops NCCL.
    for finding in found:
        if config.platform.nodes > 1 or (finding.severity, finding.code) != ("error", "nccl.version"):
            yield finding
        elif any(variable.name == "NCCL_NET" for variable in network.environment):
            what = f"{finding.what}; NCCL stops, on one node too, if it cannot load the network that NCCL_NET names"
            yield replace(finding, severity="warning", what=what, fix="set platform.network=tcp for one node")


def _check_built(config: RunConfig | ScriptConfig, image: BuiltImage, network: Network | None) -> Iterator[Finding]:
    stack = image.installed
    if stack is None:
        if network is not None:
            what = f"the NCCL of an image from {image.dockerfile} is not known before it is built"
            fix = "set image.stack to the stack that it installs; otherwise its labels are read after the build"
            yield Finding("warning", "image.unknown", what, fix)
        return
    findings: list[Finding] = []
    if network is not None:
        instead = network.without_stack
        better = stack_for(network)
        if better is not None:
            instead = f"leave image.stack out: stack {better.stack} has NCCL {better.nccl}"
        checked = _check_contents(image.contents, network, owner=str(stack), instead=instead)
        findings += _softened(config, network, checked)
        if image.dockerfile is not None:
            what = f"image.stack says that {image.dockerfile} installs {stack}, but this was not checked"
            fix = "write labels in it (docs/howto/own-image.md); they are read after the build"
            findings.append(Finding("warning", "image.unproved", what, fix))
    yield from findings
    if any(finding.severity == "error" for finding in findings):
        return
    facts = [str(image.contents)]
    if not findings:
        facts.append(_fit_text(image.contents, network))
    needed_by: list[str | None] = [stack.driver]
    if network is not None and network.pair is not None:
        needed_by.append(network.pair.driver)
    oldest = max(filter(None, needed_by), key=version, default=None)
    if oldest is not None:
        installed = config.platform.driver  # the platform installs it on the nodes
        if installed is not None and re.match(r"\d", installed) and version(installed) < version(oldest):
            what = f"platform.gpu_driver={installed} is too old for the image, which needs {oldest} or newer"
            yield Finding("error", "image.driver", what, "leave platform.gpu_driver out, or set it to a newer one")
        facts.append(f"the nodes need GPU driver {oldest} or newer")
    yield Finding("info", "image.stack", "; ".join(facts))


def _check_pinned(config: RunConfig | ScriptConfig, reference: str, network: Network) -> Iterator[Finding]:
    machine = config.platform.machine_type
    try:
        image = read_config(reference, architecture=machine.arch if machine else "amd64", patience=timeouts.INTERACTIVE)
    except ImageProblem as error:
        finding = finding_of(error, "image.unread")
        yield replace(finding, what=f"the NCCL version of the image is not known: {finding.what}")
        return
    contents = Contents.of_labels(image.labels, architecture=image.architecture)
    problems: list[Finding] = []
    if machine is not None and contents.architecture not in {"", machine.arch}:
        what = f"{reference} is for {contents.architecture}, but a {machine.name} is {machine.arch}"
        problems.append(Finding("error", "image.architecture", what, f"name an image for linux/{machine.arch}"))
    if isinstance(config, RunConfig) and contents.torch and version(contents.torch) < version(TRAINS_FROM):
        what = f"{reference} has torch {contents.torch}, but our trainer is tested with {TRAINS_FROM} and newer"
        fix = "name a newer image, or run your own script in this one"
        problems.append(Finding("error", "image.torch", what, fix))
    problems += _check_contents(contents, network, owner=reference)
    yield from problems
    if contents.nccl and not problems:
        yield Finding("info", "image.stack", f"{reference} has {contents}; {_fit_text(contents, network)}")


def _check_contents(contents: Contents, network: Network, *, owner: str, instead: str = "") -> Iterator[Finding]:
    node = network.node
    if contents.nccl:
        yield from check_nccl_version(node, contents.nccl, owner=owner, instead=instead)
    elif ranges := node.nccl_versions or node.nccl_elsewhere:
        what = f"{owner} has no label {LABELS}nccl, but the {node.name} plugin is qualified for {' or '.join(ranges)}"
        # This needs neither a GPU nor our code.
        command = "import torch; print(torch.__version__, torch.cuda.nccl.version())"
        fix = f"print its torch and NCCL: docker run --rm --entrypoint python {owner} -c '{command}'"
        yield Finding("warning", "image.unlabelled", what, fix)
    if node.glibc and contents.glibc and not within(contents.glibc, (f">={node.glibc}",)):
        what = f"{owner} has glibc {contents.glibc}, but the {node.name} plugin needs {node.glibc}"
        yield Finding("error", "image.glibc", what, "build the image on Ubuntu 22.04, Debian 12 or newer")


def _fit_text(contents: Contents, network: Network | None) -> str:
    if network is None:
        return "no NCCL plugin is needed"
    plugin = f"{network.node.name} {network.pair.plugin}" if network.pair else network.node.name
    fit = network.node.nccl_fit(contents.nccl)
    if fit is NcclFit.UNSTATED:
        return f"{plugin} does not say which NCCL it needs"
    return f"{fit.value} for {plugin}"
