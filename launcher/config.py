"""A whole run as a user writes it, and how files and overrides become one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cache, reduce
from operator import or_
from pathlib import Path, PurePosixPath
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

import yaml
from pydantic import BeforeValidator, Field, JsonValue, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import ErrorDetails

from launcher import DEFAULT_ROOT
from launcher.errors import ConfigProblem
from launcher.images.settings import Image, NoImage
from launcher.platforms import default_settings, settings_classes
from launcher.platforms.settings import PlatformSettings
from launcher.yaml_files import load_yaml, read_yaml
from litgpt_demo.config import (
    Count,
    DataConfig,
    EvaluationConfig,
    FreeValue,
    ModelConfig,
    PathOrUri,
    PositiveCount,
    RestartSettings,
    Settings,
    TrainConfig,
    described,
    discriminator,
)

# A job's name is `<name>-<run id>-<attempt>-<nonce>`. Kubernetes takes 63 characters with what JobSet appends: its
# rendering refuses a name that has too many of these.
NAME_PATTERN = r"^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$"


if TYPE_CHECKING:
    PlatformConfig = PlatformSettings
else:
    PlatformConfig = Annotated[reduce(or_, settings_classes()), Field(discriminator="kind")]


class ThreadWorkers(Settings, title="Threads"):
    """Threads of the process that runs the flow. The tokenizer leaves Python's lock, so they use every core."""

    kind: Literal["threads"] = discriminator("threads")
    count: PositiveCount | None = None
    """The number of workers; empty means one per core, or two per core if the root is a bucket."""


class ProcessWorkers(Settings, title="Processes"):
    """Processes of this machine."""

    kind: Literal["processes"] = discriminator("processes")
    count: PositiveCount | None = None
    """The number of workers; empty means one per core."""


class DaskWorkers(Settings, title="Dask cluster"):
    """The workers of a Dask cluster, which must see the root and have this package installed."""

    kind: Literal["dask"] = discriminator("dask")
    scheduler: str = Field(pattern=r"^(tcp|tls|ucx|ws|wss)://")
    """Address of the cluster's scheduler: tcp://10.0.0.2:8786."""


def _with_kind(workers: object) -> object:
    """Add the `kind` to workers without one, as in `dataset_workers.count=1`: only Dask's have a scheduler, threads are
    the default. Other unions must name it, because their branches differ in results and costs."""
    if not isinstance(workers, Mapping) or "kind" in workers:
        return workers
    return {"kind": "dask" if "scheduler" in workers else "threads", **workers}


Workers = Annotated[
    ThreadWorkers | ProcessWorkers | DaskWorkers, Field(discriminator="kind"), BeforeValidator(_with_kind)
]


class Draw(Settings):
    """One trial of a sweep as its search drew it."""

    number: Count
    """The number of the draw in the search. Draws that cannot be used have numbers too, but no trial."""
    changes: dict[str, FreeValue]
    """Dotted setting to its value, exactly as the search drew it."""


class LaunchSettings(Settings, title="Launch"):
    """The treatment of live jobs with the same name. It changes nothing in what a job computes."""

    if_running: Literal["refuse", "keep", "cancel"] = "refuse"
    """If a job of this name is running with another dataset, model or script: refuse to start, keep it and start a
    second one (--allow-duplicate), or cancel it first (--replace)."""
    sweep: SkipJsonSchema[str | None] = Field(None, exclude_if=lambda name: name is None)
    """The sweep that this is a trial of. Sweeps set it, and forms do not show it."""
    trial: SkipJsonSchema[str | None] = Field(None, exclude_if=lambda name: name is None)
    """The settings that the trial varies, as `learning_rate=0.001`. Sweeps set it."""
    draw: SkipJsonSchema[Draw | None] = Field(None, exclude_if=lambda draw: draw is None)
    """The trial's draw, by which a resumed sweep finds its trials. Sweeps set it."""


class BudgetSettings(Settings, title="Budget", allow_inf_nan=False):
    """The money that a run may cost."""

    max_usd: float | None = Field(None, gt=0)
    """Dollars that all attempts of the run may cost together. The run saves and stops before it exceeds them, and
    continues from there once this is raised. Empty sets no limit."""


class RunConfig(Settings):
    """One training, from raw text to a verified checkpoint."""

    name: str = Field("gpt", pattern=NAME_PATTERN)
    """The name of the run: lower-case letters, digits and dashes, at most 32."""
    root: PathOrUri = DEFAULT_ROOT
    """The folder, or gs://bucket/prefix, of all files of this run: dataset, checkpoints, logs, models."""
    data: DataConfig = DataConfig()
    """The text, and how it becomes tokens."""
    dataset_workers: Workers = ThreadWorkers(kind="threads")
    """The workers that prepare the dataset. Its content does not depend on them."""
    model: ModelConfig = ModelConfig()
    """The model."""
    train: TrainConfig = TrainConfig()
    """The training."""
    evaluation: EvaluationConfig | None = None
    """The tasks that score the collected model; empty means no evaluation."""
    image: Image = NoImage(kind="none")
    """The software of the nodes."""
    platform: PlatformConfig = default_settings()
    """The platform that has the nodes."""
    launch: LaunchSettings = LaunchSettings()
    """The treatment of live jobs with the same name."""
    budget: BudgetSettings = BudgetSettings()
    """The money that the run may cost."""

    @property
    def world_size(self) -> int:
        return self.platform.nodes * self.platform.processes_per_node

    @model_validator(mode="after")
    def _batch_splits(self) -> Self:
        self.train.gradient_accumulation_steps(self.world_size)
        nodes, processes = self.platform.nodes, self.platform.processes_per_node
        if self.train.strategy == "hybrid" and 1 in (nodes, processes):
            problem = "train.strategy=hybrid shards over the processes of a node and copies to the other nodes"
            size = f"the run has platform.nodes={nodes} with platform.processes_per_node={processes} each"
            raise ValueError(f"{problem}, but {size}; set train.strategy=fsdp, or raise both to at least 2")
        profiler = self.train.profiler
        if profiler is not None and max(profiler.ranks) >= self.world_size:
            problem = f"train.profiler.ranks={list(profiler.ranks)} has ranks that do not exist"
            raise ValueError(f"{problem}; list ranks from 0 to {self.world_size - 1}")
        return self

    @model_validator(mode="after")
    def _prompts_fit_a_sample(self) -> Self:
        length, longest = self.model.sequence_length, max(len(text.encode()) for text in self.train.sample_prompts)
        if self.train.sample_every is not None and longest >= length:
            problem = f"train.sample_prompts has a prompt of {longest} bytes, which may be as many tokens"
            raise ValueError(f"{problem}, but model.sequence_length={length}; shorten it")
        return self

    @model_validator(mode="after")
    def _is_priced(self) -> Self:
        if self.platform.price is not None:
            return self
        name = ""
        if self.budget.max_usd is not None:
            name = "budget.max_usd"
        elif isinstance(self, SweepConfig) and (self.sweep.max_usd or "cost" in self.sweep.objectives):
            name = "sweep.max_usd or the objective cost"
        if name:
            hardware = self.platform.hardware or self.platform.kind
            problem = f"{name} needs a price, but the list price of {hardware} is not known here"
            raise ValueError(f"{problem}; give platform.usd_per_hour, of one node")
        return self


class CodeSettings(Settings, title="Code"):
    """A folder of your own code, which is copied to the nodes: a change to it needs no new image."""

    folder: PathOrUri = Field(min_length=1)
    """A folder of the machine where the flow runs; give an absolute path for a deployment, whose worker starts in
    another folder. Ranks start in a copy of it, which is first on PYTHONPATH, and `script` is a path in it. Files that
    its .dockerignore lists or that look like secrets are left out."""


class ScriptConfig(Settings, coerce_numbers_to_str=True):
    """Any script or module on several nodes, launched and watched like a training."""

    name: str = Field("script", pattern=NAME_PATTERN)
    """The name of the job: lower-case letters, digits and dashes, at most 32."""
    root: PathOrUri = DEFAULT_ROOT
    """The folder, or gs://bucket/prefix, of the logs."""
    script: PathOrUri
    """A Python file (a path) or a module (`-m package.module`)."""
    code: CodeSettings | None = None
    """The folder of your own code that is copied to the nodes; empty means the script is in the image."""
    args: tuple[str, ...] = ()
    """The arguments of the script, one item each, without quotes for a shell."""
    env: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variables of every rank. Do not put secrets here: these values are stored and shown."""
    datasets: tuple[PathOrUri, ...] = ()
    """The addresses of prepared datasets that each node copies and verifies before its ranks start. `LITGPT_DATASET` is
    the folder of the first one on the node."""
    max_restarts: Count = Field(0, ge=0)
    """New attempts after each of node faults, network faults, hangs and preemptions, unless in `restart_policy`."""
    restart_policy: RestartSettings = RestartSettings()
    """The rules for new attempts, by class of failure. The checkpoints of a script are unknown, so that each of its
    attempts counts."""
    image: Image = NoImage(kind="none")
    """The software of the nodes."""
    platform: PlatformConfig = default_settings()
    """The platform that has the nodes."""
    launch: LaunchSettings = LaunchSettings()
    """The treatment of live jobs with the same name."""

    @property
    def program(self) -> tuple[str, ...]:
        """Return torchrun's arguments. The script is an absolute path, because nodes start in a folder of their own;
        in an image or with `code` the path is that of the image or of the code's folder."""
        if self.script.startswith("-m "):
            return ("-m", self.script[3:].strip(), *self.args)
        if self.code is not None or self.platform.in_containers:
            return (self.script, *self.args)
        return (str(Path(self.script).expanduser().resolve()), *self.args)

    @model_validator(mode="after")
    def _script_is_in_its_code(self) -> Self:
        path = PurePosixPath(self.script)
        if self.code is not None and (path.is_absolute() or ".." in path.parts):
            raise ValueError(f"script={self.script!r} is outside of code.folder; give its path within that folder")
        return self


class Choice(Settings):
    """One of several values."""

    kind: Literal["choice"]
    values: list[FreeValue] = Field(min_length=1)
    """The values."""


class Number(Settings, title="Number between two bounds"):
    """A number between two bounds, drawn uniformly from it or from its logarithm."""

    kind: Literal["uniform", "log-uniform"]
    low: float
    """The smallest."""
    high: float
    """The largest."""


class Integer(Settings):
    """A whole number between two bounds."""

    kind: Literal["integer"]
    low: int
    """The smallest."""
    high: int
    """The largest, itself included."""
    log: bool = False
    """Draw uniformly from the logarithm."""


Space: TypeAlias = Choice | Number | Integer
Objective: TypeAlias = (
    Literal["validation_loss", "tokens_per_second", "cost"] | Annotated[str, Field(pattern=r"^evaluation\..+\..+$")]
)


class SweepSettings(Settings, title="Sweep"):
    """The settings that the trials of a sweep vary, and how they are found."""

    grid: dict[str, Annotated[list[FreeValue], Field(min_length=1)]] = Field({}, json_schema_extra={"default": {}})
    """Dotted setting to its values: {"train.learning_rate": [1e-3, 3e-4]}. The trials are all combinations."""
    space: dict[str, Annotated[Space, Field(discriminator="kind")]] = Field({}, json_schema_extra={"default": {}})
    """Dotted setting to its distribution: {"train.learning_rate": {kind: log-uniform, low: 1e-4, high: 1e-2}}."""
    sampler: Literal["grid", "random", "tpe"] = "grid"
    """`grid` runs all combinations, `random` draws, `tpe` draws near the best trials so far."""
    trials: Count | None = Field(None, gt=0, le=10_000)
    """The number of trials that `random` and `tpe` draw. Draws that cannot be used do not count."""
    seed: Count = 0
    """The seed of the draws."""
    objectives: tuple[Objective, ...] = Field(("validation_loss",), min_length=1)
    """The measures that rank trials, most important first; a score of the evaluation is `evaluation.TASK.METRIC`. With
    several, the report also lists the trials that no other trial beats in all of them."""
    prune: Literal["median", "asha"] | None = None
    """End a trial early by its validation loss: `median` if it is above the median of the trials at that step, `asha`
    if it is not in the best third. Empty ends none."""
    max_parallel: Count = Field(1, gt=0)
    """Trials that run at the same time."""
    max_gpu_hours: float | None = Field(None, gt=0)
    """GPU hours of all trials, after which no new trial starts; hours of processes on machines without GPUs. Empty
    sets no limit."""
    max_usd: float | None = Field(None, gt=0)
    """Dollars of all trials, after which no new trial starts; `budget.max_usd` limits each of them. Empty sets no
    limit."""

    @model_validator(mode="after")
    def _has_trials(self) -> Self:
        for name, space in self.space.items():
            if isinstance(space, Choice):
                continue
            if not space.low < space.high:  # nan is neither
                raise ValueError(f"sweep.space.{name}: low={space.low} must be below high={space.high}")
            if _is_log(space) and not space.low > 0:
                raise ValueError(f"sweep.space.{name}: low={space.low} must be above 0 for a logarithm")
        duplicates = self.grid.keys() & self.space.keys()
        if duplicates:
            raise ValueError(f"{', '.join(sorted(duplicates))} is in sweep.grid and in sweep.space; keep one")
        if self.sampler == "grid" and self.space:
            raise ValueError("sweep.space needs a sampler that draws; set sweep.sampler to tpe or random")
        if self.sampler == "grid" and self.trials:
            problem = f"sweep.trials={self.trials} needs a sampler that draws"
            raise ValueError(f"{problem}; set sweep.sampler to tpe or random")
        if self.sampler != "grid" and self.trials is None:
            raise ValueError(f"sweep.sampler={self.sampler} draws trials without end; set sweep.trials to their number")
        if self.prune is not None and self.objectives != ("validation_loss",):
            raise ValueError(f"sweep.prune={self.prune} compares only validation losses; leave sweep.objectives out")
        return self


def _is_log(space: Number | Integer) -> bool:
    if isinstance(space, Integer):
        return space.log
    return space.kind == "log-uniform"


class SweepConfig(RunConfig):
    """Several trainings that differ in some settings and share the dataset."""

    sweep: SweepSettings = SweepSettings()
    """The settings to vary."""

    @model_validator(mode="after")
    def _is_scored(self) -> Self:
        tasks = [] if self.evaluation is None else list(self.evaluation.tasks)
        for name in self.sweep.objectives:
            kind, _, score = name.partition(".")
            task = score.rpartition(".")[0]
            if kind == "evaluation" and task not in tasks:
                problem = f"sweep.objectives has {name}, but evaluation.tasks={tasks} does not have {task}"
                raise ValueError(f"{problem}; add it there")
        return self

    @model_validator(mode="after")
    def _values_are_as_validated(self) -> Self:
        """Spell each value of a grid or choice as the setting has it: `1e-3`, which YAML reads as a text, is 0.001."""
        base = self.model_dump(mode="json", exclude={"sweep"})

        def validated_values(setting: str, values: Sequence[JsonValue]) -> list[JsonValue]:
            return [_as_validated(base, setting, value) for value in values]

        grid = {setting: validated_values(setting, values) for setting, values in self.sweep.grid.items()}
        space: dict[str, Space] = {}
        for setting, part in self.sweep.space.items():
            if isinstance(part, Choice):
                part = part.model_copy(update={"values": validated_values(setting, part.values)})
            space[setting] = part
        self.__dict__["sweep"] = self.sweep.model_copy(update={"grid": grid, "space": space})
        return self


def _as_validated(base: Mapping[str, Any], setting: str, value: JsonValue) -> JsonValue:
    """Return the value as a config has it that sets only this. A value that needs other changes too stays as it is
    written, and so does a section, which is merged with that of the config."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict | list) for item in items):
        return value
    try:
        result: Any = RunConfig.model_validate(overridden(base, {setting: value})).model_dump(mode="json")
        for name in setting.split("."):
            result = result[name]
    except (ValidationError, KeyError, TypeError):  # a KeyError: a record leaves out some defaults
        return value
    return cast(JsonValue, result)


AnyConfig = TypeVar("AnyConfig", bound=Settings)

PLATFORM_FILE_SECTIONS = ("platform", "root", "image")
"""The sections of a platform file: they say where a config runs, and change nothing in what it computes."""


def config_document(
    path: Path, assignments: Sequence[str] = (), *, platform_file: Path | None = None
) -> dict[str, Any]:
    """Return the settings of a config file, with the sections of a platform file and then dotted overrides applied."""
    document = overridden(read_yaml(path) | read_platform_file(platform_file), overrides_of(assignments))
    if "platform" in document and document.keys() <= set(PLATFORM_FILE_SECTIONS):
        problem = f"{path} is a platform file: it has only {', '.join(document)}, which say where a config runs"
        raise ConfigProblem(f"{problem}; give a config, followed by --platform {path}")
    return document


def read_platform_file(path: Path | None) -> dict[str, Any]:
    """Return the sections of a platform file, if there is one; each replaces a whole section of a config."""
    if path is None:
        return {}
    sections = read_yaml(path)
    unknown = [str(name) for name in sections if name not in PLATFORM_FILE_SECTIONS]
    if unknown:
        allowed = f"a platform file has only {', '.join(PLATFORM_FILE_SECTIONS)}"
        problem = f"{path} is given as a platform file, but has {', '.join(unknown)}: {allowed}"
        raise ConfigProblem(f"{problem}; remove {', '.join(unknown)}, or give the file as the config")
    if "platform" not in sections:
        raise ConfigProblem(f"{path} is given as a platform file, but has no platform section; add one")
    return sections


def overrides_of(assignments: Sequence[str]) -> dict[str, Any]:
    """Return `["train.learning_rate=3e-4"]` as dotted name to value; values are YAML."""
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not all(name.strip().split(".")):
            example = "write section.setting=value, as in train.learning_rate=3e-4"
            raise ConfigProblem(f"{assignment!r} is not an override; {example}")
        try:
            values[name.strip()] = load_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigProblem(f"{assignment!r}: the value is not YAML ({error}); a text may need quotes") from error
    return values


def overridden(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(document)
    for name, changes in overrides.items():
        for part in reversed(name.split(".")):
            changes = {part: changes}
        result = deep_merge(result, changes, name=name)
    return result


def deep_merge(
    base: Mapping[str, Any], changes: Mapping[str, Any], *, name: str = "", above: str = ""
) -> dict[str, Any]:
    """Return `base` with `changes`, merged section by section. A mapping with names of the user's own, as `sweep.grid`,
    is replaced unless the dotted `name` leads into it. Another `kind` drops the settings of the old branch of a
    union."""
    result = dict(base)
    for part, value in changes.items():
        dotted = f"{above}{part}"
        section = result.get(part)
        if not isinstance(section, Mapping):
            section = {}
        is_replaced = dotted in _mappings() and not name.startswith(f"{dotted}.")
        is_merged = isinstance(value, Mapping) and bool(value) and not is_replaced
        if is_merged and value.get("kind") is not None:
            is_merged = section.get("kind", value["kind"]) == value["kind"]
        result[part] = deep_merge(section, value, name=name, above=f"{dotted}.") if is_merged else value
    return result


@cache
def _mappings() -> frozenset[str]:
    found = set[str]()

    def visit(annotation: Any, name: str) -> None:
        if get_origin(annotation) is dict:
            found.add(name)
        for setting, field in _fields_of(annotation).items():
            visit(field.annotation, f"{name}.{setting}".lstrip("."))
        for branch in get_args(annotation):
            visit(branch, name)

    for kind in (RunConfig, ScriptConfig, SweepConfig):
        visit(kind, "")
    return frozenset(found)


def validated(kind: type[AnyConfig], document: Mapping[str, Any], *, where: str) -> AnyConfig:
    """Return `document` as settings. Raises ConfigProblem with every problem at once, each under its dotted name."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        lines = [f"{where} cannot be used:"]
        for problem in error.errors(include_url=False):
            names = _written_names(problem["loc"], document)
            if problem["type"] in {"union_tag_invalid", "union_tag_not_found"}:
                names.append("kind")
            message = _message(problem, kind)
            lines.append(f"  {': '.join(filter(None, ('.'.join(names), message)))}")
        raise ConfigProblem("\n".join(lines)) from error


def _written_names(location: Sequence[str | int], document: Any) -> list[str]:
    """Return a problem's location without the branches of unions, which pydantic names and the user did not write."""
    names, value = [], document
    for index, part in enumerate(location, start=1):
        if isinstance(part, str) and isinstance(value, int | float | str | list):  # only a section has settings
            continue
        if isinstance(value, Mapping) and part not in value:
            is_last = index == len(location)
            # Without a `kind`, a part that is not in the document is a branch, unless it is a missing setting.
            if part == value.get("kind") or ("kind" not in value and not is_last):
                continue
        names.append(str(part))
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return names


def _message(problem: ErrorDetails, kind: type[Settings]) -> str:
    value, text = problem["input"], problem["msg"]
    match problem["type"]:
        case "value_error":
            return text.removeprefix("Value error, ")
        case "extra_forbidden":
            *section, name = problem["loc"]
            return _unknown_setting(kind, section, str(name))
        case "missing":
            return "is required, but not given"
        case "union_tag_not_found":
            return "is required, but not given; it chooses the kind of these settings"
        case "union_tag_invalid":
            return f"{problem['ctx']['tag']!r} is unknown; choose one of {problem['ctx']['expected_tags']}"
        case "string_type" if isinstance(value, bool | date):  # YAML no longer knows how it was written
            return f"{value} given, which YAML reads from several spellings; quote it, as '{value}'"
        case "model_type" | "model_attributes_type":
            return f"{value!r} given; settings belong here, as `setting: value`, or leave the whole section out"
        case "string_pattern_mismatch" if problem["ctx"]["pattern"] == NAME_PATTERN:
            text = "a name has lower-case letters, digits and dashes, 32 at most, and begins with a letter"
    text = text.replace("Tuple", "List").replace("valid tuple", f"list, as [{value}]")
    return f"{value!r} given; {text[0].lower()}{text[1:]}"


def _unknown_setting(kind: type[Settings], section: Sequence[str | int], name: str) -> str:
    siblings = _settings_in(kind, section)
    candidates: dict[str, str] = {}
    if not section:
        for top, field in kind.model_fields.items():
            for part in (field.annotation, *get_args(field.annotation)):
                candidates |= {setting: f"{top}.{setting}" for setting in _fields_of(part)}
    candidates |= {setting: setting for setting in siblings}
    near = difflib.get_close_matches(name, candidates, n=1 if name in candidates else 2)
    if near:
        return f"unknown setting; did you mean {' or '.join(candidates[setting] for setting in near)}?"
    return f"unknown setting; choose one of {', '.join(siblings)}; docs/reference/settings explains them"


def _settings_in(kind: type[Settings], section: Sequence[str | int]) -> list[str]:
    branches = [kind]
    for part in section:
        kinds = {branch: branch.model_fields.get("kind") for branch in branches}
        chosen = [branch for branch, field in kinds.items() if field and get_args(field.annotation) == (part,)]
        if len(branches) > 1 and chosen:
            branches = chosen
            continue
        field = _fields_of(branches[0]).get(str(part))
        if field is not None:  # else it is a place in a list, or a branch of a union
            branches = list(_sections(field.annotation))
    return list(_fields_of(branches[0]))


def _fields_of(kind: Any) -> dict[str, FieldInfo]:
    return dict(getattr(kind, "model_fields", {}))


class Setting(NamedTuple):
    """A setting of a config, as lists and pages show it."""

    name: str
    """Its dotted name."""
    default: str
    """Its default as JSON, which YAML reads; empty if the setting is required."""
    meaning: str
    field: FieldInfo
    model: type[Settings]
    """The class that has it. Settings of one name and several classes belong to several kinds of a section."""
    section: FieldInfo | None
    """The field that has the section; None for settings without a section."""


def settings_of(
    model: type[Settings], prefix: str = "", defaults: Any = None, section: FieldInfo | None = None
) -> Iterator[Setting]:
    """Yield the settings of a model and its sections in the order of the form. The `defaults` of a section may differ
    from those of its model."""
    for name in model.model_json_schema()["properties"]:
        field = described(model)[name]
        value = getattr(defaults, name) if isinstance(defaults, model) else field.default
        sections = list(_sections(field.annotation))
        if not sections or value is None or isinstance(value, int):
            default, meaning = "", field.description or ""
            if name == "kind":
                default, meaning = get_args(field.annotation)[0], model.__doc__ or ""
            elif not field.is_required():
                default = json.dumps(value, ensure_ascii=False)
            yield Setting(f"{prefix}{name}", default, " ".join(meaning.split()), field, model, section)
        for kind in sections:
            yield from settings_of(kind, f"{prefix}{name}.", value, field)


def _sections(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)
