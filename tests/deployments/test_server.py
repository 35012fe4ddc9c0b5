"""What a person does with a real server and worker: start, be refused, cancel, and lose the orchestrator."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelled, Cancelling, Scheduled
from waiting import until

from deployments.bootstrap import POOL
from launcher.config import RunConfig
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import claim_of
from launcher.runs.run import RunManifest, plan_run
from litgpt_demo.manifests import read_manifest
from litgpt_demo.metrics import rows_of
from litgpt_demo.runs import METRICS

pytestmark = [pytest.mark.long, pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(600)]

OURS = (str(Path(sys.executable).with_name("train-litgpt")),)
# Slow enough to be met in the middle.
LONG = {"train.global_batch": 32, "train.max_steps": 80, "train.evaluate_every": 80, "train.checkpoint_every": 80}


@pytest.fixture
def client(served: Any) -> Iterator[SyncPrefectClient]:
    with SyncPrefectClient(served.place.api, auth_string=served.secret) as opened:
        yield opened


def submitted(served: Any, config: RunConfig, *more: str) -> UUID:
    """The flow run that our command line creates."""
    document = config.model_dump(mode="json")
    changes = [
        f"{name}={json.dumps(document[name])}" for name in ("name", "root", "data", "model", "train", "platform")
    ]
    done = served.call(*OURS, "submit", "local", *changes, *more)
    assert done.returncode == 0, done.stderr
    address, _, flow_run = done.stdout.strip().rpartition("/")
    assert address.endswith(f"{served.place.ui}/runs/flow-run")  # the UI that draws charts
    return UUID(flow_run)


def steps_done(config: RunConfig) -> int:
    storage = plan_run(config).storage
    rows = rows_of(storage.read(METRICS).decode()) if storage.exists(METRICS) else []
    return sum(row["kind"] == "step" for row in rows)


def processes_of_jobs(folder: Path) -> dict[int, psutil.Process]:
    """Everything that carries the mark of a job below the folder."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(JOB_TAG, "").startswith(str(folder)):
                found[process.pid] = process
    return found


def supervisor_of(config: RunConfig) -> int:
    """The pid of what holds the run's job together."""
    return process_of(config, lambda process: "launcher.platforms.local.supervisor" in process.cmdline()).pid


def rank_of(config: RunConfig) -> psutil.Process:
    """The process that trains."""
    return process_of(config, lambda process: "LOCAL_RANK" in process.environ())


def process_of(config: RunConfig, wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
    """The only such process of the run's job."""
    processes = processes_of_jobs(Path(plan_run(config).storage.address())).values()
    [found] = [process for process in processes if wanted(process)]
    return found


@contextlib.contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def log_of(client: SyncPrefectClient, flow_run: UUID) -> str:
    """What the flow run has logged, its restarts included."""
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
    return "\n".join(log.message for log in client.read_logs(wanted))


def engine_of(flow_run: UUID) -> psutil.Process:
    """The process that runs a flow run's code: the orchestrator."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run)
            if mine and JOB_TAG not in process.environ() and "prefect.engine" in process.cmdline():
                return process
    raise AssertionError(f"flow run {flow_run} has no process")


# --- serving ----------------------------------------------------------------------------------------------------------


def test_serving_again_starts_nothing(served: Any) -> None:
    before = (served.place.server.process(), served.place.worker.process())
    again = served.bootstrap("serve", "--port", str(served.place.port))
    assert again.returncode == 0, again.stderr
    assert "started" not in again.stdout
    assert "created" not in again.stdout
    assert before == (served.place.server.process(), served.place.worker.process())


def test_the_server_is_heard_on_this_machine_alone(served: Any) -> None:
    server = served.place.server.process()
    every = [server, *server.children(recursive=True)]
    sockets = [one for process in every for one in process.net_connections("tcp")]
    assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_serving_on_a_port_that_something_else_uses_says_so(tmp_path: Path, served: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        env = f"PREFECT_HOME={tmp_path}"
        refused = served.call("env", env, sys.executable, "-m", "deployments.bootstrap", "serve", "--port", str(port))
    assert refused.returncode != 0
    assert f"port {port} is in use" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_come_up_is_reported_with_its_last_words(tmp_path: Path, served: Any) -> None:
    env = (f"PREFECT_HOME={tmp_path}", "PREFECT_SERVER_DATABASE_CONNECTION_URL=sqlite+aiosqlite:////no/such/folder/db")
    failed = served.call("env", *env, sys.executable, "-m", "deployments.bootstrap", "serve", "--port", "4210")
    assert failed.returncode != 0
    assert "the server died" in failed.stderr
    assert "unable to open database file" in failed.stderr


def test_a_second_server_on_the_same_data_is_refused(served: Any) -> None:
    refused = served.bootstrap("serve", "--port", "4209")
    assert refused.returncode != 0
    assert "runs already" in refused.stderr


def test_a_deployment_under_a_name_of_before_goes_once_nothing_needs_it(served: Any, client: SyncPrefectClient) -> None:
    flow = client.read_deployment_by_name("sweep-litgpt/sweep-local").flow_id
    old = client.create_deployment(flow, "local", work_pool_name=POOL, tags=["litgpt"], paused=True)
    theirs = client.create_deployment(
        client.read_deployment_by_name("benchmark-network/network-local").flow_id, "local", work_pool_name=POOL
    )
    tomorrow = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))
    waiting = client.create_flow_run_from_deployment(old, state=tomorrow)
    kept = served.bootstrap("serve", "--port", str(served.place.port))
    assert "kept         sweep-litgpt/local, now sweep-litgpt/sweep-local" in kept.stdout
    client.set_flow_run_state(waiting.id, Cancelled(), force=True)
    removed = served.bootstrap("serve", "--port", str(served.place.port))
    assert "removed      sweep-litgpt/local, now sweep-litgpt/sweep-local" in removed.stdout
    left = {found.id for found in client.read_deployments()}
    assert theirs in left
    assert old not in left
    client.delete_deployment(theirs)


def test_what_was_changed_in_the_ui_stays_when_another_deployment_is_missing(
    served: Any, client: SyncPrefectClient
) -> None:
    changed, missing = (client.read_deployment_by_name(name) for name in ("train-litgpt/local", "run-torchrun/pi"))
    client.update_deployment(changed.id, DeploymentUpdate(description="mine"))
    client.delete_deployment(missing.id)
    again = served.bootstrap("serve", "--port", str(served.place.port))
    assert "created      run-torchrun/pi" in again.stdout
    assert "there        train-litgpt/local" in again.stdout
    assert client.read_deployment_by_name("train-litgpt/local").description == "mine"


@pytest.mark.long
def test_the_readmes_commands_work_when_they_are_pasted_into_a_fresh_shell(
    served: Any, client: SyncPrefectClient, tmp_path: Path
) -> None:
    checkout, place = Path(__file__).parents[2], served.place
    [block] = re.findall(r"^```sh\n(make serve.*?)^```", (checkout / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    serve = "-m deployments.bootstrap serve"
    dry = subprocess.run(["make", "-n", "serve"], cwd=checkout, capture_output=True, text=True, timeout=60, check=True)
    assert serve in dry.stdout
    # The same on the port and with the data of this test; nothing else may be needed.
    here = f"env PREFECT_HOME={place.home} {sys.executable} {serve} --port {place.port}"
    script = block.replace("make serve", here).replace(" .prefect/", f" {place.home}/")
    fresh = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    before = {run.id for run in client.read_flow_runs()}
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))  # to be looked at, not to be run
    try:
        command = ["bash", "-e", "-c", script]
        done = subprocess.run(
            command, env=fresh, cwd=checkout, capture_output=True, text=True, timeout=280, check=False
        )
        made = [run for run in client.read_flow_runs() if run.id not in before]
        assert done.returncode == 0, done.stdout + done.stderr
        changes = [(run.parameters.get("overrides") or {}, run.parameters["train"]["learning_rate"]) for run in made]
        singly = {"train.max_steps": 30, "train.learning_rate": 0.0003}
        assert sorted(changes, key=str) == sorted([({}, 0.002), (singly, 0.002), ({}, 0.0003)], key=str)
    finally:
        for run in [run for run in client.read_flow_runs() if run.id not in before]:
            client.delete_flow_run(run.id)
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))


# --- refusing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("train.learning_rat=0.1", "train.learning_rat"),
        ("train.max_steps=-1", "train.max_steps"),
        ("platform.nodes=3", "train.global_batch"),  # the batch does not split over three
    ],
)
def test_our_command_names_the_setting_that_cannot_be(
    assignment: str, named: str, served: Any, client: SyncPrefectClient
) -> None:
    before = len(client.read_flow_runs())
    refused = served.call(*OURS, "submit", "local", assignment)
    assert refused.returncode != 0
    assert named in refused.stderr
    assert len(client.read_flow_runs()) == before


@pytest.mark.parametrize(
    ("group", "value", "named"),
    [
        ("train", {"max_steps": -1}, "train.max_steps"),
        ("train", {"learning_rat": 0.1}, "learning_rat"),
        ("data", {"corpus": {"kind": "stdlib", "paths": []}}, "data.corpus"),
    ],
)
def test_the_server_refuses_it_too_and_names_the_field(
    group: str, value: dict[str, Any], named: str, client: SyncPrefectClient
) -> None:
    deployment = client.read_deployment_by_name("train-litgpt/local")
    with pytest.raises(PrefectHTTPStatusError) as refused:
        client.create_flow_run_from_deployment(deployment.id, parameters={**deployment.parameters, group: value})
    assert refused.value.response.status_code == 409
    assert named in refused.value.response.text


# --- running ----------------------------------------------------------------------------------------------------------


def test_prefects_own_command_runs_a_training_to_its_end(whole: RunConfig, client: SyncPrefectClient) -> None:
    run = plan_run(whole)
    assert read_manifest(run.storage, RunManifest) is not None
    shown = {str(artifact.key) for artifact in client.read_artifacts()}
    assert {f"{kind}-{run.name}" for kind in ("progress", "training", "report", "figures")} <= shown


def test_addresses_in_logs_lead_to_the_ui_that_draws_charts(whole: RunConfig, served: Any) -> None:
    pages = re.findall(r"View at (\S+)/runs/flow-run/", served.place.worker.log.read_text())
    assert whole.name
    assert set(pages) == {served.place.ui}


def test_a_cancelled_run_leaves_no_process_of_its_job(
    served: Any, client: SyncPrefectClient, tiny_under: Callable[..., RunConfig]
) -> None:
    # So long that it is cancelled before its end on any machine.
    changes = {"name": f"unwanted-{os.getpid()}", **LONG, "train.max_steps": 100_000}
    config = tiny_under(served.root, {**changes, "train.learning_rate": 0.002})
    flow_run = submitted(served, tiny_under(served.root, changes), "train.learning_rate=0.002")
    assert client.read_flow_run(flow_run).parameters["train"] == config.train.model_dump(mode="json")

    until(lambda: steps_done(config) > 3)
    folder = Path(plan_run(config).storage.address())
    assert processes_of_jobs(folder)
    client.set_flow_run_state(flow_run, Cancelling())
    until(lambda: client.read_flow_run(flow_run).state_type is StateType.CANCELLED, seconds=60)
    assert not processes_of_jobs(folder)
    [attempt] = claim_of(config).attempts.all()
    assert attempt.status.state == "cancelled"


@pytest.mark.long
def test_after_the_servers_sudden_death_a_cancelled_run_leaves_no_process_of_its_job_either(
    served: Any, client: SyncPrefectClient, tiny_under: Callable[..., RunConfig]
) -> None:
    """Whoever listened for cancellations may be deaf by then: it crashes and is replaced, or its job is reaped."""
    changes = {"name": f"deaf-{os.getpid()}", **LONG, "train.max_steps": 100_000}
    config = tiny_under(served.root, changes)
    flow_run = submitted(served, config)
    until(lambda: steps_done(config) > 3)
    served.place.server.process().kill()
    again = served.bootstrap("serve", "--port", str(served.place.port))
    assert again.returncode == 0, again.stderr
    client.set_flow_run_state(flow_run, Cancelling())
    folder = Path(plan_run(config).storage.address())
    until(lambda: not processes_of_jobs(folder), seconds=500)
    until(lambda: client.read_flow_run(flow_run).state_type is StateType.CANCELLED, seconds=100)


@pytest.mark.long
def test_stopping_names_the_jobs_that_go_on_and_how_to_end_them(
    served: Any, tiny_under: Callable[..., RunConfig]
) -> None:
    config = tiny_under(served.root, {"name": f"goes-on-{os.getpid()}", **LONG, "train.max_steps": 100_000})
    submitted(served, config)
    until(lambda: steps_done(config) > 1)
    stopped = served.bootstrap("stop")
    run = plan_run(config).name
    try:
        [line] = [line for line in stopped.stdout.splitlines() if run in line]
        cancel = line.partition("to end it: train-litgpt ")[2].split()
        assert cancel[0] == "cancel"
        assert processes_of_jobs(served.root)
        assert served.call(*OURS, *cancel).returncode == 0
        assert not processes_of_jobs(Path(plan_run(config).storage.address()))
    finally:
        assert served.bootstrap("serve", "--port", str(served.place.port)).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=["killed", "ended", "Ctrl-C"])
def test_a_training_outlives_its_orchestrator_and_the_resumed_run_adopts_it(
    served: Any, client: SyncPrefectClient, tiny_under: Callable[..., RunConfig], how: signal.Signals
) -> None:
    """No signal cancels a flow run: Prefect's state does. That of a terminal reaches all of its process group."""
    config = tiny_under(served.root, {"name": f"orphan-{how}-{os.getpid()}", **LONG})
    flow_run = submitted(served, config)
    until(lambda: steps_done(config) > 3)
    supervisor, killed_at = supervisor_of(config), steps_done(config)
    engine_of(flow_run).send_signal(how)
    until(lambda: steps_done(config) > killed_at + 3)
    with suspended(rank_of(config)):  # so that it does not end before the resumed run is there, however fast it is
        until(lambda: "adopted" in log_of(client, flow_run))
        assert supervisor_of(config) == supervisor
    until(lambda: client.read_flow_run(flow_run).state_type is StateType.COMPLETED, seconds=400)
    assert client.read_flow_run(flow_run).run_count in (2, 3)  # 3 where the second report of its crash came late
    assert log_of(client, flow_run).count("adopted") == 1
    assert [record.attempt for record in claim_of(config).attempts.records()] == [1]
    manifest = read_manifest(plan_run(config).storage, RunManifest)
    assert manifest is not None
    assert (manifest.step, manifest.attempts) == (80, 1)
    starts = [row for row in rows_of(plan_run(config).storage.read(METRICS).decode()) if row["kind"] == "start"]
    assert [start["step"] for start in starts] == [0]


@pytest.mark.long
def test_an_evicted_pod_of_an_orchestrator_leaves_its_job_to_the_next_one(
    served: Any, client: SyncPrefectClient, tiny_under: Callable[..., RunConfig]
) -> None:
    """A kubelet ends the command of Prefect's Kubernetes worker by SIGTERM; the flow run goes back to be scheduled."""
    config = tiny_under(served.root, {"name": f"evicted-{os.getpid()}", **LONG})
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
    try:
        flow_run = submitted(served, config)
        pod = subprocess.Popen(
            [sys.executable, "-m", "prefect", "flow-run", "execute", str(flow_run)],
            env={
                **os.environ, "PREFECT_HOME": str(served.place.home), **served.settings,
                "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",  # as that worker sets it
            },
            cwd=Path(__file__).parents[2], start_new_session=True,
        )  # fmt: skip
        until(lambda: steps_done(config) > 3)
        supervisor, evicted_at = supervisor_of(config), steps_done(config)
        pod.terminate()
        pod.wait(timeout=30)  # what a pod has by default
        assert client.read_flow_run(flow_run).state_name == "AwaitingRetry"
        until(lambda: steps_done(config) > evicted_at + 3)
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))
    with suspended(rank_of(config)):
        until(lambda: "adopted" in log_of(client, flow_run))
        assert supervisor_of(config) == supervisor
    until(lambda: client.read_flow_run(flow_run).state_type is StateType.COMPLETED, seconds=400)
    assert [record.attempt for record in claim_of(config).attempts.records()] == [1]
