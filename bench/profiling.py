"""The cost of a profiler that nobody asks for: what a training step spends on it, beside the step itself.

    make bench-profiling           with QUICK=1 one round

By processor time of the thread that trains, which other load on the machine hardly changes. The thread that looks for a
request is counted too, in its share of a second. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.figures import Bar, arguments, conclude
from bench.profile_training import prepared
from litgpt_demo.runs import PROFILE_REQUEST
from litgpt_demo.training.profiling import LOOK, Profiling
from litgpt_demo.training.setup import Training
from litgpt_demo.training.step import train_step

CALLS, STEPS = 100_000, 3
MOST = 1e-5  # of a step of the smallest model, or of a processor


def spent(action: Callable[[int], object], times: int) -> float:
    """Processor seconds of this thread for one call."""
    began = time.thread_time()
    for number in range(times):
        action(number)
    return (time.thread_time() - began) / times


def measured(training: Training) -> dict[str, float]:
    """Return the processor seconds of a step, of its profiling while nobody asks, and of a look for a request."""

    def unasked(number: int) -> None:
        profiling.before(number)
        profiling.after(number)

    with Profiling(training, look=3600.0) as profiling:
        return {
            "unasked": spent(unasked, CALLS),
            "look": spent(lambda _: training.run.exists(PROFILE_REQUEST), 1000),
            "step": spent(lambda number: train_step(training, number), STEPS),
        }


def main() -> int:
    args = arguments(__doc__, rounds=5).parse_args()
    settings = argparse.Namespace(model="pythia-14m", sequence=512, settings=[])
    with tempfile.TemporaryDirectory(prefix="bench-profiling-") as folder:
        training = prepared(Path(folder), settings)
        train_step(training, 0)
        seen = [measured(training) for _ in range(args.rounds)]
    share = median(one["unasked"] / one["step"] for one in seen)
    looking = median(one["look"] / LOOK for one in seen)
    bars = [
        Bar("profiling that nobody asks for / a step", share, f"at most {MOST}", share <= MOST),
        Bar("looking for a request / a processor", looking, f"at most {MOST}", looking <= MOST),
    ]
    return conclude("profiling", bars, {"seen": seen})


if __name__ == "__main__":
    sys.exit(main())
