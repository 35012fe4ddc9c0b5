"""Every environment variable of a node, with its origin and reason. Two that disagree are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launcher.errors import ConfigProblem
from launcher.job import Job
from launcher.networks.profile import Network, Variable
from litgpt_demo.node.network import NETWORK

Origin = Literal["profile", "platform", "user", "job", "script"]
"""`profile`: the network's. `platform`: what launching needs. `user`: platform.env. `job`: the run's own, `env`
of a script. `script`: not in the pod's specification; a script of the network sets it on the node."""
_SETTERS: dict[str, str] = {
    "platform": "the launcher", "user": "platform.env", "profile": "the network profile",
    "script": "a script of the network profile",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One variable."""

    name: str
    value: str
    origin: Origin
    why: str
    field: str | None = None
    """A field of the pod that the value is read from, instead of `value`."""
    secret: str | None = None
    """The entry of a secret that the value is read from, as `name/key`."""
    expands: bool = False
    """`$(NAME)` in the value stands for another variable, which must come before; otherwise the value is literal."""

    def as_object(self) -> dict[str, Any]:
        if self.field is not None:
            return {"name": self.name, "valueFrom": {"fieldRef": {"fieldPath": self.field}}}
        if self.secret is not None:
            name, _, key = self.secret.partition("/")
            return {"name": self.name, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        return {"name": self.name, "value": self.value if self.expands else literal(self.value)}


def literal(text: str) -> str:
    """Return `text` escaped for a command or value: Kubernetes reads `$$` as `$`, and expands `$(NAME)`."""
    return text.replace("$", "$$")


def node_environment(
    job: Job, settings: Any, network: Network, more: Sequence[Entry] = (), *, before: Sequence[Entry] = (),
    named: bool = True, **own: Any,
) -> list[Entry]:  # fmt: skip
    """Return the variables of a node in a container. `own` are the NodeNetwork fields that differ per platform.
    `named=False` leaves the network's name out."""
    # Variables of the user and of the job win over the network's scripts, which the node sources afterwards.
    user_env = dict(settings.env)
    if network.scripted:
        user_env = {**job.env, **user_env}
    # Plain TCP has no bandwidth that a test could compare with.
    is_tested = job.nodes > 1 and network.node.nccl_net is not None
    common = {
        "gpus": settings.node_gpus,
        "environment": {
            variable.name: variable.value for variable in network.environment if variable.after and network.node.scripts
        },
        "user_env": user_env,
        "test_seconds": settings.network_test if is_tested else 0,
    }
    node = network.node.model_copy(update={**common, **own})
    fields = node.model_dump(mode="json", exclude_defaults=True)
    if named:
        fields = {"name": network.node.name, **fields}
    text = json.dumps(fields, separators=(",", ":"))
    rows = [
        *before,
        Entry(name=NETWORK, value=text, origin="platform", why="the network, which the node checks"),
        Entry(name="PYTHONUNBUFFERED", value="1", origin="platform", why="log lines appear at once"),
        *more,
    ]
    return combined(rows, job.env, settings.env, network)


def combined(
    platform: Iterable[Entry], job: Mapping[str, str], user: Mapping[str, str], network: Network | None
) -> list[Entry]:
    """Return all variables of the node's container; those that scripts set come last, and are not sent. Raises
    ConfigProblem with every variable that is set twice: one that chooses another transport would be slow without a
    message."""
    by_platform = {entry.name: entry for entry in platform}
    by_profile: dict[str, Entry] = {}
    by_script: dict[str, Entry] = {}
    if network is not None:
        by_profile = {variable.name: _network_entry(variable, "profile") for variable in network.environment}
        by_script = {variable.name: _network_entry(variable, "script") for variable in network.scripted}
    by_user = {}
    for name, value in user.items():
        why = "platform.env"
        if replaced := by_profile.get(name) or by_script.get(name):
            why += f", instead of {replaced.value}"
        by_user[name] = Entry(name=name, value=value, origin="user", why=why)
    by_job = {name: Entry(name=name, value=value, origin="job", why="env of the job") for name, value in job.items()}
    problems = [
        f"{name!r} cannot be an environment variable; use letters, digits and underscores"
        for name in {**user, **job}
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
    ]
    problems += [
        f"platform.env sets {name}, which the launcher sets itself; leave it out"
        for name in sorted(by_platform.keys() & by_user.keys())
    ]
    problems += _conflicts(by_job, {**by_script, **by_profile, **by_user, **by_platform})
    if problems:
        raise ConfigProblem("\n".join(problems))
    sent = {**by_platform, **by_profile, **by_user}
    added_by_job = [entry for name, entry in by_job.items() if name not in sent]
    only_listed = [entry for name, entry in by_script.items() if name not in by_user]
    return [*sent.values(), *added_by_job, *only_listed]


def _network_entry(variable: Variable, origin: Origin) -> Entry:
    why = "; ".join(filter(None, (variable.why, variable.source)))
    return Entry(name=variable.name, value=variable.value, origin=origin, why=why)


def _conflicts(by_job: Mapping[str, Entry], others: Mapping[str, Entry]) -> Iterator[str]:
    for name in sorted(by_job.keys() & others.keys()):
        entry, value = others[name], by_job[name].value
        if entry.field is None and entry.value == value:
            continue
        fix = "leave it out of env"
        if entry.origin in {"profile", "script"}:
            fix = "to replace that value, set it in platform.env instead"
        setter = _SETTERS[entry.origin]
        yield f"env sets {name}={value}, and {setter} sets {name}={entry.value or entry.field}; {fix}"


def as_rows(entries: Iterable[Entry]) -> tuple[dict[str, str], ...]:
    return tuple(
        {
            "variable": entry.name,
            "value": f"({entry.field})" if entry.field else entry.value,
            "from": entry.origin,
            "why": entry.why,
        }
        for entry in entries
    )
