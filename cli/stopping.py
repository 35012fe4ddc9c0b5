"""The commands that end jobs, remove what dead ones have left, and disturb them on purpose."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cli.arguments import DEFAULT_ROOT, AsJson, Overrides, ProfileFile, Root, TargetWords, target_of
from cli.starting import quiet_prefect
from cli.terminal import Screen, console, print_json, print_notes, stderr
from launcher.errors import ConfigProblem
from launcher.runs.attempts import cancel_each
from launcher.runs.index import Index
from launcher.runs.leftovers import Leftover, Untold, leftovers, remove_leftover
from litgpt_demo.errors import EXIT_CODES, DataError, Fault, TrainLitgptError

if TYPE_CHECKING:
    from flows.reconciling import Reaped


def cancel(
    target: TargetWords,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    as_json: AsJson = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Cancel the jobs of a run or a sweep, and prove that nothing of them is left."""
    found, words = target_of(target, overrides, profile, root), stderr if as_json else console
    found.index.request_cancel(found.name)
    cancelled, problems = cancel_each(found.attempts, tell=lambda what: print_notes(what, to=words))
    problems += [
        DataError(f"a record that may be of a trial of {found.name} cannot be read: {why}") for why in found.damaged
    ]
    for job_id in cancelled:
        words.print(f"cancelled {escape(job_id)}; nothing of it is left", soft_wrap=True)
    if cancelled:
        from launcher.checks.plan import lost_steps

        for run in {attempts.run for attempts in found.attempts}:
            if lost := lost_steps(found.storage(run)):
                words.print(f"{escape(run)}: {lost}", soft_wrap=True)
    for problem in problems:
        stderr.print(f"[bold red]error[/] {escape(str(problem))}", soft_wrap=True)
    if as_json:
        print_json({"name": found.name, "cancelled": cancelled, "problems": [str(problem) for problem in problems]})
    if problems:
        raise typer.Exit(problems[0].exit_code)
    if not found.runs:
        words.print(
            f"{escape(found.name)} was asked to end: none of its trials has begun, and its process cancels those that "
            "wait in a work pool. If that process is gone too, cancel its flow run in Prefect.",
            soft_wrap=True,
        )
    elif not cancelled:
        words.print(f"nothing was running of {escape(found.name)}: every attempt at it has ended")


def reap(
    root: Root = DEFAULT_ROOT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what dead runs have left on their platforms and which jobs outlived their flow runs, then remove them.

    Runs that live, or whose state is not known, are never touched; but for those whose flow runs Prefect has cancelled.
    """
    words = stderr if as_json else console
    abandoned, index = _of_cancelled_flow_runs(words, dry_run=True), Index.of(root)
    found = leftovers(index)
    for one in found:
        words.print(escape(str(one)), soft_wrap=True)
    those = [one for one in found if isinstance(one, Leftover)]
    jobs = [job for one in abandoned for job in one.running]
    cancelled: Sequence[Reaped] = [one for one in abandoned if one.problem]
    removed: list[Leftover] = []
    if not those:
        words.print(f"nothing is left of the dead runs under {escape(index.root.address())}")
    if (those or jobs) and not dry_run:
        question = f"remove all of it, {len(those) + len(jobs)} attempts?"
        if yes or (sys.stdin.isatty() and typer.confirm(question, err=as_json)):
            if jobs:
                cancelled = _of_cancelled_flow_runs(words, dry_run=False)
            removed = [one for one in those if _remove(index, one, words)]
        else:
            words.print("nothing was removed; --yes removes it")
            those = []
    if as_json:
        print_json({
            "running": [asdict(one) for one in abandoned if one.running],
            "cancelled": [asdict(reaped) for reaped in cancelled],
            "left": [{"run": one.run, "attempt": one.record.attempt, "job": one.job_id, "what": one.what,
                      "removed": one in removed} for one in found if isinstance(one, Leftover)],
            "unknown": [asdict(one) for one in found if isinstance(one, Untold)],
        })  # fmt: skip
    unknown = any(isinstance(one, Untold) for one in found) or any(reaped.problem for reaped in cancelled)
    if unknown or (not dry_run and len(removed) < len(those)):
        raise typer.Exit(EXIT_CODES[Fault.UNREACHABLE])


def _of_cancelled_flow_runs(words: Screen, *, dry_run: bool) -> Sequence[Reaped]:
    """List or cancel the jobs that still run although Prefect's server has cancelled their flow runs."""
    quiet_prefect()
    from flows.reconciling import reap_here
    from flows.server import server_address

    if server_address() is None:
        return ()
    found = reap_here(dry_run=dry_run)
    for reaped in found:
        words.print(escape(str(reaped)), soft_wrap=True)
    if not found:
        words.print("no job goes on whose flow run is cancelled")
    return found


def _remove(index: Index, one: Leftover, words: Screen) -> bool:
    """Remove what is left of an attempt, and tell; return False if it is not known to be gone."""
    try:
        gone = remove_leftover(index, one)
    except TrainLitgptError as error:
        stderr.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True)
        return False
    text = f"removed {one.job_id}; nothing of it is left" if gone else f"{one.run} lives again, and was left alone"
    words.print(escape(text), soft_wrap=True)
    return True


def drill(
    platform: Annotated[
        str | None, typer.Argument(help="Your cluster's profile; this machine without one.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    only: Annotated[list[str] | None, typer.Option(help="Hold this drill alone; may be given again.")] = None,
    times: Annotated[int, typer.Option(min=1, help="How often each is held.")] = 1,
    yes: Annotated[bool, typer.Option("--yes", help="Start jobs on your cluster without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Disturb small trainings on purpose, and show what happened: kills, cancellations, a server that is gone."""
    from cli.drills import command, judging

    config = command.config_for(platform, overrides or [])
    drills = command.chosen(config, only or [])
    show = partial(stderr.print, soft_wrap=True, markup=False)
    show("\n".join(command.announcement(config, drills, times)))
    asked = yes or command.is_here(config) or (sys.stdin.isatty() and typer.confirm("hold them?"))
    if not asked:
        raise ConfigProblem("nothing was started: --yes agrees to these jobs")
    results, notes = command.hold_all(config, drills, times=times, tell=show)
    typer.echo(command.as_json(results)) if as_json else console.print_table(judging.rows(results))
    show("\n".join(notes))
    raise typer.Exit(int(any(result.violations for result in results)))
