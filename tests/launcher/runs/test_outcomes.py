from __future__ import annotations

import json
import math

import pytest

from launcher.config import RunConfig
from launcher.runs.outcomes import (
    Outcome,
    TrialEnd,
    best_first,
    best_yaml,
    pareto_front,
    ranking,
    read_outcome,
    stored,
)
from launcher.runs.trials import Trial
from litgpt_demo.evaluation import Score


def outcome(number: int, loss: float | None, speed: float | None = 100.0, ended: TrialEnd | None = None) -> Outcome:
    trial = Trial(number=number, changes={"train.seed": number}, config=RunConfig())
    return Outcome(
        trial=trial, run=f"gpt-{number}", validation_loss=loss, tokens_per_second=speed, ended=ended,
        error="" if ended in {None, "done"} else f"{ended} at step 10: because",
    )  # fmt: skip


def test_what_came_to_its_end_is_before_what_was_pruned_and_that_before_what_failed() -> None:
    those = [
        outcome(0, 9.0),
        outcome(1, 1.0, ended="pruned"),
        outcome(2, None, ended="failed"),
        outcome(3, 2.0, ended="stopped"),
        outcome(4, 3.0),
        outcome(5, math.nan),
    ]
    assert [one.trial.number for one in best_first(those)][:4] == [4, 0, 1, 3]


def test_the_first_objective_ranks_in_its_own_direction() -> None:
    those = [outcome(0, 2.0, 100.0), outcome(1, 3.0, 300.0), outcome(2, 4.0, 200.0)]
    assert [row["run"] for row in ranking(those, ["tokens_per_second"])] == ["gpt-1", "gpt-2", "gpt-0"]
    text = best_yaml(those, "tokens_per_second")
    assert text is not None
    assert "run gpt-1" in text.splitlines()[0]


def test_a_trial_is_on_the_front_unless_another_is_better_in_one_way_and_worse_in_none() -> None:
    those = [outcome(0, 2.0, 100.0), outcome(1, 3.0, 300.0), outcome(2, 3.0, 200.0), outcome(3, 2.0, 100.0)]
    front = pareto_front([*those, outcome(4, 1.0, 900.0, ended="pruned")], ["validation_loss", "tokens_per_second"])
    assert [one.trial.number for one in front] == [0, 1, 3]
    rows = ranking(those, ["validation_loss", "tokens_per_second"], numbered=True)
    assert {row["trial"]: row["on the front"] for row in rows} == {"0": "yes", "1": "yes", "2": "", "3": "yes"}


@pytest.mark.parametrize("loss", [2.5, None, math.inf, math.nan])
def test_an_outcome_is_read_as_it_was_written(loss: float | None) -> None:
    score = Score(task="endings", metric="acc", value=0.5, higher_is_better=True)
    one = outcome(3, loss)
    written = Outcome(**{**vars(one), "score": score, "scores": (score,), "mfu": 0.4, "seconds": 12.5})
    read = read_outcome(one.trial, json.dumps(stored(written)).encode(), where="here")
    assert repr(read) == repr(written)
