"""The learning rate of each schedule, step by step."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from litgpt_demo.config import TrainConfig
from litgpt_demo.schedules import (
    DECAY_SHAPES,
    SCHEDULES,
    Position,
    learning_rate_at,
    schedule_problem,
    warmup_and_decay_steps,
)

PART = st.integers(0, 400) | st.floats(0.0, 0.5)


@given(
    st.sampled_from([*SCHEDULES]), st.integers(1, 3000), PART, PART.filter(bool), st.none() | st.floats(0.0, 0.5),
    st.sampled_from([*DECAY_SHAPES]),
)  # fmt: skip
@example("linear", 10, 0, 1, 0.0, "linear")
@example("wsd", 100, 0, 50, 0.0, "sqrt")
def test_learning_rate_rises_stays_and_falls_by_its_schedule(
    schedule: str, steps: int, warmup: float, decay: float, low: float | None, shape: str
) -> None:
    """There is no jump between the phases, and the lowest rate is that of the last step."""
    values = {"decay_steps": decay, "min_learning_rate": low, "decay_shape": shape}
    settings = {name: value for name, value in values.items() if name in SCHEDULES[schedule].settings}
    train = TrainConfig.model_validate(
        {"learning_rate": 0.5, "schedule": schedule, "warmup_steps": warmup, "max_tokens": 1} | settings
    )
    rising, falling = warmup_and_decay_steps(train, steps)
    bottom = 0.05 if low is None else low
    if schedule_problem(train, steps, ""):
        assert rising + falling >= steps
        return
    rates = [learning_rate_at(train, step, steps=steps) for step in range(steps)]
    assert rates[:rising] == pytest.approx([0.5 * (step + 1) / rising for step in range(rising)])
    assert rates[rising] == 0.5
    after, rest = rates[rising:], steps - 1 - rising
    assert after == pytest.approx(sorted(after, reverse=True), rel=1e-12)
    match schedule:
        case "cosine":  # to the bit: a run that has begun continues with the same rates
            done = [min(1.0, step / max(1, rest)) for step in range(rest + 1)]
            assert after == [bottom + (0.5 - bottom) * (1 + math.cos(math.pi * part)) / 2 for part in done]
        case "linear":
            assert after == pytest.approx(np.linspace(0.5, bottom, rest + 1).tolist())
        case "wsd":
            done = np.linspace(0.0, 1.0, falling + 1)
            remaining = {"linear": 1 - done, "sqrt": 1 - np.sqrt(done), "cosine": (1 + np.cos(np.pi * done)) / 2}[shape]
            falls = (bottom + (0.5 - bottom) * remaining).tolist()
            assert after == pytest.approx([0.5] * (rest - falling) + falls)
        case "constant":
            assert set(after) == {0.5}
    if "min_learning_rate" in settings and rest:
        assert rates[-1] == pytest.approx(bottom)


def test_decay_gets_the_step_and_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inverse square root, a schedule that a user may add, depends on both, and on no other step of the run."""

    def inverse_square_root(position: Position, high: float, low: float) -> float:
        assert position.steps == 100
        return high * math.sqrt(position.warmup / position.step)

    added = replace(SCHEDULES["constant"], decay=inverse_square_root)
    monkeypatch.setitem(SCHEDULES, "constant", added)
    train = TrainConfig(learning_rate=0.5, schedule="constant", warmup_steps=4, max_tokens=1)
    rates = [learning_rate_at(train, step, steps=100) for step in (3, 4, 16, 64)]
    assert rates == [0.5, 0.5, 0.25, 0.125]
