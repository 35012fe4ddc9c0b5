"""Starting a deployment's flow with some settings changed: deep merge, our validation, then Prefect's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.client.base import ServerType
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from flows.parameters import DATASET_FIELDS
from flows.server import require_server
from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem

# The model behind each flow's parameters; prepare-dataset takes three sections of a training's.
KINDS: Mapping[str, type[RunConfig] | type[ScriptConfig] | type[SweepConfig] | type[BenchmarkConfig]] = {
    "train-litgpt": RunConfig,
    "prepare-dataset": RunConfig,
    "run-torchrun": ScriptConfig,
    "sweep-litgpt": SweepConfig,
    "benchmark-network": BenchmarkConfig,
}


async def submit_deployment(
    name: str, overrides: Mapping[str, Any], *, profile: Mapping[str, Any] | None = None
) -> tuple[str, str, str]:
    """Create a flow run of a deployment; `local` is short for `train-litgpt/local`.

    Args:
        profile: sections that take the place of the deployment's own (launcher.config.read_profile).

    Returns its name, the deployment's name in full, and its page.

    Raises:
        ConfigProblem: no server is configured, no such deployment, or the settings cannot be used.
        ServerUnreachable: the server does not answer.
    """
    full = name if "/" in name else f"train-litgpt/{name}"
    await asyncio.to_thread(require_server)
    async with get_client() as client:
        try:
            deployment = await client.read_deployment_by_name(full)
        except ObjectNotFound as error:
            flows = {flow.id: flow.name for flow in await client.read_flows()}
            names = sorted(f"{flows.get(found.flow_id)}/{found.name}" for found in await client.read_deployments())
            raise ConfigProblem(f"there is no deployment {full}; there are {', '.join(names)}") from error
        parameters = parameters_with(full.split("/")[0], deployment.parameters, overrides, profile=profile)
        created = await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        pages = (get_current_settings().ui_url or "").rstrip("/")
        if client.server_type is not ServerType.CLOUD:  # of a server's own two UIs, the second draws our charts
            pages = f"{pages.removesuffix('/v2')}/v2"
    return created.name, full, f"{pages}/runs/flow-run/{created.id}"


def parameters_with(
    flow: str, parameters: Mapping[str, Any], overrides: Mapping[str, Any], *, profile: Mapping[str, Any] | None = None
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
