"""A flow's parameters are the fields of its config: Prefect's form has their names, types, defaults and help texts.

A section that is given replaces the deployment's whole section, which is rarely what is meant; `overrides` changes
single settings.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args

from prefect.context import FlowRunContext
from pydantic import ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.fields import FieldInfo

from flows.hooks import deployed
from launcher.config import AnyConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.events import Note
from launcher.platforms import default_settings
from launcher.runs.index import platform_of
from litgpt_demo.settings import Settings
from tasks.steps import emit

Flow = TypeVar("Flow", bound=Callable[..., Coroutine[Any, Any, Any]])

DATASET_FIELDS = ("root", "data", "workers")
"""The fields of a training's config that decide what its dataset is, where it is put and who prepares it."""

_OVERRIDES = (
    'Single settings by their dotted names: {"train.learning_rate": 0.0003}. They win over the sections; '
    "a section given with -p replaces the deployment's whole section."
)


def takes(kind: type[Settings], only: Sequence[str] = ()) -> Callable[[Flow], Flow]:
    """Give a flow the fields of `kind` as parameters, all of them or some, and `overrides`.

    The flow itself receives them as keywords and hands them to `config_from`. Prefect makes its form, and its check of
    what is given, from a function's signature and from the `Args:` of its docstring, so that these are what is set.
    """
    fields = {name: kind.model_fields[name] for name in only or kind.model_fields}

    def with_parameters(flow: Flow) -> Flow:
        empty: dict[str, Any] = {}
        overrides = _parameter("overrides", dict[str, Any], empty)
        parameters = [_parameter(name, _annotation(field), _default(field)) for name, field in fields.items()]
        helps = {name: field.description or "" for name, field in fields.items()} | {"overrides": _OVERRIDES}
        lines = [f"    {name}: {' '.join(text.split())}" for name, text in helps.items()]
        returns = inspect.signature(flow).return_annotation
        flow.__signature__ = inspect.Signature([*parameters, overrides], return_annotation=returns)  # type: ignore[attr-defined]
        flow.__doc__ = "\n".join([inspect.getdoc(flow) or "", "", "Args:", *lines])
        return flow

    return with_parameters


def named(template: str) -> Callable[[], str]:
    """Return what names a flow run after its parameters with `overrides` applied; Prefect's own templates know no such.

    Args:
        template: a format string over the config, such as "{name}" or "prepare {data[corpus][kind]}".
    """

    def name() -> str:
        context = FlowRunContext.get()
        assert context is not None  # Prefect asks within the run
        document = _document(context.parameters or {})
        try:
            return template.format(**document)
        except (LookupError, TypeError):  # an override took a section's place, which the flow refuses with words
            return str(document.get("name", context.flow_run.name if context.flow_run else template))

    return name


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _default(field: FieldInfo) -> Any:
    return inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)


def _annotation(field: FieldInfo) -> Any:
    """Return the field's type with all that the field says of it, such as a pattern or a union's discriminator."""
    annotation = Annotated[field.annotation, field]  # type: ignore[name-defined]
    return Annotated[annotation, WrapValidator(_explained)] if _is_section(field) else annotation


def _is_section(field: FieldInfo) -> bool:
    branches = get_args(field.annotation) or (field.annotation,)
    return all(isinstance(branch, type) and issubclass(branch, Settings) for branch in branches)


def config_from(kind: type[AnyConfig], parameters: Mapping[str, Any]) -> AnyConfig:
    """Return the config that a flow's parameters make, `overrides` applied.

    Raises:
        ConfigProblem: they make none, or a deployment still has values of a shipped config that are only examples.
    """
    sections = {name: value for name, value in parameters.items() if isinstance(value, Settings)}
    tell_of_defaults(sections)
    config = validated(kind, _document(parameters), where="the parameters")
    if deployed():
        require_own(config.model_dump(mode="json"))
    return config


def _document(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters as a document, `overrides` applied."""
    whole = {name: value.model_dump(mode="json") for name, value in parameters.items() if isinstance(value, Settings)}
    document = {name: value for name, value in {**parameters, **whole}.items() if name != "overrides"}
    return overridden(document, parameters.get("overrides") or {})


# --- values that stand for the user's own -----------------------------------------------------------------------------

# The shipped configs have these where a bucket, a project or an address of yours belongs. The world has one of each,
# and none is a user's: example.com is kept free by RFC 2606, the others are taken; and nobody's login is `me`.
_NOBODYS = re.compile(
    r"gs://my-bucket\b|pkg\.dev/my-project/|@my-project\.iam\b|\bexample\.com\b|//my-company\.|^/scratch/me/"
)
# These may well be: a cluster called my-cluster is an example only next to one that is certain.
_PERHAPS = re.compile(r"my-(project|cluster|lab)")


def examples_in(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings, by their dotted names, that are examples of a shipped config still."""
    values = dict(_texts(document))
    certain = {name for name, value in values.items() if _NOBODYS.search(value)}
    return {name: value for name, value in values.items() if certain and (name in certain or _PERHAPS.fullmatch(value))}


def _texts(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{name}.")
        elif isinstance(value, str):
            yield f"{prefix}{name}", value


def how_to_give(names: Iterable[str], platform: str) -> str:
    """Say how a user gives their own values of these settings: for one run, and once for all on a platform."""
    values = json.dumps(dict.fromkeys(names, "…"), ensure_ascii=False)
    return (
        f"for one run by `-p 'overrides={values}'` or by a profile, `train-litgpt submit NAME --platform FILE`; "
        f"for every deployment on {platform} by `prefect variable set litgpt_{platform} '{{…}}'` with the same "
        "mapping, and `prefect --no-prompt deploy --all --prefect-file deployments/prefect.yaml`"
    )


def require_own(document: Mapping[str, Any]) -> None:
    """See that nothing in the parameters of a deployment's run is an example of a shipped config.

    Raises:
        ConfigProblem: something is.
    """
    if found := examples_in(document):
        given = ", ".join(f"{name}={value}" for name, value in found.items())
        how = how_to_give(found, platform_in(document))
        raise ConfigProblem(f"{given}: these are examples of the shipped config, and nobody's; give your own, {how}")


def platform_in(parameters: Mapping[str, Any]) -> str:
    """Return the platform of a flow's parameters; a flow without one is at work where its worker is."""
    return (platform_of(parameters) or default_settings()).kind


# --- a section that is given in part ----------------------------------------------------------------------------------


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


def tell_of_defaults(sections: Mapping[str, Settings]) -> None:
    """Warn of sections that were given to a deployment's flow run in part: the rest of them are defaults."""
    for name, section in sections.items():
        given = section.model_dump(mode="json", exclude_unset=True)
        # A deployment's own sections are whole, as a section is written down, or not given at all.
        if deployed() and given and given.keys() != section.model_dump(mode="json").keys():
            what = f"{name} was given with {', '.join(sorted(given))} alone: its other settings are defaults"
            emit(Note(what=f"{what}. {_advice(name, given)}", severity="warning"))


def _advice(section: str, given: Mapping[str, Any]) -> str:
    name = next((name for name in given if name != "kind"), "setting")
    single = json.dumps({f"{section}.{name}": given.get(name)})
    return (
        "A section that is given replaces the deployment's whole section; a single setting is changed by "
        f"-p 'overrides={single}', or by `train-litgpt submit`"
    )
