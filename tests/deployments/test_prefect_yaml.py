"""prefect.yaml as Prefect would read it, only strictly: Prefect itself ignores what it does not know."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Literal
from uuid import uuid4

import pytest
import yaml
from pydantic import BaseModel

from deployments.bootstrap import AUTOMATIONS_FILE, CONFIGS, PREFECT_FILE, settings
from launcher.config import read_yaml


class Deployment(BaseModel, extra="forbid"):
    """The part of Prefect's grammar that we use."""

    name: str
    entrypoint: str
    description: str
    build: list[dict[Literal["deployments.bootstrap.settings"], dict[str, str]]] = []
    parameters: dict[str, str] = {}
    tags: list[str]
    work_pool: dict[str, str]

    @property
    def flow(self) -> Any:
        module, _, name = self.entrypoint.rpartition(".")
        return getattr(importlib.import_module(module), name)


@cache
def parsed() -> dict[str, Deployment]:
    """FLOW/DEPLOYMENT to what stands in the file."""
    found = [Deployment.model_validate(one) for one in read_yaml(PREFECT_FILE)["deployments"]]
    return {f"{deployment.flow.name}/{deployment.name}": deployment for deployment in found}


NAMES = [
    "train-litgpt/local",
    "prepare-dataset/dataset-local",
    "run-torchrun/pi",
    "sweep-litgpt/sweep-local",
    "benchmark-network/network-local",
]


def test_runs_are_resumed_when_they_crash_and_what_reaps_jobs_is_not_reaped_itself() -> None:
    """The automation that reaps answers the cancellation of whatever has the tag `litgpt`."""
    tags = {name: set(deployment.tags) for name, deployment in parsed().items()}
    assert "litgpt" not in tags.pop("reap/reap-local")
    assert tags == {name: {"litgpt", "resume-on-crash"} for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_stores_its_whole_config_and_the_server_accepts_it(name: str) -> None:
    """A setting that is added costs no line in the file, and one that is changed in the config is deployed so."""
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate
    from prefect.utilities.templating import apply_values

    from flows.parameters import KINDS

    deployment = parsed()[name]
    [step] = deployment.build
    inputs = step["deployments.bootstrap.settings"]
    whole = KINDS[deployment.flow.name].model_validate(read_yaml(CONFIGS / inputs["config"])).model_dump(mode="json")
    stored = apply_values(deployment.parameters, {inputs.pop("id"): settings(**inputs)})
    assert stored == {field: whole[field] for field in deployment.parameters}
    schema = parameter_schema(deployment.flow).model_dump()
    validate(stored, schema, raise_on_error=True)
    # `overrides` is for the moment of submission; with everything else given, the form shows what will run.
    assert set(schema["properties"]) - set(stored) == {"overrides"}


def accepted(automation: dict[str, Any]) -> Any:
    """What Prefect makes of its trigger, once a deployment that it names has an id."""
    from prefect.events.schemas.automations import AutomationCore

    for action in automation["actions"]:
        if action.get("deployment") in parsed():
            action["deployment_id"] = action.pop("deployment") and str(uuid4())
    return AutomationCore.model_validate(automation).trigger


def test_automations_are_ones_that_prefect_accepts() -> None:
    found = {one["name"]: accepted(one) for one in yaml.safe_load(AUTOMATIONS_FILE.read_text())}
    zombies, crashed, cancelled = (found[name] for name in ("crash-zombies", "resume-crashed", "reap-cancelled"))
    # Orchestrators give a sign of life every 3 minutes; a server that was away must not look like their death.
    assert zombies.within.total_seconds() >= 1200
    assert crashed.expect == {"prefect.flow-run.Crashed"}
    assert cancelled.expect == {"prefect.flow-run.Cancelled"}
