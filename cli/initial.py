"""`train-litgpt init`: a config for a platform, by a few questions, each setting with what it means."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import TypeAdapter, ValidationError
from rich.markup import escape

from cli.settings import settings_of
from cli.terminal import console
from launcher.config import PlatformConfig, RunConfig, overridden, overrides_of, validated
from launcher.errors import ConfigProblem
from launcher.platforms import PLATFORMS, settings_classes
from launcher.platforms.settings import PlatformSettings
from litgpt_demo.storage import open_storage

# What trains in a minute on any machine, and needs no download.
_HERE: Mapping[str, Any] = {
    "data": {"corpus": {"kind": "stdlib", "max_bytes": 8_000_000}, "tokenizer": {"kind": "train", "vocab_size": 4096},
             "validation_fraction": 0.01},
    "model": {"name": None, "config": {"n_layer": 4, "n_embd": 192, "n_head": 6}, "sequence_length": 128},
    "train": {"global_batch": 16, "micro_batch": 8, "max_steps": 60, "learning_rate": 2.0e-3, "warmup_steps": 6,
              "precision": "32-true", "evaluate_every": 20, "checkpoint_every": 20},
}  # fmt: skip
# GPT-2's text and tokenizer, and a model that fits every GPU.
_ON_GPUS: Mapping[str, Any] = {
    "data": {"corpus": {"kind": "openwebtext"}, "tokenizer": {"kind": "hub", "name": "openai-community/gpt2"}},
    "model": {"name": "pythia-160m", "sequence_length": 1024},
    "train": {"global_batch": 512, "micro_batch": 8, "max_tokens": 2_500_000_000, "learning_rate": 6.0e-4,
              "precision": "bf16-mixed", "checkpoint_every": 500},
}  # fmt: skip
_EVERYWHERE: Mapping[str, str] = {"name": "my-gpt"}

_WIDTH = 120


def init(
    kind: Annotated[
        str | None, typer.Argument(metavar="PLATFORM", help=f"{', '.join(PLATFORMS)}", show_default=False)
    ] = None,
    answers: Annotated[
        list[str] | None,
        typer.Argument(help="Answers, and any other settings: root=gs://bucket/prefix train.max_steps=100"),
    ] = None,
    file: Annotated[Path, typer.Option(help="The config to write; one that is there stays as it is.")] = Path(
        "config.yaml"
    ),
) -> None:
    """Write a config for a platform by asking a few questions; answers that are given are not asked for."""
    if file.exists():
        raise ConfigProblem(f"{file} is there already, and is left as it is; give another name by --file")
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if kind is None and asks:
        kind = typer.prompt(f"platform ({', '.join(PLATFORMS)})", default=next(iter(PLATFORMS)))
    if kind is None or kind not in PLATFORMS:
        raise ConfigProblem(f"{kind or 'nothing'} is given as the platform; there are {', '.join(PLATFORMS)}")
    section = dict(zip(PLATFORMS, settings_classes(), strict=True))[kind]
    given = overrides_of(answers or [])
    document = new_config(kind, section, given, ask=_prompt if asks else None)
    if not open_storage(str(file.parent)).create(file.name, commented(document).encode()):
        raise ConfigProblem(f"{file} has just been written by somebody else; give another name by --file")
    console.print(f"[green]✓[/] {escape(str(file))}\n\n  what it would do, and what blocks it", soft_wrap=True)
    console.print(f"    train-litgpt plan {escape(str(file))}\n  then", soft_wrap=True)
    console.print(f"    train-litgpt run {escape(str(file))}", soft_wrap=True)


Ask = Callable[[str, str, str], str]
"""Asks for a setting, by its name, its meaning and the suggestion; returns the answer as YAML."""


def _prompt(name: str, meaning: str, suggestion: str) -> str:
    console.print(f"[dim]{escape(meaning)}[/]", soft_wrap=True)
    return str(typer.prompt(name, default=suggestion or None))


def new_config(
    kind: str, section: type[PlatformSettings], given: Mapping[str, Any], *, ask: Ask | None
) -> dict[str, Any]:
    """Return the document of a config for a platform.

    Args:
        given: settings by dotted name, which are not asked for.
        ask: None takes the suggestions.

    Raises:
        ConfigProblem: something has to be answered and is not, or the answers make no config.
    """
    asked = {**_EVERYWHERE, **section.asked}
    means = _meanings(section, asked)
    missing = [name for name, suggestion in asked.items() if not suggestion and not _is_given(name, given)]
    if missing and ask is None:
        listed = "\n".join(f"  {name}=…  {means[name]}" for name in missing)
        raise ConfigProblem(f"{len(missing)} answers are missing, and there is no terminal to ask on; add\n{listed}")
    answers: dict[str, Any] = {}
    for name, suggestion in asked.items():
        if not _is_given(name, given):
            answer = suggestion if ask is None else ask(name, means[name], suggestion)
            answers |= overrides_of([f"{name}={answer}"])
    image = {"image": {"kind": "auto"}} if any(name.startswith("image.") for name in asked) else {}
    start = {**(_HERE if section.on_this_machine else _ON_GPUS), **image, "platform": {"kind": kind}}
    document = overridden(overridden(start, answers), given)
    _fit_batch(document, given)
    validated(RunConfig, document, where="the new config")
    return {name: document[name] for name in RunConfig.model_fields if name in document}


def _is_given(name: str, given: Mapping[str, Any]) -> bool:
    return any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in given)


def _fit_batch(document: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Raise the suggested global batch to one that splits over the ranks, unless the user gave it."""
    try:
        platform = TypeAdapter[PlatformConfig](PlatformConfig).validate_python(document["platform"])
    except ValidationError:
        return  # the whole config is validated next, with better words
    train = document["train"]
    if not _is_given("train.global_batch", given):
        share = platform.nodes * platform.processes * train["micro_batch"]
        train["global_batch"] = math.ceil(train["global_batch"] / share) * share


# --- the text ---------------------------------------------------------------------------------------------------------


def _meanings(section: type[PlatformSettings], names: Mapping[str, Any]) -> dict[str, str]:
    """Return what these settings mean, in a sentence each; of the platform's as its own class says."""
    known = {setting.name: setting.text for setting in settings_of(RunConfig)}
    known |= {setting.name: setting.text for setting in settings_of(section, "platform.")}
    return {name: known.get(name, "") for name in names}


def commented(document: Mapping[str, Any]) -> str:
    """Return a config as YAML, each setting with what it means; sections of sections are on one line."""
    config = validated(RunConfig, dict(document), where="the new config")
    names = [name for name, _ in _leaves(document)]
    means = _meanings(type(config.platform), dict.fromkeys(names))
    lines = ["# `train-litgpt settings` lists every setting; `train-litgpt plan` says what blocks a run."]
    for name, value in document.items():
        if not isinstance(value, dict):
            lines += ["", *_line(name, value, means[name], "")]
            continue
        lines += ["", f"{name}:"]
        for inner, of_inner in value.items():
            lines += _line(inner, of_inner, means[f"{name}.{inner}"], "  ")
    return "\n".join(lines).replace("\n\nroot:", "\nroot:") + "\n"


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        yield name, value
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", of_inner) for inner, of_inner in value.items())


def _line(name: str, value: Any, meaning: str, indent: str) -> list[str]:
    """Return the lines of a setting: with its first sentence behind it, or above it where it would be too long."""
    text = f"{indent}{name}: {_flow(value)}"
    sentence = meaning.partition(". ")[0].rstrip(".")
    if not sentence:
        return [text]
    beside = f"{text:<40}  # {sentence}"
    return [beside] if len(beside) <= _WIDTH else [f"{indent}# {sentence}", text]


def _flow(value: Any) -> str:
    """Return a value on one line, as YAML that reads back as the same."""
    if isinstance(value, dict | list):
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True).strip()
    if isinstance(value, float):
        return json.dumps(value)
    return yaml.safe_dump(value, allow_unicode=True, width=10_000).removesuffix("...\n").strip()
