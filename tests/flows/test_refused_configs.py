"""What a run refuses, its plan refuses: in the same words, with the same exit code, and before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_configs import CASES, TRAINING, Bad, fill

pytestmark = [pytest.mark.prefect]

Answer = tuple[int, str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with good files and bad ones, in which one starts."""
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return tmp_path


@pytest.fixture
def call(folder: Path, cli: Any) -> Callable[..., Answer]:
    """The console script: how it ended, and all that it said, in one line."""

    def called(*words: str) -> Answer:
        said = cli(*words)
        return said.code, " ".join(f"{said.out} {said.err}".split())

    return called


# Each fifth case of the list; make test-rest tries the others.
SOME = [
    pytest.param(*bad.values, id=bad.id, marks=pytest.mark.long if number % 5 else ())
    for number, bad in enumerate(CASES)
]


@pytest.mark.parametrize("bad", SOME)
def test_what_a_run_refuses_its_plan_refuses(bad: Bad, call: Callable[..., Answer], folder: Path) -> None:
    before = sorted(folder.iterdir())
    for verb in ("plan", "run"):
        code, said = call(verb, bad.file, *bad.overrides)
        assert bad.words in said, verb
        assert code == bad.code, verb
        assert sorted(folder.iterdir()) == before, f"{verb} wrote something"


def test_the_config_that_all_of_them_change_is_a_good_one(call: Callable[..., Answer], folder: Path) -> None:
    assert (folder / "training.yaml").read_text() == TRAINING
    assert call("plan", "training.yaml")[0] == 0
    assert call("plan", "training.yaml", "sweep={grid: {train.seed: [1, 2]}}")[0] == 0
    assert call("plan", "script.yaml")[0] == 0
