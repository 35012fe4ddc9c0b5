"""The parameters of flows: derived from the configs, refused and warned of where a section is given in part."""

from __future__ import annotations

from typing import Any

import pytest
from prefect import Flow, flow
from prefect.exceptions import ParameterTypeError
from pydantic import Field

from flows.benchmark_network import benchmark_network
from flows.parameters import DATASET_FIELDS, config_from, takes, tell_of_defaults
from flows.prepare_dataset import prepare_dataset
from flows.run_torchrun import run_torchrun
from flows.submission import KINDS
from flows.sweep_litgpt import sweep_litgpt
from flows.train_litgpt import train_litgpt
from launcher.config import RunConfig
from launcher.errors import ConfigProblem
from launcher.events import Event, Listener, Note
from litgpt_demo.config import Settings, TrainConfig

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
