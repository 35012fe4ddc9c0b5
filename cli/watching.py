"""The commands that look at what has been started: runs, their attempts and their logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.markup import escape

from cli.arguments import DEFAULT_ROOT, AsJson, Overrides, ProfileFile, Root, TargetWords, target_of
from cli.terminal import console, json_text, print_findings, print_json, print_notes, show_line, stderr
from launcher.errors import ConfigProblem, PlatformUnreachable
from launcher.job import JobId, LogLine
from launcher.platforms.base import Platform
from launcher.runs.attempts import Attempt, Attempts
from launcher.runs.index import AttemptRecord, Index, damaged_records
from launcher.runs.listing import RunRow, run_rows, table_of
from launcher.runs.log_choice import LogChoice, Tail, rank_of
from launcher.runs.log_text import readable
from launcher.runs.targets import Target
from launcher.runs.waiting import follow as follow_job
from launcher.runs.waiting import read_logs
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.metrics import parsed
from litgpt_demo.settings import Duration


def runs(
    root: Annotated[str, typer.Argument(help="A folder, or gs://bucket/prefix.")] = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """List the runs that were started under a root, the newest first."""
    from flows.reconciling import contradicted

    index = Index.of(root)
    rows = contradicted(run_rows(index, bad=(bad := damaged_records())), index)
    if as_json:
        print_notes(str(bad), to=stderr)
        print_json([row.as_json() for row in rows])
        return
    console.print_table(table_of(rows))
    if not rows:
        console.print(f"nothing has been started under {escape(Index.of(root).root.address())}")
    print_notes(*_notes_of(rows), str(bad))


def _notes_of(rows: Iterable[RunRow]) -> list[str]:
    """Return what a table has no column for: why a state is not known, or what contradicts it."""
    return [f"{row.run}: {row.note}" for row in rows if row.note]


def status(
    target: TargetWords,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    as_json: AsJson = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Show the state and progress of every attempt of a run, or of a sweep and each of its trials."""
    from launcher.checks.plan import progress_of

    found = target_of(target, overrides, profile, root)
    if found.is_sweep:
        _sweep_status(found, as_json=as_json)
        return
    if as_json or len(found.runs) > 1:
        rows = run_rows(found.index, found.runs, bad=(bad := damaged_records()), open=found.open)
        if as_json:
            print_json(_with_history(found, rows))
            print_notes(str(bad), to=stderr)
            return
        console.print_table(table_of(rows))
        print_notes(*_notes_of(rows), str(bad))
        return
    [attempts] = found.attempts
    seen = attempts.all()
    console.print_table(
        [
            {
                "attempt": str(attempt.number),
                "state": attempt.status.state.value,
                "in the platform's words": attempt.status.native,
                "job": attempt.job_id,
                **({"code": attempt.record.code} if attempt.record.code else {}),
            }
            for attempt in seen
        ]
    )
    print_findings(reason for attempt in seen for reason in attempt.status.reasons)
    if progress := progress_of(found.storage(attempts.run), live=any(attempt.status.state.live for attempt in seen)):
        console.print(escape(progress), soft_wrap=True)


def _sweep_status(found: Target, *, as_json: bool) -> None:
    from launcher.runs.sweep_progress import summary_of
    from launcher.runs.trials import sweep_folder

    rows = run_rows(found.index, found.runs, bad=(bad := damaged_records()), open=found.open)
    folder = sweep_folder(found.index.root, found.name)
    summary = summary_of(found.name, folder, [row.run for row in rows if row.live])
    if as_json:
        told = None if summary is None else summary.as_json()
        print_json({"sweep": found.name, "summary": told, "trials": _with_history(found, rows)})
        print_notes(str(bad), to=stderr)
        return
    console.print_table(table_of(rows))
    for line in () if summary is None else summary.lines(now=time.time()):
        console.print(escape(line), soft_wrap=True)
    print_notes(*_notes_of(rows), str(bad))


def _with_history(found: Target, rows: Iterable[RunRow]) -> list[dict[str, Any]]:
    """Return rows for a program, each with its attempts.

    Of several runs, one whose platform cannot be asked has null for them, and its note says why.

    Raises:
        TrainLitgptError: the attempts of the only run that is meant cannot be asked for, which the table needs too.
    """
    told: list[dict[str, Any]] = []
    for row in rows:
        try:
            told.append({**row.as_json(), "history": [*map(_as_json, found.of_one(row.run).all())]})
        except TrainLitgptError as error:
            if len(found.runs) == 1 and not found.is_sweep:
                raise
            told.append({**row.as_json(), "note": row.note or str(error), "history": None})
    return told


def _as_json(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt for a program; `native` is the platform's own word."""
    status = attempt.status
    return {
        "attempt": attempt.number,
        "state": status.state.value,
        "native": status.native,
        "job": attempt.job_id,
        "code": attempt.record.code,
        "directory": attempt.record.directory,
        "exit_codes": status.exit_codes,
        "hosts": status.hosts,
        "reasons": [asdict(reason) for reason in status.reasons],
    }


def logs(
    target: TargetWords,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    attempt: Annotated[int | None, typer.Option(help="Which attempt; the last one unless given.")] = None,
    node: Annotated[list[int] | None, typer.Option(min=0, help="Lines of this node; may be given again.")] = None,
    rank: Annotated[list[int] | None, typer.Option(min=0, help="Lines of this rank; may be given again.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="The last so many lines of each node.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Lines of the last 90s, 10m, 8h or 2d, or since a time as 2026-01-31T12:00.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Metrics as the JSON that the job printed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for programs.")] = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Show the log lines of all nodes, with metrics in words. Lines of a sweep begin with the name of their trial."""
    found = target_of(target, overrides, profile, root)
    begin = None if since is None else moment(since, now=time.time())

    async def show(attempts: Attempts) -> None:
        record = _attempt_of(attempts, attempt)
        _check_there(record, nodes=node or (), ranks=rank or ())
        several = f"{attempts.run}  " if len(found.runs) > 1 else ""
        print_lines = partial(_print_as_json, record) if as_json else partial(_print_lines, raw=raw, prefix=several)
        choice = LogChoice(nodes=node or (), ranks=rank or (), since=begin)
        await _show_logs(attempts.platform_of(record), record.job_id, choice, print_lines, tail=tail, following=follow)

    async def show_all() -> None:
        await asyncio.gather(*map(show, found.attempts))

    asyncio.run(show_all())


async def _show_logs(
    platform: Platform,
    job_id: JobId,
    choice: LogChoice,
    show: Callable[[Iterable[LogLine]], None],
    *,
    tail: int | None,
    following: bool,
) -> None:
    position = ""
    if tail is not None or not following:
        last = None if tail is None else Tail(tail)
        take = show if last is None else last.add
        position = await read_logs(
            platform, job_id, on_lines=lambda lines: take(choice.among(lines)), on_silence=_tell_of_silence
        )
        if last is not None:
            show(last.lines())
    if following:
        await follow_job(
            platform, job_id, on_lines=lambda lines: show(choice.among(lines)), poll=1.0, position=position
        )


def _tell_of_silence(error: PlatformUnreachable) -> None:
    print_notes(f"{error}; waiting for the rest of the log", to=stderr)


def moment(words: str, *, now: float) -> float:
    """Return the time that `--since` means, in seconds since the epoch.

    Raises:
        ConfigProblem: it means none.
    """
    try:
        return now - TypeAdapter(Duration).validate_python(words).total_seconds()
    except ValidationError:
        pass
    try:
        return datetime.fromisoformat(words).timestamp()
    except ValueError:
        raise ConfigProblem(
            f"--since={words} is neither a time span, as 10m or 8h, nor a time, as 2026-01-31T12:00; give one of them"
        ) from None


def _attempt_of(attempts: Attempts, number: int | None) -> AttemptRecord:
    there = [record for record in attempts.records() if number in (None, record.attempt)]
    if not there:
        raise ConfigProblem(f"{attempts.run} has no attempt {number}; `train-litgpt status` lists them")
    return there[-1]


def _check_there(record: AttemptRecord, *, nodes: Collection[int], ranks: Collection[int]) -> None:
    """Refuse nodes and ranks that the attempt has not got, as far as its record says how many there are."""
    most, processes = record.platform.get("nodes"), record.platform.get("processes")
    if not isinstance(most, int) or not isinstance(processes, int):
        return
    for option, asked, count in (("--node", nodes, most), ("--rank", ranks, most * processes)):
        if wrong := [number for number in asked if number >= count]:
            raise ConfigProblem(
                f"{option}={wrong[0]} is none of {record.run}, attempt {record.attempt}, which has 0 to {count - 1}"
            )


def _print_lines(lines: Iterable[LogLine], *, raw: bool, prefix: str = "") -> None:
    for line in lines:
        show_line(f"{prefix}{line if raw else readable(line)}")


def _print_as_json(record: AttemptRecord, lines: Iterable[LogLine]) -> None:
    for line in lines:
        told = {"run": record.run, "attempt": record.attempt, "node": line.node, "rank": rank_of(line)}
        typer.echo(json_text({**told, "time": line.time, "text": line.text, "metrics": parsed(line.text)}))
