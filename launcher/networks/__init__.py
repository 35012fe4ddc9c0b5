"""The registry of networks: a module each, which has the network's settings, releases and values.

A new network is a module with a TYPE (launcher.networks.profile) and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from launcher.machines import Machine
from launcher.networks.profile import Carrier, Network, NetworkContext, NetworkType
from litgpt_demo.config import Settings

_NAMES = (
    "tcp",
    "gib",
    "ib",
    "roce",
    "tcpx",
    "tcpxo",
)
NETWORKS: Mapping[str, NetworkType] = MappingProxyType(
    {name: import_module(f"launcher.networks.{name}").TYPE for name in _NAMES}
)
DEFAULT: Final = _NAMES[0]
"""The network that every cluster has, and that a config gets which names none."""


class NetworkSettings(Settings):
    """The base of a `platform` section with a network; a form shows the networks' settings next to it."""

    network: str = DEFAULT


def _settings_of(carrier: Carrier) -> Any:
    found = [network.settings[carrier] for network in NETWORKS.values() if carrier in network.settings]
    specific = [settings for settings in found if not any(settings in base.__mro__[1:] for base in found)]
    # In a form the fields of the last base come first.
    bases: tuple[Any, ...] = (*reversed(dict.fromkeys(specific)), NetworkSettings)
    return type("NetworkSettings", bases, {"__module__": __name__})


def _name_of(carrier: Carrier) -> Any:
    titles = {name: network.title for name, network in NETWORKS.items() if carrier in network.settings}
    listed = ", ".join(f"{name} ({title})" for name, title in titles.items())
    return Annotated[Literal[tuple(titles)], Field(description=f"How nodes reach each other: {listed}.")]


if TYPE_CHECKING:
    InPods = str
    ByMultus = str
    OnMachines = str
    PodSettings = NetworkSettings
    MultusSettings = NetworkSettings
    MachineSettings = NetworkSettings
else:
    InPods, ByMultus, OnMachines = map(_name_of, Carrier)
    PodSettings, MultusSettings, MachineSettings = map(_settings_of, Carrier)


def networks_of(machine: Machine) -> tuple[str, ...]:
    """Return the networks that a machine has the hardware for, the fastest first and the default last."""
    names = [name for name, network in NETWORKS.items() if machine.name in network.machines and name != DEFAULT]
    return (*names, DEFAULT)


def chosen_network(section: Any, carrier: Carrier, *, host_network: bool = False) -> Network:
    context = NetworkContext(machine=section.machine_type, carrier=carrier, host_network=host_network)
    return NETWORKS[section.network].make(context, section)


def require_fit(section: Any) -> Any:
    """Refuse a `platform` section with settings of another network, or with a network of another machine."""
    name, machine = section.network, section.machine_type
    network = NETWORKS[name]
    if machine is None and not network.unlisted:
        fix = f"set platform.machine, or platform.network={DEFAULT}"
        raise ValueError(f"platform.network={name} works only on certain machines; {fix}")
    if machine is not None and machine.name not in network.machines:
        fix = f"set it to {' or '.join(networks_of(machine))}"
        raise ValueError(f"platform.network={name}, but platform.machine={machine.name} has no hardware for it; {fix}")
    for setting, field in type(section).model_fields.items():
        owners = [owner for owner, known in NETWORKS.items() if setting in known.setting_names]
        value = getattr(section, setting)
        if owners and name not in owners and value != field.default:
            what = f"platform.{setting}={value} is not a setting of platform.network={name}"
            raise ValueError(f"{what}; leave it out, or set platform.network to {' or '.join(owners)}")
    return section
