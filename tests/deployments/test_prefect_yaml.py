"""prefect.yaml as Prefect would read it, only strictly: Prefect itself ignores what it does not know."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import prefect
import pytest
import yaml
from jsonpatch import JsonPatch
from kubernetes_cluster.schemas import shape_troubles
from pydantic import BaseModel

from deployments.bootstrap import AUTOMATIONS_FILE, CHECKOUT, CONFIGS, PREFECT_FILE, settings
from flows.parameters import KINDS
from launcher.config import overrides_of, read_yaml, validated
from litgpt_demo.config import EvaluationConfig


class Deployment(BaseModel, extra="forbid"):
    """The part of Prefect's grammar that we use."""

    name: str
    entrypoint: str
    description: str
    build: list[dict[Literal["deployments.bootstrap.settings"], dict[str, str]]] = []
    parameters: dict[str, Any] = {}
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


def test_every_config_has_a_deployment_which_is_resumed_when_it_crashes() -> None:
    """The automation that reaps answers the cancellation of whatever has the tag `litgpt`, and is not reaped itself."""
    tags = {name: set(deployment.tags) for name, deployment in parsed().items()}
    assert "litgpt" not in tags.pop("reap/reap-local")
    assert all(one >= {"litgpt", "resume-on-crash"} for one in tags.values())
    configs = {step["config"] for one in parsed().values() for made in one.build for step in made.values()}
    assert configs == {path.name for path in CONFIGS.glob("*.yaml")}


NAMES = sorted(name for name, deployment in parsed().items() if deployment.build)


@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_stores_its_whole_config_and_the_server_accepts_it(name: str) -> None:
    """A setting that is added costs no line in the file, and one that is changed in the config is deployed so."""
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate
    from prefect.utilities.templating import apply_values

    from flows.parameters import parameters_with

    deployment = parsed()[name]
    [step] = deployment.build
    inputs = step["deployments.bootstrap.settings"]
    whole = KINDS[deployment.flow.name].model_validate(read_yaml(CONFIGS / inputs["config"])).model_dump(mode="json")
    made = {inputs.pop("id"): settings(**inputs)}
    stored = apply_values(deployment.parameters, made)
    told = apply_values(deployment.description, made)
    for command in re.findall(r"prefect deployment run .*(?=`)", told):
        words = shlex.split(command)
        assert (words[3], words[4]) == (name, "-p")
        parameters_with(deployment.flow.name, stored, json.loads(words[5].removeprefix("overrides=")))
    assert stored == {field: whole[field] for field in deployment.parameters}
    schema = parameter_schema(deployment.flow).model_dump()
    validate(stored, schema, raise_on_error=True)
    # `overrides` is for the moment of submission; with everything else given, the form shows what will run.
    assert set(schema["properties"]) - set(stored) == {"overrides"}
    sections = schema["definitions"]
    for model, values in ((schema, stored), (sections.get("DataConfig", {}), stored.get("data", {}))):
        for field, value in values.items():
            refs = [branch["$ref"].rpartition("/")[2] for branch in model["properties"][field].get("oneOf", [])]
            # Prefect's form opens the first branch that has most of the names given, whatever the kind.
            branches = [sections[ref] for ref in refs]
            if branches:
                opened = max(branches, key=lambda one: len(one["properties"].keys() & value.keys()))
                assert opened["properties"]["kind"]["const"] == value["kind"], opened["title"]


def test_the_deployment_that_scores_asks_for_a_run_and_its_commands_are_ones_that_it_accepts() -> None:
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate

    deployment = parsed()["evaluate/evaluate"]
    schema = parameter_schema(deployment.flow).model_dump()
    assert set(schema["required"]) - set(deployment.parameters) == {"run"}
    told = dict(re.findall(r"`(train-litgpt evaluate|prefect deployment run) (.*)`", deployment.description))
    name, *options = shlex.split(told["prefect deployment run"])
    given = dict(one.split("=", 1) for one in options if one != "-p")
    asked = json.loads(given["evaluation"])
    assert name == "evaluate/evaluate"
    validate({**deployment.parameters, **given, "evaluation": asked}, schema, raise_on_error=True)
    for evaluation in (deployment.parameters["evaluation"], asked):
        EvaluationConfig.model_validate(evaluation)
    _, *words = shlex.split(told["train-litgpt evaluate"])
    validated(EvaluationConfig, overrides_of(words), where="it")


def test_the_kubernetes_pools_template_is_one_that_prefect_accepts_and_names_what_is_in_the_checkout() -> None:
    from prefect.server.schemas.actions import WorkPoolCreate

    template = json.loads((CHECKOUT / "deployments" / "kubernetes-pool.json").read_text())
    WorkPoolCreate(name="litgpt-gke", type="kubernetes", base_job_template=template)
    registry = Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
    theirs = json.loads(registry.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    for part in ("job_configuration", "variables"):
        assert template[part].keys() - {"required"} <= theirs[part].keys()
    known, job = theirs["variables"]["properties"], template["job_configuration"]["job_manifest"]
    assert template["variables"]["properties"].keys() == known.keys() - {"cluster_config"}
    theirs_job = theirs["job_configuration"]["job_manifest"]
    pod = theirs_job["spec"]["template"]["spec"]  # Prefect's has two fields of a Job here, which strict servers refuse
    theirs_job["spec"] |= {name: pod.pop(name) for name in ("parallelism", "completions")}
    assert job == theirs_job
    account = template["variables"]["properties"]["service_account_name"]["default"]
    roles = list(yaml.safe_load_all((CHECKOUT / "deployments" / "rbac.yaml").read_text()))
    bound = [subject for role in roles for subject in role.get("subjects", ()) if subject["kind"] == "ServiceAccount"]
    assert [one["name"] for one in bound] == [account, account]


def test_job_of_the_kubernetes_pool_passes_strict_validation() -> None:
    template = json.loads((CHECKOUT / "deployments" / "kubernetes-pool.json").read_text())
    values = {"labels": {}, "env": [{"name": "A", "value": "b"}], "command": ["prefect"], "finished_job_ttl": 60}

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: filled(value) for name, value in part.items()}
        if isinstance(part, list):
            return list(map(filled, part))
        placeholder = re.fullmatch(r"{{ (\w+) }}", str(part))
        return values.get(placeholder[1], "1") if placeholder else part

    job = filled(template["job_configuration"]["job_manifest"])
    assert shape_troubles(job) == []
    # The worker wants what this has and that has not (prefect_kubernetes.worker, _validate_job_manifest of 0.8.0).
    pod = {"parallelism": 1, "completions": 1, "restartPolicy": "Never", "containers": [{"name": "prefect-job"}]}
    metadata = {"annotations": {}, "labels": {}}
    base = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": {"spec": pod}}}
    job["metadata"] |= metadata
    assert not [change for change in JsonPatch.from_diff(job, base) if change["op"] in {"add", "replace"}]


def accepted(automation: dict[str, Any]) -> Any:
    """What Prefect makes of it, once a deployment or a block that it names has an id."""
    from prefect.events.schemas.automations import AutomationCore

    for action in automation["actions"]:
        if action.get("deployment") in parsed():
            action["deployment_id"] = action.pop("deployment") and str(uuid4())
        if action["type"] == "call-webhook":
            action["block_document_id"] = str(uuid4())
    return AutomationCore.model_validate(automation)


def test_automations_are_ones_that_prefect_accepts() -> None:
    found = {one["name"]: accepted(one) for one in yaml.safe_load(AUTOMATIONS_FILE.read_text())}
    names = ("crash-zombies", "resume-crashed", "reap-cancelled", "tell-of-bad-ends")
    zombies, crashed, cancelled, bad = (found[name].trigger for name in names)
    # Orchestrators give a sign of life every 3 minutes; a server that was away must not look like their death.
    assert zombies.within.total_seconds() >= 1200
    # A flow run that a worker took and had not begun when it died is pending, and never gave a sign.
    named = ("Pending", "Submitting", "InfrastructurePending", "Running")
    assert zombies.after == {f"prefect.flow-run.{sign}" for sign in ("heartbeat", *named)}
    # Each begins the wait anew, and an end ends it.
    ends = ("Completed", "Failed", "Cancelled", "Crashed")
    assert zombies.expect == zombies.after | {f"prefect.flow-run.{end}" for end in ends}
    assert crashed.expect == {"prefect.flow-run.Crashed"}
    assert cancelled.expect == {"prefect.flow-run.Cancelled"}
    assert set(bad.match_related["prefect.resource.name"]) == {*KINDS}
