"""A network profile: everything that pods and nodes need for one network, as data with the source of each value.

The other modules here hold the values. A profile is made for a choice (`Choice`), because a fabric looks different
on host networking, with the plug-in from the node or from the pod, and from one plug-in version to the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.errors import ConfigProblem
from launcher.machines import Machine
from litgpt_demo.node.network import NodeNetwork

Object = Mapping[str, Any]
"""A Kubernetes object, or a part of one."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
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
    """Variables that share a source."""
    return tuple(
        Variable(name=name, value=value, source=source, why=why, after=after) for name, value in values.items()
    )


def reported(*, source: str) -> tuple[Variable, ...]:
    """Variables that make NCCL log its network, once per communicator: the launcher reads the name off the log."""
    values = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    return variables(values, source=source, why="NCCL has to say which network it uses", after=True)


def library_path(*folders: str, source: str) -> Variable:
    """The placeholder of an explanation for the folders that the node puts first."""
    value = ":".join((*folders, "$LD_LIBRARY_PATH"))
    return Variable(name="LD_LIBRARY_PATH", value=value, source=source, why="put before the image's own, on the node")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A plug-in and the daemon it was released with."""

    plugin: str
    daemon: str | None
    nccl: tuple[str, ...]
    """Qualified NCCL versions as ranges; a release names one patch level, and its minor version is taken for it."""
    released: str
    """ISO date, or as much of one as is known."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of a network that a job makes."""

    machine: Machine | None = None
    plugin: str | None = None
    """Tag of the plug-in's image; None is the newest known pair's."""
    daemon: str | None = None
    """Tag of the receive daemon's image; None is the one released with the plug-in."""
    install: Literal["node", "pod"] = "node"
    """The place of the plug-in: a DaemonSet has put it on the nodes, or each pod brings its own."""
    host_network: bool = False
    attach: Literal["networks", "dra"] = "networks"
    """RDMA cards by the pod's annotations, or by a claim (dynamic resource allocation)."""
    extra_nic: bool = False
    """The nodes have a second gVNIC, `gvnic-1`, as eth1."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A profile made for one choice."""

    name: str
    node: NodeNetwork
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)
    """Extended resources that each pod asks for, besides its GPUs."""
    init_containers: tuple[Object, ...] = ()
    """Containers in starting order; a daemon is one of them, as a native sidecar (`restartPolicy: Always`)."""
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    """Capabilities of the training's container."""
    capabilities: tuple[str, ...] = ()
    privileged: bool = False
    root: bool = False
    """The training runs as root: its fabric's devices and sockets belong to root."""
    alone: Mapping[str, str] = field(default_factory=dict)
    """The label of pods that must not share a machine with this one: one daemon per node."""
    claims: tuple[str, ...] = ()
    """Resource claims of the pod that its network needs, by kind: `rdma`, `compute-domain`."""
    rdma_cards: int | None = None
    """The number of RDMA cards that a claim asks for; None means all of the node."""
    environment: tuple[Variable, ...] = ()
    scripted: tuple[Variable, ...] = ()
    """Variables that the sourced scripts set on the node, as far as known: for explanations and clashes."""
    shm_bytes: int = 8 * GIB
    pair: Pair | None = None


DEFAULT_INTERFACE = "networking.gke.io/default-interface"
INTERFACES = "networking.gke.io/interfaces"
DEVICES = "devices.gke.io/container."


def interface_annotations(networks: Mapping[str, str]) -> dict[str, str]:
    """The pod's network interfaces besides eth0: interface to the Network object it is attached to."""
    rows = [{"interfaceName": name, "network": network} for name, network in {"eth0": "default", **networks}.items()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return {DEFAULT_INTERFACE: "eth0", INTERFACES: f"[\n{lines}\n]\n"}


def device_annotation(container: str, paths: Iterable[str]) -> dict[str, str]:
    """Devices of the host that a container gets without being privileged (NRI device injector)."""
    return {f"{DEVICES}{container}": "".join(f"- path: {path}\n" for path in paths)}


def host_path(name: str, path: str) -> Object:
    return {"name": name, "hostPath": {"path": path}}


def mount(name: str, path: str, *, read_only: bool = False) -> Object:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


def chosen_pair(choice: Choice, pairs: tuple[Pair, ...], *, network: str) -> Pair:
    """The plug-in and daemon that a choice means; the newest pair comes first in the table.

    A tag that the table lacks is taken as given, if both are: somebody has a newer release.

    Raises:
        ConfigProblem: `latest`, or a tag whose partner is not known.
    """
    for setting, tag in (("network_plugin", choice.plugin), ("network_daemon", choice.daemon)):
        if tag == "latest":
            raise ConfigProblem(
                f"platform.{setting}=latest is another build each time, and the plug-in and its daemon have to match; "
                f"name a release: {', '.join(pair.plugin for pair in pairs)}"
            )
    plugin = choice.plugin or pairs[0].plugin
    known = next((pair for pair in pairs if pair.plugin == plugin), None)
    if known is None:
        if choice.daemon is None and pairs[0].daemon is not None:
            raise ConfigProblem(
                f"platform.network_plugin={plugin} is no {network} release that we know, nor is the daemon it needs; "
                f"give platform.network_daemon too, or take one of {', '.join(pair.plugin for pair in pairs)}"
            )
        return Pair(plugin=plugin, daemon=choice.daemon, nccl=(), released="", source="platform.network_plugin")
    if choice.daemon is not None and choice.daemon != known.daemon:
        return Pair(
            plugin=plugin,
            daemon=choice.daemon,
            nccl=known.nccl,
            released=known.released,
            source="platform.network_daemon",
        )
    return known
