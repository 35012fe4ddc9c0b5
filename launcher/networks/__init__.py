"""The networks: one self-describing file each, found by listing this folder, and the settings that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import Field, create_model, model_validator
from pydantic.fields import FieldInfo

from launcher.errors import ConfigProblem
from launcher.machines import Machine
from launcher.networks import plain
from launcher.networks.profile import Choice, Network, NetworkCapability, Profile
from litgpt_demo.config import Settings

DEFAULT = plain.PROFILE.name
"""The network that every cluster has, and that a config which names none gets."""

_MODULES = (import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__))
_PROFILES = (plain.PROFILE, *(module.PROFILE for module in _MODULES if hasattr(module, "PROFILE")))
NETWORKS: Mapping[str, Profile[Any]] = MappingProxyType({profile.name: profile for profile in _PROFILES})
"""Every network that a module of this folder describes, the default one first."""


def networks_of(machine: Machine) -> tuple[str, ...]:
    """Return the networks that a machine has the hardware for, the one to use first."""
    names = [profile.name for profile in NETWORKS.values() if machine.name in profile.machines]
    return tuple(sorted(names, key=DEFAULT.__eq__))


def require_machine(name: str, machine: Machine | None) -> None:
    """Refuse with a ValueError a network that the machine has not got, or that needs one where none is named."""
    if machine is None and not NETWORKS[name].unlisted:
        raise ValueError(
            f"platform.network={name} belongs to particular machines; name one in platform.machine, or take {DEFAULT}"
        )
    if machine is not None and machine.name not in NETWORKS[name].machines:
        raise ValueError(
            f"platform.network={name}, which a {machine.name} has not got; take {' or '.join(networks_of(machine))}"
        )


def open_network(name: str, choice: Choice, **options: Any) -> Network:
    """Return the network of that name, made for what the job chose.

    Raises:
        ConfigProblem: no such network, the machine has not got it, or a release that is not known.
    """
    if name not in NETWORKS:
        raise ConfigProblem(f"platform.network={name!r} is no network; there are {', '.join(NETWORKS)}")
    try:
        require_machine(name, choice.machine)
    except ValueError as error:
        raise ConfigProblem(str(error)) from error
    profile = NETWORKS[name]
    return profile.make(choice, profile.options.model_validate(options))


def chosen_network(section: Any, *, host_network: bool = False) -> Network:
    """Return the network that a `platform` section asks for, a class that `with_networks` has made."""
    choice = Choice(machine=section.machine_type, carries=section.carries, host_network=host_network)
    options = {name: getattr(section, name) for name in NETWORKS[section.network].options.model_fields}
    return open_network(section.network, choice, **options)


Section = TypeVar("Section", bound=Settings)


def with_networks(section: type[Section]) -> type[Section]:
    """Give a `platform` section the networks that its platform carries: their names and, after them, their options.

    The section declares `carries` and a field `network`. What else a network needs to be set up stands in its own file,
    so that a new file is a new choice with settings of its own.
    """
    carries: frozenset[NetworkCapability] = section.carries  # type: ignore[attr-defined]  # one without is refused here
    profiles = {name: one for name, one in NETWORKS.items() if not one.carried_by or one.carried_by & carries}
    options: dict[str, FieldInfo] = {}
    for profile in profiles.values():
        options |= profile.options.model_fields
    listed = ", ".join(f"{name} ({profile.summary})" for name, profile in profiles.items())
    network = Field(DEFAULT, description=f"How nodes reach each other: {listed}.")

    def fits(self: Any) -> Any:
        """Refuse options of another network, and a network of another machine."""
        require_machine(self.network, self.machine_type)
        own = profiles[self.network].options.model_fields
        for name, field in options.items():
            if name in own or (value := getattr(self, name)) == field.default:
                continue
            has = ", ".join(f"platform.{option}" for option in own) or "no options"
            owners = [profile.name for profile in profiles.values() if name in profile.options.model_fields]
            raise ValueError(
                f"platform.{name}={value} means nothing to platform.network={self.network}, which has {has}; "
                f"set network: {' or '.join(owners)}, or leave it out"
            )
        return self

    validators: dict[str, Any] = {"_network_fits": model_validator(mode="after")(fits)}
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in options.items()}
    fields["network"] = (Literal.__getitem__(tuple(profiles)), network)
    made: type[Section] = create_model(
        section.__name__,
        __base__=section,
        __doc__=section.__doc__,
        __module__=section.__module__,
        __validators__=validators,
        **fields,
    )
    # A form shows fields in their order: options belong next to the network, and not at the end.
    before, _, after = " ".join(section.model_fields).partition(" network ")
    order = [*before.split(), "network", *options, *after.split()]
    made.__pydantic_fields__ = {name: made.__pydantic_fields__[name] for name in order}
    made.model_rebuild(force=True)
    return made
