"""The parameters of flows: derived from the configs, refused and warned of where a section is given in part."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow, flow, runtime
from prefect.exceptions import ParameterTypeError
from prefect.utilities.schema_tools.validation import validate
from pydantic import Field

from flows.benchmark_network import benchmark_network
from flows.parameters import DATASET_FIELDS, config_from, named, takes, tell_of_defaults
from flows.prepare_dataset import prepare_dataset
from flows.run_torchrun import run_torchrun
from flows.submission import KINDS
from flows.sweep_litgpt import sweep_litgpt
from flows.train_litgpt import train_litgpt
from launcher.config import DaskWorkers, RunConfig, ThreadWorkers, load, overridden
from launcher.errors import ConfigProblem
from launcher.events import Event, Listener, Note
from litgpt_demo.config import TrainConfig
from litgpt_demo.settings import Settings

CONFIGS = Path(__file__).parents[2] / "deployments" / "configs"
FLOWS = (train_litgpt, prepare_dataset, run_torchrun, sweep_litgpt, benchmark_network)


@pytest.mark.parametrize("one", FLOWS, ids=lambda one: one.name)
def test_a_flows_form_has_the_names_types_defaults_and_help_of_its_config(one: Flow[..., Any]) -> None:
    kind = KINDS[one.name]
    config = kind.model_json_schema(ref_template="#/definitions/{model}")
    fields = DATASET_FIELDS if one is prepare_dataset else tuple(kind.model_fields)
    form = one.parameters.properties
    assert [*form] == [*fields, "overrides"]
    for position, name in enumerate(fields):
        assert form[name] == {**config["properties"][name], "title": name, "position": position}
    assert one.parameters.required == config.get("required", [])
    assert form["overrides"]["default"] == {}
    for name, section in one.parameters.definitions.items():
        assert section == config["$defs"][name]


class Notes(Settings):
    """A section that RunConfig does not have."""

    author: str = "nobody"
    """The person to ask."""
    pages: int = Field(1, ge=1)
    """Pages at most."""


class WiderConfig(RunConfig):
    notes: Notes = Notes()
    """The notes to write down."""


@flow(name="wider", persist_result=False)
@takes(WiderConfig)
async def wider(**parameters: Any) -> WiderConfig:
    """Return the config."""
    return config_from(WiderConfig, parameters)


def test_a_section_that_is_added_to_a_config_is_in_the_form_the_overrides_and_the_config() -> None:
    """Its field is all that it costs."""
    field = wider.parameters.properties["notes"]
    assert (field["description"], field["default"]) == ("The notes to write down.", {"author": "nobody", "pages": 1})
    assert wider.parameters.definitions["Notes"]["properties"]["author"]["description"] == "The person to ask."
    assert list(RunConfig.model_fields) == [
        name for name in wider.parameters.properties if name not in {"notes", "overrides"}
    ]

    given = wider.validate_parameters({"notes": {"author": "me"}, "overrides": {"notes.pages": 3, "name": "mine"}})
    made = config_from(WiderConfig, given)
    assert (made.name, made.notes, made.train) == ("mine", Notes(author="me", pages=3), TrainConfig())


@pytest.mark.prefect
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"name": "mine"}, "mine of stdlib"),
        ({"name": "mine", "overrides": {"name": "short"}}, "short of stdlib"),
        ({"overrides": {"name": "short", "data.corpus": {"kind": "files", "paths": ["a"]}}}, "short of files"),
        ({"overrides": {"name": "short", "data": 3}}, "short"),
    ],
)
def test_a_flow_run_is_named_after_its_config_with_its_overrides(
    prefect_api: None, given: dict[str, Any], name: str
) -> None:
    @flow(flow_run_name=named("{name} of {data[corpus][kind]}"), persist_result=False)
    @takes(RunConfig)
    async def anything(**parameters: Any) -> str:
        return str(runtime.flow_run.name)

    assert asyncio.run(anything(**given)) == name


def test_what_a_section_does_not_allow_is_refused_in_the_form_and_in_the_overrides() -> None:
    with pytest.raises(ParameterTypeError, match="pages"):
        wider.validate_parameters({"notes": {"pages": 0}})
    with pytest.raises(ConfigProblem, match=r"notes\.pages"):
        config_from(WiderConfig, {"overrides": {"notes.pages": 0}})


@pytest.mark.parametrize(
    ("given", "problem", "single"),
    [
        ({"train": {"max_steps": 20}}, "train.warmup_steps=100 leaves nothing", '{"train.max_steps": 20}'),
        ({"platform": {"kind": "local", "nods": 2}}, "local.nods: Extra inputs", '{"platform.nods": 2}'),
        ({"data": {"split_seed": -1}}, "split_seed: ", '{"data.split_seed": -1}'),
    ],
)
def test_a_section_that_cannot_be_used_names_overrides(given: dict[str, Any], problem: str, single: str) -> None:
    with pytest.raises(ParameterTypeError) as refused:
        train_litgpt.validate_parameters(given)
    assert problem in str(refused.value)
    assert f"-p 'overrides={single}'" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"workers": {"count": 1}}, ThreadWorkers(count=1)),
        ({"workers": {"scheduler": "tcp://10.0.0.2:8786"}}, DaskWorkers(scheduler="tcp://10.0.0.2:8786")),
        ({"train": {"max_time": 3600}}, timedelta(hours=1)),
        ({"train": {"max_time": "8h"}}, timedelta(hours=8)),
        ({"train": {"max_time": "PT8H"}}, timedelta(hours=8)),
    ],
    ids=str,
)
def test_prefects_server_lets_through_every_way_to_write_a_setting(given: dict[str, Any], made: object) -> None:
    """It checks by the flow's schema alone, before the flow reads what was given."""
    validate(given, train_litgpt.parameters.model_dump(), raise_on_error=True)
    taken = train_litgpt.validate_parameters(given)
    assert made in (taken["workers"], taken["train"].max_time)


def test_a_section_that_can_be_used_is_taken_as_it_is() -> None:
    taken = train_litgpt.validate_parameters({"train": {"max_steps": 200}, "platform": {"kind": "local", "nodes": 2}})
    assert (taken["train"].max_steps, taken["platform"].nodes) == (200, 2)


def told(**sections: Any) -> list[str]:
    """The warnings about these sections."""
    events: list[Event] = []
    with Listener(events.append):
        tell_of_defaults(sections)
    return [event.what for event in events if isinstance(event, Note) and event.severity == "warning"]


def test_a_deployments_run_warns_where_the_rest_of_a_section_is_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    part, whole = TrainConfig(max_steps=200), TrainConfig.model_validate(TrainConfig().model_dump())
    assert told(train=part) == [], "in a file of one's own what is left out is meant to be a default"
    monkeypatch.setattr("flows.parameters.deployed", lambda: True)
    [warning] = told(train=part)
    assert warning.startswith("train was given with max_steps alone: its other settings are defaults")
    assert """-p 'overrides={"train.max_steps": 200}'""" in warning
    assert told(train=whole, other=TrainConfig()) == []


@pytest.mark.parametrize("name", ["local", "gke", "runai", "batch", "slurm"])
def test_no_run_of_a_shipped_deployment_is_told_that_it_was_given_a_part(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.parameters.deployed", lambda: True)
    shipped = load(RunConfig, CONFIGS / f"{name}.yaml").model_dump(mode="json")
    for changes in ({}, {"model.from": "gs://weights/llama"}):
        written = overridden(shipped, changes)
        handed_over = train_litgpt.validate_parameters(written)
        assert told(**{name: value for name, value in handed_over.items() if isinstance(value, Settings)}) == []
