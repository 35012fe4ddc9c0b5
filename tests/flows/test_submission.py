"""`train-litgpt submit` and `run --detach` against a real server: what is there, what is taken, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from console_script import Cli
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL
from terminal import Terminal

from deployments.steps import queue, settings
from flows.run_torchrun import run_torchrun
from flows.train_litgpt import train_litgpt
from launcher.config import RunConfig, load
from litgpt_demo.errors import EXIT_CODES, Fault

pytestmark = pytest.mark.prefect

USER = EXIT_CODES[Fault.USER]
LOCAL = "deployments/configs/local.yaml"
POOL = "submission"


@pytest.fixture(scope="module")
def client(prefect_api: None) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def pool(client: SyncPrefectClient) -> None:
    """A work pool without a worker."""
    asyncio.run(_make_pool())


async def _make_pool() -> None:
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))


async def _make_queues() -> None:
    """Make them anew: nobody has asked for their runs, as where a worker has been gone for a minute."""
    async with get_client() as client:
        for found in await client.read_work_queues(work_pool_name=POOL):
            if found.name != "default":
                await client.delete_work_queue_by_id(found.id)
    for name in ("local", "gke"):
        await queue(POOL, name, 3)


@pytest.fixture
def deployed(client: SyncPrefectClient, pool: None) -> Iterator[list[str]]:
    """Deployments for this machine and for a cluster, as prefect.yaml has them, and a queue for each."""
    asyncio.run(_make_queues())
    ids = [
        deploy(train_litgpt, "local", settings("train-litgpt", "local.yaml"), "local"),
        deploy(train_litgpt, "gke", settings("train-litgpt", "gke.yaml"), "gke"),
        deploy(run_torchrun, "pi", settings("run-torchrun", "pi.yaml"), "local"),
    ]
    yield ["run-torchrun/pi", "train-litgpt/gke", "train-litgpt/local"]
    for one in ids:
        client.delete_deployment(one)


def deploy(flow: Any, name: str, found: dict[str, Any], queue_name: str) -> UUID:
    parameters = {field: value for field, value in found.items() if field != "about"}
    made = flow.to_deployment(
        name, parameters=parameters, work_pool_name=POOL, work_queue_name=queue_name, description="**Trains.**\n\nMore."
    )
    made.storage = None
    made.entrypoint = f"{flow.fn.__module__}.{flow.fn.__name__}"
    applied: UUID = made.apply()
    return applied


@pytest.fixture
def polled(client: SyncPrefectClient, deployed: list[str]) -> None:
    """A worker has just asked for work."""
    asyncio.run(_poll())


async def _poll() -> None:
    async with get_client() as client:
        await client.get_scheduled_flow_runs_for_work_pool(POOL)


# --- submit -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_without_a_name_the_deployments_are_listed(cli: Cli, deployed: list[str]) -> None:
    said = cli("submit")
    assert said.code == 2
    assert [line.split()[0] for line in said.out.splitlines()[1:]] == deployed
    assert "**Trains.**" in said.out
    assert "nothing was submitted: name one of these" in said.err


@pytest.mark.long
def test_a_program_reads_the_list_and_what_was_submitted(
    cli: Cli, deployed: list[str], client: SyncPrefectClient
) -> None:
    said = cli("submit", "--json")
    assert said.code == 2
    assert [row["deployment"] for row in json.loads(said.out)] == deployed
    assert [row["platform"] for row in json.loads(said.out)] == ["local", "gke", "local"]
    made = json.loads(cli("submit", "local", "--json", "train.learning_rate=0.001").out)
    assert made["deployment"] == "train-litgpt/local"
    assert client.read_flow_run(UUID(made["id"])).parameters["train"]["learning_rate"] == 0.001


def test_the_only_deployment_is_taken_with_the_changes(cli: Cli, client: SyncPrefectClient, pool: None) -> None:
    asyncio.run(_make_queues())
    only = deploy(train_litgpt, "local", settings("train-litgpt", "local.yaml"), "local")
    try:
        said = cli("submit", "train.max_steps=30", "train.warmup_steps=3")
        assert said.code == 0, said
        assert "of train-litgpt/local" in said.out
        made = client.read_flow_run(UUID(said.out.splitlines()[1].rpartition("/")[2]))
        assert made.parameters["train"]["max_steps"] == 30
    finally:
        client.delete_deployment(only)


@pytest.mark.long
def test_on_a_terminal_one_is_asked_for(deployed: list[str]) -> None:
    env = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    command = [sys.executable, "-m", "cli", "submit"]
    with Terminal(command, env=env, cwd=Path.cwd()) as terminal:
        terminal.read_until("which one", within=60)
        terminal.type("3\n")
        assert "of train-litgpt/local" in terminal.read_until("runs/flow-run/", within=30)


@pytest.mark.long
def test_a_run_that_no_worker_takes_now_waits_and_says_for_what(cli: Cli, deployed: list[str]) -> None:
    said = cli("submit", "local")
    assert said.code == 0
    assert "it waits: no worker takes runs from the work queue local of the pool submission" in said.out


@pytest.mark.long
def test_a_profile_leads_into_the_queue_of_its_platform(
    cli: Cli, deployed: list[str], client: SyncPrefectClient, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("root: gs://acme/llm\nplatform: {kind: gke, cluster: gpus, location: us-east5-a}\n")
    made = json.loads(cli("submit", "local", "--json", "--platform", str(mine), "image.kind=prebuilt", IMAGE).out)
    assert client.read_flow_run(UUID(made["id"])).work_queue_name == "gke"


IMAGE = "image.reference=us-docker.pkg.dev/acme/llm/train@sha256:" + 64 * "0"


@pytest.mark.long
def test_examples_of_a_shipped_config_are_refused_by_their_names(
    cli: Cli, deployed: list[str], client: SyncPrefectClient
) -> None:
    before = len(client.read_flow_runs())
    said = cli("submit", "gke")
    assert said.code == USER
    assert "root=gs://my-bucket/pretraining, image.repository=" in said.err
    assert "platform.cluster=my-cluster" in said.err
    for way in ('-p \'overrides={"root": ', "--platform FILE", "prefect variable set litgpt_gke"):
        assert way in said.err
    assert len(client.read_flow_runs()) == before
    own = ["root=gs://acme/llm", "image.repository=us-docker.pkg.dev/acme/llm/train", "platform.cluster=my-cluster"]
    assert cli("submit", "gke", *own).code == 0, "a cluster of one's own may have that name"


# --- run --detach -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_config_is_handed_over_as_it_is_with_its_changes(
    cli: Cli, polled: None, client: SyncPrefectClient, tmp_path: Path
) -> None:
    changes = (f"root={tmp_path}", "train.learning_rate=0.001")
    said = cli("run", LOCAL, *changes, "--detach")
    assert said.code == 0, said
    first, link, status, logs, cancel = said.out.splitlines()
    made = client.read_flow_run(UUID(link.rpartition("/")[2]))
    assert first == f"flow run {made.name} of train-litgpt/local"
    whole = load(RunConfig, Path(LOCAL), changes).model_dump(mode="json")
    assert made.parameters == {**whole, "overrides": {}}
    assert made.work_queue_name == "local"
    assert status.endswith(f"status {LOCAL} root={tmp_path} train.learning_rate=0.001")
    assert logs.endswith(f"logs --follow {LOCAL} root={tmp_path} train.learning_rate=0.001")
    assert cancel == f"  cancel   prefect flow-run cancel {made.id}"
    assert "nothing has been started under" in cli("status", LOCAL, *changes).err


@pytest.mark.long
def test_a_script_goes_to_the_deployment_of_its_flow(cli: Cli, polled: None, tmp_path: Path) -> None:
    script = f"script={Path('examples/pi.py').resolve()}"
    said = cli("run", "deployments/configs/pi.yaml", f"root={tmp_path}", script, "--detach")
    assert said.code == 0, said
    assert "of run-torchrun/pi" in said.out


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LOCAL, "no worker takes runs from the work queue local of the pool submission; start one by `make serve`"),
        pytest.param(
            "deployments/configs/sweep.yaml",
            "there is no deployment of sweep-litgpt, and `make serve` makes one",
            marks=pytest.mark.long,
        ),
    ],
)
def test_where_nobody_would_take_it_nothing_is_handed_over(
    config: str, words: str, cli: Cli, deployed: list[str], client: SyncPrefectClient, tmp_path: Path
) -> None:
    before = len(client.read_flow_runs())
    said = cli("run", config, f"root={tmp_path}", "--detach")
    assert said.code == USER
    assert words in said.err
    assert len(client.read_flow_runs()) == before


@pytest.mark.long
def test_a_deployment_that_nobody_serves_any_more_gets_nothing(
    cli: Cli, deployed: list[str], client: SyncPrefectClient, tmp_path: Path
) -> None:
    """Without its queue it belongs to no pool, as one that a process of a user's own serves."""
    asyncio.run(_delete_queues())
    said = cli("run", LOCAL, f"root={tmp_path}", "--detach")
    assert said.code == USER
    assert "nothing was handed over: no worker or process serves the deployment train-litgpt/local" in said.err


async def _delete_queues() -> None:
    async with get_client() as client:
        for name in ("local", "gke"):
            found = await client.read_work_queue_by_name(name, work_pool_name=POOL)
            await client.delete_work_queue_by_id(found.id)


@pytest.mark.long
def test_a_paused_pool_is_named_with_the_command_that_resumes_it(
    cli: Cli, polled: None, client: SyncPrefectClient, tmp_path: Path
) -> None:
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
    try:
        said = cli("run", LOCAL, f"root={tmp_path}", "--detach")
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))
    assert "nothing was handed over: the work pool submission is paused; `prefect work-pool resume" in said.err


@pytest.mark.long
def test_a_relative_path_that_the_worker_would_read_elsewhere_is_refused(cli: Cli, polled: None) -> None:
    said = cli("run", LOCAL, "--detach")
    assert said.code == USER
    assert "root=output would count from the worker's folder" in said.err
    assert str(Path.cwd() / "output") in said.err


# --- what Prefect itself checks ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_prefect_accepts_what_a_config_may_say(deployed: list[str], client: SyncPrefectClient) -> None:
    short = {
        "platform": {"kind": "local", "nodes": {"min": 1, "max": 2}},
        "train": {"restarts": {"node_fault": 5, "hang": {"attempts": 2}}},
        "overrides": {"platform.nodes": {"min": 1, "max": 2}, "train.restarts.node_fault": 5},
    }
    deployment = client.read_deployment_by_name("train-litgpt/local")
    made = client.create_flow_run_from_deployment(deployment.id, parameters={**deployment.parameters, **short})
    taken = train_litgpt.validate_parameters(made.parameters)
    assert all(taken[section] is not None for section in short)


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("platform", {"kind": "local", "nodes": {"min": 1}}),
        pytest.param("platform", {"kind": "gke", "nodes": {"min": 1, "max": 2}}, marks=pytest.mark.long),
        pytest.param("train", {"restarts": {"node_fault": -5}}, marks=pytest.mark.long),
    ],
)
def test_prefect_refuses_what_a_config_may_not_say(
    section: str, value: dict[str, Any], deployed: list[str], client: SyncPrefectClient
) -> None:
    deployment = client.read_deployment_by_name("train-litgpt/local")
    with pytest.raises(PrefectHTTPStatusError, match="409"):
        client.create_flow_run_from_deployment(deployment.id, parameters={**deployment.parameters, section: value})
