"""The parameters of flows: derived from the configs, refused and warned of where a section is given in part."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import orjson
import pytest
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.exceptions import ParameterTypeError, PrefectHTTPStatusError
from prefect.runtime import flow_run as this_flow_run

from flows.parameters import (
    DATASET_FIELDS,
    KINDS,
    config_from,
    list_deployments,
    name_flow_run,
    submit_config,
    submit_deployment,
    warn_partial_sections,
)
from flows.run_torchrun import benchmark_network, run_torchrun
from flows.sweep_litgpt import sweep_litgpt
from flows.train_litgpt import prepare_dataset, train_litgpt
from flows.training import _train_here
from launcher.benchmark import BenchmarkConfig
from launcher.config import LaunchSettings, RunConfig, validated
from launcher.errors import ConfigProblem
from launcher.events import Event, Listener, Note
from litgpt_demo.config import TrainConfig

FLOWS = (train_litgpt, prepare_dataset, run_torchrun, sweep_litgpt, benchmark_network)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_form_of_a_flow_has_the_fields_of_its_config(flow: Flow[..., Any]) -> None:
    kind = KINDS[flow.name]
    config = kind.model_json_schema(ref_template="#/definitions/{model}")
    fields = DATASET_FIELDS if flow is prepare_dataset else tuple(kind.model_fields)
    form = flow.parameters.properties
    assert [*form] == ["overrides", *fields]
    for position, name in enumerate(fields, start=1):
        expected = {**config["properties"][name], "title": name, "position": position}
        expected["description"] = " ".join(expected["description"].split())
        assert form[name] == expected
    assert flow.parameters.required == config.get("required", [])
    for name, section in flow.parameters.definitions.items():
        assert section == config["$defs"][name]
        titles = [field.get("title") for field in section.get("properties", {}).values()]
        assert None not in titles
        assert len(titles) == len({*titles}), "sections of one class are told apart"
    assert "sweep" not in flow.parameters.definitions.get("LaunchSettings", {}).get("properties", {}), "sweeps set it"


def test_flow_of_a_command_has_the_parameters_of_its_form() -> None:
    """Prefect stores them with the flow run, and whatever reads them does not know who started it."""
    command, deployment = (inspect.signature(flow.fn).parameters for flow in (_train_here, train_litgpt))
    assert _train_here.name == train_litgpt.name
    assert [(name, part.default) for name, part in command.items()] == [
        (name, part.default) for name, part in deployment.items()
    ]


@pytest.mark.usefixtures("prefect_api")
def test_overrides_with_an_integer_too_large_are_refused() -> None:
    """Prefect's server would store it, and from then on list no flow runs any more."""
    form = train_litgpt.parameters.model_dump()
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("train-litgpt")
        made = client.create_deployment(flow, "large", parameter_openapi_schema=form, enforce_parameter_schema=True)
        for value in (2**64, -(2**63) - 1, [10**20], {"n_layer": [{"x": 10**20}]}):
            with pytest.raises(PrefectHTTPStatusError, match="409 Conflict"):
                client.create_flow_run_from_deployment(made, parameters={"overrides": {"model.config": value}})
        largest = {"train.seed": 2**64 - 1, "train.learning_rate": 1e-3, "model.config": {"n_layer": None, "x": ["y"]}}
        client.create_flow_run_from_deployment(made, parameters={"overrides": largest})
        assert len(client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[made])))) == 1


def integers_in(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and schema of each integer."""
    if isinstance(schema, dict) and schema.get("type") == "integer":
        yield path, schema
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, part in parts:
        yield from integers_in(part, f"{path}/{name}")


def test_flow_takes_no_integer_that_prefect_cannot_write() -> None:
    integers = [named for flow in FLOWS for named in integers_in(flow.parameters.model_dump(), flow.name)]
    assert len(integers) > 200
    for path, schema in integers:
        if path.endswith("/if"):  # of a value of any type, whose bounds stand beside it
            continue
        bounds = [schema.get(end, schema.get(f"exclusive{end.title()}")) for end in ("minimum", "maximum")]
        assert orjson.loads(orjson.dumps(bounds)) == bounds, path
        assert None not in bounds, path


@pytest.mark.prefect
def test_overrides_win_over_sections_of_a_flow(tiny: Any, tmp_path: Any) -> None:
    """A flow that cannot work is refused before it writes anything."""
    with pytest.raises(ConfigProblem, match="lerning_rate"):
        config_from(RunConfig, {"overrides": {"train.lerning_rate": 1}})
    groups = {name: getattr(tiny(), name) for name in RunConfig.model_fields}
    with pytest.raises(ConfigProblem, match=r"model\.vocabulary"):
        asyncio.run(train_litgpt(**groups, overrides={"model.config.padded_vocab_size": 64}))
    assert not [*tmp_path.iterdir()]


@pytest.mark.prefect
def test_flow_run_has_its_runs_name_unless_a_person_chose_one() -> None:
    async def named() -> str:
        await name_flow_run("gpt-0123456789")
        async with get_client() as client:
            return (await client.read_flow_run(this_flow_run.id)).name

    assert asyncio.run(Flow(named)()) == "gpt-0123456789"
    assert asyncio.run(Flow(named, flow_run_name="my-first-run")()) == "my-first-run"


@pytest.mark.parametrize(
    ("arguments", "problem", "single"),
    [
        ({"train": {"max_steps": 20}}, "train.warmup_steps=100 leaves no step", '{"train.max_steps": 20}'),
        (
            {"platform": {"kind": "local", "nods": 2}},
            "Extra inputs are not permitted at local.nods",
            '{"platform.nods": 2}',
        ),
    ],
)
def test_a_section_that_cannot_be_used_names_overrides(arguments: dict[str, Any], problem: str, single: str) -> None:
    with pytest.raises(ParameterTypeError) as refused:
        train_litgpt.validate_parameters(arguments)
    assert problem in str(refused.value)
    assert f"-p 'overrides={single}'" in str(refused.value)


def test_deployment_warns_when_a_section_falls_to_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    part, complete = TrainConfig(max_steps=200), TrainConfig.model_validate(TrainConfig().model_dump())
    events: list[Event] = []
    with Listener(events.append):
        warn_partial_sections({"train": part})  # in a file of one's own what is left out is meant to be a default
        monkeypatch.setattr("flows.parameters.deployed", lambda: True)
        stored = LaunchSettings.model_validate(LaunchSettings().model_dump())
        warn_partial_sections({"train": complete, "other": TrainConfig(), "launch": stored})
        assert not events
        warn_partial_sections({"train": part})
    [warning] = [event.what for event in events if isinstance(event, Note)]
    assert """-p 'overrides={"train.max_steps": 200}'""" in warning


@pytest.mark.usefixtures("prefect_api")
def test_deployment_is_found_by_name_in_any_flow() -> None:
    """Two of one name need the flow's name."""
    names = ["train-litgpt/here", "train-litgpt/both", "prepare-dataset/text", "prepare-dataset/both"]
    with get_client(sync_client=True) as client:
        for flow, _, name in (full.partition("/") for full in names):
            client.create_deployment(client.create_flow_from_name(flow), name, description="What it does.\nHow.")
    shown = {full: flow.description for full, flow in list_deployments().items()}
    assert [shown[name] for name in names] == 4 * ["What it does.\nHow."]
    for arguments, full in (("text", "prepare-dataset/text"), ("here", "train-litgpt/here"), (names[1], names[1])):
        assert submit_deployment(arguments, {})[1] == full
    with pytest.raises(ConfigProblem, match="several deployments; give one of prepare-dataset/both, train-litgpt/both"):
        submit_deployment("both", {})
    with pytest.raises(ConfigProblem, match="no deployment prepare-dataset/here; choose one of prepare-dataset/both"):
        submit_deployment("prepare-dataset/here", {})


@pytest.mark.usefixtures("prefect_api")
def test_config_goes_to_a_deployment_without_own_settings() -> None:
    """It is one of the config's flow."""
    kept = {"name": "theirs", "overrides": {"train.max_steps": 7}}
    user_folder = validated(RunConfig, {"name": "mine", "platform": {"kind": "local", "nodes": 2}}, where="mine.yaml")
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("train-litgpt")
        for name, kind in (("a-gke", "gke"), ("b-local", "local"), ("c-local", "local"), ("d-named", "gke")):
            client.create_deployment(flow, name, parameters={**kept, "platform": {"kind": kind}})
        for arguments, full in (("other", "train-litgpt/b-local"), ("d-named", "train-litgpt/d-named")):
            flow_run, taken, _ = submit_config(user_folder, arguments)
            assert taken == full
            created = client.read_flow_run(UUID(flow_run))
            assert config_from(RunConfig, created.parameters) == user_folder
        with pytest.raises(ConfigProblem, match=r"no deployment of benchmark-network; .* `train-litgpt deploy`"):
            submit_config(BenchmarkConfig(platform=user_folder.platform), "net")
