"""The first distributed application: pi by the trapezoid rule, the work split over all ranks.

    python examples/pi.py                                                   one process
    torchrun --nproc-per-node 4 examples/pi.py --steps 1000000              four on this machine
    python -m litgpt_demo node --nodes 2 --node-rank 0 --processes 4 … -- examples/pi.py

It needs no data and no GPU, and its answer is known: if this runs on all nodes, a training will find its peers too.
"""

from __future__ import annotations

import argparse
import math
import os
import sys

import numpy as np

# Intervals that are in memory at a time: 8 MB of float64.
_BLOCK = 1_000_000


def share(steps: int, rank: int, ranks: int) -> range:
    """The intervals of one rank: consecutive, each interval in exactly one rank's share, sizes at most one apart."""
    return range(steps * rank // ranks, steps * (rank + 1) // ranks)


def area(intervals: range, steps: int) -> float:
    """The trapezoids of 4 / (1 + x²) over these of the `steps` intervals that [0, 1] is cut into.

    An interval's two ends weigh half each, so the point between two ranks' shares counts once: half in each.
    """
    blocks = range(intervals.start, intervals.stop, _BLOCK)
    return math.fsum(_trapezoids(first, min(first + _BLOCK, intervals.stop), steps) for first in blocks)


def _trapezoids(first: int, last: int, steps: int) -> float:
    heights = 4.0 / (1.0 + (np.arange(first, last + 1) / steps) ** 2)
    return float(heights[1:-1].sum() + (heights[0] + heights[-1]) / 2) / steps


def sum_over_ranks(mine: float) -> float:
    """The sum of every rank's number, on every rank."""
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    total = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    value = float(total)
    dist.destroy_process_group()
    return value


def line(pi: float, *, ranks: int, nodes: int) -> str:
    """The result that is printed at the end."""
    where = f"{ranks} rank{'' if ranks == 1 else 's'} on {nodes} node{'' if nodes == 1 else 's'}"
    return f"pi = {pi:.14f}, error {abs(pi - math.pi):.0e}, {where}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000_000, help="intervals that [0, 1] is cut into")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps={steps} leaves nothing to add up; give at least 1")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    mine = area(share(steps, rank, ranks), steps)
    pi = sum_over_ranks(mine) if "LOCAL_RANK" in os.environ else mine
    if rank == 0:
        # In one write: torchrun may pick up a line between print's two, and tear it.
        sys.stdout.write(line(pi, ranks=ranks, nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1"))) + "\n")


if __name__ == "__main__":
    main()
