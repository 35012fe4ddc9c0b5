"""A team's server by compose.yaml and two workers, while parts of it die and after a restore."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import StateType
from prefect.events.schemas.automations import AutomationCore
from prefect.states import Scheduled
from prefect.types._datetime import now
from team_services import PACKAGED, SECRET, Team
from waiting import until

from flows.serving import CHECKOUT
from launcher.config import RunConfig
from launcher.runs.run import RunManifest, plan_run
from litgpt_demo.documents import read_manifest
from litgpt_demo.runs import read_metrics

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not PACKAGED or not shutil.which("redis-server") or not shutil.which("haproxy"),
    reason="needs root and Debian's packages: apt-get install postgresql redis-server haproxy",
)


COUNT = 50  # flow runs at once


@pytest.fixture
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    made = Team(tmp_path_factory.mktemp("team"), tmp_path_factory.mktemp("home"))
    made.make_database()
    try:
        made.up()
        output = made.call("cli", "deploy")
        assert "automation   created      resume-crashed" in output
        made.call("prefect", "work-pool", "set-concurrency-limit", "litgpt-local", "8")
        for name in ("worker-1", "worker-2"):
            made.start(name)
        yield made
    finally:
        made.down()


@pytest.fixture
def client(team: Team) -> Iterator[SyncPrefectClient]:
    with SyncPrefectClient(f"{team.url}/api", auth_string=SECRET) as opened:
        [dead] = [automation for automation in opened.read_automations() if automation.name == "mark-dead-flow-runs"]
        # As docs/howto/team-server.md says for those who will not wait 20 minutes for the flow runs of a dead machine.
        dead.trigger.within = timedelta(seconds=75)
        wanted = dead.model_dump(include={"name", "description", "enabled", "trigger", "actions"})
        opened.update_automation(dead.id, AutomationCore.model_validate(wanted))
        yield opened


@pytest.fixture
def tiny(team: Team, client: SyncPrefectClient) -> UUID:
    where = [{"prefect.deployments.steps.set_working_directory": {"directory": str(CHECKOUT)}}]
    return client.create_deployment(
        client.create_flow_from_name("tiny"),
        "tiny",
        work_pool_name="litgpt-local",
        entrypoint="tests/real/team/tiny.py:tiny",
        pull_steps=where,
        tags=["resume-on-crash"],
    )


def states(client: SyncPrefectClient, flow_runs: list[UUID]) -> set[StateType | None]:
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=flow_runs))
    found = client.read_flow_runs(flow_run_filter=chosen, limit=200)
    assert len(found) == len(flow_runs)
    return {flow_run.state_type for flow_run in found}


def test_fifty_flow_runs_run_once_when_services_die(
    team: Team, client: SyncPrefectClient, tiny: UUID, tmp_path: Path
) -> None:
    """An API server, a worker and Redis die."""
    gate = tmp_path / "gate"

    def lines_of(flow_run: UUID) -> list[str]:
        file = tmp_path / str(flow_run)
        return file.read_text().split("\n")[:-1] if file.exists() else []

    def started(held: str | None) -> UUID:
        parameters = {"folder": str(tmp_path), "gate": held}
        return client.create_flow_run_from_deployment(tiny, parameters=parameters).id

    def pid(flow_run: UUID) -> int:
        return int(lines_of(flow_run)[-1].split()[1])

    def taken_up(flow_run: UUID) -> bool:
        return any(state.name == "AwaitingRetry" for state in client.read_flow_run_states(flow_run))

    held = [started(str(gate)) for _ in range(2)]
    flow_runs = [*held, *(started(None) for _ in range(COUNT - 2))]
    until(lambda: all(map(lines_of, held)))
    team.kill("api-1")
    until(lambda: sum("ended" in lines_of(flow_run) for flow_run in flow_runs) > 5, seconds=600)
    # A machine dies, with what its worker runs just now.
    worker = next(name for name in ("worker-1", "worker-2") if pid(held[1]) in team.tree(name))
    lost = team.kill(worker)
    killed = {
        flow_run for flow_run in flow_runs if lines_of(flow_run) and int(lines_of(flow_run)[0].split()[1]) in lost
    } | set(held)
    until(lambda: taken_up(held[1]), seconds=120)

    more = [started(None) for _ in range(10)]
    until(lambda: any(map(lines_of, more)), seconds=600)
    team.kill("redis")
    team.start("redis")
    until(lambda: all(Path(f"/proc/{pid(flow_run)}").exists() for flow_run in held), seconds=600)
    before = len(lines_of(held[0]))
    os.kill(pid(held[0]), signal.SIGKILL)
    until(lambda: len(lines_of(held[0])) > before, seconds=120)
    gate.touch()
    flow_runs += more
    until(lambda: states(client, flow_runs) == {StateType.COMPLETED}, seconds=900)
    # One that is killed after its last line, and before it has told the server so, runs anew.
    assert all("ended" in lines_of(flow_run) for flow_run in killed)
    assert [lines_of(flow_run) for flow_run in set(flow_runs) - killed if len(lines_of(flow_run)) != 2] == []


def test_restored_database_loses_nothing_or_starts_a_job_again(
    team: Team,
    client: SyncPrefectClient,
    tiny: UUID,
    tiny_under: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    config = tiny_under(tmp_path, {"name": "handed-over", "train.max_steps": 40})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    output = team.call("cli", "run", str(tmp_path / "mine.yaml"), "--detach")
    assert "of train-litgpt/local" in output
    training = UUID(output.strip().rpartition("/")[2])
    done = client.create_flow_run_from_deployment(tiny, parameters={"folder": str(tmp_path)}).id
    gate = tmp_path / "gate"
    meanwhile = {"folder": str(tmp_path), "gate": str(gate)}
    waits = client.create_flow_run_from_deployment(tiny, parameters=meanwhile).id
    in_an_hour = Scheduled(scheduled_time=now() + timedelta(hours=1))
    later = client.create_flow_run_from_deployment(tiny, parameters=meanwhile, state=in_an_hour).id
    until(lambda: states(client, [done]) == {StateType.COMPLETED}, seconds=600)
    until((tmp_path / str(waits)).exists, seconds=600)
    until(lambda: any(row["kind"] == "step" for row in read_metrics(plan_run(config).storage)), seconds=600)
    backup = tmp_path / "backup"
    with backup.open("wb") as file:
        subprocess.run(team.client("pg_dump", "-Fc"), stdout=file, check=True)
    until(lambda: states(client, [training]) == {StateType.COMPLETED}, seconds=600)

    for name in ("door", "services", "api-1", "api-2"):
        team.kill(name)
    with backup.open("rb") as file:
        subprocess.run(team.client("pg_restore", "--clean", "--if-exists"), stdin=file, check=True)
    team.serve()
    assert states(client, [done]) == {StateType.COMPLETED}
    assert states(client, [later]) == {StateType.SCHEDULED}
    gate.touch()
    until(lambda: states(client, [training, waits]) == {StateType.COMPLETED}, seconds=120)
    assert (tmp_path / str(waits)).read_text().count("ended") == 1
    manifest = read_manifest(plan_run(config).storage, RunManifest)
    assert manifest is not None
    assert (manifest.step, manifest.attempts) == (40, 1)
