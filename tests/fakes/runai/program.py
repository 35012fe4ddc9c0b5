"""The `runai` program, strict: two generations, each with the flags that its documentation lists and no others.

    python -m runai.program CLUSTER GENERATION command …

v1: https://docs.run.ai/v2.13/Researcher/cli-reference/runai-submit-dist-pytorch/. v2: docs.nvidia.com/run-ai, the
pages of `runai training pytorch`. `generation` is v1, v2, or one of the two with less or more: see VARIANTS.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .cluster import UNANSWERED, Cluster, Lost, Refused, Training

# Long flag to its type and short form; a switch takes no value.
_V1 = """
name=string job-name-prefix=string template=string add-capability=list annotation=list/a attach=switch command=switch
create-home-dir=switch environment=list/e image=string/i image-pull-policy=string label=list/l
preferred-pod-topology-key=string required-pod-topology-key=string stdin=switch tty=switch/t working-dir=string
cpu=number cpu-limit=number extended-resource=list gpu=number/g gpu-memory=string memory=string memory-limit=string
mig-profile=string backoff-limit=integer git-sync=list large-shm=switch mount-propagation=switch nfs-server=string
pvc=list pvc-exists=list pvc-new=list s3=list volume=list/v address=string host-ipc=switch host-network=switch
port=list service-type=string/s allow-privilege-escalation=switch run-as-user=switch node-pools=string
node-type=string toleration=list loglevel=string project=string/p clean-pod-policy=string max-replicas=integer
min-replicas=integer workers=integer dry-run=switch
"""
_V2 = """
allow-privilege-escalation=switch annotation=list attach=switch auto-deletion-time-after-completion=string
backoff-limit=integer capability=list command=switch/c configmap-map-volume=list cpu-core-limit=number
cpu-core-request=number cpu-memory-limit=string cpu-memory-request=string create-home-dir=switch environment=list/e
existing-pvc=list extended-resource=list external-url=list git-sync=list gpu-devices-request=integer/g
gpu-memory-limit=string gpu-memory-request=string gpu-portion-limit=number gpu-portion-request=number
gpu-request-type=string host-ipc=switch host-network=switch host-path=list image=string/i image-pull-policy=string
label=list large-shm=switch master-args=string master-environment=list master-extended-resource=list
master-gpu-devices-request=integer master-gpu-portion-limit=number master-gpu-portion-request=number
master-no-pvcs=switch max-replicas=integer mig-profile=string min-replicas=integer name-prefix=string new-pvc=list
nfs=list no-master=switch node-pools=list node-type=string pod-running-timeout=string port=list
preferred-pod-topology-key=string project=string/p required-pod-topology-key=string run-as-gid=integer
run-as-uid=integer run-as-user=switch s3=list seccomp-profile=string stdin=switch supplemental-groups=list
toleration=list tty=switch/t user-group-source=string wait-for-submit=string workers=integer working-dir=string
"""
# The newest releases: `--environment` names an asset, only -e sets a variable (docs.nvidia.com, v3.0).
_V3 = (
    _V2.replace("environment=list/e", "environment-variable=list/e environment=asset")
    + "exclude-node=list priority=string preemptibility=string env-secret=list env-pod-field-ref=list template=string"
)
VARIANTS = {
    "v1": (("submit-dist", "pytorch"), _V1),
    # Before 2.10 volumes were mounted by --pvc alone.
    "v1-2.9": (("submit-dist", "pytorch"), _V1.replace("pvc-exists=list pvc-new=list ", "")),
    # Of the clusters that csub.py was written for.
    "v1-2.18": (("submit-dist", "pytorch"), _V1 + "run-as-uid=integer run-as-gid=integer preemptible=switch"),
    "v1-before": ((), ""),
    "v2": (("training", "pytorch", "submit"), _V2),
    "v2-early": (("distributed", "submit"), _V2 + "framework=string/f"),
    "v2-newest": (("training", "pytorch", "submit"), _V3),
}


class Usage(Exception):
    """A command line that the program does not take."""


class Flags:
    """What one command takes."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.short: dict[str, str] = {}
        for entry in text.split():
            name, _, rest = entry.partition("=")
            self.types[name], _, short = rest.partition("/")
            if short:
                self.short[short] = name

    def help(self) -> str:
        shorts = {name: short for short, name in self.short.items()}
        lines = []
        for name, kind in sorted(self.types.items()):
            short = f"-{shorts[name]}, " if name in shorts else "    "
            value = {"switch": "", "list": " stringArray", "integer": " int32", "number": " float"}.get(kind, " string")
            lines.append(f"  {short}--{name}{value}   what it does, e.g. with --{name}-of-another-kind")
        return "Usage:\n  [flags]\n\nOptions\n\n" + "\n".join([*lines, "  -h, --help   help for this command"])

    def parse(self, words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Values by flag, and what stands for itself."""
        found: dict[str, list[str]] = {}
        rest: list[str] = []
        todo = list(words)
        while todo:
            word = todo.pop(0)
            if not word.startswith("-"):
                rest.append(word)
                continue
            text, equals, value = word.lstrip("-").partition("=")
            name = text if word.startswith("--") else self.short.get(text, "")
            if name not in self.types:
                raise Usage(f"unknown flag: {word}" if word.startswith("--") else f"unknown shorthand flag: {word}")
            kind = self.types[name]
            if kind == "switch":
                found[name] = ["true"]
                continue
            if not equals:
                if not todo:
                    raise Usage(f"flag needs an argument: {word}")
                value = todo.pop(0)
            if kind in {"integer", "number"} and not re.fullmatch(r"\d+" if kind == "integer" else r"\d*\.?\d+", value):
                raise Usage(f'invalid argument "{value}" for "--{name}" flag: parsing "{value}": invalid syntax')
            found.setdefault(name, []).append(value)
        return found, rest


def main(argv: Sequence[str]) -> int:
    cluster, variant, words = Cluster(Path(argv[0])), argv[1], list(argv[2:])
    submit, text = VARIANTS[variant]
    fault = cluster.settings["fault"]
    try:
        if words[: len(submit)] == list(submit) and submit:
            flags = Flags(text)
            if "--help" in words[: words.index("--")] if "--" in words else "--help" in words:
                print(flags.help())
                return 0
            _answer(fault)
            return _submit(cluster, variant, flags, words[len(submit) :])
        if "--help" in words:
            raise Usage(f'unknown command "{" ".join(words)}" for "runai"')
        _answer(fault)
        return _old(cluster, words) if variant.startswith("v1") else _new(cluster, list(submit[:-1]), words)
    except Usage as error:
        print(f"Error: {error}\nRun 'runai --help' for usage.", file=sys.stderr)
        return 1
    except Refused as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except Lost as error:
        words = UNANSWERED[str(error)]
        print(f"Error: {words}" if words else "", end="", file=sys.stderr)
        return 1


def _answer(fault: str) -> None:
    """What is wrong with the network or the login today."""
    if fault == "silent":
        raise Refused('Get "https://10.0.0.1:6443/apis": dial tcp 10.0.0.1:6443: i/o timeout')
    if fault == "logged out":
        raise Refused("unauthorized: please log in with `runai login`")


# --- submitting -------------------------------------------------------------------------------------------------------


def _submit(cluster: Cluster, variant: str, flags: Flags, words: list[str]) -> int:
    split = words.index("--") if "--" in words else len(words)
    given, rest = flags.parse(words[:split])
    command = words[split + 1 :]
    old = variant.startswith("v1")

    def one(name: str, default: str = "") -> str:
        return given.get(name, [default])[-1]

    def many(name: str) -> list[str]:
        values = given.get(name, [])
        # "You can either separate values with a comma or add the flag twice."
        apart = old and name in {"annotation", "environment", "extended-resource", "label"}
        return [part for value in values for part in (value.split(",") if apart else [value])]

    name = one("name") if old else (rest[0] if rest else "")
    if not name or (rest and old) or len(rest) > 1:
        raise Usage(f"accepts one workload name, received {rest or 'none'}")
    if not one("image"):
        raise Usage('required flag(s) "image" not set')
    if variant == "v2-early" and one("framework") != "PyTorch":
        raise Usage("framework must be one of: PyTorch, TF, MPI, XGBoost")
    if "command" not in given:
        raise AssertionError("without --command the image's entry point would be kept")
    gpus = one("gpu", "0") if old else one("gpu-portion-request") or one("gpu-devices-request", "0")
    training = Training(
        name=name,
        project=one("project"),
        workers=int(one("workers", "0")),
        # 2.13 joins what follows `--` and leaves it to a shell; the newer one keeps the words.
        command=("/bin/sh", "-c", "exec " + " ".join(command)) if old else tuple(command),
        environment=_pairs(many("environment-variable" if variant == "v2-newest" else "environment")),
        gpus=float(gpus),
        claims=tuple(_claims(given)),
        annotations=_pairs(many("annotation")),
        resources=_pairs(many("extended-resource")),
        labels=_pairs(many("label")),
        backoff_limit=int(one("backoff-limit", "6")),
        extra=given,
    )
    if "dry-run" in given:
        cluster.create(training, dry=True)
        print("apiVersion: run.ai/v1alpha1")
    else:
        cluster.submit(training)
        print(f"The job '{name}' has been submitted successfully")
    return 0


def _pairs(entries: list[str]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in entries]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise Usage(f"{wrong[0]!r} must be formatted as key=value")
    return {name: value for name, _, value in pairs}


def _claims(given: dict[str, list[str]]) -> list[tuple[str, str]]:
    found = []
    for entry in [*given.get("pvc-exists", []), *given.get("existing-pvc", [])]:
        fields = _pairs(entry.split(","))
        if set(fields) != {"claimname", "path"}:
            raise Usage(f"invalid pvc {entry!r}: use claimname=CLAIM_NAME,path=PATH")
        found.append((fields["claimname"], fields["path"]))
    for entry in given.get("pvc", []):
        name, _, path = entry.partition(":")
        found.append((name, path))
    return found


# --- looking and ending -----------------------------------------------------------------------------------------------


def _old(cluster: Cluster, words: list[str]) -> int:
    flags = Flags("project=string/p loglevel=string pod=string")
    verb, given, rest = words[0] if words else "", *flags.parse(words[1:])
    project = given.get("project", [""])[-1]
    match [verb, *rest]:
        case ["list", "jobs"]:
            print(f"Showing jobs for project {project}")
            print("NAME                STATUS    AGE  NODE  IMAGE  TYPE  PROJECT  USER  GPUs Allocated (Requested)")
            words_of = {"Completed": "Succeeded", "Deleting": "Terminating"}
            for name, phase in cluster.phases(project).items():
                print(f"{name}  {words_of.get(phase, phase)}  3s  node-1  image  Train  {project}  me  0.00 (0.00)")
        case ["delete", "job", name]:
            cluster.delete(project, name)
            print(f"Successfully deleted job: {name}")
        case ["logs", name]:
            pods = cluster.pods(project, name)
            print(cluster.log(project, name, given.get("pod", [pods[0]["name"]])[-1]), end="")
        case _:
            raise Usage(f'unknown command "{" ".join(words)}" for "runai"')
    return 0


def _new(cluster: Cluster, noun: list[str], words: list[str]) -> int:
    if words[: len(noun)] != noun:
        raise Usage(f'unknown command "{" ".join(words)}" for "runai"')
    common = "project=string/p config-file=string config-path=string debug=switch quiet=switch verbose=switch "
    of = {
        "list": "all=switch json=switch limit=integer no-headers=switch offset=integer status=string table=switch "
        "yaml=switch",
        "delete": "uuid=string/u",
        "logs": "pod=string follow=switch tail=integer",
    }
    verb = words[len(noun)] if len(words) > len(noun) else ""
    if verb not in of:
        raise Usage(f'unknown command "{verb}" for "runai {" ".join(noun)}"')
    given, rest = Flags(common + of[verb]).parse(words[len(noun) + 1 :])
    project = given.get("project", [""])[-1]
    if verb == "list":
        offset, limit = int(given.get("offset", ["0"])[-1]), int(given.get("limit", ["50"])[-1])
        rows = list(cluster.phases(project).items())[offset : offset + limit]
        found = [{"name": name, "phase": phase, "project": project, "type": "Distributed"} for name, phase in rows]
        print(json.dumps({"workloads": found}) if "json" in given else shlex.join(name for name, _ in rows))
    elif verb == "delete":
        cluster.delete(project, rest[0])
        print(f"Workload {rest[0]} deleted successfully")
    else:
        # The master alone, unless a pod is named.
        pods = cluster.pods(project, rest[0])
        print(cluster.log(project, rest[0], given.get("pod", [pods[0]["name"]])[-1]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
