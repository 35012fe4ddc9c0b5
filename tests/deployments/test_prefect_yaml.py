"""prefect.yaml as Prefect would read it, only strictly: Prefect itself ignores what it does not know."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast
from uuid import uuid4

import pytest
from prefect import Flow
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from prefect.utilities.schema_tools.validation import validate
from prefect.utilities.templating import apply_values
from pydantic import BaseModel, ConfigDict, Field

from deployments.bootstrap import NOTIFY_FILE, POOL, PREFECT_FILE, RENAMED, automations, deployment_names
from deployments.steps import CONFIGS, settings
from flows.orphans import RESUMED
from flows.parameters import examples_in
from flows.submission import KINDS
from launcher.config import read_yaml
from launcher.errors import ConfigProblem
from tasks.run_events import RESOURCE, RunFinished, VerdictGiven


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WorkPool(Strict):
    name: Literal["litgpt-local"]
    work_queue_name: str = "default"


class Deployment(Strict):
    """The part of Prefect's grammar that we use. `concurrency_limit` is left out for a reason, which the file says."""

    name: str
    entrypoint: str = Field(pattern=r"^flows\.\w+\.\w+$")
    description: str = Field(min_length=10)
    build: list[dict[str, dict[str, str | int]]] = []
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
    def queue(self) -> dict[str, Any]:
        """Return what the build step that makes the work queue is given."""
        return self.build[0]["deployments.steps.queue"]

    @property
    def inputs(self) -> dict[str, Any]:
        """Return what the build step that reads the config is given."""
        return self.build[1]["deployments.steps.settings"]

    @property
    def made(self) -> dict[str, Any]:
        """Return what that step returns on a server where nobody has set a variable."""
        [function] = self.build[1]
        given = {name: "" if name == "yours" else value for name, value in self.inputs.items() if name != "id"}
        return cast(dict[str, Any], import_object(function)(**given))

    @property
    def stored(self) -> dict[str, Any]:
        """The parameters that the server stores: those of the file, filled in with what the build step returns."""
        return apply_values(self.parameters, {self.inputs["id"]: self.made})

    @property
    def config(self) -> Path:
        return CONFIGS / self.inputs["config"]


class PrefectFile(Strict):
    definitions: dict[str, Any]
    deployments: list[Deployment]


@cache
def parsed() -> dict[str, Deployment]:
    """FLOW/DEPLOYMENT to what stands in the file."""
    file = PrefectFile.model_validate(read_yaml(PREFECT_FILE))
    return {f"{deployment.flow.name}/{deployment.name}": deployment for deployment in file.deployments}


REAP = "reap/reap-local"
NAMES = [name for name in parsed() if name != REAP]
ELSEWHERE = [name for name in NAMES if parsed()[name].work_pool.work_queue_name != "local"]


def test_the_file_deploys_what_the_documentation_names() -> None:
    here = {name for name in parsed() if name not in ELSEWHERE}
    assert deployment_names() == {name: name in here for name in parsed()}
    assert {
        "train-litgpt/local", "train-litgpt/gke-tcpxo", "prepare-dataset/dataset-local", "run-torchrun/pi",
        "sweep-litgpt/sweep-local", "sweep-litgpt/search-local", "benchmark-network/network-local", REAP,
    } <= set(parsed())  # fmt: skip


def test_each_shipped_config_has_a_deployment() -> None:
    """Not the drill's, which trains nothing of use."""
    shipped = {path.name for path in CONFIGS.glob("*.yaml")} - {"drill.yaml"}
    assert {parsed()[name].config.name for name in NAMES} == shipped


def test_the_network_is_measured_on_every_platform_that_has_a_profile() -> None:
    measured = {parsed()[name].stored["platform"]["kind"] for name in NAMES if name.startswith("benchmark-network/")}
    assert measured == {path.stem for path in (CONFIGS / "profiles").glob("*.yaml")}


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
def test_a_deployment_is_resumed_when_it_crashes_and_waits_in_the_queue_of_its_platform(name: str) -> None:
    deployment = parsed()[name]
    platform = deployment.stored.get("platform", {"kind": "local"})["kind"]
    assert set(deployment.tags) == {"litgpt", RESUMED, platform}
    assert deployment.work_pool == WorkPool(name=POOL, work_queue_name=platform)
    assert deployment.queue == {"pool": POOL, "name": platform, "limit": 4 if platform == "local" else 16}


def test_reaping_waits_for_no_training() -> None:
    assert parsed()[REAP].work_pool.work_queue_name == "default"
    assert parsed()[REAP].build == []


@pytest.mark.parametrize("name", NAMES)
def test_a_description_says_what_it_does_and_what_is_left_to_the_user(name: str) -> None:
    deployment = parsed()[name]
    shown = apply_values({"": deployment.description}, {"settings": deployment.made})[""]
    assert len(shown) > 80
    assert "{{" not in shown
    about = deployment.made["about"]
    assert about.splitlines()[0] == deployment.config.read_text().splitlines()[0].removeprefix("# ")
    left = examples_in(deployment.stored)
    assert all(f"`{field}`" in about for field in left)
    assert bool(left) == (name in ELSEWHERE) == ("**Before its first run**" in about)


OWN_IMAGE = {
    "image.repository": "us-docker.pkg.dev/acme-llm/train",
    "image.reference": "us-docker.pkg.dev/acme-llm/it:1",
}
YOURS = {
    "gke": OWN_IMAGE | {"root": "gs://acme/llm", "platform.cluster": "gpus", "platform.location": "us-east5-a"},
    "runai": OWN_IMAGE | {"platform.project": "llm", "platform.url": "https://acme.run.ai"},
    "batch": OWN_IMAGE
    | {"root": "gs://acme/llm", "platform.project": "acme-llm", "platform.location": "us-east5"}
    | {"platform.service_account": "trainer@acme-llm.iam.gserviceaccount.com"},
    "slurm": {"root": "/scratch/llm", "platform.account": "llm", "platform.environment.path": "/scratch/llm/.venv"},
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_values_of_ones_own_are_given_once_for_all_deployments_of_a_platform(name: str) -> None:
    """Those that a config does not have are for others: a prebuilt image has no repository."""
    deployment = parsed()[name]
    assert deployment.inputs["yours"] == f"{{{{ prefect.variables.litgpt_{deployment.queue['name']} }}}}"
    given = {field: value for field, value in deployment.inputs.items() if field not in {"id", "yours"}}
    made = settings(**given, yours=YOURS[deployment.queue["name"]])
    assert not examples_in(made)
    assert "Before its first run" not in made["about"]
    before, about = deployment.made, "about"
    assert (made["name"], made["platform"]["nodes"]) == (before["name"], before["platform"]["nodes"])
    assert made[about] != before[about]


def test_a_variable_that_is_no_mapping_is_refused_with_the_command_that_sets_one() -> None:
    with pytest.raises(ConfigProblem, match=r"'gs://acme' is a text, .* prefect variable set NAME"):
        settings("train-litgpt", "gke.yaml", yours="gs://acme")


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
    profile = deployment.inputs.get("platform")
    kind = KINDS[deployment.flow.name]
    whole = kind.model_validate(written | (read_yaml(CONFIGS / profile) if profile else {})).model_dump(mode="json")
    assert stored == {field: whole[field] for field in deployment.parameters}


FLOWS = sorted({name.partition("/")[0] for name in NAMES})
Fields: TypeAlias = dict[str, dict[str, Any]]

# A number is told what it counts or measures, by its help or by its own name.
UNITS = re.compile(
    r"second|hour|byte|gigabyte|dollar|step|token|character|word|sample|sequence|question|document|window|checkpoint"
    r"|attempt|restart|trial|node|machine|pod|agent|process|rank|gpu|core|cpu|worker|bucket|hash|share|seed|weight"
    r"|number|distance|times|one of so many|rate|factor|port|id\b|earlier|norm|alpha|column|score|decay|time",
    re.IGNORECASE,
)


@cache
def fields(flow: str) -> Fields:
    """Return what the form of a flow asks for: `Section.field` to what the schema says of it."""
    schema = parameter_schema(next(one.flow for name, one in parsed().items() if name.startswith(f"{flow}/")))
    groups = {"": schema.properties, **{name: one.get("properties", {}) for name, one in schema.definitions.items()}}
    return {f"{group}.{field}".strip("."): about for group, own in groups.items() for field, about in own.items()}


def branches(about: dict[str, Any]) -> list[dict[str, Any]]:
    choice = about.get("anyOf") or about.get("oneOf")
    return [leaf for branch in choice for leaf in branches(branch)] if choice else [about]


@pytest.mark.parametrize("flow", FLOWS)
def test_every_field_of_the_form_has_a_title_and_help(flow: str) -> None:
    assert [name for name, about in fields(flow).items() if not about.get("title")] == []
    assert [name for name, about in fields(flow).items() if not about.get("description")] == []


@pytest.mark.parametrize("flow", FLOWS)
def test_a_choice_is_shown_by_names(flow: str) -> None:
    """A field that holds one of several words is a list of them, the only word of a union's tag too."""
    choices = {name: branch for name, about in fields(flow).items() for branch in branches(about) if "const" in branch}
    assert [name for name, branch in choices.items() if branch.get("enum") != [branch["const"]]] == []
    nested = [name for name, about in fields(flow).items() for one in about.get("anyOf", []) if "oneOf" in one]
    assert nested == []


@pytest.mark.parametrize("flow", FLOWS)
def test_every_number_of_the_form_says_what_it_counts(flow: str) -> None:
    numbers = {
        name: f"{branch.get('title')}: {about.get('description')}"
        for name, about in fields(flow).items()
        for branch in branches(about)
        if branch.get("type") in {"integer", "number"}
    }
    assert [name for name, words in numbers.items() if not UNITS.search(words)] == []


@pytest.mark.parametrize("flow", FLOWS)
def test_the_form_asks_for_json_only_where_the_user_chooses_the_names(flow: str) -> None:
    """Prefect's form has an editor of JSON for what is no text, number, switch, list or section."""
    known = {"string", "number", "integer", "boolean", "array", "null"}
    json_fields = {
        name: branch
        for name, about in fields(flow).items()
        for branch in branches(about)
        if not (branch.get("type") in known or branch.keys() & {"$ref", "enum", "const", "properties"})
    }
    assert [name for name, branch in json_fields.items() if not branch.get("additionalProperties")] == []


def accepted(automation: dict[str, Any]) -> AutomationCore:
    """What Prefect makes of it, once a deployment or block that it names has an id."""
    actions = []
    for action in automation["actions"]:
        rest = {name: value for name, value in action.items() if name not in {"deployment", "block"}}
        if action.get("deployment") in parsed():
            rest["deployment_id"] = str(uuid4())
        if action.get("block") == "webhook/train-litgpt":
            rest["block_document_id"] = str(uuid4())
        actions.append(rest)
    return AutomationCore.model_validate({**automation, "actions": actions})


def test_automations_are_ones_that_prefect_accepts() -> None:
    [cancelled] = (accepted(one).trigger for one in automations())
    assert isinstance(cancelled, EventTrigger)
    assert cancelled.expect == {"prefect.flow-run.Cancelled"}


def test_a_build_step_may_send_a_config_elsewhere_by_a_profile() -> None:
    here = settings("train-litgpt", "local.yaml")
    there = settings("train-litgpt", "local.yaml", platform="profiles/gke.yaml")
    assert (there["platform"]["kind"], there["root"]) == ("gke", "gs://my-bucket/pretraining")
    moved = {"platform", "root", "image", "about"}
    assert {name: there[name] for name in there.keys() - moved} == {name: here[name] for name in here.keys() - moved}


def test_the_example_of_a_notification_waits_for_events_that_runs_have() -> None:
    [notification] = (accepted(one) for one in automations(NOTIFY_FILE))
    assert isinstance(notification.trigger, EventTrigger)
    assert notification.trigger.expect == {VerdictGiven.name, RunFinished.name}
    assert notification.trigger.match.root == {"prefect.resource.id": f"{RESOURCE}*"}
    assert notification.name not in {one["name"] for one in automations()}, "it needs an address"
