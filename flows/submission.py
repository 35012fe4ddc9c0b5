"""Starting a deployment's flow with some settings changed: deep merge, our validation, then Prefect's."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from prefect.client.base import ServerType
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import DeploymentStatus, WorkQueue, WorkQueueStatus
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from flows.parameters import DATASET_FIELDS, platform_in, require_own
from flows.server import require_server
from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from litgpt_demo.data.settings import FileCorpus, InstructionCorpus, TokensCorpus
from litgpt_demo.storage.base import is_remote

AnySettings: TypeAlias = RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig
# The model behind each flow's parameters; prepare-dataset takes three sections of a training's.
KINDS: Mapping[str, type[AnySettings]] = {
    "train-litgpt": RunConfig,
    "prepare-dataset": RunConfig,
    "run-torchrun": ScriptConfig,
    "sweep-litgpt": SweepConfig,
    "benchmark-network": BenchmarkConfig,
}
DEFAULT_FLOW = "train-litgpt"


@dataclass(frozen=True, kw_only=True)
class CreatedRun:
    """A flow run that waits for a worker."""

    id: str
    name: str
    deployment: str
    url: str
    waits: str = ""
    """The reason why no worker takes it now, and what to do; empty where one does."""


async def submit_deployment(
    name: str, overrides: Mapping[str, Any], *, profile: Mapping[str, Any] | None = None
) -> CreatedRun:
    """Create a flow run of a deployment; `local` is short for `train-litgpt/local`.

    Args:
        profile: sections that take the place of the deployment's own (launcher.config.read_profile).

    Raises:
        ConfigProblem: no server is configured, no such deployment, or the settings cannot be used.
        ServerUnreachable: the server does not answer.
    """
    full = name if "/" in name else f"{DEFAULT_FLOW}/{name}"
    await asyncio.to_thread(require_server)
    async with get_client() as client:
        try:
            deployment = await client.read_deployment_by_name(full)
        except ObjectNotFound as error:
            raise ConfigProblem(f"there is no deployment {full}; {_those(await _ours(client))}") from error
        parameters = parameters_with(full.split("/")[0], deployment.parameters, overrides, profile=profile)
        waits = await queue_of(client, full, deployment, parameters)
        return await _created(client, full, deployment, parameters, waits)


async def hand_over(settings: AnySettings, *, written_at: Path) -> CreatedRun:
    """Create a flow run with the settings of a config for a worker that is there to take it.

    The deployment only says which flow and where the worker has the code: one for the config's platform, if there is.

    Args:
        written_at: the folder from which the config's relative paths count.

    Raises:
        ConfigProblem: no server is configured, it has no deployment of the flow, no worker asks for its runs, or the
            config cannot be used there.
        ServerUnreachable: the server does not answer.
    """
    flow = next(flow for flow, kind in KINDS.items() if type(settings) is kind)
    await asyncio.to_thread(require_server)
    async with get_client() as client:
        there = await _ours(client)
        mine = {name: found for name, found in there.items() if name.startswith(f"{flow}/")}
        if not mine:
            raise ConfigProblem(f"there is no deployment of {flow}, and `make serve` makes one; {_those(there)}")
        parameters = parameters_with(flow, settings.model_dump(mode="json"), {})
        name = min(mine, key=lambda name: (platform_in(mine[name].parameters) != platform_in(parameters), name))
        require_same_paths(settings, mine[name], written_at)
        waits = await queue_of(client, name, mine[name], parameters)
        if waits.why:
            raise ConfigProblem(f"nothing was handed over: {waits.why}")
        # A deployment's own overrides would win over the config.
        return await _created(client, name, mine[name], {**parameters, "overrides": {}}, waits)


async def deployments() -> list[dict[str, str]]:
    """Return the deployments of our flows on the server: name, platform, and the first line of the description.

    Raises:
        ConfigProblem: no server is configured.
        ServerUnreachable: the server does not answer.
    """
    await asyncio.to_thread(require_server)
    async with get_client() as client:
        return [
            {
                "deployment": name,
                "platform": platform_in(found.parameters),
                "about": ((found.description or "").splitlines() or [""])[0],
            }
            for name, found in (await _ours(client)).items()
        ]


async def _created(
    client: PrefectClient, name: str, deployment: DeploymentResponse, parameters: Mapping[str, Any], waits: FoundQueue
) -> CreatedRun:
    """Create the flow run, unless its settings are examples still."""
    require_own(parameters)
    created = await client.create_flow_run_from_deployment(
        deployment.id, parameters=dict(parameters), work_queue_name=waits.name
    )
    url = f"{ui_of(client)}/runs/flow-run/{created.id}"
    return CreatedRun(id=str(created.id), name=created.name, deployment=name, url=url, waits=waits.why)


@dataclass(frozen=True, kw_only=True)
class FoundQueue:
    """The work queue that a flow run belongs into."""

    name: str | None = None
    """None where the deployment has none, as one that a process of a user's own serves."""
    why: str = ""
    """The reason why no worker takes a run from it now, and what to do; empty where one does."""


async def queue_of(
    client: PrefectClient, name: str, deployment: DeploymentResponse, parameters: Mapping[str, Any]
) -> FoundQueue:
    """Return the queue of the platform, which a profile or an override may change, or else the deployment's own."""
    pool = deployment.work_pool_name or ""
    for one in (platform_in(parameters), deployment.work_queue_name or "default") if pool else ():
        with suppress(ObjectNotFound):
            queue = await client.read_work_queue_by_name(one, work_pool_name=pool)
            paused = (await client.read_work_pool(pool)).is_paused
            return FoundQueue(name=queue.name, why=_why_not_taken(queue, pool, pool_is_paused=paused))
    if deployment.status is DeploymentStatus.READY:
        return FoundQueue()
    return FoundQueue(why=f"no worker or process serves the deployment {name}; deploy it into a work pool")


def _why_not_taken(queue: WorkQueue, pool: str, *, pool_is_paused: bool) -> str:
    if pool_is_paused:
        return f"the work pool {pool} is paused; `prefect work-pool resume {pool}` lets it go on"
    if queue.is_paused:
        return (
            f"the work queue {queue.name} of the pool {pool} is paused; "
            f"`prefect work-queue resume {queue.name} --pool {pool}` lets it go on"
        )
    if queue.status is not WorkQueueStatus.READY:  # the server's word: no worker has asked for a minute
        return (
            f"no worker takes runs from the work queue {queue.name} of the pool {pool}; start one by `make serve`, or "
            f"near the cluster by `prefect worker start --pool {pool} --work-queue {queue.name}`"
        )
    return ""


def require_same_paths(settings: RunConfig | AnySettings, deployment: DeploymentResponse, written_at: Path) -> None:
    """See that relative paths mean the same to the worker, which runs in the folder that its deployment names.

    Raises:
        ConfigProblem: one does not.
    """
    steps = [inputs for step in deployment.pull_steps or [] for inputs in step.values()]
    folder = next((inputs["directory"] for inputs in steps if "directory" in (inputs or {})), None)
    if folder is not None and Path(folder) == written_at:
        return
    for name, path in _paths(settings):
        if not is_remote(path) and not Path(path).is_absolute():
            raise ConfigProblem(
                f"{name}={path} would count from the worker's folder, {folder or 'which is not known'}, and not from "
                f"here; give a path that both have, as {written_at / path}, or one in a bucket"
            )


def _paths(settings: AnySettings) -> Iterator[tuple[str, str]]:
    """Yield the settings that name something on the machine where the flow runs."""
    yield "root", settings.root
    if isinstance(settings, RunConfig):
        for data in settings.data.sources.values() or [settings.data]:
            if isinstance(data.corpus, FileCorpus | InstructionCorpus):
                yield from (("data.corpus.paths", path) for path in data.corpus.paths)
            elif isinstance(data.corpus, TokensCorpus):
                yield "data.corpus.path", data.corpus.path
        weights = settings.model.pretrained
        if weights is not None and (weights.startswith(".") or Path(weights).is_dir()):  # else it is the Hub's
            yield "model.from", weights
    if isinstance(settings, ScriptConfig) and settings.platform.on_this_machine and settings.code is None:
        yield from (("script", script) for script in [settings.script] if not script.startswith("-m "))


def ui_of(client: PrefectClient) -> str:
    """Return the address of the UI that draws our charts: of the two that a server of one's own has, the second."""
    ui = (get_current_settings().ui_url or "").rstrip("/")
    return ui if client.server_type is ServerType.CLOUD else f"{ui.removesuffix('/v2')}/v2"


async def _ours(client: PrefectClient) -> dict[str, DeploymentResponse]:
    """Return the deployments of our flows by FLOW/DEPLOYMENT, sorted."""
    flows = {flow.id: flow.name for flow in await client.read_flows()}
    found = {f"{flows.get(one.flow_id)}/{one.name}": one for one in await client.read_deployments()}
    return {name: found[name] for name in sorted(found) if name.partition("/")[0] in KINDS}


def _those(found: Collection[str]) -> str:
    return f"there are {', '.join(found)}" if found else "there are none of ours: `make serve` makes them"


def parameters_with(
    flow: str,
    parameters: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    profile: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A deployment's parameters with a profile's sections and dotted overrides applied, whole and in JSON's types.

    Prefect merges top-level names only, and would take a lone `train: {learning_rate: …}` for the whole section.
    """
    kind = KINDS.get(flow)
    if kind is None:
        raise ConfigProblem(f"{flow} is not a flow of ours; there are {', '.join(KINDS)}")
    given = {name: value for name, value in parameters.items() if name != "overrides"}
    deployed = overridden(given, parameters.get("overrides") or {})
    document = overridden({**deployed, **(profile or {})}, overrides)
    settings = validated(kind, document, where="the deployment's parameters with your changes")
    if isinstance(settings, ScriptConfig) and settings.code and not Path(settings.code.mount).is_absolute():
        raise ConfigProblem(
            f"code.mount={settings.code.mount} would be a folder below the one that the worker runs in; a deployment "
            "takes an absolute path, of a folder that its worker has"
        )
    whole: dict[str, Any] = settings.model_dump(mode="json")
    if flow == "prepare-dataset":
        whole = {name: whole[name] for name in DATASET_FIELDS}
    # The deployment's own overrides are in by now; left there, they would win over yours.
    return {**whole, "overrides": {}} if parameters.get("overrides") else whole
