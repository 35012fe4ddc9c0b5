"""A whole run as a user writes it, and how files and overrides become one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache, reduce
from operator import or_
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, TypeVar, cast, get_args, get_origin

import yaml
from pydantic import BeforeValidator, Field, JsonValue, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import ErrorDetails

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
    Kind,
    ModelConfig,
    Place,
    PositiveCount,
    RestartSettings,
    Settings,
    TrainConfig,
)

# A job's name is `<name>-<key>-<attempt>-<nonce>`. Kubernetes takes 63 characters with what JobSet appends: its
# rendering refuses a name that has too many of these.
NAME_PATTERN = r"^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$"


if TYPE_CHECKING:
    PlatformConfig = PlatformSettings
else:
    PlatformConfig = Annotated[reduce(or_, settings_classes()), Field(discriminator="kind")]


class ThreadWorkers(Settings, title="Threads"):
    """Threads of the process that runs the flow. The tokenizer leaves Python's lock, so they use every core."""

    kind: Literal["threads"] = Kind("threads")
    count: PositiveCount | None = None
    """The number of workers; empty is one per core, two where the root is a bucket."""


class ProcessWorkers(Settings, title="Processes"):
    """Processes of this machine."""

    kind: Literal["processes"] = Kind("processes")
    count: PositiveCount | None = None
    """The number of workers; empty means one per core."""


class DaskWorkers(Settings, title="Dask cluster"):
    """The workers of a Dask cluster, which must see the root and have this package installed."""

    kind: Literal["dask"] = Kind("dask")
    scheduler: str = Field(pattern=r"^(tcp|tls|ucx|ws|wss)://")
    """Address of the cluster's scheduler: tcp://10.0.0.2:8786."""


def _kind_by_what_is_given(workers: object) -> object:
    """Read workers without a `kind`, as in `workers.count=1`: only Dask's have a scheduler; threads are the default.
    Other unions have to name it, because their branches differ in what they make and cost."""
    if not isinstance(workers, Mapping) or "kind" in workers:
        return workers
    return {"kind": "dask" if "scheduler" in workers else "threads", **workers}


Workers = Annotated[
    ThreadWorkers | ProcessWorkers | DaskWorkers, Field(discriminator="kind"), BeforeValidator(_kind_by_what_is_given)
]


class Draw(Settings):
    """One trial of a sweep, as its search has found it."""

    number: Count
    """The place of the draw in the search. Draws that cannot be used have numbers too, and no trial."""
    changes: dict[str, FreeValue]
    """Dotted setting to its value, exactly as the search has it."""


class StartSettings(Settings, title="Start"):
    """The choice of what happens to other jobs of the same name. It changes nothing in what a job computes."""

    others: Literal["refuse", "keep", "cancel"] = "refuse"
    """The answer to a live job of the same name, but of another dataset, model or script: refuse to start, keep it
    and start a second one (--new), or cancel it first (--cancel-old)."""
    sweep: SkipJsonSchema[str | None] = Field(None, exclude_if=lambda name: name is None)
    """The sweep that this is a trial of. Sweeps set it: no form offers it."""
    trial: SkipJsonSchema[str | None] = Field(None, exclude_if=lambda name: name is None)
    """The settings that the trial varies, as `learning_rate=0.001`. Sweeps set it."""
    draw: SkipJsonSchema[Draw | None] = Field(None, exclude_if=lambda draw: draw is None)
    """The same in full, by which a sweep that is resumed finds its trials again. Sweeps set it."""


class TrainingStart(StartSettings, allow_inf_nan=False):
    """The same for a training, and the money that it may cost: it can be asked to save and leave."""

    max_usd: float | None = Field(None, gt=0)
    """Dollars that all attempts of the run may cost: it saves and leaves before they are passed, and goes on from there
    once this is raised."""


class RunConfig(Settings):
    """One training, from raw text to a verified checkpoint."""

    name: str = Field("gpt", pattern=NAME_PATTERN)
    """The name of the run: lower-case letters, digits and dashes, at most 32."""
    root: Place = "output"
    """A folder, or gs://bucket/prefix, that everything is written under."""
    data: DataConfig = DataConfig()
    """The text, and how it is cut into tokens."""
    workers: Workers = ThreadWorkers(kind="threads")
    """The workers that prepare the dataset. They change nothing in it."""
    model: ModelConfig = ModelConfig()
    """The model."""
    train: TrainConfig = TrainConfig()
    """The training."""
    evaluation: EvaluationConfig | None = None
    """The tasks that the collected model is scored by; empty asks none."""
    image: Image = NoImage(kind="none")
    """The software of the nodes."""
    platform: PlatformConfig = default_settings()
    """The platform that has the nodes."""
    start: TrainingStart = TrainingStart()
    """The answer to a job of the same name that runs already, and the money that the run may cost."""

    @property
    def world_size(self) -> int:
        return self.platform.nodes * self.platform.processes

    @model_validator(mode="after")
    def _batch_splits(self) -> Self:
        self.train.accumulation(self.world_size)
        nodes, processes = self.platform.nodes, self.platform.processes
        if self.train.strategy == "hybrid" and 1 in (nodes, processes):
            what = "train.strategy=hybrid shards over the processes of a node and copies to the other nodes"
            there = f"platform.nodes={nodes} with platform.processes={processes} each"
            raise ValueError(f"{what}, and there are {there}; take train.strategy=fsdp, or at least 2 of both")
        if (profile := self.train.profile) is not None and max(profile.ranks) >= self.world_size:
            what = f"train.profile.ranks={list(profile.ranks)} are not all there"
            raise ValueError(f"{what}: the run has {self.world_size}, the first is 0")
        return self

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        if (every := self.train.evaluate_with) is not None and self.evaluation is None:
            raise ValueError(f"train.evaluate_with={every} has nothing to ask; give evaluation.tasks")
        return self

    @model_validator(mode="after")
    def _is_priced(self) -> Self:
        asks: dict[str, object] = {"start.max_usd": self.start.max_usd}
        if isinstance(self, SweepConfig):
            asks["sweep.max_usd or the objective cost"] = self.sweep.max_usd or "cost" in self.sweep.objectives
        if self.platform.price is None and (name := next(filter(asks.get, asks), None)):
            known = f"{self.platform.hardware or self.platform.kind} has no list price that is known here"
            raise ValueError(f"{name} needs a price, and {known}; give platform.usd_per_hour, of one node")
        return self


class CodeSettings(Settings, title="Code"):
    """A folder of your own code, which nodes get as it is: a change to it needs no new image."""

    mount: Place = Field(min_length=1)
    """A folder of the machine where the flow runs: a deployment's worker has another, so that one takes an absolute
    path. Its files, less what its .dockerignore names and what looks like a secret, become the folder that ranks start
    in, first on PYTHONPATH; `script` is then a path in it."""


class ScriptConfig(Settings, coerce_numbers_to_str=True):
    """Any script or module on several nodes, launched and watched as a training is."""

    name: str = Field("script", pattern=NAME_PATTERN)
    """The name of the job: lower-case letters, digits and dashes, at most 32."""
    root: Place = "output"
    """A folder, or gs://bucket/prefix, that logs are written under."""
    script: Place
    """A Python file (a path) or a module (`-m package.module`)."""
    code: CodeSettings | None = None
    """The folder of your own code that goes to the nodes; empty takes what the image has."""
    args: tuple[str, ...] = ()
    """Its arguments, one item each; no quoting is needed."""
    env: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variables for every rank. Not for secrets: they would be stored and shown."""
    max_restarts: Count = Field(0, ge=0)
    """New attempts after each of node faults, network faults, hangs and preemptions; `restarts` may say otherwise."""
    restarts: RestartSettings = RestartSettings()
    """The rules of new attempts, by class of failure. What a script saves is not known, so that none is forgiven."""
    image: Image = NoImage(kind="none")
    """The software of the nodes."""
    platform: PlatformConfig = default_settings()
    """The platform that has the nodes."""
    start: StartSettings = StartSettings()
    """The answer to a job of the same name that runs already."""

    @property
    def program(self) -> tuple[str, ...]:
        """Return what torchrun is given: the script as an absolute path, because nodes start in their own folder.
        In an image it is a path there; with `code` it is one in the mounted folder."""
        if self.script.startswith("-m "):
            return ("-m", self.script[3:].strip(), *self.args)
        if self.code is not None or self.platform.in_containers:
            return (self.script, *self.args)
        return (str(Path(self.script).expanduser().resolve()), *self.args)

    @model_validator(mode="after")
    def _script_is_in_its_code(self) -> Self:
        path = PurePosixPath(self.script)
        if self.code is not None and (path.is_absolute() or ".." in path.parts):
            raise ValueError(f"script={self.script!r} leads out of code.mount; give its path within that folder")
        return self


class Choice(Settings):
    """One of some values."""

    kind: Literal["choice"]
    values: list[FreeValue] = Field(min_length=1)
    """The values."""


class Number(Settings, title="Number between two bounds"):
    """A number between two bounds, evenly, or evenly in its logarithm."""

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
    """The largest, which may be taken too."""
    log: bool = False
    """Evenly in its logarithm."""


Space: TypeAlias = Choice | Number | Integer
Objective: TypeAlias = (
    Literal["validation_loss", "tokens_per_second", "cost"] | Annotated[str, Field(pattern=r"^evaluation\..+\..+$")]
)


class SweepSettings(Settings, title="Sweep"):
    """The settings that the trials of a sweep vary, and how they are found."""

    grid: dict[str, Annotated[list[FreeValue], Field(min_length=1)]] = Field({}, json_schema_extra={"default": {}})
    """Dotted setting to the values it takes: {"train.learning_rate": [1e-3, 3e-4]}. Trials are all combinations."""
    space: dict[str, Annotated[Space, Field(discriminator="kind")]] = Field({}, json_schema_extra={"default": {}})
    """Dotted setting to what is drawn from: {"train.learning_rate": {kind: log-uniform, low: 1e-4, high: 1e-2}}."""
    sampler: Literal["grid", "random", "tpe"] = "grid"
    """`grid` takes all combinations; `random` draws; `tpe` draws near the best trials so far."""
    trials: Count | None = Field(None, gt=0, le=10_000)
    """The number of trials that `random` and `tpe` draw, without draws that cannot be used."""
    seed: Count = 0
    """The seed of the draws."""
    objectives: tuple[Objective, ...] = Field(("validation_loss",), min_length=1)
    """What a trial is judged by, the first above all; a score is `evaluation.TASK.METRIC`. Of several, the report has
    the trials that no other beats."""
    prune: Literal["median", "asha"] | None = None
    """End a trial by its validation loss on the way: `median` where it is above the median of the trials at that point,
    `asha` where it is not in the best third; empty ends none."""
    max_parallel: Count = Field(1, gt=0)
    """Trials that run at the same time."""
    max_gpu_hours: float | None = Field(None, gt=0)
    """No trial begins once all have taken so many hours of a GPU; of a process where there are no GPUs."""
    max_usd: float | None = Field(None, gt=0)
    """No trial begins once all have cost so many dollars; `start.max_usd` is what each of them may cost."""

    @model_validator(mode="after")
    def _has_trials(self) -> Self:
        for name, space in self.space.items():
            if not isinstance(space, Choice) and not (space.low < space.high and (space.low > 0 or not _is_log(space))):
                above = " and above 0" if _is_log(space) else ""
                raise ValueError(f"sweep.space.{name}: low={space.low} has to be below high={space.high}{above}")
        if twice := self.grid.keys() & self.space.keys():
            raise ValueError(f"{', '.join(sorted(twice))} is in sweep.grid and in sweep.space; keep one")
        if self.sampler == "grid" and (self.space or self.trials):
            what = "sweep.space" if self.space else f"sweep.trials={self.trials}"
            raise ValueError(f"{what} needs a sampler that draws; set sweep.sampler to tpe or random")
        if self.sampler != "grid" and self.trials is None:
            raise ValueError(f"sweep.sampler={self.sampler} draws trials without end; set sweep.trials")
        if self.prune is not None and self.objectives != ("validation_loss",):
            raise ValueError(f"sweep.prune={self.prune} goes by the validation loss alone; leave sweep.objectives out")
        return self


def _is_log(space: Number | Integer) -> bool:
    return space.log if isinstance(space, Integer) else space.kind == "log-uniform"


class SweepConfig(RunConfig):
    """Several trainings that differ in some settings and share the dataset."""

    sweep: SweepSettings = SweepSettings()
    """The settings to vary."""

    @model_validator(mode="after")
    def _is_scored(self) -> Self:
        asked = () if self.evaluation is None else self.evaluation.tasks
        for name in self.sweep.objectives:
            kind, _, score = name.partition(".")
            if kind == "evaluation" and (task := score.rpartition(".")[0]) not in asked:
                what = f"sweep.objectives has {name}, and evaluation.tasks={list(asked)} does not ask {task}"
                raise ValueError(f"{what}; add it there")
        return self

    @model_validator(mode="after")
    def _values_are_as_validated(self) -> Self:
        """Spell each value of a grid or choice as the setting has it: `1e-3`, which YAML reads as a text, is 0.001."""
        base = self.model_dump(mode="json", exclude={"sweep"})

        def validated_values(setting: str, values: Sequence[JsonValue]) -> list[JsonValue]:
            return [_as_validated(base, setting, value) for value in values]

        sweep = self.sweep
        grid = {setting: validated_values(setting, values) for setting, values in sweep.grid.items()}
        space = {
            setting: part.model_copy(update={"values": validated_values(setting, part.values)})
            if isinstance(part, Choice)
            else part
            for setting, part in sweep.space.items()
        }
        self.__dict__["sweep"] = sweep.model_copy(update={"grid": grid, "space": space})
        return self


def _as_validated(base: Mapping[str, Any], setting: str, value: JsonValue) -> JsonValue:
    """Return the value as a config has it that sets it alone; a value that needs other changes beside it stays as it is
    written, and so does a section, which is merged with what the config has."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict | list) for item in items):
        return value
    try:
        found: Any = RunConfig.model_validate(overridden(base, {setting: value})).model_dump(mode="json")
        for name in setting.split("."):
            found = found[name]
    except (ValidationError, KeyError, TypeError):  # a KeyError: a record leaves out some defaults
        return value
    return cast(JsonValue, found)


AnyConfig = TypeVar("AnyConfig", bound=Settings)

PLATFORM_FILE_SECTIONS = ("platform", "root", "image")
"""The sections of a platform file: they say where a config runs, and change nothing in what it computes."""


def config_document(
    path: Path, assignments: Sequence[str] = (), *, platform_file: Path | None = None
) -> dict[str, Any]:
    """Return the settings of a config file, with the sections of a platform file and then dotted overrides applied."""
    document = read_yaml(path)
    if platform_file is not None:
        document |= read_platform_file(platform_file)
    document = overridden(document, overrides_of(assignments))
    if "platform" in document and document.keys() <= set(PLATFORM_FILE_SECTIONS):
        problem = f"{path} is a platform file: it has only {', '.join(document)}, which say where a config runs"
        raise ConfigProblem(f"{problem}; give a config, and behind it --platform {path}")
    return document


def read_platform_file(path: Path) -> dict[str, Any]:
    """Return the sections of a platform file, each of which replaces a whole section of a config.

    Raises:
        ConfigProblem: it has other sections, or lacks `platform`.
    """
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
    """Return `document` with each dotted name set to its value by `deep_merge`."""
    result = dict(document)
    for name, changes in overrides.items():
        for part in reversed(name.split(".")):
            changes = {part: changes}
        result = deep_merge(result, changes, name=name)
    return result


def deep_merge(
    base: Mapping[str, Any], changes: Mapping[str, Any], *, name: str = "", above: str = ""
) -> dict[str, Any]:
    """Return `base` with `changes`, merged section by section; values that are not sections are replaced.

    A mapping with names of the user's own, as `sweep.grid`, is replaced unless the dotted `name` leads into it. An
    empty mapping empties the old one. Another `kind` drops the settings of the old branch of a union.
    """
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
    """Return the dotted names of the settings that are mappings with names of the user's own."""
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
    """Return `document` as settings.

    Raises:
        ConfigProblem: it has every problem at once, each under its dotted name.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        lines = [f"{where} cannot be used:"]
        for problem in error.errors(include_url=False):
            names = _written_names(problem["loc"], document)
            if problem["type"] in {"union_tag_invalid", "union_tag_not_found"}:
                names.append("kind")
            message = _message(problem, kind)
            lines.append(f"  {'.'.join(names)}: {message}" if names else f"  {message}")
        raise ConfigProblem("\n".join(lines)) from error


def _written_names(location: Sequence[str | int], document: Any) -> list[str]:
    """Return a problem's location without the branches of unions, which pydantic names and the user did not write."""
    names, value = [], document
    for index, part in enumerate(location, start=1):
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
            return "is required, but not given; it says which kind of settings these are"
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
    """Return the message for a setting that a section lacks, with the nearest settings of it. At the top they may also
    be settings of a section."""
    siblings = _settings_in(kind, section)
    candidates = {}
    if not section:
        for top, field in kind.model_fields.items():
            for part in (field.annotation, *get_args(field.annotation)):
                candidates |= {setting: f"{top}.{setting}" for setting in _fields_of(part)}
    candidates |= {setting: setting for setting in siblings}
    near = difflib.get_close_matches(name, candidates, n=1 if name in candidates else 2)
    if near:
        return f"unknown setting; did you mean {' or '.join(candidates[setting] for setting in near)}?"
    return f"unknown setting; choose one of {', '.join(siblings)}"


def _settings_in(kind: type[Settings], section: Sequence[str | int]) -> list[str]:
    """Return the settings of a section; its location has the kind of each union's branch, as pydantic names it."""
    branches = [kind]
    for part in section:
        kinds = {branch: branch.model_fields.get("kind") for branch in branches}
        chosen = [branch for branch, field in kinds.items() if field and get_args(field.annotation) == (part,)]
        if len(branches) > 1 and chosen:
            branches = chosen
            continue
        annotation = _fields_of(branches[0])[str(part)].annotation
        options = get_args(annotation) or (annotation,)
        branches = [option for option in options if issubclass(option, Settings)]
    return list(_fields_of(branches[0]))


def _fields_of(kind: Any) -> dict[str, FieldInfo]:
    """Return the settings of a section by the names that users write; a plain type has none."""
    return {field.alias or name: field for name, field in getattr(kind, "model_fields", {}).items()}
