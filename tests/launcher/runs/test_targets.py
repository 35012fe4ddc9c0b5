"""Which run a user means: by name, by its beginning, by its folder, by a config."""

from collections.abc import Callable
from pathlib import Path

import pytest
from job_handles import handle_of

from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.errors import UnknownRun
from launcher.runs.listing import find_started_with, resolve_target
from launcher.runs.sweeps import sweep_name, trials

Tiny = Callable[..., RunConfig]


def started(config: RunConfig | ScriptConfig) -> str:
    """Write a run's first attempt down as the pipeline does; returns the run's name."""
    return handle_of(config).reattach_or_create().run


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


def test_a_run_is_found_by_its_name_its_beginning_and_its_folder(tiny: Tiny, root: str) -> None:
    run = started(tiny())
    for query in (run, run[:-3], run[:4], "@last", f"{root}/runs/{run}", f"{root}/runs/{run}/attempts/1"):
        assert resolve_target(query, root=root).runs == (run,)
    newest = started(tiny({"train.seed": 2}))
    assert resolve_target("@last", root=root).runs == (newest,)
    with pytest.raises(UnknownRun, match="is the beginning of 2 names") as refused:
        resolve_target("tiny", root=root)
    assert run in str(refused.value)
    assert newest in str(refused.value)


def test_a_name_that_no_run_has_is_answered_with_those_there_are(tiny: Tiny, root: str) -> None:
    with pytest.raises(UnknownRun, match=f"nothing has been started under {root}"):
        resolve_target("gpt", root=root)
    run = started(tiny())
    for query in ("gtp", f"{root}/runs/gtp"):
        with pytest.raises(UnknownRun, match="name one of these") as refused:
            resolve_target(query, root=root)
        assert run in str(refused.value)


def test_config_finds_its_run_when_the_corpus_has_changed(tiny: Tiny, tmp_path: Path, corpus: Path) -> None:
    """No byte of the corpus is read to find a live job."""
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text())
    config = tiny({"data.corpus.paths": [str(text)]})
    run = started(config)
    text.write_text(corpus.read_text() + "!")
    assert find_started_with(config).runs == (run,)
    second = started(config)
    with pytest.raises(UnknownRun, match="2 runs were started with this config") as refused:
        find_started_with(config)
    assert run in str(refused.value)
    assert second in str(refused.value)


def test_config_finds_no_run_of_another_training(tiny: Tiny, root: str) -> None:
    run, script = started(tiny()), ScriptConfig(root=root, script="pi.py")
    assert find_started_with(tiny({"platform.port": 20999, "train.keep_last": 7})).runs == (run,)
    with pytest.raises(UnknownRun, match="nothing has been started with this config") as refused:
        find_started_with(tiny({"train.learning_rate": 0.3}))
    assert run in str(refused.value)
    of_script = started(script)
    assert find_started_with(script).runs == (of_script,)
    with pytest.raises(UnknownRun):
        find_started_with(script.model_copy(update={"args": ("--more",)}))


def test_a_sweep_is_one_thing(tiny: Tiny, root: str) -> None:
    sweep = SweepConfig.model_validate({**tiny().model_dump(), "sweep": {"grid": {"train.seed": [1, 2]}}})
    with pytest.raises(UnknownRun):
        find_started_with(sweep)
    runs = {started(trial.config) for trial in trials(sweep)}
    for found in (
        find_started_with(sweep),
        resolve_target(sweep_name(sweep), root=root),
        resolve_target("tiny", root=root),
    ):
        assert (set(found.runs), found.name) == (runs, sweep_name(sweep))
    assert resolve_target(min(runs), root=root).runs == (min(runs),)
