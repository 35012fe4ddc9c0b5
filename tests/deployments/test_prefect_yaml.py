"""prefect.yaml as Prefect would read it, only strictly: Prefect itself ignores what it does not know."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import pytest
from prefect import Flow
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from prefect.utilities.schema_tools.validation import validate
from prefect.utilities.templating import apply_values
from pydantic import BaseModel, ConfigDict, Field

from deployments.bootstrap import (
    CONFIGS,
    POOL,
    PREFECT_FILE,
    RENAMED,
    automations,
    deployment_names,
    settings,
)
from flows.submission import KINDS
from launcher.config import read_yaml


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WorkPool(Strict):
    name: Literal["litgpt-local"]


class Deployment(Strict):
    """The part of Prefect's grammar that we use. `concurrency_limit` is left out for a reason, which the file says."""

    name: str
    entrypoint: str = Field(pattern=r"^flows\.\w+\.\w+$")
    description: str = Field(min_length=40)
    build: list[dict[str, dict[str, str]]] = []
    parameters: dict[str, str] = {}
    tags: list[str]
    work_pool: WorkPool

    @property
    def flow(self) -> Flow[..., Any]:
        module, _, name = self.entrypoint.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, Flow)
        return found

    @property
    def stored(self) -> dict[str, Any]:
        """The parameters that the server stores: those of the file, filled in with what the build step returns."""
        [step] = self.build
        [(function, inputs)] = step.items()
        given = {name: value for name, value in inputs.items() if name != "id"}
        return apply_values(self.parameters, {inputs["id"]: import_object(function)(**given)})

    @property
    def config(self) -> Path:
        [step] = self.build
        return CONFIGS / step["deployments.bootstrap.settings"]["config"]


class PrefectFile(Strict):
    definitions: dict[str, Any]
    deployments: list[Deployment]


@cache
def parsed() -> dict[str, Deployment]:
    """FLOW/DEPLOYMENT to what stands in the file."""
    file = PrefectFile.model_validate(read_yaml(PREFECT_FILE))
    return {f"{deployment.flow.name}/{deployment.name}": deployment for deployment in file.deployments}


NAMES = [
    "train-litgpt/local",
    "prepare-dataset/dataset-local",
    "run-torchrun/pi",
    "sweep-litgpt/sweep-local",
    "benchmark-network/network-local",
]


REAP = "reap/reap-local"


def test_the_file_deploys_what_the_documentation_names() -> None:
    assert list(parsed()) == [*NAMES, REAP] == deployment_names()


def test_what_reaps_jobs_is_not_reaped_itself() -> None:
    """Its automation answers the cancellation of whatever has the tag `litgpt`."""
    assert parsed()[REAP].work_pool.name == POOL
    assert "litgpt" not in parsed()[REAP].tags


def test_the_list_of_deployments_tells_them_apart_by_their_names_alone() -> None:
    names = [name.partition("/")[2] for name in deployment_names()]
    assert len(set(names)) == len(names)
    assert set(RENAMED.values()) <= set(deployment_names())
    assert not set(RENAMED) & set(deployment_names())


@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_runs_on_the_pool_that_is_served_and_is_resumed_when_it_crashes(name: str) -> None:
    deployment = parsed()[name]
    assert deployment.work_pool.name == POOL
    assert set(deployment.tags) == {"litgpt", "resume-on-crash"}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_complete_and_accepted_by_the_servers_validation(name: str) -> None:
    deployment = parsed()[name]
    schema, stored = parameter_schema(deployment.flow).model_dump(), deployment.stored
    validate(stored, schema, raise_on_error=True)
    # `overrides` is for the moment of submission; with everything else given, the form shows what will run.
    missing = set(schema["properties"]) - set(stored)
    assert missing == {"overrides"}, "list them in prefect.yaml, as {{ settings.… }}"


@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_names_its_config_file_alone(name: str) -> None:
    """A setting that is added costs no line here, and one that is changed in the file is deployed as it is there."""
    deployment = parsed()[name]
    assert set(deployment.parameters.values()) == {f"{{{{ settings.{field} }}}}" for field in deployment.parameters}
    written, stored = read_yaml(deployment.config), deployment.stored
    kind = KINDS[deployment.flow.name]
    whole = kind.model_validate(written).model_dump(mode="json")
    assert stored == {field: whole[field] for field in deployment.parameters}


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_the_form_has_help(name: str) -> None:
    schema = parameter_schema(parsed()[name].flow).model_dump()
    fields = {("", field): about for field, about in schema["properties"].items()}
    for group, definition in schema["definitions"].items():
        fields |= {(group, field): about for field, about in definition.get("properties", {}).items()}
    # A union's tag is told by the title of its branch.
    silent = [".".join(where) for where, about in fields.items() if not about.get("description") and where[1] != "kind"]
    assert not silent


def accepted(automation: dict[str, Any]) -> AutomationCore:
    """What Prefect makes of it, once a deployment that it names has an id."""
    actions = [
        {name: value for name, value in action.items() if name != "deployment"} | {"deployment_id": str(uuid4())}
        if action.get("deployment") in parsed()
        else action
        for action in automation["actions"]
    ]
    return AutomationCore.model_validate({**automation, "actions": actions})


def test_automations_are_ones_that_prefect_accepts() -> None:
    found = {one["name"]: accepted(one) for one in automations(silence=None)}
    assert list(found) == ["crash-zombies", "resume-crashed", "reap-cancelled"]
    zombies, crashed, cancelled = (one.trigger for one in found.values())
    assert isinstance(zombies, EventTrigger)
    assert isinstance(crashed, EventTrigger)
    assert isinstance(cancelled, EventTrigger)
    # Orchestrators give a sign of life every 3 minutes; a server that was away must not look like their death.
    assert zombies.within.total_seconds() >= 1200
    assert crashed.expect == {"prefect.flow-run.Crashed"}
    assert cancelled.expect == {"prefect.flow-run.Cancelled"}


def test_the_patience_with_silent_runs_can_be_chosen() -> None:
    zombies, crashed, _ = (accepted(one).trigger for one in automations(silence=90))
    assert isinstance(zombies, EventTrigger)
    assert isinstance(crashed, EventTrigger)
    assert (zombies.within.total_seconds(), crashed.within.total_seconds()) == (90, 0)


def test_a_build_step_may_send_a_config_elsewhere_by_a_profile() -> None:
    here = settings("train-litgpt", "local.yaml")
    there = settings("train-litgpt", "local.yaml", platform="profiles/gke.yaml")
    assert (there["platform"]["kind"], there["root"]) == ("gke", "gs://my-bucket/pretraining")
    moved = {"platform", "root", "image"}
    assert {name: there[name] for name in there.keys() - moved} == {name: here[name] for name in here.keys() - moved}
