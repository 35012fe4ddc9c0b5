"""Network profiles by name, imported on use."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType

from launcher.errors import ConfigProblem
from launcher.networks.profile import Choice, Network, Pair

NETWORKS = MappingProxyType(
    {
        "plain": "launcher.networks.plain",
        "tcpx": "launcher.networks.tcpx",
        "tcpxo": "launcher.networks.tcpxo",
        "gib": "launcher.networks.gib",
        "roce": "launcher.networks.roce",
    }
)


def known_pairs(name: str, *, arch: str = "amd64") -> tuple[Pair, ...]:
    """The releases of a network that we know, newest first; none where it has no plug-in."""
    pairs: tuple[Pair, ...] = getattr(import_module(NETWORKS[name]), "ARM_PAIRS" if arch == "arm64" else "PAIRS", ())
    return pairs


def open_network(name: str, choice: Choice) -> Network:
    """The profile that a job's network setting names, made for what the job chose.

    Raises:
        ConfigProblem: no such network, the machine has not got it, or a release that is not known.
    """
    if name not in NETWORKS:
        raise ConfigProblem(f"platform.network={name!r} is no network; there are {', '.join(NETWORKS)}")
    machine = choice.machine
    if machine is not None and name not in machine.networks:
        raise ConfigProblem(
            f"platform.network={name} is no network of platform.machine={machine.name}; "
            f"it has {' and '.join(machine.networks)}"
        )
    if machine is None and name not in {"plain", "roce"}:
        raise ConfigProblem(
            f"platform.network={name} belongs to particular machines; name one in platform.machine, or take plain"
        )
    made: Network = import_module(NETWORKS[name]).network(choice)
    return made
