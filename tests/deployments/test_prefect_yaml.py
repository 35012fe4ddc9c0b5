"""prefect.yaml as Prefect would read it, only strictly: Prefect itself ignores what it does not know."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock
from uuid import uuid4

import prefect
import pytest
import yaml
from jsonpatch import JsonPatch
from kubernetes_cluster.schemas import shape_troubles
from pydantic import BaseModel

from deployments.bootstrap import AUTOMATIONS_FILE, CHECKOUT, CONFIGS, PREFECT_FILE, settings
from flows.parameters import KINDS, MAX_RESUMES
from flows.reconciling import ORPHANED
from launcher.config import overrides_of, validated
from launcher.yaml_files import read_yaml
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
    found = [Deployment.model_validate(entry) for entry in read_yaml(PREFECT_FILE)["deployments"]]
    return {f"{deployment.flow.name}/{deployment.name}": deployment for deployment in found}


def test_every_config_has_a_deployment() -> None:
    """An automation reacts to the cancellation of any flow run with the tag `litgpt`; its own flow runs lack it."""
    tags = {name: set(deployment.tags) for name, deployment in parsed().items()}
    assert "litgpt" not in tags.pop("cancel-orphaned-jobs/cancel-orphaned-jobs")
    assert all(entry >= {"litgpt", "resume-on-crash"} for entry in tags.values())
    configs = {step["config"] for entry in parsed().values() for made in entry.build for step in made.values()}
    assert configs == {path.name for path in CONFIGS.glob("*.yaml")}


NAMES = sorted(name for name, deployment in parsed().items() if deployment.build)


@pytest.mark.parametrize("name", NAMES)
def test_deployment_stores_a_config_that_the_server_accepts(name: str) -> None:
    """A setting that is added costs no line in the file, and one that is changed in the config is deployed so."""
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate
    from prefect.utilities.templating import apply_values

    from flows.parameters import parameters_with

    deployment = parsed()[name]
    [step] = deployment.build
    inputs = step["deployments.bootstrap.settings"]
    complete = KINDS[deployment.flow.name].model_validate(read_yaml(CONFIGS / inputs["config"])).model_dump(mode="json")
    made = {inputs.pop("id"): settings(**inputs)}
    stored = apply_values(deployment.parameters, made)
    shown = apply_values(deployment.description, made)
    for command in re.findall(r"prefect deployment run .*(?=`)", shown):
        query = shlex.split(command)
        assert (query[3], query[4]) == (name, "-p")
        parameters_with(deployment.flow.name, stored, json.loads(query[5].removeprefix("overrides=")))
    assert stored == {field: complete[field] for field in deployment.parameters}
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
                opened = max(branches, key=lambda entry: len(entry["properties"].keys() & value.keys()))
                assert opened["properties"]["kind"]["const"] == value["kind"], opened["title"]


def test_evaluate_deployment_accepts_its_documented_commands() -> None:
    """It needs a run."""
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate

    deployment = parsed()["evaluate/evaluate"]
    schema = parameter_schema(deployment.flow).model_dump()
    assert set(schema["required"]) - set(deployment.parameters) == {"run"}
    shown = dict(re.findall(r"`(train-litgpt evaluate|prefect deployment run) (.*)`", deployment.description))
    name, *options = shlex.split(shown["prefect deployment run"])
    arguments = dict(entry.split("=", 1) for entry in options if entry != "-p")
    requests = json.loads(arguments["evaluation"])
    assert name == "evaluate/evaluate"
    validate({**deployment.parameters, **arguments, "evaluation": requests}, schema, raise_on_error=True)
    for evaluation in (deployment.parameters["evaluation"], requests):
        EvaluationConfig.model_validate(evaluation)
    _, *query = shlex.split(shown["train-litgpt evaluate"])
    validated(EvaluationConfig, overrides_of(query), where="it")


def test_template_of_the_kubernetes_pool_is_valid() -> None:
    """Prefect accepts it, and what it names is in the checkout."""
    from prefect.server.schemas.actions import WorkPoolCreate

    template = json.loads((CHECKOUT / "deployments" / "kubernetes-pool.json").read_text())
    WorkPoolCreate(name="litgpt-gke", type="kubernetes", base_job_template=template)
    registry = Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
    foreign = json.loads(registry.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    for part in ("job_configuration", "variables"):
        assert template[part].keys() - {"required"} <= foreign[part].keys()
    known, job = foreign["variables"]["properties"], template["job_configuration"]["job_manifest"]
    assert template["variables"]["properties"].keys() == known.keys() - {"cluster_config"}
    theirs_job = foreign["job_configuration"]["job_manifest"]
    pod = theirs_job["spec"]["template"]["spec"]  # Prefect's has two fields of a Job here, which strict servers refuse
    theirs_job["spec"] |= {name: pod.pop(name) for name in ("parallelism", "completions")}
    assert job == theirs_job
    account = template["variables"]["properties"]["service_account_name"]["default"]
    assert template["variables"]["properties"]["env"]["default"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    roles = list(yaml.safe_load_all((CHECKOUT / "deployments" / "rbac.yaml").read_text()))
    bound = [subject for role in roles for subject in role.get("subjects", ()) if subject["kind"] == "ServiceAccount"]
    assert [entry["name"] for entry in bound] == [account, account]


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
    found = {entry["name"]: accepted(entry) for entry in yaml.safe_load(AUTOMATIONS_FILE.read_text())}
    names = ("mark-dead-flow-runs", "resume-crashed", "cancel-orphaned-jobs", "notify-on-failure")
    dead, crashed, cancelled, bad = (found[name].trigger for name in names)
    # A server that was away must not look like the death of orchestrators.
    assert dead.within.total_seconds() >= 1200
    # A flow run that a worker took and had not begun when it died is pending, and never gave a sign.
    named = ("Pending", "Submitting", "InfrastructurePending", "Running")
    assert dead.after == {f"prefect.flow-run.{sign}" for sign in ("heartbeat", *named)}
    # Each begins the wait anew, and an end ends it.
    ends = ("Completed", "Failed", "Cancelled", "Crashed")
    assert dead.expect == dead.after | {f"prefect.flow-run.{end}" for end in ends}
    assert crashed.expect == {"prefect.flow-run.Crashed"}
    assert cancelled.expect == {"prefect.flow-run.Cancelled"}
    assert set(bad.match_related["prefect.resource.name"]) == {*KINDS, "evaluate"}


def event_of(kind: str, message: str, run_count: int = 1, tags: tuple[str, ...] = ("litgpt", "resume-on-crash")) -> Any:
    """The event of a state, as prefect/server/models/events.py makes it for a flow run of train-litgpt."""
    from prefect.server.events.schemas.events import ReceivedEvent

    resource = {"prefect.resource.id": f"prefect.flow-run.{uuid4()}", "prefect.resource.name": "gpt-0123456789"}
    resource |= {"prefect.run-count": str(run_count), "prefect.state-name": kind, "prefect.state-message": message}
    resource |= {"prefect.state-type": kind.upper(), "prefect.state-timestamp": datetime.now(UTC).isoformat()}
    related = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in tags]
    flow = {"prefect.resource.id": f"prefect.flow.{uuid4()}", "prefect.resource.role": "flow"}
    related.append(flow | {"prefect.resource.name": "train-litgpt"})
    document = {"event": f"prefect.flow-run.{kind}", "resource": resource, "related": related, "id": uuid4()}
    return ReceivedEvent.model_validate(document | {"occurred": datetime.now(UTC), "payload": {}})


AUTOMATIONS = {automation["name"]: automation for automation in yaml.safe_load(AUTOMATIONS_FILE.read_text())}


def trigger_of(name: str) -> Any:
    from prefect.server.events.schemas.automations import EventTrigger

    return EventTrigger.model_validate(AUTOMATIONS[name]["trigger"])


def reactions_to(event: Any) -> set[str]:
    """The automations that the event starts, without those that wait for a silence or for several events."""
    return {name for name in AUTOMATIONS if (trigger := trigger_of(name)).immediate and trigger.covers(event)}


def exited(code: int) -> str:
    from prefect._internal.infrastructure_exit_codes import get_infrastructure_exit_info

    return f" {code}. {get_infrastructure_exit_info(code).explanation}"


@pytest.mark.parametrize(
    "query", ["Process exited with status code:", "Flow run infrastructure exited with non-zero status code"]
)
def test_flow_run_that_cannot_begin_ends_after_its_first_crash(query: str) -> None:
    """The flow's own limit of starts is never reached where its parameters, its imports or its folder are wrong."""
    for code in (1, 2, 77, 125, 127):
        assert reactions_to(event_of("Crashed", query + exited(code), 0)) == {"end-unstartable", "notify-on-failure"}
    for code in (-9, -15, 137, 143, 247):  # its machine was too full, or went away
        assert reactions_to(event_of("Crashed", query + exited(code), 0)) == {"resume-killed", "notify-on-failure"}
    for code in (1, -9):  # also of a flow run whose server was away for too long
        assert reactions_to(event_of("Crashed", query + exited(code))) == {"resume-crashed", "notify-on-failure"}


@pytest.mark.parametrize(
    "message", ["Flow run could not start: no space left", "Failed to submit flow run to infrastructure: OSError: full"]
)
def test_flow_run_whose_process_cannot_start_ends(message: str) -> None:
    assert reactions_to(event_of("Crashed", message, 0)) == {"end-unstartable", "notify-on-failure"}


def test_flow_run_of_a_dead_machine_is_started_again() -> None:
    [silent] = AUTOMATIONS["mark-dead-flow-runs"]["actions"]
    for message in (silent["message"], ORPHANED):
        for count, name in ((0, "resume-killed"), (1, "resume-crashed")):
            assert reactions_to(event_of("Crashed", message, count)) == {name, "notify-on-failure"}


def test_crash_loop_ends_after_20_starts_within_an_hour() -> None:
    """A process that dies before it counts its starts, as after an update of the checkout."""
    trigger = trigger_of("end-crash-loop")
    assert (trigger.threshold, trigger.within.total_seconds()) == (MAX_RESUMES, 3600)
    assert trigger.covers(event_of("AwaitingRetry", "Crashed; started again by the automation resume-crashed"))
    assert [action["state"] for action in AUTOMATIONS["end-crash-loop"]["actions"]] == ["FAILED"]


def test_only_flow_runs_with_our_heartbeat_are_marked_dead() -> None:
    trigger = trigger_of("mark-dead-flow-runs")
    assert trigger.covers(event_of("heartbeat", ""))
    # By hand (`train-litgpt run`), or another team's: Prefect's heartbeat of 180 s.
    assert not trigger.covers(event_of("heartbeat", "", tags=()))


@pytest.mark.parametrize(
    ("kind", "message", "is_sent"),
    [
        ("Crashed", "Process exited with status code: -9.", True),
        ("Failed", "Flow run encountered an exception: JobFailed: user error on node 0", True),
        ("Failed", "", True),
        ("Failed", "Flow run encountered an exception: JobCancelled: gpt was cancelled; run it again", False),
        ("Cancelled", "", False),
        ("Completed", "All states completed.", False),
    ],
)
def test_notice_is_sent_of_each_bad_end_but_no_cancellation(kind: str, message: str, is_sent: bool) -> None:
    assert ("notify-on-failure" in reactions_to(event_of(kind, message, tags=()))) is is_sent


def test_notice_names_the_state_of_its_event() -> None:
    """By the time that the notice is rendered, the flow run may be scheduled again: its advice would be lost."""
    from prefect.server.events.actions import CallWebhook
    from prefect.server.schemas.responses import FlowRunResponse

    resource = event_of("Crashed", "killed").resource
    later = {"id": str(uuid4()), "flow_id": str(uuid4()), "name": "gpt"}
    later |= {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}}
    action = CallWebhook(block_document_id=uuid4(), payload="")
    rendered: Any = action.instantiate_object(FlowRunResponse, later, triggered_action=Mock(), resource=resource)
    assert (rendered.state.name, rendered.state.message) == ("Crashed", "killed")


def notice_of(message: str) -> str:
    """The text that the webhook gets, rendered as Prefect's server does."""
    from prefect.server.events.jinja_filters import all_filters
    from prefect.server.utilities.user_templates import register_user_template_filters, render_user_template_sync

    register_user_template_filters(all_filters)
    [payload] = [action["payload"] for action in AUTOMATIONS["notify-on-failure"]["actions"]]
    state = {"name": "Failed", "message": message}
    context = {"flow_run": {"name": "gpt", "state": state}, "flow": {"name": "train-litgpt"}}
    return str(json.loads(render_user_template_sync(payload, context))["text"])


def test_notice_is_short_text_without_commands_to_slack() -> None:
    text = notice_of("ValueError: <!channel> see <https://evil.example|the log> & retry")
    assert "&lt;!channel&gt; see &lt;https://evil.example|the log&gt; &amp; retry" in text
    assert "<" not in text
    assert len(notice_of("<" * 100_000)) < 4 * 3010
