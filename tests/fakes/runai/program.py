"""The `runai` program in two generations, each with flags that its documentation lists and no others.

v1: https://docs.run.ai/v2.13/Researcher/cli-reference/runai-submit-dist-pytorch/. v2: docs.nvidia.com/run-ai, the
pages of `runai training pytorch`.
"""

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

from serving_thread import served

from .cluster import Cluster, Lost, Refused, Training

_BOTH = """-e --project --workers --command --image --image-pull-policy --annotation --label --backoff-limit --large-shm
--extended-resource --node-pools --node-type --run-as-user --preferred-pod-topology-key --required-pod-topology-key"""
FLAGS = {
    "v1": f"{_BOTH} --name --environment --cpu --gpu --memory --pvc --pvc-exists --dry-run",
    # The newest releases: `--environment` names an asset, only -e sets a variable (docs.nvidia.com, v3.0).
    "v2": f"""{_BOTH} --environment-variable --cpu-core-request --cpu-memory-request --existing-pvc --run-as-gid
    --gpu-devices-request --gpu-portion-request --gpu-request-type --run-as-uid --exclude-node --priority
    --preemptibility --env-pod-field-ref""",
}
SWITCHES = {"--command", "--large-shm", "--run-as-user", "--dry-run", "--json", "--help"}
_POST = 'Post "https://runai.example/api/v1/workloads/distributed": '
# Words of Go 1.22's net/http, net and context packages, which the program prints as they come.
UNANSWERED = {
    "EOF": f"{_POST}EOF",
    "look-alike": f'{_POST[:-3]}/projects/conflict is forbidden: "x" not found": EOF',
    "nothing": " ",
    "refusal": 'Error: admission webhook "workload-controller.runai.io" denied the request: quota exceeded',
}
_CLIENT = """
import json, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as cluster:
    cluster.sendall(json.dumps(sys.argv[2:]).encode() + b"\\n")
    code, text = json.load(cluster.makefile())
(sys.stderr if code else sys.stdout).write(text)
sys.exit(code)
"""


@contextlib.contextmanager
def program(folder: Path, cluster: Cluster, variant: str) -> Iterator[Path]:
    """The `runai` executable for a cluster."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            answer = _answer(cluster, variant, json.loads(self.rfile.readline()))
            self.wfile.write(json.dumps(answer).encode())

    path = folder / "bin" / "runai"
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "client.py").write_text(_CLIENT)
    with served(server := ThreadingTCPServer(("127.0.0.1", 0), Handler)):
        client = f'"{sys.executable}" -S "{path.parent}/client.py" {server.server_address[1]}'
        path.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
        path.chmod(0o755)
        yield path


def _answer(cluster: Cluster, variant: str, arguments: list[str]) -> tuple[int, str]:
    """Its exit code and what it prints."""
    submit = ["submit-dist", "pytorch"] if variant == "v1" else ["training", "pytorch", "submit"]
    flags = FLAGS.get(variant, "").split()
    try:
        if flags and arguments == [*submit, "--help"]:
            return 0, "".join(f"   {flag}  what it does\n" for flag in flags)
        if cluster.fault and "--help" not in arguments:
            raise Refused(cluster.fault)
        if flags and arguments[: len(submit)] == submit:
            return 0, _submit(cluster, flags, arguments[len(submit) :], old=variant == "v1")
        return 0, _managed(cluster, arguments, old=variant == "v1")
    except Refused as error:
        return 1, f"Error: {error}"
    except Lost as error:
        return 1, UNANSWERED.get(str(error), str(error))


def _parsed(arguments: Iterable[str], flags: Iterable[str]) -> tuple[Mapping[str, list[str]], list[str]]:
    """Values by flag, and what stands for itself."""
    found, rest, remaining = defaultdict[str, list[str]](list), list[str](), iter(arguments)
    for word in remaining:
        if not word.startswith("-"):
            rest.append(word)
        elif word not in flags:
            raise Refused(f"unknown flag: {word}")
        else:
            found[word].append("" if word in SWITCHES else next(remaining))
    return found, rest


def _submit(cluster: Cluster, flags: Sequence[str], arguments: list[str], *, old: bool) -> str:
    values, rest = _parsed(arguments[: arguments.index("--")], flags)
    command = arguments[arguments.index("--") + 1 :]
    (name,) = [*values["--name"], *rest]
    assert "--command" in values, "without it the image's entry point would be kept"
    pvcs = [_pairs(text.split(",")) for text in values["--pvc-exists" if old else "--existing-pvc"]]
    training = Training(
        name=name,
        project=values["--project"][0],
        workers=int(values["--workers"][0]),
        # 2.13 joins what follows `--` and leaves it to a shell; the newer one keeps the words.
        command=("/bin/sh", "-c", "exec " + " ".join(command)) if old else tuple(command),
        # "You can either separate values with a comma or add the flag twice."
        environment=_pairs([part for text in values["-e"] for part in (text.split(",") if old else [text])]),
        pvcs={pvc["claimname"]: pvc["path"] for pvc in pvcs},
    )
    if "--dry-run" in values:
        cluster.create(training, dry=True)
    else:
        cluster.submit(training)
    return ""


def _pairs(entries: Iterable[str]) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in entries)


def _managed(cluster: Cluster, arguments: list[str], *, old: bool) -> str:
    values, rest = _parsed(arguments, ["--project", "--json", "--limit", "--offset"])
    phases = cluster.phases(values["--project"][0]) if values["--project"] else {}
    match rest:
        case ["list", "jobs"] if old:
            rows = [f"{name}  {phase}  3s  node-1\n" for name, phase in phases.items()]
            return "Showing jobs\nNAME  STATUS  AGE  NODE\n" + "".join(rows).replace("Completed", "Succeeded")
        case ["training", "pytorch", "list"] if "--json" in values and not old:
            found = [{"name": name, "phase": phase} for name, phase in phases.items()]
            begin = int(values["--offset"][0])
            return json.dumps({"workloads": found[begin : begin + int(values["--limit"][0])]})
        case [*which, name] if which == (["delete", "job"] if old else ["training", "pytorch", "delete"]):
            cluster.delete(values["--project"][0], name)
            return ""
    raise Refused(f'unknown command "{" ".join(arguments)}" for "runai"')
