"""What people do with a run's model on the command line: score it, let it write, talk to it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from console_script import Cli


@pytest.fixture(scope="module")
def run(scored_run: Path) -> Path:
    return scored_run


@pytest.mark.long
def test_generate_goes_on_with_a_text_the_same_way_for_the_same_seed(
    run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cli("generate", str(run), "--prompt", "the ", "--tokens", "8", "--seed", "5", "--device", "cpu")
    assert first.code == 0, first
    assert len(first.out) > 1
    monkeypatch.setattr("sys.stdin", io.StringIO("the "))
    assert (
        cli("generate", str(run), "--prompt", "-", "--tokens", "8", "--seed", "5", "--device", "cpu").out == first.out
    )
    assert (
        cli("generate", str(run), "--prompt", "the ", "--tokens", "8", "--seed", "6", "--device", "cpu").out
        != first.out
    )


def test_chat_answers_each_line_and_ends_with_the_input(run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the \nand \n"))
    said = cli("chat", str(run), "--tokens", "6", "--temperature", "0", "--device", "cpu")
    assert said.code == 0, said
    alone = cli("generate", str(run), "--prompt", "and", "--tokens", "6", "--temperature", "0", "--device", "cpu")
    assert said.out.endswith(alone.out)
    assert len(said.out) > len(alone.out)


def test_a_prompt_longer_than_the_model_takes_is_refused(run: Path, cli: Cli) -> None:
    said = cli("generate", str(run), "--prompt", "the " * 200)
    assert said.code == 40
    assert "this model takes 1 to 31; give another" in " ".join(said.err.split())


def test_evaluate_prints_scores_as_a_table_and_as_json(run: Path, cli: Cli) -> None:
    table = cli("evaluate", str(run), "validation_windows=3")
    assert table.code == 0, table
    shown = cli("evaluate", str(run), "validation_windows=3", "--json")
    scores = json.loads(shown.out)["scores"]
    assert [score["metric"] for score in scores] == ["bits_per_byte", "perplexity"]
    assert f"{scores[0]['value']:.4f} ± {scores[0]['stderr']:.4f}" in table.out
    assert f"{run}/evaluations/" in table.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["limit=0"], "limit: 0 given"),
        (["task=[hellaswag]"], "task: there is no such setting; did you mean tasks"),
    ],
)
def test_settings_that_no_evaluation_has_are_refused_by_their_names(
    words: list[str], told: str, run: Path, cli: Cli
) -> None:
    said = cli("evaluate", str(run), *words)
    assert said.code == 40
    assert told in " ".join(said.err.split())


def test_a_folder_without_a_model_says_what_makes_one(finished: Path, cli: Cli) -> None:
    for verb in (["evaluate"], ["generate", "--prompt", "a"], ["chat"]):
        said = cli(verb[0], str(finished), *verb[1:])
        assert said.code == 40
        assert "train-litgpt collect" in said.err
