"""Flow runs for workers: a deployment's with some settings changed, or with the whole of a config."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.prompt import IntPrompt

from cli.foreground import program
from cli.terminal import Screen, print_json
from flows.server import server_problems
from flows.submission import AnySettings, CreatedRun, deployments, hand_over, submit_deployment

_MISUSED = 2
"""The exit code of a command line that lacks something."""


def submit(
    deployment: str | None, changes: Mapping[str, Any], profile: Mapping[str, Any], *, as_json: bool, console: Screen
) -> None:
    """Create a flow run of a deployment, without a name of the only one or of one that the user is asked for."""
    with server_problems():
        name = deployment or _chosen(as_json=as_json, console=console)
        created = asyncio.run(submit_deployment(name, changes, profile=profile))
    if as_json:
        print_json(asdict(created))
        return
    _print_created(created, console)
    if created.waits:
        console.print(f"  [yellow]it waits:[/] {escape(created.waits)}", soft_wrap=True)


def detach(settings: AnySettings, words: Sequence[str], *, as_json: bool, console: Screen) -> None:
    """Hand a config over to a worker, and say where its flow run is and how it is followed.

    Args:
        words: those that name the config on a command line, its overrides and profile included.
    """
    with server_problems():
        created = asyncio.run(hand_over(settings, written_at=Path.cwd()))
    if as_json:
        print_json(asdict(created))
        return
    _print_created(created, console)
    for verb, command in {
        "status": [*program(), "status", *words],
        "logs": [*program(), "logs", "--follow", *words],
        "cancel": ["prefect", "flow-run", "cancel", created.id],  # works before there is a job, too
    }.items():
        console.print(f"  {verb:<8} {escape(shlex.join(command))}", soft_wrap=True)


def _print_created(created: CreatedRun, console: Screen) -> None:
    console.print(f"flow run [bold]{created.name}[/] of {created.deployment}\n  {created.url}", soft_wrap=True)


def _chosen(*, as_json: bool, console: Screen) -> str:
    """Return the only deployment, or the one that the user names; without a terminal, list them and end."""
    there = asyncio.run(deployments())
    if len(there) == 1:
        return there[0]["deployment"]
    if as_json:
        print_json(there)
        raise typer.Exit(_MISUSED)
    asks = sys.stdin.isatty() and sys.stdout.isatty() and bool(there)
    console.print_table([{**({"": number} if asks else {}), **row} for number, row in enumerate(there, start=1)])
    if not asks:
        why = "name one of these" if there else "the server has no deployment of ours; `make serve` makes them"
        typer.echo(f"nothing was submitted: {why}", err=True)
        raise typer.Exit(_MISUSED)
    numbers = [str(number) for number in range(1, len(there) + 1)]
    number = IntPrompt.ask("which one", console=console, choices=numbers, show_choices=False)
    return there[number - 1]["deployment"]
