from __future__ import annotations

import math
from typing import Any

import pytest

from launcher.config import RunConfig, overridden, validated
from launcher.reports.charts import PICTURES, picture
from launcher.reports.compare import MOST_DRAWN, as_json, charts, html, results_table, settings_table
from launcher.runs.results import RunResult
from litgpt_demo.evaluation import Score


def result(name: str, loss: float = 2.0, *, tokens_per_step: int = 512, **changes: Any) -> RunResult:
    config = validated(RunConfig, overridden({}, {"name": "gpt", **changes}), where="test").model_dump(mode="json")
    rows: list[dict[str, Any]] = [{"kind": "start", "step": 0, "steps": 4, "tokens_per_step": tokens_per_step}]
    paces = {"tokens_per_second": 1000.0, "step_seconds": 1.0}
    rows += [{"kind": "step", "step": step, "loss": loss + 1 / step, **paces} for step in range(1, 5)]
    rows.append({"kind": "evaluation", "step": 4, "validation_loss": loss, "seconds": 1.0})
    scores = (Score(task="hellaswag", metric="acc", value=0.25),)
    return RunResult(name=name, config=config, rows=rows, scores=scores if loss < 2.5 else ())


def test_settings_that_differ_are_listed_and_no_others() -> None:
    runs = [result("a"), result("b", **{"train.seed": 7, "platform": {"kind": "runai", "project": "team", "nodes": 2}})]
    rows = {row["setting"]: (row["a"], row["b"]) for row in settings_table(runs)}
    assert rows["train.seed"][1] == "7"
    assert rows["platform.kind"] == ('"local"', '"runai"')
    assert rows["platform.project"][0] == "–", "a run has no such setting"
    assert not [name for name in rows if name.startswith(("model", "start"))]
    assert settings_table([result("a"), result("b", 3.0)]) == []


def test_results_have_a_row_for_each_run_and_a_column_for_each_score() -> None:
    one, other = results_table([result("a"), result("b", 3.0)])
    assert (one["run"], one["step"], one["validation loss"], one["hellaswag/acc"]) == (
        "a",
        "4 of 4",
        "2.0000",
        "0.2500",
    )
    assert (other["validation loss"], other["hellaswag/acc"]) == ("3.0000", "–")
    told = as_json([result("a"), result("b", math.nan)])["runs"]
    assert (told[0]["validation_loss"], told[0]["tokens"], told[1]["validation_loss"]) == (2.0, 2048, None)


def test_losses_of_all_runs_are_in_one_chart() -> None:
    chart = charts([result("a"), result("b", 3.0)])["loss"]
    assert [line.label for line in chart.lines] == ["a", "b"]
    assert len({(line.color, line.style) for line in chart.lines}) == 2
    assert (chart.x_label, list(chart.lines[0].points)) == ("step", [1, 2, 3, 4])


def test_runs_whose_batches_differ_are_compared_by_tokens() -> None:
    chart = charts([result("a"), result("b", tokens_per_step=1024)])["loss"]
    assert chart.x_label == "tokens"
    assert [max(line.points) for line in chart.lines] == [4 * 512, 4 * 1024]


def test_of_more_runs_than_can_be_told_apart_the_best_are_drawn() -> None:
    runs = [result(f"run-{number}", 9.0 - number / 10) for number in range(MOST_DRAWN + 2)]
    chart = charts(runs)["loss"]
    assert [line.label for line in chart.lines] == [f"run-{number}" for number in range(2, MOST_DRAWN + 2)]
    assert chart.title.endswith(f"the best {MOST_DRAWN} of {MOST_DRAWN + 2} runs")


def test_a_script_is_compared_by_its_settings_alone() -> None:
    scripts = [RunResult(name=name, config={"args": [name]}) for name in "ab"]
    assert charts(scripts) == {}
    assert [row["setting"] for row in settings_table(scripts)] == ["args"]
    assert "<svg" not in html(scripts, root="out")


def test_the_page_shows_names_as_text() -> None:
    text = html([result("<script>$x"), result("b", **{"train.seed": 7})], root="out")
    assert "<script>" not in text
    assert "&lt;script&gt;$x" in text
    assert "train.seed" in text
    assert text.count("<svg") == 3


@pytest.mark.parametrize(("kind", "begin"), [*zip(PICTURES, (b"\x89PNG", b"<?xml", b"%PDF"), strict=True)])
def test_the_picture_is_a_file_of_its_kind(kind: str, begin: bytes) -> None:
    chart = charts([result("a"), result("b", 3.0)])["loss"]
    made = picture(chart, width=400, height=200, kind=kind)
    assert made.startswith(begin)
    assert b"var(--" not in made
