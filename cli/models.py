"""`train-litgpt collect`, `evaluate`, `generate` and `chat`: what people do with the model of a run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer
from rich.markup import escape

from cli.arguments import (
    DEFAULT_ROOT,
    AsJson,
    Overrides,
    ProfileFile,
    Root,
    RunName,
    TargetWords,
    folders_of,
)
from cli.terminal import console, print_json, show_line, shown_as_text
from launcher.config import overridden, overrides_of, validated
from launcher.errors import ConfigProblem
from launcher.runs.targets import find
from litgpt_demo.config import EvaluationConfig
from litgpt_demo.export import bring_model
from litgpt_demo.runs import EVALUATIONS, FINAL, LITGPT, read_document
from litgpt_demo.storage import Storage, open_storage

if TYPE_CHECKING:
    from litgpt_demo.export.proof import LitgptModel

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
OnDevice = Annotated[Device, typer.Option(help="Where the model computes; auto is a GPU if there is one.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token; 1 samples as the model says.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample among so many likeliest tokens.")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="Sample among the likeliest tokens of this share.")]
Seed = Annotated[int | None, typer.Option(help="The same seed writes the same on the same machine.")]
TOP_K = 50


def collect(
    target: TargetWords,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    step: Annotated[int | None, typer.Option(help="Export the checkpoint of this step.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="The newest one, even of a live run.")] = False,
    as_json: AsJson = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Export a run's last checkpoint for LitGPT and Hugging Face, and check both against the trained weights."""
    from litgpt_demo.export import export as collect_models
    from litgpt_demo.export import summary_lines

    made = []
    for storage in folders_of(target, overrides, profile, root):
        final = collect_models(storage, step=step, newest=newest)
        made.append({"address": storage.address(FINAL), **final.model_dump(mode="json")})
        if as_json:
            continue
        for line in summary_lines(final):
            console.print(escape(line), soft_wrap=True)
        console.print(f"[green]✓[/] {escape(storage.address(FINAL))}", soft_wrap=True)
    if as_json:
        print_json(made)


def evaluate(
    target: RunName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of the evaluation: tasks=[hellaswag] limit=100", show_default=False),
    ] = None,
    as_json: AsJson = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Score the model of a run as its config says, or read its scores where it is scored already."""
    from launcher.reports.report import scores_table
    from litgpt_demo.evaluation import score_model

    run = _run_of(target, root)
    made = score_model(run, settings_of(run, overrides or []))
    if as_json:
        typer.echo(made.model_dump_json(indent=1))
        return
    console.print_table(scores_table(made.scores))
    show_line(run.address(f"{EVALUATIONS}/{made.key}"))


def generate(
    target: RunName,
    prompt: Annotated[str, typer.Option(help="The text that the model goes on with; - reads standard input.")],
    tokens: Tokens = 100,
    temperature: Temperature = 0.8,
    top_k: TopK = TOP_K,
    top_p: TopP = 1.0,
    seed: Seed = None,
    device: OnDevice = "auto",
    root: Root = DEFAULT_ROOT,
) -> None:
    """Let the model of a run go on with a text. It is shown as it is written, without the prompt."""
    with _opened(_run_of(target, root), device, seed) as model:
        text = sys.stdin.read() if prompt == "-" else prompt
        _show(model.stream(text, most=tokens, temperature=temperature, top_k=top_k, top_p=top_p))


def chat(
    target: RunName,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = TOP_K,
    top_p: TopP = 1.0,
    seed: Seed = None,
    device: OnDevice = "auto",
    root: Root = DEFAULT_ROOT,
) -> None:
    """Answer line after line with the model of a run, each by itself; an empty line or Ctrl-D ends it."""
    with _opened(_run_of(target, root), device, seed) as model:
        for line in _lines():
            _show(model.stream(line, most=tokens, temperature=temperature, top_k=top_k, top_p=top_p))


def settings_of(run: Storage, overrides: list[str]) -> EvaluationConfig:
    """Return the `evaluation` section of the run's own config, with these settings changed.

    Raises:
        ConfigProblem: they are no settings of an evaluation.
    """
    section = read_document(run).run.get("evaluation")
    document = overridden(section if isinstance(section, dict) else {}, overrides_of(overrides))
    return validated(EvaluationConfig, document, where="the evaluation")


def _run_of(words: str, root: str) -> Storage:
    """The folder of one run, by its name or as it is given."""
    if "/" in words:
        return open_storage(words)
    found = find(words, root=root)
    return found.storage(found.run)


@contextmanager
def _opened(run: Storage, device: Device, seed: int | None) -> Iterator[LitgptModel]:
    """The collected model of a run, every byte verified, on a device."""
    with tempfile.TemporaryDirectory(prefix="litgpt-model-") as scratch:
        folder = bring_model(run, LITGPT, Path(scratch))
        import torch

        from litgpt_demo.export.proof import opened_by_litgpt

        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigProblem("--device=cuda: torch finds no GPU on this machine; take --device=cpu")
        if seed is not None:
            torch.manual_seed(seed)
        with opened_by_litgpt(folder, accelerator=device, precision=None) as model:
            yield model


def _lines() -> Iterator[str]:
    """Yield what the user types, until an empty line or the end."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        if not (line := sys.stdin.readline().strip()):
            return
        yield line


def _show(parts: Iterator[str]) -> None:
    """Print a text as it is written; what a model writes cannot steer a terminal."""
    for part in parts:
        typer.echo(shown_as_text(part) if sys.stdout.isatty() else part, nl=False)
        sys.stdout.flush()
    typer.echo()
