"""The pages of docs/reference/settings, from the classes of settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from docs.markdown import page, sentence, table
from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, Setting, SweepSettings, settings_of
from launcher.platforms import PLATFORMS, settings_classes
from litgpt_demo.config import DataConfig, EvaluationConfig, ModelConfig, RunIdRole, Seconds, Settings, TrainConfig

_DURATION = get_args(Seconds)[1].func  # the validator that accepts 90s and 5m
_UNITS = {"_bytes": "bytes", "_gb": "GB", "per_hour": "US dollars an hour", "_usd": "US dollars"}
_UNITS |= {"gpu_hours": "hours", "_steps": "steps", "_tokens": "tokens", "keep_every": "steps"}
_FIRST_WORDS = ("Steps", "Tokens", "Sequences", "Samples", "Seconds", "Dollars", "Gigabytes", "Bytes")
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_TYPES = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", Path: "path"}


@dataclass(frozen=True, kw_only=True)
class SettingsPage:
    """A page for some settings of a class."""

    title: str
    purpose: str
    kind: type[Settings]
    prefix: str = ""
    only: tuple[str, ...] = ()
    """The settings and sections that the page has; empty means all."""
    note: str = ""

    def text(self) -> str:
        """Return the page: the class's own settings, then a table for each section and for each kind of a section."""
        groups: dict[tuple[str, type[Settings]], list[Setting]] = {}
        for setting in settings_of(self.kind, self.prefix):
            top = setting.name.removeprefix(self.prefix).partition(".")[0]
            # A source of a mixture takes the same corpora as data.corpus.
            if top in (self.only or {top}) and not setting.name.startswith("data.mixture.corpus."):
                groups.setdefault((setting.name.rpartition(".")[0], setting.model), []).append(setting)
        own = {group: rows for group, rows in groups.items() if group[1] is self.kind}
        sections = [name for name, _ in groups]
        anchors = set[str]()
        parts = [_table(rows, anchors) for rows in own.values()]
        for (name, model), rows in groups.items():
            if model is not self.kind:
                parts += _heading(name, rows[0], is_union=sections.count(name) > 1)
                parts.append(_table(rows, anchors))
        source = f"`{self.kind.__name__}` of {self.kind.__module__.replace('.', '/')}.py"
        return page(self.title, source, self.purpose, _HOW, self.note, *parts)


_HOW = (
    "`train-litgpt settings` prints the same settings. In a config, the dots of a name are sections. "
    "A command takes the dotted name: `train.seed=1`."
)


def _heading(name: str, first: Setting, *, is_union: bool) -> Iterator[str]:
    """Yield the heading of a section or of one kind of it, and its meaning."""
    if is_union:
        kinds = type_of(first.field.annotation).replace(", ", " or ")
        yield f"## `{name}`, kind {kinds}"
        yield sentence(first.meaning)
    else:
        yield f"## `{name}`"
        yield sentence(first.section.description or "") if first.section else ""


def _table(settings: Sequence[Setting], anchors: set[str]) -> str:
    has_roles = any(isinstance(mark, RunIdRole) for setting in settings for mark in setting.field.metadata)
    rows = []
    for setting in settings:
        # Several kinds of a section have settings of one name.
        anchor = f"{setting.name}-{settings[0].default}" if setting.name in anchors else setting.name
        anchors.add(anchor)
        default, meaning = f"`{setting.default}`" if setting.default else "required", setting.meaning
        if setting.name.endswith(".kind"):  # the meaning of a kind is above the table
            default, meaning = "required", "Selects this kind."
        row = [f'<a id="{anchor}"></a>`{setting.name}`', type_of(setting.field.annotation, setting.field.metadata)]
        row += [default, unit_of(setting), meaning]
        if has_roles:
            row.append("yes" if RunIdRole.SHAPES_MODEL in setting.field.metadata else "no")
        rows.append(row)
    columns = ["setting", "type or choices", "default", "unit", "meaning"]
    if has_roles:
        columns.append("part of the run id")
    return table(*columns, rows=rows)


def type_of(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return the type of a setting with its bounds, or its choices."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin is Annotated:
        return type_of(arguments[0], (*metadata, *arguments[1:]))
    if origin in (Union, UnionType):
        parts = [part for part in arguments if part is not NoneType and not (part is int and float in arguments)]
        kinds = dict.fromkeys(type_of(part, metadata) for part in parts)
        return " or ".join(kinds) + (", or `null`" if NoneType in arguments else "")
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is dict:
        return f"mapping of names to {type_of(arguments[1])}"
    bounds = " and ".join(_bounds(metadata, is_whole=annotation is int))
    if origin in (list, tuple):
        items = [part for part in arguments if part is not Ellipsis]
        return f"list of {f'{len(items)} × ' if len(items) > 1 else ''}{type_of(items[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return "section"
    if annotation is timedelta or _DURATION in {getattr(mark, "func", None) for mark in metadata}:
        return f"duration {bounds}".strip()
    return f"{_TYPES.get(annotation, 'any value')} {bounds}".strip()


def _bounds(metadata: Iterable[Any], *, is_whole: bool) -> list[str]:
    marks = [part for mark in metadata for part in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    bounds = dict[str, float]()
    for name, sign in _SIGNS.items():
        for mark in marks:
            if isinstance(bound := getattr(mark, name, None), int | float):
                bounds[sign] = bound
    if ">" in bounds and is_whole:
        bounds["≥"] = bounds.pop(">") + 1
    if ">" in bounds:  # which is tighter than a bound that a type has anyway
        bounds.pop("≥", None)
    return [f"{sign} {bounds[sign]:,}" for sign in "≥>≤<" if sign in bounds]


def unit_of(setting: Setting) -> str:
    """Return the unit of a number, by its type, its name or the first word of its meaning."""
    kind = type_of(setting.field.annotation, setting.field.metadata)
    if kind.startswith("duration"):
        return "seconds"
    if "number" not in kind:
        return ""
    for end, unit in _UNITS.items():
        if setting.name.endswith(end):
            return unit
    first = setting.meaning.partition(" ")[0]
    return first.lower() if first in _FIRST_WORDS else ""


def _section(name: str, kind: type[Settings], what: str, note: str = "") -> SettingsPage:
    """Return the page of a whole section."""
    title, purpose = f"Settings of `{name}`", f"Use this page to look up the settings of {what}."
    return SettingsPage(title=title, purpose=purpose, kind=kind, prefix=f"{name}.", note=note)


def _platform(name: str, kind: type[Settings]) -> SettingsPage:
    title, purpose = f"Settings of `platform`, kind `{name}`", "Use this page to look up the settings of this platform."
    meaning = f"{' '.join((kind.__doc__ or '').split())} {_DURATIONS}"
    return SettingsPage(title=title, purpose=purpose, kind=kind, prefix="platform.", note=meaning)


_DURATIONS = "A duration is a number of seconds, or a text such as `90s`, `5m` or `2h`."
_DATA = """The content hash of the dataset is part of the run id. It depends on the content of the files, on the
tokenizer and on the other settings of this page, not on paths. `data.max_document_bytes` changes it only with
`data.on_bad_document: skip`.

`data.mixture` and `data.stages` are lists, whose items have the settings below. Each item of `data.mixture` also needs
a `corpus`, of any kind on this page."""
_MODEL = "All settings of this page are part of the run id. Initial weights count by their content, not by address."
_TRAIN = f"""A setting that is part of the run id decides what the model becomes: another value makes another run. You
can change the other settings and continue the run. {_DURATIONS}"""
_NOT_HERE = f"The sections `image`, `platform` and `launch` are those of a training. {_DURATIONS}"

SETTINGS_PAGES = {
    "general": SettingsPage(
        title="General settings",
        purpose="Use this page to look up the settings of a training that belong to no other page.",
        kind=RunConfig,
        only=("name", "root", "dataset_workers", "launch", "budget"),
    ),
    "data": _section("data", DataConfig, "the dataset", _DATA),
    "model": _section("model", ModelConfig, "the model", _MODEL),
    "train": _section("train", TrainConfig, "the training", _TRAIN),
    "evaluation": _section("evaluation", EvaluationConfig, "the evaluation"),
    "sweep": _section("sweep", SweepSettings, "a sweep", "A sweep's config also has the sections of a training."),
    "image": SettingsPage(
        title="Settings of `image`",
        purpose="Use this page to look up the settings of each kind of image.",
        kind=RunConfig,
        only=("image",),
    ),
    "script": SettingsPage(
        title="Settings of a script",
        purpose="Use this page to look up the settings of a config that runs your own script.",
        kind=ScriptConfig,
        only=("name", "root", "script", "code", "args", "env", "datasets", "max_restarts", "restart_policy"),
        note=_NOT_HERE,
    ),
    "network-benchmark": SettingsPage(
        title="Settings of a network benchmark",
        purpose="Use this page to look up the settings of `train-litgpt benchmark-network`.",
        kind=BenchmarkConfig,
        only=("name", "root", "measure"),
        note=_NOT_HERE,
    ),
    **{f"platform-{name}": _platform(name, kind) for name, kind in zip(PLATFORMS, settings_classes(), strict=True)},
}
