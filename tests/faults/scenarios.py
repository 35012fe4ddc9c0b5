"""The failures that tests/faults/make.py causes: one row each, with whose fault it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from litgpt_demo.errors import Fault


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A failure to cause."""

    name: str
    about: str
    fault: Fault
    culprits: tuple[tuple[int | None, int | None], ...]
    program: tuple[str, ...] = ()
    """Arguments of failing.py; or another script with its own."""
    nodes: int = 2
    processes: int = 1
    outside: tuple[str, int] | None = None
    """What is done to which node from outside (make.OUTSIDE)."""
    disk: str = ""
    """The size of the file system that the attempt's folder is on."""
    port_taken: bool = False
    late_name: bool = False
    damaged_dataset: bool = False
    held_out: bool = False


def in_rank(
    what: str, fault: Fault, rank: int, *, nodes: int = 2, processes: int = 1, step: int = 3, name: str = "",
    more: Sequence[str] = (), outside: tuple[str, int] | None = None,
) -> Scenario:  # fmt: skip
    """A fault of one rank while it trains; -1 is all of them."""
    world = f"{nodes}x{processes}"
    ranks = range(nodes * processes) if rank == -1 else [rank]
    return Scenario(
        name=name or f"{what}-{'all' if rank == -1 else rank}-of-{world}",
        about=f"failing.py --fault {what} in {'all ranks' if rank == -1 else f'rank {rank}'} of {world} at step {step}",
        fault=fault,
        culprits=tuple((one // processes, one) for one in ranks),
        program=("--fault", what, "--rank", str(rank), "--step", str(step), *more),
        nodes=nodes,
        processes=processes,
        outside=outside,
    )


def of_node(
    what: str, fault: Fault, node: int, *, nodes: int = 2, processes: int = 1, rank: bool = False,
    more: Sequence[str] = (),
) -> Scenario:  # fmt: skip
    """A fault done to a node from outside; `rank` says that its first rank is the culprit."""
    return Scenario(
        name=f"{what.replace('_', '-')}-node-{node}-of-{nodes}x{processes}",
        about=f"make.py's {what} is done to node {node} of {nodes}x{processes}",
        fault=fault,
        culprits=((node, node * processes if rank else None),),
        program=("--fault", "none", *more),
        nodes=nodes,
        processes=processes,
        outside=(what, node),
    )


SILENT = ("--silence", "5")
IMPATIENT = ("--patience", "6")

TUNED = (
    in_rank("key-error", Fault.USER, 1),
    in_rank("name-error", Fault.USER, 0, processes=2),
    in_rank("value-error", Fault.USER, 3, processes=2, step=0),
    in_rank("shape", Fault.USER, -1),
    in_rank("assertion", Fault.USER, 2, nodes=3),
    in_rank("loader-error", Fault.USER, 1),
    in_rank("user-error", Fault.USER, 0, step=-1),
    in_rank("exit-2", Fault.USER, -1, step=-1),
    Scenario(
        name="syntax-all",
        about="a script that cannot be compiled, in all ranks",
        fault=Fault.USER,
        culprits=((0, 0), (1, 1)),
        program=("syntax.py",),
    ),
    in_rank("python-memory", Fault.OUT_OF_MEMORY, 1),
    in_rank("torch-memory", Fault.OUT_OF_MEMORY, 2, processes=2),
    in_rank(
        "kernel-memory", Fault.OUT_OF_MEMORY, 1, more=("--delay", "6"), outside=("into_cgroup", 1),
    ),
    in_rank("kill", Fault.NODE, 1),
    in_rank("segfault", Fault.NODE, 0),
    in_rank("terminate", Fault.NODE, 2, processes=2),
    in_rank("sleep", Fault.HANG, 1, more=SILENT),
    in_rank("data", Fault.HANG, 0, more=SILENT),
    in_rank("stop", Fault.HANG, 3, processes=2, more=SILENT),
    in_rank("sleep", Fault.HANG, 0, more=IMPATIENT, name="sleep-unwatched-0-of-2x1"),
    in_rank("deadlock", Fault.HANG, 2, processes=2, more=IMPATIENT, name="deadlock-unwatched-2-of-2x2"),
    of_node("at_start", Fault.NODE, 1),
    of_node("at_rendezvous", Fault.NODE, 1),
    of_node("while_training", Fault.NODE, 0),
    of_node("torchrun_alone", Fault.NODE, 1),
    of_node("asked_to_leave", Fault.PREEMPTED, 1),
    Scenario(
        name="late-name",
        about="node 0's name does not resolve on node 1",
        fault=Fault.NETWORK,
        culprits=((1, None),),
        program=("--fault", "none"),
        late_name=True,
    ),
    Scenario(
        name="port-taken",
        about="another process listens where node 0 is to",
        fault=Fault.NODE,
        culprits=((0, None),),
        program=("--fault", "none"),
        port_taken=True,
    ),
    Scenario(
        name="damaged-dataset",
        about="a byte of the dataset is not what its manifest says",
        fault=Fault.DATA,
        culprits=((0, None), (1, None)),
        program=("--fault", "none"),
        damaged_dataset=True,
    ),
    in_rank("world", Fault.USER, -1, step=0),
    in_rank("json", Fault.DATA, 1),
    in_rank("torch-file", Fault.DATA, 0),
    in_rank("full-disk", Fault.DISK_FULL, 1),
    Scenario(
        name="filled-disk",
        about="rank 0 fills the file system that the attempt's folder is on",
        fault=Fault.DISK_FULL,
        culprits=((0, 0),),
        program=("--fill", "{disk}", "--rank", "0"),
        disk="16m",
    ),
    in_rank("nan", Fault.USER, -1),
    # The first was held out until its class was wrong: since then the rules know what torch.save says of a full disk.
    in_rank("full-checkpoint", Fault.DISK_FULL, 0, processes=2, step=7),
    in_rank("full-checkpoint", Fault.DISK_FULL, 1, nodes=3, step=2),
)  # fmt: skip

# Caused after the rules of the verdict had been fixed on those above.
HELD_OUT = tuple(
    replace(scenario, held_out=True)
    for scenario in (
        in_rank("attribute-error", Fault.USER, 2, nodes=4, step=1),
        in_rank("type-error", Fault.USER, 1, processes=2, step=7),
        in_rank("index-error", Fault.USER, 0, nodes=3, step=12),
        in_rank("zero-division", Fault.USER, -1, processes=2, step=2),
        in_rank("not-implemented", Fault.USER, -1, nodes=3, step=0),
        in_rank("recursion", Fault.USER, 1, step=5),
        in_rank("file-not-found", Fault.USER, 2, processes=2, step=-1),
        in_rank("permission", Fault.USER, 0, step=4),
        in_rank("import", Fault.USER, -1, processes=2, step=-1),
        in_rank("devices", Fault.USER, -1, nodes=3, step=0),
        in_rank("loader-error", Fault.USER, 2, nodes=3, step=6),
        in_rank("nan-detected", Fault.USER, 1, step=9),
        in_rank("nan", Fault.USER, 3, nodes=4, step=2),
        in_rank("python-memory", Fault.OUT_OF_MEMORY, 0, processes=2, step=6),
        in_rank("torch-memory", Fault.OUT_OF_MEMORY, -1, nodes=3, step=1),
        in_rank("kernel-memory", Fault.OUT_OF_MEMORY, 0, more=("--delay", "6"), outside=("into_cgroup", 0)),
        in_rank("kill", Fault.NODE, 2, nodes=4, step=8),
        in_rank("kill", Fault.NODE, 0, processes=2, step=0),
        in_rank("segfault", Fault.NODE, 3, processes=2, step=5),
        in_rank("bus", Fault.NODE, 1, nodes=3, step=4),
        in_rank("abort", Fault.NODE, 1, step=10),
        in_rank("terminate", Fault.NODE, 0, nodes=3, step=3),
        in_rank("pipe", Fault.HANG, 1, nodes=3, step=4, more=SILENT),
        in_rank("compute", Fault.HANG, 2, processes=2, step=5, more=SILENT),
        in_rank("data", Fault.HANG, 3, processes=2, step=1, more=SILENT),
        in_rank("deadlock", Fault.HANG, 0, step=6, more=SILENT),
        in_rank("data", Fault.HANG, 1, step=2, more=IMPATIENT, name="data-unwatched-1-of-2x1"),
        in_rank("pipe", Fault.HANG, 1, nodes=3, step=5, more=IMPATIENT, name="pipe-unwatched-1-of-3x1"),
        of_node("stopped", Fault.HANG, 0, processes=2, rank=True, more=SILENT),
        of_node("at_start", Fault.NODE, 2, nodes=3),
        of_node("at_rendezvous", Fault.NODE, 0),
        of_node("while_training", Fault.NODE, 3, nodes=4),
        of_node("agent_alone", Fault.NODE, 1),
        of_node("rank_from_outside", Fault.NODE, 0, processes=2, rank=True),
        of_node("asked_to_leave", Fault.PREEMPTED, 0, processes=2),
        in_rank("parquet", Fault.DATA, 1, nodes=3, step=2),
        in_rank("pickle", Fault.DATA, 0, step=3),
        in_rank("unicode", Fault.DATA, 3, processes=2, step=1),
        in_rank("data-error", Fault.DATA, -1, step=-1),
        in_rank("full-disk", Fault.DISK_FULL, -1, nodes=3, step=4),
    )
)  # fmt: skip

SCENARIOS: tuple[Scenario, ...] = TUNED + HELD_OUT
