"""The variables of a PyTorchJob's pods, and with it of every Run:ai: the node's rank, and the address of node 0.

Its WORLD_SIZE means pods in one version and GPUs in another: Kubeflow multiplies by nprocPerNode where that is a number
(https://github.com/kubeflow/trainer/blob/v1.9.0/pkg/controller.v1/pytorch/envvar.go), Run:ai of 2.13 counts pods
and Run:ai of 2.18 counts GPUs (https://github.com/epfml/getting-started/blob/5b3f69d/docs/multinode.md). So the
number of nodes is never taken from it: the launcher says how many it submitted, and this module finds out whether
that is so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from litgpt_demo.errors import UserError

TOLD = "pytorchjob"
"""The value of --node-rank and --master that leaves them to the PyTorchJob."""

_PORT = "23456"  # pytorchjob-port of the operator
_POD = re.compile(r".*-(?P<role>master|worker)-(?P<index>\d+)")

_VARIABLES = (
    "PET_NODE_RANK", "RANK", "PET_NNODES", "WORLD_SIZE", "PET_NPROC_PER_NODE", "RUNAI_NUM_OF_GPUS", "HOSTNAME",
    "PET_MASTER_ADDR", "PET_MASTER_PORT", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def node_rank(environ: Mapping[str, str]) -> int:
    """This pod's number.

    Raises:
        UserError: the platform does not tell; shows what it tells.
    """
    for name in ("PET_NODE_RANK", "RANK"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    raise UserError(
        "neither PET_NODE_RANK nor RANK is a number, so this pod does not know which node it is; submit the job as a "
        f"PyTorch training with a master. The platform tells\n{table(environ)}"
    )


def table(environ: Mapping[str, str]) -> str:
    """All that the platform tells a pod of its place."""
    return "\n".join(f"  {name}={environ[name]}" for name in _VARIABLES if name in environ) or "  nothing"


def problems(environ: Mapping[str, str], *, nodes: int, processes: int) -> Iterator[str]:
    """Yield differences between what the platform says and what was submitted."""
    ranks = {name: environ[name] for name in ("PET_NODE_RANK", "RANK") if environ.get(name)}
    if len(set(ranks.values())) > 1:
        yield " and ".join(f"{name}={value}" for name, value in ranks.items()) + " name two different nodes"
    for name, value in ranks.items():
        if not value.isdecimal() or int(value) >= nodes:
            yield f"{name}={value} is none of the nodes 0 to {nodes - 1}"
    by_name = rank_of_pod(environ.get("HOSTNAME", ""))
    if by_name is not None and ranks and str(by_name) not in ranks.values():
        yield f"{environ['HOSTNAME']} is node {by_name} by its name, and {' and '.join(ranks)} say otherwise"
    told = environ.get("PET_NNODES")
    if told and told != str(nodes):
        yield f"PET_NNODES={told} pods run, and {nodes} were submitted"
    world = environ.get("WORLD_SIZE")
    if world and world not in {str(size) for size in worlds(environ, nodes=nodes, processes=processes)}:
        yield f"WORLD_SIZE={world} is neither the {nodes} pods nor their GPUs"


def worlds(environ: Mapping[str, str], *, nodes: int, processes: int) -> Iterator[int]:
    """Return what WORLD_SIZE may be: pods, or GPUs, of which a pod may have more than it has ranks."""
    yield nodes
    yield nodes * processes
    for name in ("RUNAI_NUM_OF_GPUS", "PET_NPROC_PER_NODE"):
        if environ.get(name, "").isdecimal():
            yield nodes * int(environ[name])


def rank_of_pod(name: str) -> int | None:
    """The node that a pod's name stands for: `<job>-master-0` is 0, `<job>-worker-<i>` is i + 1; None for others."""
    pod = _POD.fullmatch(name)
    if pod is None:
        return None
    return 0 if pod["role"] == "master" else int(pod["index"]) + 1


def master(environ: Mapping[str, str]) -> str:
    """Return the address of node 0, as HOST:PORT.

    Raises:
        UserError: the platform does not tell; a guess would let each pod train alone.
    """
    for prefix in ("PET_MASTER", "MASTER"):
        if host := environ.get(f"{prefix}_ADDR"):
            return f"{host}:{environ.get(f'{prefix}_PORT') or environ.get('MASTER_PORT') or _PORT}"
    raise UserError(
        "neither PET_MASTER_ADDR nor MASTER_ADDR is set, so this pod does not know where node 0 is; submit the job as "
        "a PyTorch training with a master"
    )
