"""The settings that every platform has, and the questions that shared code asks of them, instead of which they are."""

from __future__ import annotations

import math
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from inspect import get_annotations
from itertools import pairwise
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from launcher.errors import ConfigProblem
from launcher.machines import MACHINES, ListPrice, Machine
from litgpt_demo.config import Count, Settings, arrange_form
from litgpt_demo.errors import Finding

if TYPE_CHECKING:
    from launcher.networks.profile import Network
    from launcher.platforms.base import Platform


LONGEST_LABEL = 63
"""Characters of a DNS label: pod names become host names, and Services need one (RFC 1123, RFC 1035). What a name is
made of NAME_PATTERN sees to."""


def only_recorded(claim: str, *, variable: str, value: str) -> ConfigProblem:
    """Return the refusal of an address that only a record names, which whoever writes to the root may have forged."""
    fix = f"if it is yours, export {variable}={value}, or give the verb a config that names it"
    what = f"only the job's record, which others may write, says that {claim}"
    return ConfigProblem(f"{what}; {variable} is {os.environ.get(variable) or 'not set'}", fix=fix)


def drop_empty(**fields: Any) -> dict[str, Any]:
    """The fields that ask for something: what is left out is the platform's own default."""
    return {name: value for name, value in fields.items() if value}


def without_default(schema: dict[str, Any]) -> None:
    """Remove a default that depends on another field: a form must not send it."""
    schema.pop("default", None)


def _in_order_of_the_class(schema: dict[str, Any], model: type[PlatformSettings]) -> None:
    """Put each inherited setting after the one that it follows in the base; the others stand as the class has them."""
    properties = schema["properties"]
    order = [name for name in get_annotations(model) if name in properties]
    for before, name in pairwise(properties):
        if name not in order:
            order.insert(order.index(before) + 1, name)
    schema["properties"] = {name: properties[name] for name in order}
    arrange_form(schema)


class PlatformSettings(Settings):
    """The `platform` section of a config. Each platform has a class of its own, told apart by `kind`."""

    model_config = ConfigDict(json_schema_extra=_in_order_of_the_class, allow_inf_nan=False)

    on_this_machine: ClassVar[bool] = False
    """Nodes are processes of this machine: they have its files, packages, environment, memory and GPUs."""

    opens: ClassVar[str]
    """The module and the class of the platform."""

    kind: str
    nodes: Count
    processes: Count
    grace: Count
    usd_per_hour: float | None = Field(None, gt=0)
    """The price of a node for an hour, in dollars; empty takes the list price of `machine`, where one is known."""

    def open(self) -> Platform:
        """Return the platform, set up as these settings say. Its module is imported here, and not before."""
        opened: Platform = resolve_name(self.opens)(self)
        return opened

    def open_recorded(self, given: PlatformSettings | None) -> Platform:
        """Return the platform of a record's settings: whoever may write to the root's storage may have written them.

        Args:
            given: the settings of the config that the user gave; None for a verb that was given a name.
        """
        return self.open()

    @abstractmethod
    def missing_secrets(self, names: Iterable[str]) -> Iterator[Finding]:
        """Yield a finding for each of these environment variables that ranks would not have."""

    @property
    def in_containers(self) -> bool:
        """Return whether nodes run the image of the config; otherwise they run an environment that is there."""
        return not self.on_this_machine

    @property
    def hardware(self) -> str | None:
        """Return the machine type or GPU of the nodes by the name that users know, None where it is not known."""
        named: str | None = getattr(self, "machine", None)
        return named

    @property
    def region(self) -> str | None:
        """Return the region of Google Cloud that the nodes are in, None where it is not known."""
        location: str | None = getattr(self, "location", None)  # gke's may be a zone
        return location and re.sub("-[a-z]$", "", location)

    @property
    def machine_type(self) -> Machine | None:
        """Return the nodes' entry in the table of machines, None where they have none."""
        return MACHINES.get(self.hardware or "")

    @property
    def price(self) -> ListPrice | None:
        """Return the price of a node, its user's or the list's; None where neither is known."""
        if self.usd_per_hour is not None:
            return ListPrice(usd=self.usd_per_hour, region="", date="", source="platform.usd_per_hour")
        return self.machine_type.price if self.machine_type else None

    @property
    def fabric(self) -> Network | None:
        """Return the network between the nodes, None where the platform has no choice of them.

        Raises:
            ConfigProblem: its release is not known.
        """
        return None

    @property
    def driver(self) -> str | None:
        """Return the GPU driver that the platform is asked to install, None where the machines' own is taken."""
        named: str | None = getattr(self, "gpu_driver", None)
        return named

    def for_measuring(self, *, sockets: bool) -> Self:
        """Return the settings for a job that measures the network itself, with plain sockets if that is asked for.
        It has no gate; the network's daemons and cards stay, so that nothing else differs."""
        overrides = {**getattr(self, "overrides", {}), "NCCL_NET": "Socket"}
        return self._changed(gate=0, **({"overrides": overrides, "allow_sockets": True} if sockets else {}))

    def for_one_process(self) -> Self:
        """Return the settings for a job of one process, which has a whole machine."""
        return self._changed(nodes=1, processes=1, gate=0, slice_nodes=None)

    def _changed(self, **changes: Any) -> Self:
        there = type(self).model_fields
        return self.model_copy(update={name: value for name, value in changes.items() if name in there})


class ClusterSettings(PlatformSettings):
    """The settings of every platform whose nodes are machines elsewhere that run containers."""

    processes: Count = Field(1, gt=0, le=64, json_schema_extra=without_default)
    """Ranks per node; left out, one per GPU, or one."""
    secrets: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variable to the place where its value is kept."""
    overrides: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variables that win over the network profile's. Not for secrets: they would be stored and shown."""
    gate: Count = Field(60, ge=0, le=60)
    """Seconds that the bandwidth measurement before the training may take; 0 leaves it out."""
    grace: Count = Field(30, ge=1, le=3600)
    """Seconds that ranks have to save when they are asked to leave."""

    @property
    def node_gpus(self) -> int:
        """GPUs of each node; a part of one counts as one."""
        return self.machine_type.gpus if self.machine_type else math.ceil(getattr(self, "gpus", None) or 0)

    @field_validator("secrets")
    @classmethod
    def _are_variables(cls, secrets: dict[str, str]) -> dict[str, str]:
        for name in secrets:
            if not (name.isascii() and name.isidentifier()):  # shells are shown it
                what = f"{name!r} cannot be the name of an environment variable"
                raise ValueError(f"{what}; use letters, digits and underscores")
        return secrets

    @model_validator(mode="before")
    @classmethod
    def _one_rank_per_gpu(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("processes") is not None:
            return given
        machine = MACHINES.get(str(given.get("machine")))
        try:
            gpus = int(float(machine.gpus if machine else given.get("gpus") or 0))
        except (TypeError, ValueError, OverflowError):  # no number: its own field says so
            return given
        return {**given, "processes": max(1, gpus)}

    def missing_secrets(self, names: Iterable[str]) -> Iterator[Finding]:
        """Yield a finding for each that `secrets` does not name."""
        for name in names:
            if name not in self.secrets:
                what = f"the training needs the secret {name}, and platform.secrets does not say where it is"
                fix = f"add it: `train-litgpt settings platform` shows how {self.kind} names secrets"
                yield Finding("error", "platform.secrets", what, fix)
