"""The page of a sweep: its table and its pictures."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from job_handles import handle_of

from launcher.config import RunConfig, SweepConfig, validated
from launcher.job import JobState, JobStatus
from launcher.reports.goodput import AttemptTimes
from launcher.reports.sweeps import Outcome, html, outcome_of
from launcher.runs.run import plan_run
from launcher.runs.search import Search
from launcher.runs.sweeps import trial_of


@pytest.fixture
def page(tiny: Callable[..., RunConfig]) -> Callable[..., str]:
    """Makes the page of a sweep of twelve trials, the last of which failed."""

    def make(**sweep: Any) -> str:
        space = {
            "train.learning_rate": {"kind": "log-uniform", "low": 1e-4, "high": 1e-2},
            "train.betas": {"kind": "choice", "values": [[0.9, 0.95], [0.9, 0.99]]},
        }
        settings = {"space": space, "sampler": "random", "trials": 12} | sweep
        config = validated(SweepConfig, {**tiny().model_dump(mode="json"), "sweep": settings}, where="test")
        search, outcomes = Search(config.sweep), list[Outcome]()
        while (number := search.ask()) is not None:
            changes = search.changes[number]
            loss = None if number == 11 else 3.0 + abs(changes["train.learning_rate"] - 3e-3) * 100
            ended = "user error on node 0, rank 0: " + "the loss is <nan> " * 20 if loss is None else ""
            losses = {step: 3.0 + 9.0 / step for step in (4, 8)}
            outcomes.append(
                Outcome(
                    trial=trial_of(config, changes),
                    run=f"tiny-{number:010x}",
                    validation_loss=loss,
                    losses=losses,
                    tokens_per_second=1e5 + number,
                    ended=ended,
                    link=f"/runs/tiny-{number:010x}/report.html",
                )
            )
            search.tell(number, outcomes[-1].values(config.sweep.objectives))
        return html("tiny-0123456789", outcomes, search)

    return make


def test_trial_that_was_never_admitted_used_no_gpu_hours(
    tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first attempt was refused three days ago, and the next one has no row of metrics yet."""
    monkeypatch.setattr("launcher.reports.sweeps.read_document", lambda _: SimpleNamespace(price=None))
    sweep = {"grid": {"train.seed": [1]}}
    config = validated(SweepConfig, {**tiny().model_dump(mode="json"), "sweep": sweep}, where="test")
    trial = trial_of(config, {"train.seed": 1})
    handle = handle_of(trial.config)
    first = handle.reattach_or_create().model_copy(update={"created": 1e9})
    handle.attempts.index.record_end(first, JobStatus(state=JobState.FAILED, native="refused"))
    refused = handle.attempts.index.ends(first.run)[1].model_copy(update={"seen": 1e9 + 60})
    later = first.model_copy(update={"attempt": 2, "created": 1e9 + 3 * 86_400})
    times = [AttemptTimes(record=first, end=refused), AttemptTimes(record=later, end=None)]
    outcome = outcome_of(trial, plan_run(trial.config), times)
    assert (outcome.hours, outcome.seconds) == (0.0, 3 * 86_400)


def test_page_has_a_row_for_each_trial_and_pictures(page: Callable[..., str]) -> None:
    made = page()
    pictures = re.findall(r"<svg.*?</svg>", made, flags=re.DOTALL)
    assert len(pictures) == 4, "curves, wide and narrow, importance, parallel coordinates"
    for picture in pictures[2:]:
        assert {"train.learning_rate", "train.betas"} <= {*re.findall(r">([a-z_.]+)</text>", picture)}
    ids = [word for picture in pictures[1:] for word in re.findall(r'\bid="([^"]+)"', picture)]
    assert len(ids) == len(set(ids))
    assert made.count("report.html") == 12
    assert 0 < made.count("the loss is &lt;nan&gt;") < 5, "the reason is one line"


def test_pareto_front_has_a_table_of_its_own(page: Callable[..., str]) -> None:
    """The front holds the trials that no other trial beats in every objective."""
    made = page(objectives=["validation_loss", "tokens_per_second"])
    _, _, front = made.partition("Not beaten in every objective")
    assert 0 < front.count("report.html") < 12
    assert front.count("<svg") == 1
