"""A real server and its worker: the orchestrator dies, the server dies, a run is cancelled."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from job_handles import handle_of
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling
from waiting import until

from launcher.config import RunConfig
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.run import RunManifest, plan_run
from litgpt_demo.documents import read_manifest
from litgpt_demo.runs import read_metrics

# Slow enough to be met in the middle.
LONG = {"train.global_batch": 32, "train.max_steps": 80, "train.evaluate_every": 80, "train.checkpoint_every": 80}


def submitted(served: Any, config: RunConfig) -> UUID:
    """The flow run that our command line creates, met in the middle of its training."""
    settings = config.model_dump(mode="json", exclude={"launch"})
    changes = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    output = served.call(str(Path(sys.executable).with_name("train-litgpt")), "submit", "local", *changes)
    storage = plan_run(config).storage
    until(lambda: sum(row["kind"] == "step" for row in read_metrics(storage)) > 3)
    return UUID(output.strip().rpartition("/")[2])


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """The processes whose environment has the variable with a value that begins so."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if process.environ().get(name, "").startswith(value) else []
    return found


def engine_of(flow_run: UUID) -> psutil.Process:
    """The process that orchestrates it."""
    engines = with_variable("PREFECT__FLOW_RUN_ID", str(flow_run))
    [engine] = [
        process for process in engines if JOB_TAG not in process.environ() and "prefect.engine" in process.cmdline()
    ]
    return engine


def of_job(config: RunConfig) -> list[psutil.Process]:
    return with_variable(JOB_TAG, str(plan_run(config).storage.address()))


def test_prefects_own_command_runs_a_training_to_its_end(tiny_run: RunConfig, client: SyncPrefectClient) -> None:
    run = plan_run(tiny_run)
    assert read_manifest(run.storage, RunManifest) is not None
    for kind in ("progress", "training", "report"):
        client.request("GET", "/artifacts/{key}/latest", path_params={"key": f"{kind}-{run.name}"}).raise_for_status()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_resumed_flow_run_reattaches_to_the_running_training(
    served: Any, client: SyncPrefectClient, tiny_under: Callable[..., RunConfig], how: signal.Signals
) -> None:
    """No signal cancels a flow run: Prefect's state does."""
    config = tiny_under(served.root, {"name": f"orphan-{how}", **LONG})
    flow_run = submitted(served, config)
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
    engine_of(flow_run).send_signal(how)
    [rank] = [process for process in of_job(config) if "LOCAL_RANK" in process.environ()]
    rank.suspend()  # so that it does not end before the resumed run is there, however fast it is
    try:
        message = re.compile("reattached|this orchestrator follows")  # the dead one's lease may not have run out
        until(lambda: message.search("\n".join(log.message for log in client.read_logs(wanted))), seconds=600)
    finally:
        rank.resume()
    until(lambda: client.read_flow_run(flow_run).state_type is StateType.COMPLETED, seconds=600)
    manifest = read_manifest(plan_run(config).storage, RunManifest)
    assert manifest is not None
    assert (manifest.step, manifest.attempts) == (80, 1)


def test_cancelled_run_leaves_no_process_when_the_server_died(
    served: Any, client: SyncPrefectClient, tiny_under: Callable[..., RunConfig]
) -> None:
    """Whoever listened for cancellations may be deaf by then: it crashes and is replaced, or its job is cancelled."""
    config = tiny_under(served.root, {"name": "deaf", **LONG, "train.max_steps": 100_000})
    flow_run = submitted(served, config)
    psutil.Process(int((served.home / "serve" / "server.pid").read_text().split()[0])).kill()
    served.serve()
    client.set_flow_run_state(flow_run, Cancelling())
    until(lambda: not of_job(config), seconds=600)
    until(lambda: client.read_flow_run(flow_run).state_type is StateType.CANCELLED)
    [attempt] = handle_of(config).attempts.all()
    assert attempt.status.state == "cancelled"
