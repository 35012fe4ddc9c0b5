from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bucket_emulator import bucket_emulator

from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.errors import UnknownRun
from launcher.runs.attempts import claim_of
from launcher.runs.sweeps import sweep_name, trials
from launcher.runs.targets import find, find_started_with
from litgpt_demo.errors import DataError
from litgpt_demo.storage import open_storage

Tiny = Callable[..., RunConfig]


def started(config: RunConfig | ScriptConfig) -> str:
    """Write a run's first attempt down as the pipeline does; returns the run's name."""
    return claim_of(config).take().run


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def bucket_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bucket_emulator("runs") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield "gs://runs/team"


def test_a_run_is_found_by_its_name_and_by_the_beginning_of_it(tiny: Tiny, root: str) -> None:
    run = started(tiny())
    for words in (run, run[:-3], run[:4], "@last", f"{root}/runs/{run}", f"{root}/runs/{run}/attempts/1"):
        assert find(words, root=root).runs == (run,)


def test_a_beginning_of_several_names_is_refused_with_the_candidates(tiny: Tiny, root: str) -> None:
    one, other = started(tiny()), started(tiny({"train.seed": 2}))
    with pytest.raises(UnknownRun, match="is the beginning of 2 names") as refused:
        find("tiny", root=root)
    assert one in str(refused.value)
    assert other in str(refused.value)


def test_the_last_run_is_the_one_that_was_started_last(tiny: Tiny, root: str) -> None:
    started(tiny())
    newest = started(tiny({"train.seed": 2}))
    assert find("@last", root=root).runs == (newest,)


def test_a_name_that_no_run_has_is_answered_with_those_there_are(tiny: Tiny, root: str) -> None:
    run = started(tiny())
    with pytest.raises(UnknownRun, match="called 'gtp'; there are") as refused:
        find("gtp", root=root)
    assert run in str(refused.value)
    with pytest.raises(UnknownRun, match="has no run gtp"):
        find(f"{root}/runs/gtp", root=root)


def test_an_empty_root_says_where_it_looked(root: str) -> None:
    with pytest.raises(UnknownRun, match=f"nothing has been started under {root}"):
        find("gpt", root=root)


def test_a_config_finds_its_run_though_the_corpus_has_grown_or_gone(tiny: Tiny, tmp_path: Path, corpus: Path) -> None:
    """No byte of the corpus is read to find a live job."""
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text())
    config = tiny({"data.corpus.paths": [str(text)]})
    run = started(config)
    with text.open("a") as more:
        more.write("!")
    assert find_started_with(config).runs == (run,)
    text.unlink()
    assert find_started_with(config).runs == (run,)


def test_a_config_with_another_learning_rate_finds_another_run_or_none(tiny: Tiny) -> None:
    run = started(tiny())
    other = tiny({"train.learning_rate": 0.3})
    with pytest.raises(UnknownRun, match="nothing has been started with this config") as refused:
        find_started_with(other)
    assert run in str(refused.value)
    assert find_started_with(tiny({"platform.port": 20999, "train.keep_last": 7})).runs == (run,), (
        "neither changes what is trained"
    )


def test_two_runs_of_one_config_are_told_apart_by_name_alone(tiny: Tiny, tmp_path: Path, corpus: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text())
    config = tiny({"data.corpus.paths": [str(text)]})
    one = started(config)
    text.write_text(corpus.read_text() + "!")
    other = started(config)
    assert one != other
    with pytest.raises(UnknownRun, match="2 runs were started with this config") as refused:
        find_started_with(config)
    assert one in str(refused.value)
    assert other in str(refused.value)


def test_a_script_is_found_by_its_config(root: str) -> None:
    script = ScriptConfig(root=root, script="pi.py")
    run = started(script)
    assert find_started_with(script).runs == (run,)
    with pytest.raises(UnknownRun):
        find_started_with(script.model_copy(update={"args": ("--more",)}))


def test_a_sweep_is_one_thing(tiny: Tiny, root: str) -> None:
    sweep = SweepConfig.model_validate({**tiny().model_dump(), "sweep": {"grid": {"train.seed": [1, 2]}}})
    with pytest.raises(UnknownRun):
        find_started_with(sweep)
    runs = {started(trial.config) for trial in trials(sweep)}
    for found in (find_started_with(sweep), find(sweep_name(sweep), root=root), find("tiny", root=root)):
        assert set(found.runs) == runs
        assert found.is_sweep
        assert found.name == sweep_name(sweep)
    alone = find(min(runs), root=root)
    assert alone.runs == (min(runs),)
    assert not alone.is_sweep


def test_a_damaged_record_of_another_run_hides_neither_a_run_nor_a_sweep_from_its_config(tiny: Tiny, root: str) -> None:
    alone = tiny({"train.seed": 7})
    sweep = SweepConfig.model_validate({**tiny().model_dump(), "sweep": {"grid": {"train.seed": [1, 2]}}})
    script = ScriptConfig(root=root, script="pi.py")
    runs = {started(trial.config) for trial in trials(sweep)}
    run = started(alone)
    damaged = Path(root) / "index" / "cut-0123456789" / "1.json"
    damaged.parent.mkdir()
    damaged.write_text('{"format":')
    assert find_started_with(alone).runs == (run,)
    assert set(find_started_with(sweep).runs) == runs
    with pytest.raises(UnknownRun, match="nothing has been started with this config"):
        find_started_with(script)
    with pytest.raises(UnknownRun, match=r"has no run gtp; there are"):
        find(f"{root}/runs/gtp", root=root)
    with pytest.raises(DataError, match="1 records of the run index could not be read"):  # it may be the one
        find_started_with(tiny({"train.seed": 8}))


def test_a_run_in_a_bucket_is_found_like_any_other(tiny: Tiny, bucket_root: str) -> None:
    config = tiny().model_copy(update={"root": bucket_root})
    run = started(config)
    assert find("tiny", root=bucket_root).runs == (run,)
    assert find(f"{bucket_root}/runs/{run}", root="elsewhere").runs == (run,)
    again = replace(claim_of(config), flow_runs=["second"]).take()
    assert again.attempt == 1, "two orchestrators claim one attempt in a bucket too"
    assert open_storage(bucket_root).list("index")
