"""The command line. Heavy imports (Prefect, and through no path torch) wait until a command needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from cli import checking, comparing, entering, initial, interrupts, models, profiling, starting, stopping, watching
from cli.terminal import stderr
from launcher.errors import JobFailed
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.proxies import settle_proxies


class Verb(NamedTuple):
    """A command: the function that carries it out, and an example that its help ends with."""

    function: Callable[..., Any]
    example: str

    @property
    def name(self) -> str:
        return self.function.__name__.replace("_", "-")


PANELS: Mapping[str, Sequence[Verb]] = {
    "Look before a run": (
        Verb(initial.init, "train-litgpt init local platform.nodes=1 --file my-config.yaml"),
        Verb(checking.plan, "train-litgpt plan deployments/configs/local.yaml train.max_steps=100"),
        Verb(checking.render, "train-litgpt render deployments/configs/gke-tcpxo.yaml"),
        Verb(checking.doctor, "train-litgpt doctor deployments/configs/local.yaml"),
        Verb(checking.settings, "train-litgpt settings train"),
    ),
    "Start": (
        Verb(starting.run, "train-litgpt run deployments/configs/local.yaml train.learning_rate=3e-4"),
        Verb(starting.prepare, "train-litgpt prepare deployments/configs/local.yaml"),
        Verb(starting.sweep, "train-litgpt sweep deployments/configs/local.yaml 'sweep.grid={train.seed: [1, 2]}'"),
        Verb(starting.submit, "train-litgpt submit local train.max_steps=100"),
        Verb(starting.benchmark_network, "train-litgpt benchmark-network deployments/configs/network.yaml"),
    ),
    "Look at runs": (
        Verb(watching.runs, "train-litgpt runs output"),
        Verb(watching.status, "train-litgpt status @last"),
        Verb(watching.logs, "train-litgpt logs @last --rank 0 --tail 20 --follow"),
        Verb(entering.shell, "train-litgpt shell @last 1"),
        Verb(comparing.compare, "train-litgpt compare stdlib-gpt-1a2b3c4d5e stdlib-gpt-6f7a8b9c0d"),
        Verb(profiling.profile, "train-litgpt profile @last --steps 5"),
    ),
    "Use and check what was made": (
        Verb(models.collect, "train-litgpt collect @last"),
        Verb(models.evaluate, "train-litgpt evaluate @last tasks=[hellaswag] limit=100"),
        Verb(models.generate, "train-litgpt generate @last --prompt 'def main('"),
        Verb(models.chat, "train-litgpt chat @last"),
        Verb(checking.verify, "train-litgpt verify output/datasets/stdlib-0123456789"),
    ),
    "End and clean up": (
        Verb(stopping.cancel, "train-litgpt cancel @last"),
        Verb(stopping.reap, "train-litgpt reap --dry-run"),
        Verb(stopping.drill, "train-litgpt drill --only sigterm"),
    ),
}
"""Every command, by the panel of the help that it stands in."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="From raw text to a verified, trained GPT, on whatever machines you have.",
)
for panel, verbs in PANELS.items():
    for verb in verbs:
        epilog = f"[bold]Example[/]: {escape(verb.example)}"
        app.command(verb.name, rich_help_panel=panel, epilog=epilog)(verb.function)


def _print_version(asked: bool) -> None:
    """Print what this is and what it runs on, from installed metadata: nothing heavy is imported."""
    if not asked:
        return
    from launcher.images.identity import software_identity

    identity = software_identity()
    for known in (
        [*identity.listed("train-litgpt"), identity.revision],
        identity.listed("torch", "litgpt", "prefect", "python"),
    ):
        typer.echo(", ".join(filter(None, known)))
    raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Versions and commit, then exit."),
    ] = False,
) -> None:
    """Declare the options that come before a command."""


def main() -> None:
    """The console script."""
    with errors_for_people():
        settle_proxies(os.environ)
        app()


@contextmanager
def errors_for_people() -> Iterator[None]:
    """A known error is a message and an exit code; a traceback is for errors that are ours."""
    try:
        yield
    except TrainLitgptError as error:
        word = "failed" if isinstance(error, JobFailed) else "error"
        stderr.print(f"[bold red]{word}[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    interrupts.answer()
    main()
