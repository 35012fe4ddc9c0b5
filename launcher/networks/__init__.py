"""The networks: one self-describing file each, found by listing this folder, and the settings that follow from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field, create_model, model_validator
from pydantic.fields import FieldInfo

from launcher.errors import ConfigProblem
from launcher.machines import Machine
from launcher.networks import plain
from launcher.networks.profile import Choice, Network, NetworkCapability, Profile, ReleasePair
from litgpt_demo.config import Settings
from litgpt_demo.findings import Finding

DEFAULT = plain.PROFILE.name
"""The network that every cluster has, and that a config which names none gets."""


def _described() -> dict[str, Profile[Any]]:
    """Every network that a module of this folder describes, the default one first."""
    modules = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    found = [module.PROFILE for module in modules if hasattr(module, "PROFILE")]
    return {profile.name: profile for profile in (plain.PROFILE, *found)}


NETWORKS: Mapping[str, Profile[Any]] = MappingProxyType(_described())


def networks_of(machine: Machine) -> tuple[str, ...]:
    """Return the networks that a machine has the hardware for, the one to use first."""
    names = [profile.name for profile in NETWORKS.values() if machine.name in profile.machines]
    return tuple(sorted(names, key=DEFAULT.__eq__))


def carried(capabilities: Collection[NetworkCapability]) -> dict[str, Profile[Any]]:
    """Return the networks that a platform with these capabilities can carry."""
    return {
        name: profile
        for name, profile in NETWORKS.items()
        if any(way <= frozenset(capabilities) for way in profile.carried_by)
    }


def require_machine(name: str, machine: Machine | None) -> None:
    """Refuse a network that the machine has not got.

    Raises:
        ValueError: it is another machine's, or belongs to particular machines and none is named.
    """
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


# --- the settings of a platform's networks ----------------------------------------------------------------------------


class Carrier(Protocol):
    """A `platform` section that lets a job choose its network."""

    carries: ClassVar[frozenset[NetworkCapability]]

    @property
    def network(self) -> str: ...

    @property
    def machine_type(self) -> Machine | None: ...


def chosen_network(settings: Carrier, *, host_network: bool = False) -> Network:
    """Return the network that a `platform` section asks for.

    Raises:
        ConfigProblem: the machine has not got it, or its release is not known.
    """
    return open_network(settings.network, _choice(settings, host_network), **_options(settings))


def known_pairs(settings: Carrier) -> tuple[ReleasePair, ...]:
    """Return the releases that we know of a section's network, the default first; none where it has no plug-in."""
    return NETWORKS[settings.network].pairs.get(_choice(settings).arch, ())


def network_findings(settings: Carrier, *, host_network: bool = False) -> Iterable[Finding]:
    """Return what the chosen network says of a `platform` section."""
    profile = NETWORKS[settings.network]
    options = profile.options.model_validate(_options(settings))
    return profile.check(_choice(settings, host_network), options)


def _choice(settings: Carrier, host_network: bool = False) -> Choice:
    return Choice(machine=settings.machine_type, carries=settings.carries, host_network=host_network)


def _options(settings: Carrier) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in NETWORKS[settings.network].options.model_fields}


Section = TypeVar("Section", bound=Settings)


def with_networks(section: type[Section]) -> type[Section]:
    """Give a `platform` section the networks that its platform carries: their names and, after them, their options.

    The section declares `carries` and a field `network`. What else a network needs to be set up stands in its own file,
    so that a new file is a new choice with settings of its own.
    """
    profiles = carried(section.carries)  # type: ignore[attr-defined]  # a section without is refused right here
    options: dict[str, FieldInfo] = {}
    for profile in profiles.values():
        options |= profile.options.model_fields
    listed = ", ".join(f"{name} ({profile.summary})" for name, profile in profiles.items())
    network = Field(DEFAULT, description=f"How nodes reach each other: {listed}.")

    def fits(self: Section) -> Section:
        _require_own_options(self, profiles, options)
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


def _require_own_options(section: Any, profiles: Mapping[str, Profile[Any]], options: Mapping[str, FieldInfo]) -> None:
    """Refuse options of another network, and a network of another machine.

    Raises:
        ValueError: which it is, and what would do.
    """
    require_machine(section.network, section.machine_type)
    own = profiles[section.network].options.model_fields
    for name, field in options.items():
        if name in own or (value := getattr(section, name)) == field.default:
            continue
        has = ", ".join(f"platform.{option}" for option in own) or "no options"
        owners = [profile.name for profile in profiles.values() if name in profile.options.model_fields]
        raise ValueError(
            f"platform.{name}={value} means nothing to platform.network={section.network}, which has {has}; "
            f"set network: {' or '.join(owners)}, or leave it out"
        )
