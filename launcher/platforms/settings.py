"""The settings of every platform, and the properties that shared code uses instead of the kind of platform."""

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
from litgpt_demo.config import Count, Settings, WholeSeconds, arrange_form
from litgpt_demo.errors import Finding

if TYPE_CHECKING:
    from launcher.networks.profile import Network
    from launcher.platforms.base import Platform


LONGEST_LABEL = 63
"""Characters of a DNS label: pod names become host names, and Services need one (RFC 1123, RFC 1035). NAME_PATTERN has
the permitted characters."""


def only_recorded(statement: str, *, variable: str, value: str) -> ConfigProblem:
    """Return the error for an address that only a record names: everyone who writes to the root may have forged it."""
    fix = f"if it is yours, export {variable}={value}, or give the command a config that names it"
    what = f"only the job's record, which others may write, says that {statement}"
    return ConfigProblem(f"{what}; {variable} is {os.environ.get(variable) or 'not set'}", fix=fix)


def without_default(schema: dict[str, Any]) -> None:
    """Remove a default that depends on another field, because a form must not send it."""
    schema.pop("default", None)


def _order_as_declared(schema: dict[str, Any], model: type[PlatformSettings]) -> None:
    """Order settings as the class declares them. An inherited one follows the setting that precedes it in the base."""
    properties = schema["properties"]
    order = [name for name in get_annotations(model) if name in properties]
    for predecessor, name in pairwise(properties):
        if name not in order:
            order.insert(order.index(predecessor) + 1, name)
    schema["properties"] = {name: properties[name] for name in order}
    arrange_form(schema, model)


class PlatformSettings(Settings):
    """The `platform` section of a config. Each platform has its own class, which `kind` selects."""

    model_config = ConfigDict(json_schema_extra=_order_as_declared, allow_inf_nan=False)

    on_this_machine: ClassVar[bool] = False
    """Nodes are processes of this machine, with its files, packages, environment, memory and GPUs."""

    opens: ClassVar[str]
    """The module and the class of the platform."""

    kind: str
    nodes: Count
    processes_per_node: Count
    grace_period: WholeSeconds
    usd_per_hour: float | None = Field(None, gt=0)
    """The price of a node for an hour, in dollars; empty is the list price of `machine`, if there is one."""

    @property
    def area(self) -> str:
        """The first word of its findings' codes: the platform's folder."""
        return self.opens.split(".")[2]

    def open(self) -> Platform:
        """Return the platform with these settings. Its module is imported only here."""
        opened: Platform = resolve_name(self.opens)(self)
        return opened

    def open_recorded(self, config: PlatformSettings | None) -> Platform:
        """Return the platform of a record's settings, which everyone who may write to the root may have written.
        `config` has the settings of the user's own config, if there is one."""
        return self.open()

    @abstractmethod
    def missing_secrets(self, names: Iterable[str]) -> Iterator[Finding]:
        """Yield a finding for each of these environment variables that ranks would lack."""

    @property
    def in_containers(self) -> bool:
        """Return whether nodes run the image of the config, and not an existing environment."""
        return not self.on_this_machine

    @property
    def hardware(self) -> str | None:
        """Return the machine type or GPU of the nodes by its usual name, None if it is not known."""
        machine: str | None = getattr(self, "machine", None)
        return machine

    @property
    def region(self) -> str | None:
        """Return the Google Cloud region of the nodes, None if it is not known."""
        location: str | None = getattr(self, "location", None)  # on GKE it may be a zone
        return re.sub("-[a-z]$", "", location) if location else None

    @property
    def machine_type(self) -> Machine | None:
        """Return the nodes' entry in the table of machines, None without one."""
        return MACHINES.get(self.hardware or "")

    @property
    def price(self) -> ListPrice | None:
        """Return the price of a node: the user's, or the list price. None if neither is known."""
        if self.usd_per_hour is not None:
            return ListPrice(usd=self.usd_per_hour, region="", date="", source="platform.usd_per_hour")
        return self.machine_type.price if self.machine_type else None

    @property
    def fabric(self) -> Network | None:
        """Return the network between the nodes, None if the platform has no choice of them."""
        return None

    @property
    def driver(self) -> str | None:
        """Return the GPU driver that the platform must install, None for the machines' own."""
        driver: str | None = getattr(self, "gpu_driver", None)
        return driver

    def for_measuring(self, *, sockets: bool) -> Self:
        """Return the settings for a job that measures the network itself, or plain sockets: with the same daemons and
        cards."""
        if not sockets:
            return self._changed(network_test=0)
        env = {**getattr(self, "env", {}), "NCCL_NET": "Socket"}
        return self._changed(network_test=0, env=env, allow_tcp_fallback=True)

    def for_one_process(self) -> Self:
        return self._changed(nodes=1, processes_per_node=1, network_test=0, slice_nodes=None)

    def _changed(self, **changes: Any) -> Self:
        fields = type(self).model_fields
        return self.model_copy(update={name: value for name, value in changes.items() if name in fields})


class ClusterSettings(PlatformSettings):
    """The settings of every platform whose nodes are machines elsewhere that run containers."""

    processes_per_node: Count = Field(1, gt=0, le=64, json_schema_extra=without_default)
    """Ranks per node; left out, one per GPU, or one."""
    secrets: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variable to the place where its value is kept."""
    env: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variables of the nodes. They win over those of the network. Do not put secrets here: these values are
    stored and shown."""
    network_test: WholeSeconds = Field(60, ge=0, le=60)
    """Seconds that the network test before the training may take; 0 leaves it out."""
    grace_period: WholeSeconds = Field(30, ge=1, le=3600)
    """Seconds that ranks have to save after the signal to end."""

    @property
    def node_gpus(self) -> int:
        """The number of GPUs of each node. A part of a GPU counts as one."""
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
    def _one_rank_per_gpu(cls, section: Any) -> Any:
        if not isinstance(section, Mapping) or section.get("processes_per_node") is not None:
            return section
        machine = MACHINES.get(str(section.get("machine")))
        try:
            gpus = int(float(machine.gpus if machine else section.get("gpus") or 0))
        except (TypeError, ValueError, OverflowError):  # the field `gpus` reports that this is not a number
            return section
        return {**section, "processes_per_node": max(1, gpus)}

    def missing_secrets(self, names: Iterable[str]) -> Iterator[Finding]:
        """Yield a finding for each that `secrets` does not name."""
        for name in names:
            if name not in self.secrets:
                what = f"the training needs the secret {name}, but platform.secrets does not say where it is"
                fix = f"add it there: `train-litgpt settings platform` shows the form for platform.kind={self.kind}"
                yield Finding("error", "platform.secrets", what, fix)
