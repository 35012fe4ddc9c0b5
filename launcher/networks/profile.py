"""The vocabulary of networks: the values that pods and nodes need for a fabric, each with its source.

A network is made for its context and its options, because a fabric looks different on the host's network, with the
plugin from the node or from the pod, and from one release of the plugin to the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from pydantic import Field

from launcher.errors import ConfigProblem
from launcher.job import Object, drop_empty
from launcher.machines import Machine
from litgpt_demo.config import Settings
from litgpt_demo.errors import Finding
from litgpt_demo.node.network import NodeNetwork

GR = "https://github.com/AI-Hypercomputer/gpu-recipes/blob/2e1fd5e"
GIB = 2**30
OTHERS_FILES = "DAC_OVERRIDE"
"""The capability by which root reads and writes files of user 1000: the image's home, and files of earlier attempts.
No publisher's manifest names another one of a container runtime's default capabilities, so that the others are dropped.
That no fabric needs one of them is INFERRED."""
TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
HOST = rf"({LABEL}(\.{LABEL})+(:[0-9]+)?|{LABEL}:[0-9]+|localhost)"
"""A registry. A name without dot and port is a folder of Docker Hub:
https://github.com/distribution/reference (splitDockerDomain)."""
COMPONENT = r"/[a-z0-9]+([._-]+[a-z0-9]+)*"
RELEASE = rf"^({TAG}|{HOST}({COMPONENT})+:{TAG}(@sha256:[0-9a-f]{{64}})?)$"
"""A release: the tag of a publisher's image, or a user's own image with the tag of a release."""
ENTRY = "/scripts/container_entry.sh"
INSTALL = f"{ENTRY} install --install-nccl"
"""The command of the images that installs both plugin and NCCL."""
STOPS = "without the plugin NCCL stops, instead of using sockets"
REGISTRY = "us-docker.pkg.dev"
"""The registry of Google's plugins and daemons, which a mirror can replace."""


class PluginOptions(Settings):
    network_plugin: str | None = Field(None, pattern=RELEASE)
    """Release of the network's NCCL plugin, a tag or a registry/path:tag, which the nodes must have. The default is the
    one of the publisher's installer."""
    network_registry: str | None = Field(None, pattern=rf"^{HOST}({COMPONENT})*$")
    """A mirror for the images of plugin and daemon, in place of us-docker.pkg.dev: registry.example.com/google."""
    network_install: Literal["node", "pod"] = "node"
    """The place of the plugin: a DaemonSet has installed it on the `node`, or each `pod` installs its own."""
    allow_unqualified_nccl: bool = False
    """Continue with a warning if the plugin is not qualified for the image's NCCL."""


class DaemonOptions(PluginOptions):
    network_daemon: str | None = Field(None, pattern=RELEASE)
    """Release of the network's receive daemon, a tag or a registry/path:tag. The default is the one released with the
    plugin."""


@dataclass(frozen=True)
class Variable:
    """An environment variable that a profile sets, or that one of its scripts sets on the node."""

    name: str
    value: str
    source: str
    """Address of the page or file that says so."""
    why: str = ""
    after: bool = False
    """Set again after the network's scripts, which would overwrite it."""


def variables(values: Mapping[str, str], *, source: str, why: str = "", after: bool = False) -> tuple[Variable, ...]:
    return tuple(Variable(name, value, source, why, after) for name, value in values.items())


def reported(*, source: str) -> tuple[Variable, ...]:
    """Return variables that make NCCL log its network once per communicator. The node reads the name in the log."""
    values = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    return variables(values, source=source, why="NCCL must report the network that it uses", after=True)


def library_path(*folders: str, source: str) -> Variable:
    """Return a placeholder for the explanation: the node puts these folders first."""
    value = ":".join((*folders, "$LD_LIBRARY_PATH"))
    return Variable("LD_LIBRARY_PATH", value, source, "put before the image's own, on the node")


@dataclass(frozen=True)
class ReleasePair:
    """A plugin and the daemon it was released with."""

    plugin: str
    daemon: str | None
    released: str
    """ISO date, or as much of one as is known."""
    source: str
    nccl: tuple[str, ...] = ()
    """Qualified NCCL versions as ranges; a release names one patch level, and its minor version is taken for it."""
    nccl_loads: tuple[str, ...] = ()
    """NCCL versions that are known to load the plugin, as ranges; that does not prove that they work with it."""
    nccl_fails: tuple[str, ...] = ()
    """NCCL versions that are known to fail with it, as ranges."""
    driver: str | None = None
    """The oldest GPU driver that the publisher names."""
    since: tuple[int, int] | None = None
    """Kubernetes version from which on the nodes need this release or a newer one."""


class Installer(NamedTuple):
    """The DaemonSet that puts a network's plugin on the nodes, and the address of the manifest that makes it."""

    images: tuple[str, ...]
    """Images by which it is known, without their tag, which is the release."""
    manifest: str


class Carrier(StrEnum):
    """The way in which a platform connects its nodes to a network."""

    PODS = "pods"
    """Pods get whatever they request, GKE's Network objects and the host's network included."""
    MULTUS = "multus"
    """Multus attaches pods to further interfaces, and cards are extended resources. Both have the same names in all
    clusters, so that a network can have defaults."""
    MACHINES = "machines"
    """Nodes are machines without pods, which see their cards directly."""


@dataclass(frozen=True, kw_only=True)
class NetworkContext:
    machine: Machine | None = None
    carrier: Carrier = Carrier.PODS
    host_network: bool = False
    """Pods share the network of their machine."""


@dataclass(frozen=True, kw_only=True)
class Network:
    node: NodeNetwork
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)
    """Extended resources that each pod requests, in addition to its GPUs."""
    init_containers: Sequence[Object] = ()
    """Containers in starting order; a daemon is one of them, as a native sidecar (`restartPolicy: Always`)."""
    volumes: Sequence[Object] = ()
    mounts: Sequence[Object] = ()
    capabilities: tuple[str, ...] = ()
    """All capabilities that the training's container has, as root; without them it is not root."""
    privileged: bool = False
    anti_affinity: Mapping[str, str] = field(default_factory=dict)
    """The label of pods that must not share a machine with this one: one daemon per node."""
    claims: tuple[str, ...] = ()
    """Resource claims of the pod that its network needs, by kind: `rdma`, `compute-domain`."""
    rdma_cards: int | None = None
    """The number of RDMA cards that a claim requests; None means all of the node."""
    environment: tuple[Variable, ...] = ()
    scripted: tuple[Variable, ...] = ()
    """Variables that the sourced scripts set on the node, as far as known: for explanations and clashes."""
    shm_bytes: int = 8 * GIB
    pair: ReleasePair | None = None
    known: tuple[ReleasePair, ...] = ()
    """The releases that we know for the nodes' processor, the default first."""
    problems: tuple[Finding, ...] = ()
    """Errors of a context and options that are each right by themselves."""
    without_stack: str = ""
    """The advice to users where the plugin is not qualified for any of our software stacks."""
    installer: Installer | None = None
    """None where nothing has to be on the nodes."""

    @property
    def root(self) -> bool:
        """The training runs as root: its fabric's devices and sockets belong to root, and only root has the use of a
        capability that is added (https://github.com/kubernetes/enhancements/issues/2763)."""
        return bool(self.capabilities)


@dataclass(frozen=True)
class NetworkType:
    """A network as shared code sees it. The module of each network has one, named TYPE."""

    title: str
    make: Callable[[NetworkContext, Any], Network]
    settings: Mapping[Carrier, type[Settings]]
    """The network's settings on each carrier that has it. They become settings of the `platform` section."""
    machines: tuple[str, ...] = ()
    """Machine types that have its hardware."""
    unlisted: bool = False
    """Machines that are not in our table may have it."""

    @property
    def setting_names(self) -> set[str]:
        return {name for settings in self.settings.values() for name in settings.model_fields}


INTERFACES = "networking.gke.io/interfaces"
DEVICES = "devices.gke.io/container."
MULTUS = "k8s.v1.cni.cncf.io/networks"
"""Multus' annotation: which networks a pod is attached to besides the cluster's own."""
GPUS = [*(f"/dev/nvidia{number}" for number in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm"]
LIBRARIES = "/usr/local/nvidia/lib64"
"""The folder where containers find what the nodes have in /home/kubernetes/bin/nvidia/lib64."""


def interface_annotations(networks: Mapping[str, str]) -> dict[str, str]:
    """The pod's network interfaces besides eth0: interface to the Network object it is attached to."""
    rows = [{"interfaceName": name, "network": network} for name, network in {"eth0": "default", **networks}.items()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return {"networking.gke.io/default-interface": "eth0", INTERFACES: f"[\n{lines}\n]\n"}


def device_annotation(container: str, paths: Iterable[str]) -> dict[str, str]:
    """Devices of the host that a container gets without being privileged (NRI device injector)."""
    return {f"{DEVICES}{container}": "".join(f"- path: {path}\n" for path in paths)}


def volume(name: str, path: str | None = None) -> Object:
    """A folder of the host, or an empty one of the pod."""
    return {"name": name, **({"hostPath": {"path": path}} if path else {"emptyDir": {}})}


def mount(name: str, path: str, *, read_only: bool = False) -> Object:
    return {"name": name, "mountPath": path, **drop_empty(readOnly=read_only)}


def installer(name: str, image: str, commands: Iterable[str], target: Object, *, cpu: str | None = None) -> Object:
    """The init container that brings plugin and NCCL into the pod, onto the volume that `target` mounts."""
    resources = {"resources": {"requests": {"cpu": cpu}}} if cpu else {}
    command = ["/bin/sh", "-c", "; ".join(commands)]
    return {"name": name, "image": image, "command": command, **resources, "volumeMounts": [target]}


def daemon(
    name: str, image: str, command: list[str], *mounts: Object, rights: list[str], privileged: bool,
    variables: Mapping[str, str] | None = None, probe: Object | None = None,
) -> Object:  # fmt: skip
    """Return a receive daemon as a native sidecar: it is up before the training and ends after it. `rights` are
    capabilities."""
    environment = {"LD_LIBRARY_PATH": LIBRARIES, **(variables or {})}
    return {
        "name": name,
        "image": image,
        "restartPolicy": "Always",
        "command": command,
        "env": [{"name": variable, "value": value} for variable, value in environment.items()],
        "securityContext": {"privileged": True} if privileged else {"capabilities": {"add": rights}},
        **drop_empty(startupProbe=probe),
        "volumeMounts": [
            mount("libraries", LIBRARIES), *mounts, mount("sys", "/hostsysfs"), mount("proc-sys", "/hostprocsysfs"),
        ],
    }  # fmt: skip


class Released(NamedTuple):
    """A plugin and its daemon, as the options of a network want them."""

    pair: ReleasePair
    plugin: str
    daemon: str
    """The images to pull."""
    node: dict[str, Any]
    network: dict[str, Any]
    """The fields of a NodeNetwork, by which a node judges the NCCL and the driver that it finds, and of a Network."""


def tag_of(release: str) -> str:
    """Return the tag of a release, which is a tag by itself or an image with a tag and perhaps a digest."""
    return re.split("[:/]", release.partition("@")[0])[-1]


def find_pair(pairs: tuple[ReleasePair, ...], tag: str, daemon_tag: str, *, name: str, daemon: bool) -> ReleasePair:
    """Return the pair that two tags name, by default the first one. An unknown plugin is accepted with its daemon: a
    user may have a newer release."""
    releases = ", ".join(pair.plugin for pair in pairs)
    for option, text in (("plugin", tag), ("daemon", daemon_tag)):
        if text == "latest":
            what = f"platform.network_{option}=latest changes over time, but plugin and daemon must match"
            raise ConfigProblem(what, fix=f"name a release: {releases}")
    for pair in pairs:
        if tag in {"", pair.plugin}:
            if daemon_tag in {"", pair.daemon}:
                return pair
            return replace(pair, daemon=daemon_tag, source="platform.network_daemon")
    if daemon and not daemon_tag:
        what = f"platform.network_plugin={tag} is an unknown {name} release, and so is the daemon that it needs"
        raise ConfigProblem(what, fix=f"give platform.network_daemon too, or take one of {releases}")
    return ReleasePair(tag, daemon_tag or None, "", "platform.network_plugin")


def image_for(release: str, image: str, tag: str | None, registry: str) -> str:
    """Return the image to pull: the release itself if it is an image, else the publisher's `image` from a registry."""
    return release if "/" in release else f"{image.replace(REGISTRY, registry, 1)}:{tag}"


def check_registry(registry: str, images: Iterable[str]) -> tuple[Finding, ...]:
    """Return an error if a mirror is set but no image comes from it."""
    if registry == REGISTRY or any("/" not in image for image in images):
        return ()
    what = f"platform.network_registry={registry} has no effect, because plugin and daemon have full image paths"
    return (Finding("error", "network.registry", what, "leave it out, or give tags instead of paths"),)


def released(
    options: PluginOptions, pairs: tuple[ReleasePair, ...], *, name: str, plugin: str, daemon: str = "", manifest: str
) -> Released:
    """Return the plugin and the daemon that options name. The first of the `pairs` is the default; `plugin` and
    `daemon` are the publisher's images, without tags."""
    release = options.network_plugin or ""
    daemon_release = getattr(options, "network_daemon", None) or ""
    pair = find_pair(pairs, tag_of(release), tag_of(daemon_release), name=name, daemon=bool(daemon))
    registry = options.network_registry or REGISTRY
    image = image_for(release, plugin, pair.plugin, registry)
    installer = None
    if options.network_install == "node":
        # The installer's image may be the publisher's, a mirror's or the user's own.
        images = (plugin, plugin.replace(REGISTRY, registry, 1), image.partition("@")[0].rpartition(":")[0])
        installer = Installer(images=images, manifest=manifest)
    # If nothing is known of this release, it may load or fail like another one.
    similar = pair if pair.nccl else next((known for known in pairs if known.nccl), pair)
    return Released(
        pair=pair,
        plugin=image,
        daemon=image_for(daemon_release, daemon, pair.daemon, registry),
        node={
            "nccl_versions": pair.nccl,
            "nccl_elsewhere": () if pair.nccl else similar.nccl,
            "nccl_loads": similar.nccl_loads,
            "nccl_fails": similar.nccl_fails,
            "allow_unqualified": options.allow_unqualified_nccl,
            "drivers": (f">={pair.driver}",) if pair.driver else (),
        },
        network={
            "pair": pair,
            "known": pairs,
            "problems": check_registry(registry, [release, daemon_release] if daemon else [release]),
            "installer": installer,
        },
    )
