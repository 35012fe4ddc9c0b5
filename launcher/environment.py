"""Every environment variable of a pod, with where it comes from and why. Two that disagree are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launcher.errors import ConfigProblem
from launcher.job import Job
from launcher.networks.profile import Network, Variable
from litgpt_demo.node.network import NETWORK

Origin = Literal["profile", "platform", "user", "job", "script"]
"""`profile`: the network's. `platform`: what launching needs. `user`: platform.overrides. `job`: the run's own, `env`
of a script. `script`: not in the pod's specification; a script of the network sets it on the node."""
_SETTERS: dict[str, str] = {
    "platform": "the launcher", "user": "platform.overrides", "profile": "the network profile",
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
    """`$(NAME)` in the value stands for another variable, which has to come before; otherwise it is taken literally."""

    def as_object(self) -> dict[str, Any]:
        """The entry as a container's `env` has it."""
        if self.field is not None:
            return {"name": self.name, "valueFrom": {"fieldRef": {"fieldPath": self.field}}}
        if self.secret is not None:
            name, _, key = self.secret.partition("/")
            return {"name": self.name, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        return {"name": self.name, "value": self.value if self.expands else literal(self.value)}


def literal(text: str) -> str:
    """`text` as it has to be written in a command or value: Kubernetes takes `$$` for `$`, and expands `$(NAME)`."""
    return text.replace("$", "$$")


def node_environment(
    job: Job, settings: Any, network: Network, more: Sequence[Entry] = (), *, before: Sequence[Entry] = (),
    named: bool = True, **own: Any,
) -> list[Entry]:  # fmt: skip
    """The variables of a node in a container: the platform's, and between them what it has to know of its network.

    `own` are fields of its NodeNetwork that not all platforms set alike; the name of a network may go without saying.
    """
    alike = {
        "gpus": settings.node_gpus,
        "environment": {one.name: one.value for one in network.environment if one.after and network.node.scripts},
        # What the user and the job set has to win over the scripts, which the node sources later than the pod sets
        # anything.
        "overrides": {**job.env, **settings.overrides} if network.scripted else dict(settings.overrides),
        # Plain TCP has no figure that it could be held to.
        "gate_seconds": settings.gate if job.nodes > 1 and network.node.nccl_net is not None else 0,
    }
    told = network.node.model_copy(update={**alike, **own}).model_dump(mode="json", exclude_defaults=True)
    text = json.dumps({"name": network.node.name, **told} if named else told, separators=(",", ":"))
    rows = [
        *before,
        Entry(name=NETWORK, value=text, origin="platform", why="what the node has to know of its network"),
        Entry(name="PYTHONUNBUFFERED", value="1", origin="platform", why="log lines appear when they are printed"),
        *more,
    ]
    return combined(rows, job.env, settings.overrides, network)


def combined(
    platform: Iterable[Entry], job: Mapping[str, str], overrides: Mapping[str, str], network: Network | None
) -> list[Entry]:
    """All variables of the node's container; those of scripts are last, and only to be told.

    What the user overrides replaces the profile's. What the job sets must agree with all others, because a program
    that asks for another transport than its network's would be slow and not say so; a ConfigProblem names every clash.
    """

    def named(variables: Sequence[Variable], origin: Origin) -> dict[str, Entry]:
        rows = [(one.name, one.value, "; ".join(filter(None, (one.why, one.source)))) for one in variables]
        return {name: Entry(name=name, value=value, origin=origin, why=why) for name, value, why in rows}

    mine = {one.name: one for one in platform}
    profile = named(network.environment, "profile") if network else {}
    by_script = named(network.scripted, "script") if network else {}
    users = {}
    for name, value in overrides.items():
        replaced = profile.get(name) or by_script.get(name)
        why = f"platform.overrides, instead of {replaced.value}" if replaced else "platform.overrides"
        users[name] = Entry(name=name, value=value, origin="user", why=why)
    wrong = [name for name in {**overrides, **job} if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    problems = [f"{name!r} cannot be an environment variable; use letters, digits and underscores" for name in wrong]
    problems += [
        f"platform.overrides sets {name}, which the launcher sets itself; leave it out"
        for name in sorted(mine.keys() & users.keys())
    ]
    known = {**by_script, **profile, **users, **mine}
    for name in sorted(job.keys() & known.keys()):
        other = known[name]
        if other.field is None and other.value == job[name]:
            continue
        where, fix = _SETTERS[other.origin], "leave it out of env"
        if other.origin in {"profile", "script"}:
            fix = "if that is meant, set it in platform.overrides instead"
        problems.append(f"env sets {name}={job[name]}, and {where} sets {name}={other.value or other.field}; {fix}")
    if problems:
        raise ConfigProblem("\n".join(problems))
    own = {name: Entry(name=name, value=value, origin="job", why="env of the job") for name, value in job.items()}
    sent = {**mine, **profile, **users}
    told = [entry for name, entry in by_script.items() if name not in users]
    return [*sent.values(), *(entry for name, entry in own.items() if name not in sent), *told]


def as_rows(entries: Iterable[Entry]) -> tuple[dict[str, str], ...]:
    """The variables as a table, for people."""
    rows = [(one.name, f"({one.field})" if one.field else one.value, one.origin, one.why) for one in entries]
    return tuple(dict(zip(("variable", "value", "from", "why"), row, strict=True)) for row in rows)
