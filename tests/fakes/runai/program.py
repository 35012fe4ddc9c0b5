"""The `runai` program, strict: two generations, each with the flags that its documentation lists and no others.

    python -m program CLUSTER GENERATION command …

v1: https://docs.run.ai/v2.13/Researcher/cli-reference/runai-submit-dist-pytorch/. v2: docs.nvidia.com/run-ai, the
pages of `runai training pytorch`.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cluster import UNANSWERED, Cluster, Lost, Refused, Training

# Long flags, with their short form; `!` is a switch, `+` may be given several times.
_V1 = """
name template annotation+/a attach! command! environment+/e image/i image-pull-policy label+/l
preferred-pod-topology-key required-pod-topology-key working-dir cpu cpu-limit extended-resource+ gpu/g gpu-memory
memory backoff-limit large-shm! pvc+ pvc-exists+ pvc-new+ volume+/v host-network! allow-privilege-escalation!
run-as-user! node-pools node-type project/p workers dry-run!
"""
# The newest releases: `--environment` names an asset, only -e sets a variable (docs.nvidia.com, v3.0).
_V2 = """
allow-privilege-escalation! annotation+ attach! backoff-limit command!/c cpu-core-request cpu-memory-request
environment environment-variable+/e existing-pvc+ extended-resource+ gpu-devices-request/g gpu-portion-request
gpu-request-type host-network! image/i image-pull-policy label+ large-shm! node-pools+ node-type
preferred-pod-topology-key project/p required-pod-topology-key run-as-gid run-as-uid run-as-user! workers working-dir
exclude-node+ priority preemptibility env-secret+ env-pod-field-ref+ template
"""
VARIANTS = {
    "v1": (["submit-dist", "pytorch"], _V1),
    "v2-newest": (["training", "pytorch", "submit"], _V2),
    "before": (["training", "pytorch", "submit"], ""),
}


class Usage(Exception):
    """A command line that the program does not take."""


class Flags(ArgumentParser):
    """What one command takes."""

    def __init__(self, text: str) -> None:
        super().__init__(allow_abbrev=False, add_help=False)
        for entry in text.split():
            name, _, short = entry.partition("/")
            plain = name.rstrip("!+")
            names = [f"--{plain}", *([f"-{short}"] if short else [])]
            action = "store_true" if name.endswith("!") else "append" if name.endswith("+") else "store"
            self.add_argument(*names, action=action, default=[] if action == "append" else None)

    def error(self, message: str) -> NoReturn:
        raise Usage(message)

    def parse(self, words: Sequence[str]) -> tuple[Namespace, list[str]]:
        """Values by flag, and what stands for itself."""
        found, rest = self.parse_known_args(words)
        if unknown := [word for word in rest if word.startswith("-")]:
            raise Usage(f"unknown flag: {unknown[0]}")
        return found, rest

    def help(self) -> str:
        return "\n".join(f"  {', '.join(reversed(one.option_strings)):>30}   what it does" for one in self._actions)


def main(argv: Sequence[str]) -> int:
    cluster, variant, words = Cluster(Path(argv[0])), argv[1], list(argv[2:])
    submit, text = VARIANTS[variant]
    try:
        if text and words == [*submit, "--help"]:
            print(Flags(text).help())
            return 0
        if "--help" in words[: words.index("--")] if "--" in words else "--help" in words:
            raise Usage(f'unknown command "{" ".join(words)}" for "runai"')
        if fault := cluster.settings["fault"]:
            raise Refused(fault)
        if words[: len(submit)] == submit:
            return _submit(cluster, Flags(text), words[len(submit) :], old=variant == "v1")
        if variant == "v1":
            return _manage(cluster, ["list", "jobs"], ["delete", "job"], words)
        return _manage(cluster, [*submit[:-1], "list"], [*submit[:-1], "delete"], words)
    except (Usage, Refused) as error:
        print(f"Error: {error}", file=sys.stderr)
    except Lost as error:
        print(f"Error: {UNANSWERED[str(error)]}".removesuffix("Error: "), file=sys.stderr)
    return 1


def _submit(cluster: Cluster, flags: Flags, words: list[str], *, old: bool) -> int:
    split = words.index("--")
    given, rest = flags.parse(words[:split])
    command = words[split + 1 :]
    asked: dict[str, Any] = vars(given)
    (name,) = [given.name, *rest] if old else rest
    assert given.command, "without --command the image's entry point would be kept"
    claims = [_pairs(one.split(",")) for one in asked["pvc_exists" if old else "existing_pvc"]]
    variables = given.environment if old else given.environment_variable
    training = Training(
        name=name,
        project=given.project,
        workers=int(given.workers),
        # 2.13 joins what follows `--` and leaves it to a shell; the newer one keeps the words.
        command=("/bin/sh", "-c", "exec " + " ".join(command)) if old else tuple(command),
        # "You can either separate values with a comma or add the flag twice."
        environment=_pairs([part for one in variables for part in (one.split(",") if old else [one])]),
        gpus=float((given.gpu if old else given.gpu_portion_request or given.gpu_devices_request) or 0),
        claims=tuple((one["claimname"], one["path"]) for one in claims),
        labels=_pairs(given.label),
    )
    if asked.get("dry_run"):
        cluster.create(training, dry=True)
    else:
        cluster.submit(training)
    return 0


def _pairs(entries: list[str]) -> dict[str, str]:
    if wrong := [entry for entry in entries if "=" not in entry]:
        raise Usage(f"{wrong[0]!r} must be formatted as key=value")
    return dict(entry.split("=", 1) for entry in entries)


def _manage(cluster: Cluster, listing: list[str], deleting: list[str], words: list[str]) -> int:
    given, rest = Flags("project/p json! limit offset").parse(words)
    phases = cluster.phases(given.project)
    if rest == listing and given.json:
        offset, limit = int(given.offset or 0), int(given.limit or 50)
        rows = list(phases.items())[offset : offset + limit]
        print(json.dumps({"workloads": [{"name": name, "phase": phase} for name, phase in rows]}))
    elif rest == listing:
        print(f"Showing jobs for project {given.project}\nNAME  STATUS  AGE  NODE  IMAGE  TYPE  PROJECT  USER")
        for name, phase in phases.items():
            print(f"{name}  {phase.replace('Completed', 'Succeeded')}  3s  node-1  image  Train  {given.project}  me")
    elif rest[:-1] == deleting:
        cluster.delete(given.project, rest[-1])
    else:
        raise Usage(f'unknown command "{" ".join(words)}" for "runai"')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
