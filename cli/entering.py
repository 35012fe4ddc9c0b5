"""`train-litgpt shell`: a shell in a node of a job that runs, or its last lines where it does not."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from typing import Annotated

import typer

from cli.arguments import DEFAULT_ROOT, Root, RunName
from cli.terminal import print_findings, show_line
from launcher.errors import ConfigProblem
from launcher.job import JobState
from launcher.platforms.base import Enterable
from launcher.runs.attempts import Attempt, Attempts
from launcher.runs.log_choice import LogChoice, Tail
from launcher.runs.log_text import readable
from launcher.runs.targets import find
from launcher.runs.waiting import read_logs

_LAST = 20  # lines of the log that say why there is no node to enter


def shell(
    target: RunName,
    node: Annotated[int, typer.Argument(min=0, help="The number of the node.")] = 0,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Open a shell in a node of a run that runs; of one that does not, show the last lines of the node's log."""
    found = find(target, root=root)
    attempts = found.of_one(found.run)
    attempt = attempts.all()[-1]
    if attempt.status.state is not JobState.RUNNING:
        asyncio.run(_show_end(attempts, attempt, node))
        raise ConfigProblem(
            f"{attempts.run} has no node to enter: attempt {attempt.number} is {attempt.status.native!r}; "
            f"`{attempts.index.command('logs', attempts.run)}` has its whole log"
        )
    platform = attempts.platform_of(attempt.record)
    if not isinstance(platform, Enterable):
        raise ConfigProblem(
            f"{platform.name} has no way into the nodes of a job; "
            f"`{attempts.index.command('logs', attempts.run, '--node', str(node))}` shows what the node prints"
        )
    way = platform.entrance(attempt.job_id, node, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    program = shutil.which(way.words[0])
    if program is None:
        raise ConfigProblem(f"{way.words[0]} is not installed here, and the way into that node leads through it")
    if way.folder is not None:
        os.chdir(way.folder)
    sys.stdout.flush()
    # The shell takes this process's place: its job control, its signals and its exit code are its own.
    os.execve(program, list(way.words), {**os.environ, **way.env})  # noqa: S606 (a list, and no shell reads it)


async def _show_end(attempts: Attempts, attempt: Attempt, node: int) -> None:
    """Print why an attempt does not run, as its platform says, and the last lines of a node."""
    print_findings(attempt.status.reasons)
    choice, tail = LogChoice(nodes=[node]), Tail(_LAST)
    await read_logs(
        attempts.platform_of(attempt.record), attempt.job_id, on_lines=lambda lines: tail.add(choice.among(lines))
    )
    for line in tail.lines():
        show_line(readable(line))
