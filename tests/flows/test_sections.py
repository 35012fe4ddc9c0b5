from __future__ import annotations

from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError

from flows.sections import tell_of_defaults
from flows.train_litgpt import train_litgpt
from launcher.events import Event, Listener, Note
from litgpt_demo.config import TrainConfig


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
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "11111111-1111-1111-1111-111111111111")
    [warning] = told(train=part)
    assert warning.startswith("train was given with max_steps alone: its other settings are defaults")
    assert """-p 'overrides={"train.max_steps": 200}'""" in warning
    assert told(train=whole, other=TrainConfig()) == []
