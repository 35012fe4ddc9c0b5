"""A config's sections as parameters of a flow: to give one replaces the deployment's, which is rarely what is meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from prefect.runtime import deployment
from pydantic import ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from launcher.events import Note
from litgpt_demo.config import Settings
from tasks.steps import emit

T = TypeVar("T")


def _explained(value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Validate a section; where it cannot be used, say how single settings are changed."""
    try:
        return validate(value)
    except ValidationError as error:
        if not isinstance(value, Mapping):
            raise
        problems = (
            ": ".join(filter(None, [".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")]))
            for one in error.errors(include_url=False)
        )
        raise ValueError(f"{'; '.join(problems)}. {_advice(info.field_name or 'section', value)}") from error


Section = Annotated[T, WrapValidator(_explained)]
"""A section whose refusal names `overrides`."""


def tell_of_defaults(sections: Mapping[str, Settings]) -> None:
    """Warn of sections that were given to a deployment's flow run in part: the rest of them are defaults."""
    for name, section in sections.items():
        given, there = section.model_fields_set, set(type(section).model_fields)
        if deployment.id and given and given < there:  # a deployment's own sections are whole, or not given at all
            what = f"{name} was given with {', '.join(sorted(given))} alone: its other settings are defaults"
            advice = _advice(name, section.model_dump(mode="json", exclude_unset=True))
            emit(Note(what=f"{what}. {advice}", severity="warning"))


def _advice(section: str, given: Mapping[str, Any]) -> str:
    name = next((name for name in given if name != "kind"), "setting")
    single = json.dumps({f"{section}.{name}": given.get(name)})
    return (
        "A section that is given replaces the deployment's whole section; a single setting is changed by "
        f"-p 'overrides={single}', or by `train-litgpt submit`"
    )
