from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from launcher.config import SweepConfig, validated
from launcher.reports.charts import svg
from launcher.reports.sweep import (
    SweepReport,
    curves_chart,
    front_charts,
    importance_chart,
    lead,
    parallel_chart,
    sweep_markdown,
    sweep_page,
    table,
)
from launcher.runs.outcomes import Outcome, best_yaml
from launcher.runs.trials import base_of, trial_of

RATES = [0.1, 0.01, 0.001, 0.0001]
Make = Callable[..., SweepReport]


@pytest.fixture
def report(tmp_path: Path) -> Make:
    """Makes the report of a sweep of four trials: the third is pruned, the last fails, the first diverges."""

    def make(**settings: Any) -> SweepReport:
        space = {"train.learning_rate": {"log_uniform": [1e-4, 0.1]}, "model.sequence_length": {"choice": [64, 128]}}
        document = {"root": str(tmp_path), "sweep": {"space": space, "trials": 4, **settings}}
        config = validated(SweepConfig, document, where="test")
        base, rows, outcomes = base_of(config), {}, []
        losses = [[5.0, 4.0, 1e6], [5.0, 4.0, 3.0], [5.5], []]
        for number, rate in enumerate(RATES):
            evaluated = [
                {"kind": "evaluation", "step": 10 * (n + 1), "validation_loss": x} for n, x in enumerate(losses[number])
            ]
            rows[f"gpt-{number}"] = evaluated
            trial = trial_of(
                base, number, {"train.learning_rate": rate, "model.sequence_length": 64 if number % 2 else 128}
            )
            outcomes.append(
                Outcome(
                    trial=trial, run=f"gpt-{number}", validation_loss=losses[number][-1] if losses[number] else None,
                    tokens_per_second=1000.0 + number, step=10 * len(losses[number]), seconds=60.0,
                    ended="pruned" if number == 2 else None,
                    error={2: "pruned at step 10: it is <b>behind</b>", 3: "out of memory <script>"}.get(number, ""),
                )
            )  # fmt: skip
        return SweepReport(
            config=config, outcomes=outcomes, rows=rows,
            importance={"train.learning_rate": 0.9, "model.sequence_length": 0.1},
            best=best_yaml(outcomes, config.sweep.aims[0]),
        )  # fmt: skip

    return make


def texts(drawn: str) -> list[str]:
    return [
        " ".join("".join(one.itertext()).split())
        for one in ElementTree.fromstring(drawn).iter()
        if one.tag.endswith("text")
    ]


def test_all_curves_are_in_one_picture_and_one_that_diverged_leaves_the_others_room(report: Make) -> None:
    chart = curves_chart(report(), "wide")
    assert chart is not None
    assert len(chart.lines) == 3
    assert chart.lines[-1].label == "the best, trial 1"
    assert chart.top == 7.5
    assert {"pruned", "to the end", "the best, trial 1"} <= set(texts(svg(chart, width=940, height=380)))


def test_every_trial_with_a_figure_is_a_line_through_its_settings(report: Make) -> None:
    chart = parallel_chart(report())
    assert chart is not None
    assert [axis.name for axis in chart.axes] == ["learning_rate", "sequence_length", "validation loss"]
    heights = [[round(height, 3) for height in path.heights] for path in chart.paths]
    assert heights[-1] == [0.667, 0.0, 0.0], "the best, on top"
    assert [0.333, 1.0, round(2.5 / 4.5, 3)] in heights
    assert [1.0, 1.0, 1.0] in heights, "one that diverged is at the end of its axis"
    assert {"0.0001", "0.1", "64", "128", "3"} <= set(texts(svg(chart, width=940, height=380)))


def test_the_page_tells_what_became_of_each_trial_and_shows_text_as_text(report: Make) -> None:
    made = report()
    page = sweep_page(made)
    assert lead(made) == "4 trials: 2 came to their end, 1 was pruned, 1 failed."
    assert [(row["trial"], row["end"]) for row in table(made)] == [
        ("1", ""), ("0", ""), ("2", "pruned at step 10"), ("3", "failed")
    ]  # fmt: skip
    assert '<a href="../../runs/gpt-1/report.html">gpt-1</a>' in page
    assert "gpt-2/report.html" not in page
    assert "<script" not in page
    assert "trial 3: out of memory &lt;script&gt;" in page
    assert page.count("<svg") == 4
    assert "learning_rate: 0.01" in page


def test_the_importance_is_told_largest_first(report: Make) -> None:
    chart = importance_chart(report())
    assert chart is not None
    assert list(chart.bars) == ["learning_rate", "sequence_length"]
    assert {"learning_rate", "80 %"} <= set(texts(svg(chart, width=440, height=260)))


def test_a_page_that_cannot_tell_what_mattered_says_when_it_will(report: Make) -> None:
    few = replace(report(), importance={})
    assert importance_chart(few) is None
    assert "once 4 trials with different results came to their end" in sweep_page(few)
    assert "once 4 trials" not in sweep_page(report())


def test_several_objectives_have_a_front(report: Make) -> None:
    made = report(objectives=["validation_loss", "tokens_per_second"])
    (plane,) = front_charts(made)
    assert [dots.label for dots in plane.dots] == ["Pareto front"]
    assert plane.dots[0].points == [(1001.0, 3.0)]
    assert "tokens per second" in texts(svg(plane, width=440, height=260))
    assert front_charts(report()) == []


def test_prefect_gets_the_table_and_the_curves(report: Make) -> None:
    text = sweep_markdown(report())
    assert "| 1 |  | 0.01 | 64 | 3.0000 |" in text
    assert text.count("```mermaid") == 2
    assert "<script>" not in text


def test_a_sweep_of_which_nothing_is_known_yet_has_a_page(report: Make) -> None:
    made = report()
    empty = SweepReport(config=made.config, outcomes=[], rows={}, importance={}, best=None)
    assert "No trial has ended yet." in sweep_page(empty)
    assert math.isinf(empty.top)


def test_settings_with_the_same_last_word_are_told_by_their_whole_names(report: Make) -> None:
    names = ["model.name", "data.tokenizer.name", "train.seed"]
    given = report(space={name: {"choice": ["a", "b"]} if name != names[2] else {"choice": [1, 2]} for name in names})
    made = replace(given, outcomes=[], importance=dict(zip(names, [0.6, 0.3, 0.1], strict=True)))
    chart = importance_chart(made)
    assert chart is not None
    assert dict(chart.bars) == {"model.name": 0.6, "data.tokenizer.name": 0.3, "train.seed": 0.1}
    markdown = sweep_markdown(made)
    assert all(name in markdown for name in names)
    one, other = ({names[0]: value, names[1]: value, names[2]: 1} for value in "ab")
    ended = [
        replace(outcome, trial=replace(outcome.trial, changes=changes), ended=None, error="", validation_loss=loss)
        for outcome, changes, loss in zip(given.outcomes[:2], (one, other), (3.0, 4.0), strict=True)
    ]
    drawn = parallel_chart(replace(made, outcomes=ended))
    assert drawn is not None
    assert [axis.name for axis in drawn.axes] == [*names, "validation loss"]
    assert set(names) <= set(table(replace(made, outcomes=ended))[0])
