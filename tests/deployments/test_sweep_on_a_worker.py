"""A sweep whose trials are runs of a deployment, on the server and the worker that `make serve` starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun
from waiting import until

from deployments.bootstrap import CHECKOUT
from launcher.config import RunConfig, SweepConfig, validated
from launcher.runs.index import Index
from launcher.runs.listing import run_rows
from launcher.runs.studies import Study
from launcher.runs.trials import sweep_name

pytestmark = [pytest.mark.long, pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(1800)]

FAR = 100_000  # steps that no test waits for


@pytest.fixture
def client(served: Any) -> Iterator[SyncPrefectClient]:
    with SyncPrefectClient(served.place.api, auth_string=served.secret) as opened:
        yield opened


@pytest.fixture
def config(served: Any, tiny_under: Callable[..., RunConfig]) -> SweepConfig:
    """Three trials, one after the other: one that is good, one that is pruned long before its end, one that fails."""
    base = tiny_under(served.root, {"name": f"spread-{os.getpid()}", "train.max_steps": 40, "train.evaluate_every": 10})
    document = base.model_dump(mode="json")

    def train(**changes: Any) -> dict[str, Any]:
        return {**document["train"], **changes}

    choice = [train(learning_rate=0.01), train(learning_rate=1e-9, max_steps=FAR), train(learning_rate=1e30)]
    space = {"train": {"choice": choice}}
    sweep = {"space": space, "sampler": "grid", "pruning": {"kind": "asha"}, "deployment": "train-litgpt/local"}
    return validated(SweepConfig, {**document, "sweep": sweep}, where="test")


def start(served: Any, config: SweepConfig) -> subprocess.Popen[str]:
    """The sweep's own process, which only waits."""
    path = served.root / f"{config.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return subprocess.Popen(
        [sys.executable, "-m", "cli", "sweep", str(path)],
        env=served.environment, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def runs_of(client: SyncPrefectClient, config: SweepConfig) -> list[FlowRun]:
    """The flow runs of the trials, in the order of their names."""
    wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[sweep_name(config)]))
    return sorted(client.read_flow_runs(flow_run_filter=wanted), key=lambda one: one.name)


def test_trials_run_on_the_worker_once_however_often_their_sweep_is_killed_and_started(
    served: Any, config: SweepConfig, client: SyncPrefectClient
) -> None:
    index, one = Index.of(config.root), start(served, config)
    name = sweep_name(config)  # other tests have runs under this root
    until(lambda: any(record.sweep == name for record in index.newest()) or one.poll() is not None)
    assert one.poll() is None, one.stdout and one.stdout.read()
    one.kill()
    assert len(runs_of(client, config)) == 1

    other = start(served, config)
    text, _ = other.communicate(timeout=900)
    assert other.returncode == 0, text
    good, pruned, failed = Study(config).earlier()
    assert [good.state, pruned.state, failed.state] == ["done", "pruned", "failed"], text
    assert "not finite" in failed.error or "user error" in failed.error, failed.error
    assert (pruned.step or FAR) < FAR, "its job was stopped"
    rows = {row.run: row.state for row in run_rows(index)}
    assert (rows[good.run], rows[pruned.run]) == ("done", "pruned")

    flow_runs = runs_of(client, config)
    assert [one.state_name for one in flow_runs] == ["Completed", "Pruned", "Failed"], "none ran twice"
    assert [one.name.partition(": ")[0] for one in flow_runs] == [f"{config.name} {number}" for number in range(3)]
    assert [good.flow_run, failed.flow_run] == [str(flow_runs[0].id), str(flow_runs[2].id)]
    parents = {client.read_task_run(one.parent_task_run_id).flow_run_id for one in flow_runs if one.parent_task_run_id}
    assert len(parents) == 2, "the sweep's first process began the first trial, the second one the others"
    assert {client.read_flow_run(parent).name for parent in parents if parent} == {f"sweep {config.name}"}

    again = start(served, config)
    text, _ = again.communicate(timeout=280)
    assert (again.returncode, "3 trials have ended before" in text) == (0, True), text
    assert len(runs_of(client, config)) == 3
    assert Path(config.root, "sweeps", name, "sweep.html").exists()
