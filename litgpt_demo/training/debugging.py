"""The logs that `train.debug` has torch and NCCL write, in the node's own folder: it is brought to where the run is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.node.environment import DEBUG
from litgpt_demo.storage import Storage


def debug_folder(run: Storage, environ: Mapping[str, str]) -> Path:
    """Return the folder of the logs: the node's; without a node above, the run's or the current one."""
    node = environ.get(NODE_DIRECTORY)
    return Path(node) / DEBUG if node else run.local_path(DEBUG) or Path(DEBUG)


def debug_environment(folder: Path, rank: int) -> dict[str, str]:
    """Return the variables, which have to be set before the ranks meet. What a user has set himself stays."""
    return {
        # DDP says how it is built and which weights got no gradient. DETAIL, which also compares collectives among
        # ranks, ends torch 2.13's DDP with a segmentation fault in its constructor (seen with gloo on CPUs).
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        # The flight recorder's entries, by the names of torch 2.13 and of those before it (FlightRecorder.hpp).
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV,COLL",
        "NCCL_DEBUG_FILE": str(folder / f"nccl-of-rank-{rank}.log"),
    }


@contextmanager
def debugging(run: Storage, *, on: bool) -> Iterator[None]:
    """Let this rank be debugged while it is entered, if that is on; at the end leave its flight recorder's entries."""
    if not on:
        yield
        return
    rank, folder = int(os.environ.get("RANK", "0")), debug_folder(run, os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in debug_environment(folder, rank).items():
        os.environ.setdefault(name, value)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # of torch 2.13; the first is not known
        if dump is not None:
            with suppress(OSError, RuntimeError):
                (folder / f"flight-recorder-of-rank-{rank}.json").write_bytes(dump())
