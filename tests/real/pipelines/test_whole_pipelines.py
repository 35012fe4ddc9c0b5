"""Whole pipelines on this machine: sweeps, scripts, workers of other kinds, a rank that is killed, a proxy."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from waiting import until

from flows.run_torchrun import run_torchrun
from flows.train_litgpt import prepare_dataset
from launcher.config import CodeSettings, DaskWorkers, ProcessWorkers, RunConfig, ThreadWorkers
from launcher.errors import JobFailed, LauncherError
from launcher.events import Event, Listener, MetricsRow
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.reports.goodput import Part, attempt_times, ledger
from launcher.runs.index import Index
from launcher.runs.run import plan_run
from launcher.yaml_files import read_yaml
from litgpt_demo.node.agent import processes_with_env
from litgpt_demo.runs import read_metrics
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import list_complete

pytestmark = pytest.mark.prefect

Tiny = Callable[..., RunConfig]


def test_killed_search_continues_without_repeating_a_trial(tiny: Tiny, tmp_path: Path) -> None:
    """It has twelve trials and prunes."""
    steps = {"train.max_steps": 80, "train.evaluate_every": 4, "train.checkpoint_every": 80, "train.global_batch": 32}
    space = {"train.learning_rate": {"kind": "log-uniform", "low": 1e-6, "high": 3e-2}}
    search = {"space": space, "sampler": "tpe", "trials": 12, "prune": "asha", "max_parallel": 3}
    document = tiny({**steps, "name": "search"}).model_dump(mode="json", exclude={"launch"}) | {"sweep": search}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(document))
    command = [str(Path(sys.executable).with_name("train-litgpt")), "sweep", str(tmp_path / "sweep.yaml")]

    def ended() -> list[Path]:
        return [*tmp_path.glob("runs/*/final/manifest.json"), *tmp_path.glob("sweeps/*/pruned/*")]

    with (tmp_path / "first.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as first:
        until(lambda: len(ended()) >= 4, seconds=600)
        first.kill()
    before = {path.name for path in tmp_path.glob("runs/*")}
    assert len(before) < 12
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    runs = {path.name for path in tmp_path.glob("runs/*")}
    assert before <= runs
    assert len(runs) == 12
    index = Index.of(str(tmp_path))
    assert {run: len(index.records(run)) for run in runs} == dict.fromkeys(runs, 1)
    [sweep] = tmp_path.glob("sweeps/*")
    pruned = {path.name for path in (sweep / "pruned").iterdir()}
    assert 0 < len(pruned) < 12
    assert all(f"{run}  pruned at step" in output for run in pruned)
    rows = [read_metrics(open_storage(str(tmp_path)).within(f"runs/{run}")) for run in pruned]
    assert min(max(row["step"] for row in metrics) for metrics in rows) < 80, "none was ended before its last step"
    assert (sweep / "sweep.html").read_text().count("<svg") >= 3
    assert RunConfig.model_validate(read_yaml(sweep / "best.yaml")).train.learning_rate > 1e-5


def test_run_stops_within_its_budget_until_that_is_raised(tiny: Tiny, run_again: Callable[..., Any]) -> None:
    """A second costs a dollar. On a busy machine the start of the job is half of them."""
    endless = {"train.max_steps": 1_000_000, "train.evaluate_every": 1_000_000, "train.checkpoint_every": 1_000_000}
    money = {"platform.usd_per_hour": 3600, "platform.grace_period": 40}
    config = tiny({**endless, **money, "budget.max_usd": 140})
    run = plan_run(config)
    with pytest.raises(JobFailed, match=r"the budget is spent, and step \d+ is saved; raise budget\.max_usd"):
        run_again(config)
    saved = list_complete(run.storage)[0]
    spent = ledger(attempt_times(Index(run.root), run.name), read_metrics(run.storage))
    assert saved.step > 0
    assert 95 < spent.usd < 140
    with pytest.raises(LauncherError, match=r"the budget is spent: .* has cost \$\d+\.\d\d of budget\.max_usd=140"):
        run_again(config)
    done = run_again(tiny({**endless, **money, "budget.max_usd": 4000, "train.max_time": f"{saved.seconds + 1}s"}))
    assert done.final.run == run.name
    assert done.final.step > saved.step
    assert [record.attempt for record in Index(run.root).records(run.name)] == [1, 2]
    assert "as platform.usd_per_hour has it" in run.storage.read("report.html").decode()


def test_ledger_of_a_run_with_a_killed_rank_adds_up(tiny: Tiny, run_again: Callable[..., Any]) -> None:
    """It has the lost steps."""
    config = tiny({"train.max_steps": 60, "train.checkpoint_every": 20, "train.log_every": 1})
    run = plan_run(config)
    killed: list[int] = []

    def kill_a_rank(event: Event) -> None:
        match event:
            case MetricsRow(row={"kind": "step", "step": int(step)}) if step >= 33 and not killed:
                [record] = Index(run.root).records(run.name)
                ranks = [
                    process
                    for process in processes_with_env(JOB_TAG, record.job_id)
                    if "LOCAL_RANK" in process.environ()
                ]
                killed.append(ranks[-1].pid)
                os.kill(killed[0], signal.SIGKILL)

    with Listener(kill_a_rank):
        assert run_again(config).final.step == 60
    made = ledger(attempt_times(Index(run.root), run.name), read_metrics(run.storage))
    assert sum(made.seconds.values()) == pytest.approx(made.wall)
    assert made.seconds[Part.LOST] > 0
    assert made.seconds[Part.RESTART] > 0
    assert Part.STOPPED not in made.seconds


def test_script_runs_on_every_rank_with_its_first_code(
    tmp_path: Path,
) -> None:
    """What is edited while the job runs changes nothing."""
    (lib := tmp_path / "mine" / "lib").mkdir(parents=True)
    (lib / "second.py").write_text("WORD = 'as it was'")
    (tmp_path / "mine" / "train.py").write_text(
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
        "from lib import second\n"
        "import torch.distributed as world\n"
        "world.init_process_group('gloo')\n"
        "print(f'rank {world.get_rank()} of {world.get_world_size()} reads {second.WORD}')\n"
        "assert 'as' in second.WORD, second.WORD\n"
    )

    def run() -> Path:
        two, code = (
            LocalPlatformConfig(kind="local", nodes=2, processes_per_node=1),
            CodeSettings(folder=str(lib.parent)),
        )
        parameters = {"args": (str(tmp_path / "up"), str(tmp_path / "go")), "root": str(tmp_path), "code": code}
        return Path(asyncio.run(run_torchrun(script="train.py", platform=two, **parameters)))

    def edit() -> None:
        until((tmp_path / "up").exists)
        (lib / "second.py").write_text("WORD = 'edited'")
        (tmp_path / "go").touch()

    with ThreadPoolExecutor(1) as aside:
        edited = aside.submit(edit)
        logs = run()
        edited.result()
    for number in (0, 1):
        assert f"rank {number} of 2 reads as it was" in (logs / f"node-{number}.log").read_text()
    with pytest.raises(JobFailed, match="AssertionError: edited"):
        run()


def test_processes_or_dask_prepare_the_same_bytes_as_threads(tiny: Tiny, tmp_path: Path) -> None:
    from distributed import LocalCluster

    def prepared(root: str, workers: Any) -> Any:
        return asyncio.run(prepare_dataset(root=str(tmp_path / root), data=tiny().data, dataset_workers=workers))

    expected = prepared("threads", ThreadWorkers(kind="threads", count=2))
    assert prepared("processes", ProcessWorkers(kind="processes", count=2)) == expected
    # Dask changes the environment of this process when it starts others.
    local = partial(LocalCluster, n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with patch.dict(os.environ), local() as cluster:
        assert prepared("dask", DaskWorkers(kind="dask", scheduler=cluster.scheduler_address)) == expected


def died(*_: Any) -> None:
    os._exit(9)


def test_dead_process_of_a_preparation_is_named_with_a_fix(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.dataset._results", died)
    with pytest.raises(LauncherError, match="a worker was lost"):
        asyncio.run(
            prepare_dataset(
                root=str(tmp_path), data=tiny().data, dataset_workers=ProcessWorkers(kind="processes", count=1)
            )
        )
