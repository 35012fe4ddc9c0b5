"""A sweep of trainings that do not train; a whole one is in tests/real/pipelines."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_handles import begin
from pipelines import artifact
from prefect import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from pydantic import ValidationError
from strict_platform import StrictPlatform
from waiting import until

from flows import sweep_litgpt as module
from flows.sweep_litgpt import sweep_litgpt
from flows.training import PLANNED
from launcher.config import RunConfig, SweepConfig
from launcher.errors import ConfigProblem, JobCancelled, JobFailed, LauncherError
from launcher.runs.attempts import CancelWatch, job_handle
from launcher.runs.index import Index
from launcher.runs.run import Run, plan_run
from launcher.runs.search import Search
from launcher.yaml_files import read_yaml
from litgpt_demo.documents import with_checksum, write_manifest
from litgpt_demo.export import FinalManifest
from litgpt_demo.export.evaluation import Evaluation, Score, place_of
from litgpt_demo.metrics import METRICS_MARK, to_log_line
from litgpt_demo.runs import FINAL, METRICS

pytestmark = pytest.mark.prefect

DIVERGES = 9.0
Swept = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def trained() -> list[RunConfig]:
    """The trials that began."""
    return []


@pytest.fixture
def swept(
    trained: list[RunConfig], tiny: Callable[..., RunConfig], corpus: Path, tmp_path: Path, monkeypatch: Any
) -> Swept:
    """Runs the flow for a grid; a trial's validation loss is its learning rate. The corpus is gone when one begins."""
    own = tmp_path / "corpus.txt"

    async def train(**groups: Any) -> Any:
        own.unlink(missing_ok=True)
        trained.append(config := RunConfig(**groups))
        planned = PLANNED.get()
        assert planned is not None
        assert planned.config == config
        if (rate := config.train.learning_rate) >= DIVERGES:
            raise JobFailed("user error on node 0: the loss is not finite")
        return SimpleNamespace(validation_loss=rate)

    def run(
        grid: dict[str, list[Any]], train: Callable[..., Any] = train, evaluation: Any = None, **sweep: Any
    ) -> list[dict[str, Any]]:
        shutil.copy(corpus, own)
        monkeypatch.setattr(module, "train_litgpt", SimpleNamespace(with_options=lambda **_: train))
        full = tiny({"data.corpus.paths": [str(own)], "platform.usd_per_hour": 10}).model_dump()
        arguments = {**full, "evaluation": evaluation, "sweep": {"grid": grid, "max_parallel": 2} | sweep}
        config = SweepConfig.model_validate(arguments)
        return asyncio.run(sweep_litgpt(**dict(config)))

    return run


def test_failed_trial_does_not_end_the_others(swept: Swept, trained: list[RunConfig], tmp_path: Path) -> None:
    table = swept({"train.learning_rate": [0.03, DIVERGES, 0.01]})
    assert [row["validation loss"] for row in table] == ["0.0100", "0.0300", ""]
    assert "user error" in table[2]["ended"]
    assert len([*(tmp_path / "datasets").iterdir()]) == 1
    [written] = tmp_path.glob("sweeps/*/best.yaml")
    [best] = [config for config in trained if config.train.learning_rate == 0.01]
    present = RunConfig.model_validate(read_yaml(written))
    assert present == best.model_copy(update={"launch": present.launch})
    assert "learning_rate: 0.01" in artifact(f"best-{written.parent.name}")
    assert "user error" in artifact(f"sweep-{written.parent.name}")


def test_sweep_with_a_refused_trial_never_begins(swept: Swept, trained: list[RunConfig]) -> None:
    with pytest.raises(ConfigProblem, match="padded_vocab_size=64"):
        swept({"train.seed": [91, 92], "model.config.padded_vocab_size": [320, 64]})
    assert trained == []


def test_a_sweep_in_which_nothing_succeeds_says_why(swept: Swept) -> None:
    with pytest.raises(LauncherError, match=r"no trial of 1 has a model.*user error"):
        swept({"train.learning_rate": [DIVERGES]})


def test_an_error_that_is_ours_ends_its_trial_and_not_the_sweep(swept: Swept) -> None:
    async def train(**groups: Any) -> Any:
        if (seed := RunConfig(**groups).train.seed) == 2:
            raise ZeroDivisionError("not foreseen")
        return SimpleNamespace(validation_loss=float(seed))

    table = swept({"train.seed": [1, 2, 3]}, train)
    assert [(row["train.seed"], row["ended"]) for row in table] == [
        ("1", ""), ("3", ""), ("2", "ZeroDivisionError: not foreseen"),
    ]  # fmt: skip


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the extra `evaluate`, which are only looked for."""
    for name in ("lm_eval", "accelerate"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))


def test_best_trial_has_the_best_score(swept: Swept, tmp_path: Path, harness: None) -> None:
    """Each trial's accuracy is its learning rate, which is its validation loss too."""

    async def train(**groups: Any) -> Any:
        config = RunConfig(**groups)
        rate, queries = config.train.learning_rate, config.evaluation
        assert queries is not None
        final: Any = SimpleNamespace(validation_loss=rate, step=8, files=())
        score = Score(task="words", metric="acc", value=rate, error=None, samples=3, few_shot=0)
        made = Evaluation(step=8, settings=queries, scores=(score,), versions={})
        run = await asyncio.to_thread(plan_run, config)
        run.storage.write(place_of(final, queries), with_checksum(made.model_dump_json(indent=1).encode(), "record"))
        return final

    grid, objectives = {"train.learning_rate": [0.01, 0.03]}, ["evaluation.words.acc", "tokens_per_second"]
    table = swept(grid, train, evaluation={"tasks": ["words"]}, objectives=objectives)
    assert [row["evaluation.words.acc"] for row in table] == ["0.0300", "0.0100"]
    [written] = tmp_path.glob("sweeps/*/best.yaml")
    assert written.read_text().startswith("# evaluation.words.acc 0.0300, validation loss 0.0300")
    with pytest.raises(LauncherError, match=r"no score evaluation.words.f1; there are evaluation.words.acc"):
        swept(grid, train, evaluation={"tasks": ["words"]}, objectives=["evaluation.words.f1"])
    with pytest.raises(ValidationError, match=r"evaluation.tasks=\['words'\] does not have hellaswag; add it there"):
        swept(grid, train, evaluation={"tasks": ["words"]}, objectives=["evaluation.hellaswag.acc"])


def test_trial_that_falls_behind_is_cancelled_with_its_step(swept: Swept, tmp_path: Path) -> None:
    """Each trial tells its seed as the validation loss, and ends when its run is asked to. One tells it at its end."""

    async def train(**groups: Any) -> Any:
        config = RunConfig(**groups)
        run = plan_run(config).name
        loss = float(config.train.seed)
        step = 4 if loss != 5 else 8
        module.ON_ROW.get()({"kind": "start", "step": 0, "steps": 8})
        module.ON_ROW.get()({"kind": "evaluation", "step": step, "validation_loss": loss})
        if loss in {2, 9}:
            await asyncio.to_thread(until, lambda: Index.of(str(tmp_path)).cancellations(run))
            raise JobCancelled(f"{run} was cancelled")
        await asyncio.to_thread(lambda: None)
        return SimpleNamespace(validation_loss=loss)

    table = swept({"train.seed": [1, 2, 9, 5]}, train, prune="asha", max_parallel=1)
    losses = [(row["train.seed"], row["validation loss"]) for row in table]
    assert losses == [("1", "1.0000"), ("5", "5.0000"), ("2", ""), ("9", "")]
    assert [row["ended"] for row in table[2:]] == [
        f"pruned at step 4, with validation loss {seed:.4f}" for seed in (2, 9)
    ]
    assert len([*tmp_path.glob("sweeps/*/pruned/*")]) == 2


def test_a_resumed_trial_is_judged_by_its_newest_evaluation(swept: Swept, tmp_path: Path) -> None:
    """The second trial was far behind at its first evaluation, hours ago, and is the best one by now."""

    async def train(**groups: Any) -> Any:
        seed = RunConfig(**groups).train.seed
        for step, loss in [(1, float(seed)), (2, 1.0 / seed)]:
            module.ON_ROW.get()({"kind": "evaluation", "step": step, "validation_loss": loss})
        await asyncio.to_thread(lambda: None)
        return SimpleNamespace(validation_loss=1.0 / seed)

    swept({"train.seed": [1, 2, 9], "train.evaluate_every": [1]}, train, prune="asha", max_parallel=1)
    assert [*tmp_path.glob("sweeps/*/pruned/*")] == []


def test_a_resumed_sweep_cancels_the_live_job_of_a_pruned_trial(
    swept: Swept, platform: StrictPlatform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sweep was killed when it had marked the trial, and not cancelled its job yet."""
    monkeypatch.setattr(module, "attempt_times", lambda *_: [])

    async def train(**groups: Any) -> Any:
        if RunConfig(**groups).train.seed == 1:
            return SimpleNamespace(validation_loss=1.0)
        run = PLANNED.get()
        assert run is not None
        handle = job_handle(run)
        platform.start(await asyncio.to_thread(begin, handle))
        mark = f"sweeps/{run.config.launch.sweep}/pruned/{run.name}"
        await asyncio.to_thread(handle.attempts.index.root.write, mark, b"pruned at step 4")
        raise JobFailed("the orchestrator was killed")

    swept({"train.seed": [1, 2]}, train, prune="asha")
    assert len(platform.live()) == 1
    table = swept({"train.seed": [1, 2]}, train, prune="asha")
    assert platform.live() == []
    assert [row["ended"] for row in table] == ["", "pruned at step 4"]


def test_a_trial_collected_on_the_way_is_trained_to_its_end(
    swept: Swept, monkeypatch: pytest.MonkeyPatch, harness: None
) -> None:
    """One that has ended is judged by its evaluations as it was then, and is scored where scores are asked for."""
    monkeypatch.setattr(module, "attempt_times", lambda *_: [])
    trained, searches = list[int](), list[Search]()
    monkeypatch.setattr(module, "Search", lambda sweep: searches.append(Search(sweep)) or searches[-1])

    async def train(**groups: Any) -> Any:
        trained.append(seed := RunConfig(**groups).train.seed)
        await asyncio.to_thread(take, run := PLANNED.get())
        rows = [to_log_line({"kind": "evaluation", "step": step, "validation_loss": 1.0}) for step in (4, 8)]
        run.storage.write(METRICS, "\n".join(row.removeprefix(METRICS_MARK) for row in rows).encode())
        final = collected_model(complete=seed == 1)
        await asyncio.to_thread(write_manifest, run.storage.within(FINAL), final)
        return final

    for evaluation in (None, None, {"tasks": ["words"]}):
        swept({"train.seed": [1, 2]}, train, evaluation=evaluation, prune="median")
        assert sorted(trained) == ([1, 2], [1, 2, 2], [1, 1, 2, 2, 2])[len(searches) - 1]
    assert searches[1].study.trials[0].intermediate_values == {1: 1.0, 2: 1.0}


def collected_model(*, complete: bool) -> FinalManifest:
    """The manifest of a model without files."""
    return FinalManifest(
        run="tiny", step=4, tokens=1, complete=complete, parameters=1, dataset_hash="d", validation_loss=1.0,
        perplexity=2.7, validation_windows=1, logits_difference=0.0, logits_tolerance=0.1, huggingface=None,
        prompt="", sample="", files=(),
    )  # fmt: skip


def test_search_draws_trials_except_invalid_ones(swept: Swept) -> None:
    space = {
        "train.learning_rate": {"kind": "log-uniform", "low": 1e-3, "high": 1e-1},
        "model.config.n_embd": {"kind": "choice", "values": [32, 33]},  # 33 does not split over two heads
    }
    table = swept({}, space=space, sampler="tpe", trials=6)
    assert {row["model.config.n_embd"] for row in table} == {"32"}
    losses = [float(row["validation loss"]) for row in table]
    assert losses == sorted(losses)
    assert 0 < len(losses) <= 6


@pytest.mark.parametrize(
    "sweep",
    [
        {"grid": {"train.learning_rate": ["1e-2", 1], "model.init_from": [None]}},
        {"grid": {"train.max_time": ["2h"], "train.seed": [7, 8]}},
        {
            "grid": {},
            "space": {
                "train.weight_decay": {"kind": "uniform", "low": 0, "high": 0.3},
                "model.config.n_embd": {"kind": "choice", "values": [32, 33]},
            },
            "sampler": "random",
            "trials": 5,
            "seed": 5,
        },
    ],
    ids=["text for a number", "duration", "half of the draws unusable"],
)
def test_a_finished_sweep_started_again_begins_no_new_trial(
    swept: Swept, monkeypatch: pytest.MonkeyPatch, sweep: dict[str, Any]
) -> None:
    """No trial leaves a model, so that each start trains all trials of the sweep."""
    monkeypatch.setattr(module, "attempt_times", lambda *_: [])  # nothing was trained
    begun = set[str]()

    async def train(**groups: Any) -> Any:
        begun.add(await asyncio.to_thread(take, PLANNED.get()))
        return SimpleNamespace(validation_loss=1.0)

    first = swept(train=train, **sweep)
    assert {row["run"] for row in first} == begun
    again = swept(train=train, **sweep)
    assert {row["run"] for row in again} == {row["run"] for row in first}


def take(run: Run | None) -> str:
    """Write the run's first attempt into the index, as the job step does; return the run's name."""
    assert run is not None
    return job_handle(run).reattach_or_create().run


@pytest.mark.parametrize(
    ("budget", "trials"), [({"max_gpu_hours": 2.5}, 3), ({"max_usd": 19.9}, 2), ({"max_usd": 20}, 2), ({}, 4)]
)
def test_no_trial_begins_once_the_budget_is_spent(
    swept: Swept, trained: list[RunConfig], monkeypatch: pytest.MonkeyPatch, budget: dict[str, float], trials: int
) -> None:
    """Each trial takes an hour of one process, which costs $10."""
    original = module.outcome_of
    monkeypatch.setattr(module, "outcome_of", lambda *args, **more: replace(original(*args, **more), hours=1, usd=10))
    table = swept({"train.seed": [1, 2, 3, 4]}, max_parallel=1, **budget)
    assert (len(table), len(trained)) == (trials, trials)
    assert {row["cost"] for row in table} == {"$10.00"}


def test_spending_of_running_trials_counts(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first goes on until somebody asks what it has spent after the second one's end: enough for no third."""
    begun, ended, queries = list[int](), list[int](), list[int]()

    async def train(**groups: Any) -> Any:
        begun.append(seed := RunConfig(**groups).train.seed)
        if seed == 1:
            await asyncio.to_thread(until, lambda: queries or 3 in begun)
        ended.append(seed)
        return SimpleNamespace(validation_loss=float(seed))

    def outcome_of(trial: Any, *more: Any, **others: Any) -> Any:
        spent = trial.config.train.seed == 1 and bool(ended)
        queries.extend([1] * spent)
        return replace(original(trial, *more, **others), usd=30 if spent else 1)

    original = module.outcome_of
    monkeypatch.setattr(module, "outcome_of", outcome_of)
    swept({"train.seed": [1, 2, 3]}, train, max_usd=20)
    assert sorted(begun) == [1, 2]


@contextmanager
def shared_limit(slots: int) -> Iterator[None]:
    """Prefect's global concurrency limit of the name that sweeps look for."""
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=module.GPUS, limit=slots))
        try:
            yield
        finally:
            client.delete_global_concurrency_limit_by_name(module.GPUS)


class Crowd:
    """Trials that wait for each other, until so many have been there at once or all have begun."""

    def __init__(self, *, wanted: int, trials: int) -> None:
        self.wanted, self.trials, self.begun, self.present, self.most = wanted, trials, 0, 0, 0

    async def train(self, **_: Any) -> Any:
        self.begun, self.present = self.begun + 1, self.present + 1
        self.most = max(self.most, self.present)
        await asyncio.to_thread(until, lambda: self.present >= self.wanted or self.begun == self.trials)
        self.present -= 1
        return SimpleNamespace(validation_loss=1.0)


def test_trials_use_no_more_gpus_than_the_limit(swept: Swept) -> None:
    """Without a limit they use all."""
    crowds = Crowd(wanted=2, trials=3), Crowd(wanted=3, trials=3)
    with shared_limit(2):
        swept({"train.seed": [1, 2, 3]}, crowds[0].train, max_parallel=3)
    swept({"train.seed": [1, 2, 3]}, crowds[1].train, max_parallel=3)
    assert [crowd.most for crowd in crowds] == [2, 3]


def test_trial_with_more_gpus_than_the_limit_is_refused(swept: Swept) -> None:
    with (
        shared_limit(1),
        pytest.raises(LauncherError, match=r"needs 2 slots .* limit gpus has 1; raise it: prefect gcl update gpus"),
    ):
        swept({"platform.processes_per_node": [2], "train.micro_batch": [2]})


def test_cancellation_ends_a_sweep_that_waits_for_slots(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list[Callable[[], str]]()

    def watch(index: Index, names: list[str]) -> CancelWatch:
        requests.append(partial(index.request_cancel, names[0]))
        return CancelWatch(index, names)

    @asynccontextmanager
    async def taken_for_ever(count: int) -> AsyncIterator[None]:
        requests[0]()
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(module, "CancelWatch", watch)
    monkeypatch.setattr(module, "gpus", taken_for_ever)
    with pytest.raises(JobCancelled):
        swept({"train.seed": [1, 2]}, max_parallel=2)
