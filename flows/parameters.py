"""The parameters of all flows, the guard that keeps a resumed flow run from running forever or twice, and the hook.

A flow's parameters are the fields of its config: Prefect's form has their names, types, defaults and help texts.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args
from uuid import UUID

import coolname.data
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run as this_flow_run
from prefect.utilities.urls import url_for
from pydantic import (
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.fields import FieldInfo

from flows.server import require_server
from launcher.benchmark import BenchmarkConfig
from launcher.config import AnyConfig, PlatformConfig, RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.events import SCRIPT_STEPS, TRAINING_STEPS, FlowRunStarted, Note, Step, report
from launcher.runs.attempts import Attempts, cancel_all, platform_opener
from launcher.runs.index import Index
from litgpt_demo.config import INTEGERS, Settings, bounded, described
from litgpt_demo.documents import first_problem
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.storage.private import make_temporary
from tasks.steps import emit

T = TypeVar("T")

# The model behind each flow's parameters; prepare-dataset takes three sections of a training's.
KINDS: Mapping[str, type[RunConfig] | type[ScriptConfig] | type[SweepConfig] | type[BenchmarkConfig]] = {
    "train-litgpt": RunConfig,
    "prepare-dataset": RunConfig,
    "run-torchrun": ScriptConfig,
    "sweep-litgpt": SweepConfig,
    "benchmark-network": BenchmarkConfig,
}

DATASET_FIELDS = ("root", "data", "dataset_workers")
"""The fields of a training's config that decide what its dataset is, where it is put and who prepares it."""

# Automation `resume-crashed` restarts a crashed orchestrator; one that crashes this often has another problem.
MAX_RESUMES = 20

_BOUNDED = GetPydanticSchema(lambda source, handler: bounded(handler(source)))  # Settings does it for its own fields


def _writable(depth: int = 4) -> dict[str, Any]:
    """Return the JSON schema of a value whose integers Prefect's server can write, so that it refuses others itself."""
    bounds = {"if": {"type": "integer"}, "then": {"minimum": INTEGERS[0], "maximum": INTEGERS[-1]}}
    parts = {"items": _writable(depth - 1), "patternProperties": {"": _writable(depth - 1)}} if depth else {}
    return {**bounds, **parts}


_OVERRIDES = FieldInfo(
    annotation=dict[str, Any],
    default={},
    json_schema_extra={"patternProperties": {"": _writable()}},
    description='Single settings by their dotted names: {"train.max_steps": 100}. They win over the sections; '
    "a section given with -p replaces the deployment's whole section.",
)


def with_config_parameters(
    kind: type[AnyConfig], only: Sequence[str] = (), *, has_form: bool = True
) -> Callable[[Callable[[AnyConfig], Coroutine[Any, Any, T]]], Callable[..., Coroutine[Any, Any, T]]]:
    """Give a flow the fields of `kind` as parameters, all or `only` some, and `overrides`. Prefect makes its form and
    its validation from a function's signature and from the `Args:` of its docstring. Without a form it takes any value.
    """

    def with_parameters(flow: Callable[[AnyConfig], Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
        @wraps(flow)
        async def begun(**values: Any) -> T:
            steps: tuple[Step, ...] = TRAINING_STEPS
            if not issubclass(kind, RunConfig):
                steps = SCRIPT_STEPS
            elif only:
                steps = (Step.DATASET,)
            elif values.get("evaluation"):
                steps += (Step.EVALUATION,)
            begin(steps)
            return await flow(config_from(kind, values))

        parameters, lines, kinds = [], [], inspect.Parameter
        fields = {"overrides": _OVERRIDES} | {name: described(kind)[name] for name in only or kind.model_fields}
        for name, field in fields.items():
            # The type with all metadata of the field, such as a pattern or a union's discriminator.
            annotation: Any = Annotated[field.annotation, field, _BOUNDED]
            branches = get_args(field.annotation) or (field.annotation,)
            if not has_form:
                annotation = Any
            elif all(isinstance(branch, type) and issubclass(branch, Settings) for branch in branches):
                annotation = Annotated[annotation, WrapValidator(_explained)]
            default = kinds.empty if field.is_required() else field.get_default(call_default_factory=True)
            parameters.append(kinds(name, kinds.KEYWORD_ONLY, annotation=annotation, default=default))
            lines.append(f"    {name}: {' '.join((field.description or '').split())}")
        returns = inspect.signature(flow).return_annotation
        begun.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
        begun.__doc__ = "\n".join([inspect.getdoc(flow) or "", "", "Args:", *lines])
        return begun

    return with_parameters


def deployed() -> bool:
    """Return True if this flow run is a deployment's. Prefect's `runtime.deployment` would query the API each time."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


def begin(steps: tuple[Step, ...]) -> None:
    """Begin a flow of these steps: check that it is the only orchestrator of its flow run, and not one of too many."""
    # A worker reports a killed engine twice, seconds apart. The second report can hit the resumed flow run, which is
    # then resumed once more although its engine is alive.
    if deployed() and not acquire_process_lock(this_flow_run.id):
        get_run_logger().info("another process already orchestrates this flow run; this process ends")
        raise Abort  # Prefect then ends this process, and does not change the flow run's state
    # Prefect's own count of starts also grows whenever a state gets a name (tasks.report.show_state).
    count = this_flow_run.run_count or 0
    if count > MAX_RESUMES:
        with get_client(sync_client=True) as client:  # the state is pending before each start
            count = sum(state.is_pending() for state in client.read_flow_run_states(UUID(this_flow_run.id)))
    if count > MAX_RESUMES:
        raise ConfigProblem(
            f"this flow run has been started {count} times, and its orchestrator keeps crashing",
            fix="read its logs, then start a new flow run, which reattaches to a running job",
        )
    report(FlowRunStarted(id=str(this_flow_run.id), steps=steps))


async def name_flow_run(name: str) -> None:
    """Name this flow run, unless a person has named it: a name of Prefect's server is two words of coolname."""
    lists = cast(Any, coolname.data.config).values()
    known = {word for entry in lists for word in entry.get("words", ())}
    if {*this_flow_run.name.split("-")} <= known:
        async with get_client() as client:
            await client.set_flow_run_name(this_flow_run.id, name)


def acquire_process_lock(flow_run: str) -> bool:
    """Lock a flow run until this process ends; return False if another process of this machine holds its lock."""
    lock = os.open(make_temporary("flow-runs") / f"{flow_run}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    return True


def cancel_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel every live job that a cancelled flow run started or reattached to, and prove that no resources remain.
    Prefect calls this with exactly these keyword names, in a new process that shares nothing with the flow."""
    logger, parameters = flow_run_logger(flow_run, flow), flow_run.parameters
    index, opener = Index.of(root_of(parameters)), platform_opener(platform_of(parameters))
    own: list[Attempts] = []
    unreadable: list[TrainLitgptError] = []
    for run, attempt in index.attempts_of_flow_run(str(flow_run.id)).items():
        attempts = Attempts(index=index, run=run, open_platform=opener)
        try:
            if attempts.records()[-1].attempt == attempt:
                own.append(attempts)
        except TrainLitgptError as error:
            unreadable.append(error)
    cancelled, problems = cancel_all(own, log=logger.warning)
    problems = problems + unreadable
    if problems:  # all others are cancelled by now
        raise type(problems[0])("; ".join(map(str, problems)), fault=problems[0].fault) from problems[0]
    for run in cancelled:
        logger.info("cancelled %s; no resources remain", run)
    if not cancelled:
        logger.info("there was no live job to cancel")


def root_of(parameters: Mapping[str, Any]) -> str:
    overrides = parameters.get("overrides") or {}
    return str(overrides.get("root") or parameters.get("root") or RunConfig.model_fields["root"].default)


def platform_of(parameters: Mapping[str, Any]) -> PlatformConfig | None:
    """Return the `platform` section that a flow run with these parameters was started with; None if it is invalid."""
    overrides = parameters.get("overrides") or {}
    changes = {name: value for name, value in overrides.items() if name.partition(".")[0] == "platform"}
    try:
        document = overridden({"platform": parameters.get("platform") or {}}, changes)
        return TypeAdapter[PlatformConfig](PlatformConfig).validate_python(document["platform"])
    except (ConfigProblem, ValidationError):
        return None


def config_from(kind: type[AnyConfig], parameters: Mapping[str, Any]) -> AnyConfig:
    sections = {name: value for name, value in parameters.items() if isinstance(value, Settings)}
    warn_partial_sections(sections)
    document = {name: value for name, value in parameters.items() if name != "overrides"}
    document |= {name: section.model_dump(mode="json") for name, section in sections.items()}
    return validated(kind, overridden(document, parameters.get("overrides") or {}), where="the parameters")


def _explained(value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        if not isinstance(value, Mapping):
            raise
        raise ValueError(f"{first_problem(error)}. {_advice(info.field_name or 'section', value)}") from error


def warn_partial_sections(sections: Mapping[str, Settings]) -> None:
    """Warn of sections that a deployment's flow run got only in part: the rest of them are defaults."""
    for name, section in sections.items():
        fields = section.model_fields_set
        is_partial = bool(fields) and fields < section.model_dump().keys()
        if deployed() and is_partial:  # a deployment's own sections are complete, or not set at all
            what = f"{name} was set with only {', '.join(sorted(fields))}: its other settings are defaults"
            advice = _advice(name, section.model_dump(mode="json", exclude_unset=True))
            emit(Note(what=f"{what}. {advice}", severity="warning"))


def _advice(section: str, values: Mapping[str, Any]) -> str:
    name = next((name for name in values if name != "kind"), "setting")
    single = json.dumps({f"{section}.{name}": values.get(name)})
    return (
        "A section replaces the deployment's whole section. Change a single setting by "
        f"-p 'overrides={single}', or by `train-litgpt submit`"
    )


def submit_deployment(
    name: str, overrides: Mapping[str, Any], *, platform_file: Mapping[str, Any] | None = None
) -> tuple[str, str, str | None]:
    """Create a flow run of a deployment. A `platform_file`'s sections replace the deployment's own. Returns the flow
    run's id, because its name changes, the deployment's full name, and the flow run's page."""
    deployments = list_deployments(name.rpartition("/")[2])
    matches = [full for full, deployment in deployments.items() if name in (full, deployment.name)]
    if not matches:
        raise ConfigProblem(f"there is no deployment {name}; choose one of {', '.join(sorted(list_deployments()))}")
    if len(matches) > 1:
        raise ConfigProblem(f"{name} is the name of several deployments; give one of {', '.join(sorted(matches))}")
    full, deployment = matches[0], deployments[matches[0]]
    parameters = parameters_with(full.split("/")[0], deployment.parameters, overrides, platform_file=platform_file)
    return _created(full, deployment, parameters)


def submit_config(settings: AnyConfig, name: str) -> tuple[str, str, str | None]:
    """Create a flow run of a deployment of the config's flow, with the config's settings. It is the deployment of the
    config's name, else one with its kind of platform, else any, and decides only the work pool."""
    flow = next(flow for flow, kind in KINDS.items() if type(settings) is kind)
    document, deployments = settings.model_dump(mode="json"), list_deployments()
    candidates = sorted(full for full in deployments if full.startswith(f"{flow}/"))
    if not candidates:
        fix = "deploy them with `train-litgpt deploy`"
        raise ConfigProblem(f"Prefect's server has no deployment of {flow}", fix=fix)
    kinds = {full: (deployments[full].parameters.get("platform") or {}).get("kind") for full in candidates}
    full = next((full for full in candidates if kinds[full] == document["platform"]["kind"]), candidates[0])
    if f"{flow}/{name}" in candidates:
        full = f"{flow}/{name}"
    return _created(full, deployments[full], parameters_with(flow, document, {}) | {"overrides": {}})


def _created(full: str, deployment: DeploymentResponse, parameters: dict[str, Any]) -> tuple[str, str, str | None]:
    with get_client(sync_client=True) as client:
        created = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
    return str(created.id), full, url_for("flow-run", created.id)


def list_deployments(name: str | None = None) -> dict[str, DeploymentResponse]:
    """Return the server's deployments, all or only those of a name, by FLOW/DEPLOYMENT."""
    require_server()
    only = None if name is None else DeploymentFilter(name=DeploymentFilterName(any_=[name]))
    with get_client(sync_client=True) as client:
        deployments: list[DeploymentResponse] = []
        while True:
            page = client.read_deployments(deployment_filter=only, limit=200, offset=len(deployments))
            if not page:
                break
            deployments += page  # the server returns at most 200 at once
        flows = {flow: client.read_flow(flow).name for flow in {deployment.flow_id for deployment in deployments}}
    return {f"{flows[deployment.flow_id]}/{deployment.name}": deployment for deployment in deployments}


def parameters_with(
    flow: str,
    parameters: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    platform_file: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a deployment's complete parameters, in JSON's types, with a platform file's sections and dotted overrides.
    Prefect merges only top-level names, and `train: {max_steps: …}` would replace the whole section."""
    kind = KINDS.get(flow)
    if kind is None:
        raise ConfigProblem(f"the flow {flow} has no config to change; flows with a config are {', '.join(KINDS)}")
    stored = {name: value for name, value in parameters.items() if name != "overrides"}
    stored = overridden(stored, parameters.get("overrides") or {})
    document = overridden({**stored, **(platform_file or {})}, overrides)
    settings = validated(kind, document, where="the deployment's parameters with your changes")
    if isinstance(settings, ScriptConfig) and settings.code and not Path(settings.code.folder).is_absolute():
        raise ConfigProblem(
            f"code.folder={settings.code.folder} is relative, but a worker starts in another folder",
            fix="give an absolute path of a folder that the worker has",
        )
    complete: dict[str, Any] = settings.model_dump(mode="json")
    if flow == "prepare-dataset":
        complete = {name: complete[name] for name in DATASET_FIELDS}
    if parameters.get("overrides"):  # they are applied by now, and would win over yours
        complete["overrides"] = {}
    return complete
