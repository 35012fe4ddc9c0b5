"""The values that depend on the step alone: learning rate and random state."""

from __future__ import annotations

import math
from hashlib import blake2b

from litgpt_demo.config import TrainConfig


def learning_rate(train: TrainConfig, *, step: int, steps: int) -> float:
    """The rate of step `step` (from 0): up in a straight line, then down a cosine to the minimum at the last step."""
    low = train.learning_rate / 10 if train.min_learning_rate is None else train.min_learning_rate
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, steps - 1 - train.warmup_steps)
    return low + (train.learning_rate - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def step_seed(*, seed: int, step: int, rank: int) -> int:
    """Seeds torch's generators at every step, so that dropout is a function of the step and resumes exactly."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=7).digest(), "little")
