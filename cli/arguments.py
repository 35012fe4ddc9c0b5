"""The arguments and options that several commands share, and what they mean: a config, a run, a root."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, SweepConfig, config_document, validated
from launcher.errors import ConfigProblem
from launcher.runs.index import Index
from launcher.runs.targets import LAST, Target, find, find_started_with
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.storage import Storage, is_remote, open_storage

DEFAULT_ROOT: str = RunConfig.model_fields["root"].default

ConfigFile = Annotated[Path, typer.Argument(help="A YAML file, as in deployments/configs.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings that override it: train.learning_rate=3e-4", show_default=False)
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--platform", show_default=False,
        help="A YAML file whose platform, root and image take the place of the config's; overrides win over it.",
    ),
]  # fmt: skip


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of runs of a local root that begin so, for the shell; a bucket would keep it waiting."""
    root = str(context.params.get("root") or DEFAULT_ROOT)
    if is_remote(root) or not Path(root).expanduser().is_dir():  # a look must not create the folder
        return []
    with suppress(TrainLitgptError, OSError):  # a message would end up in the command line that is being typed
        return [name for name in (*Index.of(root).runs(), LAST) if name.startswith(incomplete)]
    return []


TargetWords = Annotated[
    str,
    typer.Argument(
        metavar="RUN", show_default=False, autocompletion=complete_run,
        help="A run's or sweep's name or its beginning, @last, a run's folder, or the config that it was started with.",
    ),
]  # fmt: skip
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", show_default=False, autocompletion=complete_run,
        help="A run's name or its beginning, @last, or a run's folder.",
    ),
]  # fmt: skip
NewJob = Annotated[bool, typer.Option("--new", help="Start even if another job of this name runs.")]
CancelOld = Annotated[bool, typer.Option("--cancel-old", help="First cancel another job of this name that runs.")]
Root = Annotated[str, typer.Option(help="The root in which names are looked up: a folder, or gs://bucket/prefix.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

AnyKind: TypeAlias = RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig


def config_at(path: Path, assignments: list[str] | None, profile: Path | None = None) -> AnyKind:
    """The config in a file, of the kind that its sections say: `script`, `sweep`, `measure`, or a training."""
    document, where = config_document(path, assignments or [], profile=profile), given_as(path, profile)
    if "measure" in document:
        return validated(BenchmarkConfig, document, where=where)
    if "script" in document:
        return validated(ScriptConfig, document, where=where)
    return validated(SweepConfig if "sweep" in document else RunConfig, document, where=where)


def given_as(path: Path, profile: Path | None) -> str:
    """Return what a message calls a config."""
    return str(path) if profile is None else f"{path} with {profile}"


def target_of(words: str, overrides: list[str] | None, profile: Path | None, root: str) -> Target:
    """The run or sweep that a verb is about: by its name or folder, or by its config."""
    if words.endswith((".yaml", ".yml")) or Path(words).is_file():
        config = config_at(Path(words), overrides, profile)
        require_same_root(root, config.root, words)
        return find_started_with(config)
    if overrides:
        raise ConfigProblem(f"{overrides[0]!r} is an override, which belongs to a config; {words!r} is a run's name")
    if profile is not None:
        raise ConfigProblem(f"--platform={profile} belongs to a config; {words!r} is a run's name, found under --root")
    return find(words, root=root)


def require_same_root(given: str, configured: str, config: str) -> None:
    """Refuse a `--root` beside a config that has another one: what is looked at would be that of another root.

    Raises:
        ConfigProblem: it has.
    """
    if given != DEFAULT_ROOT and open_storage(given).address() != open_storage(configured).address():
        raise ConfigProblem(
            f"--root={given} is for a run's name; {config} has root={configured}: leave --root out, or change the "
            f"config's by the override root={given}"
        )


def folders_of(words: str, overrides: list[str] | None, profile: Path | None, root: str) -> list[Storage]:
    """The folders of the runs that a verb is about, a copy of a run among them, which is in no index."""
    if "/" in words and not words.endswith((".yaml", ".yml")):
        return [open_storage(words)]
    found = target_of(words, overrides, profile, root)
    return [found.storage(run) for run in found.runs]
