"""What a sweep and its trials are called, and what they take from the config."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from launcher.config import RunConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.job import JobId
from launcher.runs.index import AttemptRecord, DamagedRecords, Index
from launcher.runs.run import plan_run
from launcher.runs.search import Search
from launcher.runs.sweeps import existing_trial_params, sweep_name, trial_of, trials

RATES = {"train.learning_rate": {"kind": "log-uniform", "low": 1e-4, "high": 1e-2}}
DRAWN = {"space": RATES, "sampler": "tpe", "trials": 6}


@pytest.fixture
def swept(tiny: Callable[..., RunConfig]) -> Callable[..., SweepConfig]:
    """Makes configs of sweeps: `swept({"sweep.trials": 9})`."""

    def make(changes: Mapping[str, Any] | None = None, sweep: Mapping[str, Any] = DRAWN) -> SweepConfig:
        document = {**tiny().model_dump(mode="json", exclude={"launch"}), "sweep": sweep}
        return validated(SweepConfig, overridden(document, changes or {}), where="sweep")

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"sweep.trials": 60}, {"sweep.max_parallel": 4}, {"sweep.max_gpu_hours": 1}, {"root": "elsewhere"},
        {"platform.processes_per_node": 1, "platform.grace_period": 9, "platform.usd_per_hour": 2},
        {"train.checkpoint_every": 2},
        {"train.max_time": "8h"}, {"platform.usd_per_hour": 2, "budget.max_usd": 1}, {"dataset_workers.count": 3},
    ],
)  # fmt: skip
def test_sweep_keeps_its_name_when_its_result_is_the_same(swept: Any, changes: dict[str, Any]) -> None:
    assert sweep_name(swept(changes)) == sweep_name(swept())


@pytest.mark.parametrize(
    "changes",
    [
        {"sweep.space": {"train.learning_rate": {"kind": "uniform", "low": 1e-4, "high": 1e-2}}}, {"sweep.seed": 1},
        {"sweep.sampler": "random"}, {"sweep.prune": "asha"}, {"sweep.objectives": ["tokens_per_second"]},
        {"train.weight_decay": 0.2}, {"train.max_steps": 9}, {"model.config.n_layer": 2}, {"name": "other"},
        {"data.validation_fraction": 0.1},
    ],
)  # fmt: skip
def test_sweep_has_another_name_when_its_result_may_differ(swept: Any, changes: dict[str, Any]) -> None:
    assert sweep_name(swept(changes)) != sweep_name(swept())


def test_trial_has_the_budget_of_the_config(swept: Any, tiny: Callable[..., RunConfig]) -> None:
    """Its title has four digits of each number, and its run follows from its settings."""
    rich = {"platform.usd_per_hour": 2, "budget.max_usd": 1}
    trial = trial_of(swept(rich), {"train.learning_rate": 0.0012345678, "model.config.n_layer": 2})
    assert (trial.config.budget.max_usd, trial.config.launch.sweep) == (1, sweep_name(swept()))
    assert trial.config.launch.trial == "learning_rate=0.001235, n_layer=2"
    alone = tiny({"train.learning_rate": 0.0012345678, "model.config.n_layer": 2})
    assert plan_run(trial.config).name == plan_run(alone).name


SPELLINGS: dict[str, list[Any]] = {
    "train.learning_rate": ["1e-3", "3e-4", 1, 0.02],
    "train.weight_decay": [0, "0.1", 0.2],
    "train.betas": [[0.9, "0.95"], ["9e-1", 0.99]],
    "train.max_time": ["2h", 3600, None],
    "train.warmup_steps": ["1", 2, 3.0],
    "data.max_document_bytes": ["20e9", 10_000],
    "data.mixture": [[]],
    "data.stages": [[]],
    "model.init_from": [None, "gpt-0123456789"],
    "model.load_optimizer_state": [False, True],
    "model.config": [{}, {"n_layer": 2}],
    "model.config.n_layer": [1, 2],
    "evaluation": [None, {"tasks": ["words"]}],
    "platform.processes_per_node": ["1", 2],
}
"""Values of settings of every kind, as people write them."""


@given(
    st.data(), st.lists(st.sampled_from([*SPELLINGS]), unique=True, min_size=1, max_size=3),
    st.sampled_from(["grid", "random", "tpe"]), st.integers(0, 6),
)  # fmt: skip
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sweep_killed_after_any_trial_has_the_same_trials(
    swept: Any, tmp_path_factory: pytest.TempPathFactory, data: Any, varied: list[str], sampler: str, killed: int
) -> None:
    values = {name: data.draw(st.lists(st.sampled_from(SPELLINGS[name]), unique_by=str, min_size=1)) for name in varied}
    space = {name: {"kind": "choice", "values": values[name]} for name in varied}
    sweep = {"grid": values} if sampler == "grid" else {"space": space, "trials": 5, "sampler": sampler}
    config = swept({"root": str(tmp_path_factory.mktemp("root"))}, sweep)
    undisturbed = continued(config)
    assume(undisturbed)
    restarted = config.model_copy(update={"root": f"{config.root}/restarted"})
    begun = continued(restarted, most=killed)
    assert begun + continued(restarted) == undisturbed


def continued(sweep: SweepConfig, *, most: int = 100) -> list[Mapping[str, Any]]:
    """Begin the trials that a sweep has not begun yet, at most so many; return what they vary."""
    index, search, begun = Index.of(sweep.root), Search(sweep.sweep), list[Mapping[str, Any]]()
    for draw in existing_trial_params(sweep, index, DamagedRecords()):
        search.tell(search.enqueue_existing(draw), [1.0])
    while len(begun) < most and (number := search.ask()) is not None:
        try:
            trial = trial_of(sweep, search.changes[number], number)
        except ConfigProblem:
            search.reject(number)
            continue
        search.tell(number, [1.0])
        run = f"{sweep.name}-{number:010x}"
        record = AttemptRecord(
            run=run, name=sweep.name, run_id=f"{number:010x}", attempt=1, nonce="0a1b2c",
            sweep=trial.config.launch.sweep, config=trial.config.model_dump(mode="json"), platform={},
            job_id=JobId("job"), directory=str(Path(sweep.root, "runs", run, "attempts", "1")), user="me", host="here",
            machine="m", created=time.time(),
        )  # fmt: skip
        assert index.create(record)
        begun.append(trial.changes)
    return begun


def test_a_sweep_continues_beside_a_trial_with_a_damaged_record(swept: Any) -> None:
    """The trial that cannot be read is not known to have begun; the others are."""
    config = swept(sweep={"grid": {"train.seed": [1, 2, 3]}})
    continued(config)
    damaged = f"{config.name}-{1:010x}"
    Path(config.root, "index", damaged, "1.json").write_text("{")
    bad = DamagedRecords()
    begun = existing_trial_params(config, Index.of(config.root), bad)
    assert [draw.changes["train.seed"] for draw in begun] == [1, 3]
    assert [*bad] == [damaged]


@pytest.mark.parametrize(("written", "meant"), [("1e-3", 0.001), (1, 1.0), ("0.01", 0.01)])
def test_a_sweep_has_one_name_for_every_spelling(swept: Any, written: Any, meant: float) -> None:
    sweeps = [swept(sweep={"grid": {"train.learning_rate": [value, 0.5]}}) for value in (written, meant)]
    assert len({sweep_name(sweep) for sweep in sweeps}) == 1
    assert [*trials(sweeps[0])[0].changes.values()] == [meant]


@pytest.mark.parametrize("what", [{"sweep.max_usd": 5}, {"sweep.objectives": ["validation_loss", "cost"]}])
def test_unknown_cost_is_refused_with_the_setting_that_fixes_it(swept: Any, what: Any) -> None:
    with pytest.raises(ConfigProblem, match=r"the list price of local is not known here; give platform\.usd_per_hour"):
        swept(what)
    assert trials(swept({**what, "platform.usd_per_hour": 2}))
