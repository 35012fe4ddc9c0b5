"""The networks: a file each but for plain TCP, the registry of them, and the settings that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from launcher.machines import MACHINES, Machine
from launcher.networks import gib, ib, roce, tcpx, tcpxo
from launcher.networks.profile import GIB, Choice, DaemonOptions, Network
from litgpt_demo.config import Settings
from litgpt_demo.node.network import NodeNetwork

DEFAULT: Final = "plain"
"""The network that every cluster has, and that a config which names none gets."""
InPods: TypeAlias = Literal["plain", "gib", "roce", "tcpx", "tcpxo"]
"""Those of a platform that gives pods whatever they ask for, GKE's Network objects and the host's network included."""
OnMachines: TypeAlias = Literal["plain", "ib", "roce"]
"""Those of a platform whose nodes are machines that see their cards themselves."""
ByMultus: TypeAlias = Literal["plain", "roce"]
"""Those of a platform that gives further interfaces by Multus, and devices as extended resources."""


def plain(choice: Choice, _options: Settings) -> Network:
    """Plain TCP over the pod's only interface, for which nothing is to be set up but /dev/shm: data loaders and NCCL
    outgrow the 64 MB that a container has by default (https://github.com/NVIDIA/nccl/issues/290)."""
    machine = choice.machine
    shm = min(64 * GIB, machine.memory_gib * GIB // 4 if machine else 8 * GIB)
    node = NodeNetwork(name="plain", gpus=machine.gpus if machine else 0, shm_bytes=min(shm, GIB))
    return Network(node=node, shm_bytes=shm)


class Profile(NamedTuple):
    """All that shared code knows of a network."""

    make: Callable[[Choice, Any], Network]
    options: type[Settings]
    """Its settings, which are bases of the `platform` section of every platform that can carry it."""
    machines: tuple[str, ...] = ()
    """Machine types that have its hardware."""
    unlisted: bool = False
    """Machines that are not in our table may have it."""


NETWORKS: Mapping[str, Profile] = MappingProxyType(
    {
        "plain": Profile(plain, Settings, tuple(MACHINES), unlisted=True),
        "gib": Profile(gib.network, gib.Options, ("a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g")),
        "ib": Profile(ib.network, ib.Options, unlisted=True),
        "roce": Profile(roce.network, roce.Options, unlisted=True),
        "tcpx": Profile(tcpx.network, tcpx.Options, ("a3-highgpu-8g",)),
        "tcpxo": Profile(tcpxo.network, DaemonOptions, ("a3-megagpu-8g",)),
    }
)


class NetworkSettings(Settings):
    """The last of the network's bases of a `platform` section: a form shows networks' options next to it."""

    network: str = DEFAULT


def networks_of(machine: Machine) -> tuple[str, ...]:
    """Return the networks that a machine has the hardware for, the one to use first."""
    names = [name for name, profile in NETWORKS.items() if machine.name in profile.machines]
    return tuple(sorted(names, key=DEFAULT.__eq__))


def chosen_network(section: Any, **choice: bool) -> Network:
    """Return the network that a `platform` section asks for; `choice` is the platform's part of a Choice."""
    return NETWORKS[section.network].make(Choice(machine=section.machine_type, **choice), section)


def require_fit(section: Any) -> Any:
    """Refuse a `platform` section with options of another network, or with a network of another machine."""
    chosen, machine = section.network, section.machine_type
    if machine is None and not NETWORKS[chosen].unlisted:
        fix = f"name one in platform.machine, or take {DEFAULT}"
        raise ValueError(f"platform.network={chosen} belongs to particular machines; {fix}")
    if machine is not None and machine.name not in NETWORKS[chosen].machines:
        fix = f"take {' or '.join(networks_of(machine))}"
        raise ValueError(f"platform.network={chosen}, which a {machine.name} has not got; {fix}")
    own = NETWORKS[chosen].options.model_fields
    for profile in NETWORKS.values():
        for name, field in profile.options.model_fields.items():
            if name not in own and (value := getattr(section, name, field.default)) != field.default:
                owners = " or ".join(owner for owner, other in NETWORKS.items() if name in other.options.model_fields)
                what = f"platform.{name}={value} means nothing to platform.network={chosen}"
                raise ValueError(f"{what}; set network: {owners}, or leave it out")
    return section
