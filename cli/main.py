"""The command line. Heavy imports (Prefect, and through no path torch) wait until a command needs them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.markup import escape
from rich.table import Table

from cli import interrupts
from cli.prefect_settings import problem_of_prefects_settings
from cli.terminal import Screen, accept_any_text, show_line
from launcher.benchmark import BenchmarkConfig, pairs_table, table
from launcher.config import (
    RunConfig,
    ScriptConfig,
    SweepConfig,
    config_document,
    overrides_of,
    read_profile,
    validated,
)
from launcher.errors import ConfigProblem, JobFailed
from launcher.formatting import bytes_text
from launcher.job import LogLine
from launcher.runs.attempts import Attempts, cancel_each
from launcher.runs.index import Index, damaged_records
from launcher.runs.log_text import readable
from launcher.runs.sweeps import trials
from launcher.runs.targets import Target, find, find_started_with
from litgpt_demo.config import Settings
from litgpt_demo.errors import EXIT_CODES, DataError, Fault, TrainLitgptError
from litgpt_demo.export import use_of
from litgpt_demo.findings import Finding, fault_of_findings
from litgpt_demo.proxies import settle_proxies
from litgpt_demo.runs import FINAL, HUGGINGFACE, LITGPT, METRICS, REPORT
from litgpt_demo.storage import Storage, open_storage

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="From raw text to a verified, trained GPT, on whatever machines you have.",
)
# Into a file or a pipe every row and message is one line, so that it can be searched and cut. Output of jobs has colons
# that are no emoji.
console = Screen(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 10_000)
stderr = Screen(stderr=True, highlight=False, emoji=False)


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


ConfigFile = Annotated[Path, typer.Argument(help="A YAML file, as in deployments/configs.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings that override it: train.learning_rate=3e-4", show_default=False)
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--platform", show_default=False,
        help="A YAML file whose platform, root and image take the place of the config's; overrides win over it.",
    ),
]  # fmt: skip
TargetWords = Annotated[
    str,
    typer.Argument(
        metavar="RUN", show_default=False,
        help="A run's or sweep's name or its beginning, @last, a run's folder, or the config that it was started with.",
    ),
]  # fmt: skip
NewJob = Annotated[bool, typer.Option("--new", help="Start even if another job of this name runs.")]
CancelOld = Annotated[bool, typer.Option("--cancel-old", help="First cancel another job of this name that runs.")]
Root = Annotated[str, typer.Option(help="The root in which names are looked up: a folder, or gs://bucket/prefix.")]
DEFAULT_ROOT: str = RunConfig.model_fields["root"].default


def main() -> None:
    """The console script."""
    accept_any_text()
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
    except ValueError as error:
        if (told := problem_of_prefects_settings(error)) is None:
            raise
        stderr.print(f"[bold red]error[/] {escape(told)}", soft_wrap=True)
        sys.exit(EXIT_CODES[Fault.USER])


AnyKind: TypeAlias = RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig


def read_config(path: Path, assignments: list[str] | None, profile: Path | None = None) -> AnyKind:
    """The config in a file, of the kind that its sections say: `script`, `sweep`, `measure`, or a training."""
    document, where = config_document(path, assignments or [], profile=profile), _where(path, profile)
    if "measure" in document:
        return validated(BenchmarkConfig, document, where=where)
    if "script" in document:
        return validated(ScriptConfig, document, where=where)
    return validated(SweepConfig if "sweep" in document else RunConfig, document, where=where)


def _where(path: Path, profile: Path | None) -> str:
    return str(path) if profile is None else f"{path} with {profile}"


# --- doing ------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: Profile = None,
    output: Annotated[bool, typer.Option("--output", help="Also show what the job prints.")] = False,
    new: NewJob = False,
    cancel_old: CancelOld = False,
) -> None:
    """Run a config from this terminal: the whole pipeline, a script on several nodes, or a sweep."""
    settings = read_config(config, [*(overrides or []), *_about_others(new=new, cancel_old=cancel_old)], profile)
    match settings:
        case SweepConfig():
            _run_sweep(settings, output)
        case RunConfig():
            _run_training(settings, output)
        case ScriptConfig():
            _run_script(settings)
        case BenchmarkConfig():
            _run_benchmark(settings)


def _about_others(*, new: bool, cancel_old: bool) -> list[str]:
    """The overrides that these options stand for."""
    if new and cancel_old:
        raise ConfigProblem("--new keeps the job that runs already and --cancel-old ends it; give one of them")
    return ["start.others=keep"] if new else ["start.others=cancel"] if cancel_old else []


def _run_training(settings: RunConfig, output: bool) -> None:
    final = _watched("flows.train_litgpt:train_litgpt", dict(settings), output=output)
    where = open_storage(settings.root).within(f"runs/{final.run}")
    console.print(f"\n[bold]{escape(final.prompt)}[/]{escape(final.sample.removeprefix(final.prompt))}\n")
    model = (
        {"model": LITGPT}
        | ({"hf model": HUGGINGFACE} if final.huggingface else {})
        | {"card": f"{FINAL}/MODEL_CARD.md"}
    )
    for name, path in (model | {"report": REPORT, "metrics": METRICS}).items():
        console.print(f"  {name:<8} {escape(where.address(path))}", soft_wrap=True)
    console.print("\n  use it")
    for line in use_of(where.address(LITGPT), settings.name):
        console.print(f"    {escape(line)}", soft_wrap=True)


def _run_script(settings: ScriptConfig) -> None:
    logs = _watched("flows.run_torchrun:run_torchrun", dict(settings), output=True)
    console.print(f"\n  logs     {escape(logs)}", soft_wrap=True)


def _run_sweep(settings: SweepConfig, output: bool) -> None:
    trials(settings)  # one that cannot be is refused before anything is started for it
    _print_table(_watched("flows.sweep_litgpt:sweep_litgpt", dict(settings), output=output))


def _run_benchmark(settings: BenchmarkConfig) -> None:
    made = _watched("flows.benchmark_network:benchmark_network", dict(settings))
    _print_table(table(made))
    _print_table(pairs_table(made.result))


@app.command(name="benchmark-network")
def benchmark_network(config: ConfigFile, overrides: Overrides = None, profile: Profile = None) -> None:
    """Measure the network of a config's platform: the bandwidth among ranks, and the slow node if there is one."""
    document = config_document(config, overrides or [], profile=profile)
    # Any config will do: of a training's, what it trains is left out.
    mine = {name: value for name, value in document.items() if name in BenchmarkConfig.model_fields}
    _run_benchmark(validated(BenchmarkConfig, mine, where=_where(config, profile)))


@app.command()
def prepare(config: ConfigFile, overrides: Overrides = None, profile: Profile = None) -> None:
    """Prepare the dataset of a config, and stop there."""
    settings = read_config(config, overrides, profile)
    if isinstance(settings, ScriptConfig | BenchmarkConfig):
        raise ConfigProblem(f"{config} runs a script, which has no dataset; give the config of a training or a sweep")
    parameters = {"root": settings.root, "data": settings.data, "workers": settings.workers}
    _watched("flows.prepare_dataset:prepare_dataset", parameters)


@app.command()
def sweep(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: Profile = None,
    new: NewJob = False,
    cancel_old: CancelOld = False,
) -> None:
    """Train every combination of a grid (the config's `sweep` section)."""
    changes = [*(overrides or []), *_about_others(new=new, cancel_old=cancel_old)]
    settings = read_config(config, changes, profile)
    if not isinstance(settings, SweepConfig):
        raise ConfigProblem(
            f"{config} has no `sweep` section, so that there is nothing to vary; add one, as "
            "`sweep={grid: {train.learning_rate: [3.0e-4, 1.0e-3]}}`, or use `train-litgpt run`"
        )
    _run_sweep(settings, output=False)


@app.command()
def collect(
    target: TargetWords,
    overrides: Overrides = None,
    profile: Profile = None,
    step: Annotated[int | None, typer.Option(help="Export the checkpoint of this step.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="The newest one, even of a live run.")] = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Export a run's last checkpoint for LitGPT and Hugging Face, and check both against the trained weights."""
    from litgpt_demo.export import export as collect_models
    from litgpt_demo.export import summary_lines

    for storage in _folders(target, overrides, profile, root):
        final = collect_models(storage, step=step, newest=newest)
        for line in summary_lines(final):
            console.print(escape(line), soft_wrap=True)
        console.print(f"[green]✓[/] {escape(storage.address(FINAL))}", soft_wrap=True)


@app.command()
def submit(
    deployment: Annotated[str, typer.Argument(help="`local`, or FLOW/DEPLOYMENT in full.", show_default=False)],
    overrides: Overrides = None,
    profile: Profile = None,
    new: NewJob = False,
    cancel_old: CancelOld = False,
) -> None:
    """Start the flow of a deployment on Prefect's server, with some settings changed."""
    _quiet_prefect()
    from flows.server import server_problems
    from flows.submission import submit_deployment

    changes = overrides_of([*(overrides or []), *_about_others(new=new, cancel_old=cancel_old)])
    sections = {} if profile is None else read_profile(profile)
    with server_problems():
        created = asyncio.run(submit_deployment(deployment, changes, profile=sections))
    console.print(f"flow run [bold]{created.name}[/] of {created.deployment}\n  {created.url}", soft_wrap=True)


def _watched(flow: str, parameters: Mapping[str, Any], *, output: bool = False) -> Any:
    """Run a flow in this process and show it; Ctrl-C leaves a job that has been started alone, and says so.

    Args:
        flow: `module:name`; imported when the terminal shows something.
    """
    from cli.foreground import in_foreground

    def load() -> Callable[[], Coroutine[Any, Any, Any]]:
        module, _, name = flow.partition(":")
        return partial(getattr(import_module(module), name), **parameters)

    _quiet_prefect()
    return in_foreground(load, console, output=output)


def _quiet_prefect() -> None:
    """Prefect's own console lines would fight with ours; its server and UI get them all the same."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # A fresh database is migrated first, which takes 15 s on two cores; the default of 20 s is too close.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "9")


# --- looking ----------------------------------------------------------------------------------------------------------


@app.command()
def render(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: Profile = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where every environment variable of the nodes comes from instead.")
    ] = False,
) -> None:
    """Print exactly what would be sent to the platform, for each trial of a sweep. Nothing is started or written."""
    from launcher.checks.preview import previews

    shown = list(previews(read_config(config, overrides, profile)))
    unknown = dict.fromkeys(what for preview in shown for what in preview.unknown)
    if unknown and not explain:
        show_line("# Not to be sent as it is: values that are not known from here have something else in their place.")
    for what in unknown:
        if not explain:
            show_line(f"# - {' '.join(what.split())}")
        if explain or not sys.stdout.isatty():  # a terminal shows the line above
            stderr.print(f"[cyan]?[/] not known from here: {escape(what)}", soft_wrap=True)
    for preview in shown:
        if preview.title:
            show_line(f"--- # {preview.title}")
        if explain:
            _print_table([dict(row) for row in preview.submission.environment])
        else:
            typer.echo(str(preview.submission), nl=False)


@app.command()
def plan(config: ConfigFile, overrides: Overrides = None, profile: Profile = None) -> None:
    """Show which steps would run, which are done already, what the training costs, and what blocks it."""
    from launcher.checks.plan import plan_of

    planned = plan_of(read_config(config, overrides, profile))
    for rows in (planned.steps, planned.trials, planned.arithmetic):
        _print_table(rows)
        if rows:
            console.print()
    _print_findings(planned.findings)
    if fault := fault_of_findings(planned.findings):
        raise typer.Exit(EXIT_CODES[fault])
    severities = {finding.severity for finding in planned.findings}
    if "unknown" in severities:
        console.print("nothing that is known blocks it; a run needs to know what is marked with ?")
    elif severities <= {"info"}:
        console.print("nothing blocks it")


@app.command()
def settings(
    prefix: Annotated[str, typer.Argument(help="Only settings whose names begin with this: train, data.corpus")] = "",
    kind: Annotated[str, typer.Option(help="training, script, sweep or network benchmark")] = "training",
) -> None:
    """List every setting of a config, with its default and its meaning."""
    from cli.settings import settings_of

    kinds: dict[str, type[Settings]] = {
        "training": RunConfig, "script": ScriptConfig, "sweep": SweepConfig, "network": BenchmarkConfig,
    }  # fmt: skip
    if kind not in kinds:
        raise ConfigProblem(f"--kind={kind!r} is no kind of config; there are {', '.join(kinds)}")
    found = [setting for setting in settings_of(kinds[kind]) if setting.name.startswith(prefix)]
    if not found:
        raise ConfigProblem(f"no setting begins with {prefix!r}; without it all are listed")
    _print_table([{"setting": item.name, "default": item.default, "meaning": item.text} for item in found])


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Also check what this config needs.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    profile: Profile = None,
    root: Annotated[str, typer.Option(help="Where runs would be written.")] = "output",
) -> None:
    """Check this machine and what a config needs, and say how to fix what is wrong."""
    from launcher.checks.doctor import examine_environment
    from launcher.checks.plan import findings_of

    if config is None and profile is not None:
        raise ConfigProblem("--platform means nothing without a config; give the config that is to run there")
    settings = None if config is None else read_config(config, overrides, profile)
    findings = examine_environment(root if settings is None else settings.root)
    if settings is not None:
        findings += [finding for finding in findings_of(settings) if finding not in findings]
    _print_findings(findings)
    if any(finding.severity in {"error", "unknown"} for finding in findings):
        raise typer.Exit(EXIT_CODES[Fault.USER])


@app.command()
def verify(
    dataset: Annotated[str, typer.Argument(help="Its folder, or gs://bucket/…/datasets/…", show_default=False)],
) -> None:
    """Read every byte of a prepared dataset again, and compare the dataset with its manifest."""
    from litgpt_demo.data.verification import verify_dataset

    start = time.monotonic()
    found = verify_dataset(dataset)
    manifest, seconds = found.manifest, max(time.monotonic() - start, 1e-3)
    for problem in found.problems:
        console.print(f"[bold red]✗[/] {escape(problem)}", soft_wrap=True)
    if found.problems:
        stderr.print(
            f"[bold red]error[/] {escape(dataset)} is not what its manifest says: {found.remedy}",
            soft_wrap=True,
        )
        raise typer.Exit(EXIT_CODES[Fault.DATA])
    size = sum(file.size for file in manifest.files)
    console.print(
        f"[green]✓[/] {len(manifest.files)} files, {bytes_text(size)} at {bytes_text(size / seconds)}/s: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, all as the manifest says"
    )


@app.command()
def runs(
    root: Annotated[str, typer.Argument(help="A folder, or gs://bucket/prefix.")] = DEFAULT_ROOT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, for programs.")] = False,
) -> None:
    """List the runs that were started under a root, the newest first."""
    from flows.reconciling import contradicted
    from launcher.runs.listing import run_rows, table_of

    rows = contradicted(run_rows(Index.of(root), bad=(bad := damaged_records())))
    if as_json:
        if bad.count:
            stderr.print(escape(str(bad)), soft_wrap=True)
        typer.echo(json.dumps([row.as_json() for row in rows], indent=1))
        return
    _print_table(table_of(rows))
    if not rows:
        console.print(f"nothing has been started under {escape(Index.of(root).root.address())}")
    _print_notes(*(f"{row.run}: {row.note}" for row in rows if row.note), str(bad))


@app.command()
def status(
    target: TargetWords, overrides: Overrides = None, profile: Profile = None, root: Root = DEFAULT_ROOT
) -> None:
    """Show the state and progress of every attempt of a run, or of every trial of a sweep."""
    from launcher.checks.plan import progress_of
    from launcher.runs.listing import run_rows, table_of

    found = target_of(target, overrides, profile, root)
    if len(found.runs) > 1:
        _print_table(table_of(run_rows(found.index, found.runs, bad=(bad := damaged_records()), open=found.open)))
        _print_notes(str(bad))
        return
    [attempts] = found.attempts
    seen = attempts.all()
    _print_table(
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
    _print_findings(reason for attempt in seen for reason in attempt.status.reasons)
    if progress := progress_of(found.storage(attempts.run), live=any(attempt.status.state.live for attempt in seen)):
        console.print(escape(progress), soft_wrap=True)


@app.command()
def logs(
    target: TargetWords,
    overrides: Overrides = None,
    profile: Profile = None,
    attempt: Annotated[int | None, typer.Option(help="Which attempt; the last one unless given.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Metrics as the JSON that the job printed.")] = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Show the log lines of all nodes, with metrics in words. Lines of a sweep begin with the name of their trial."""
    found = target_of(target, overrides, profile, root)
    asyncio.run(_show_logs(found, number=attempt, following=follow, raw=raw))


async def _show_logs(found: Target, *, number: int | None, following: bool, raw: bool) -> None:
    from launcher.runs.waiting import follow as follow_job
    from launcher.runs.waiting import read_logs

    async def show(attempts: Attempts) -> None:
        there = [record for record in attempts.records() if number in (None, record.attempt)]
        if not there:
            raise ConfigProblem(f"{attempts.run} has no attempt {number}; `train-litgpt status` lists them")
        platform, job_id = attempts.platform_of(there[-1]), there[-1].job_id
        show_lines = partial(_print_lines, raw=raw, prefix=f"{attempts.run}  " if len(found.runs) > 1 else "")
        if following:
            await follow_job(platform, job_id, on_lines=show_lines, poll=1.0)
        else:
            await read_logs(platform, job_id, on_lines=show_lines)

    await asyncio.gather(*map(show, found.attempts))


def _print_lines(lines: Iterable[LogLine], *, raw: bool, prefix: str = "") -> None:
    for line in lines:
        show_line(f"{prefix}{line if raw else readable(line)}")


@app.command()
def cancel(
    target: TargetWords, overrides: Overrides = None, profile: Profile = None, root: Root = DEFAULT_ROOT
) -> None:
    """Cancel the jobs of a run or a sweep, and prove that nothing of them is left."""
    found = target_of(target, overrides, profile, root)
    found.index.request_cancel(found.name)
    cancelled, problems = cancel_each(found.attempts, tell=lambda what: _print_notes(what))
    problems += [
        DataError(f"a record that may be of a trial of {found.name} cannot be read: {why}") for why in found.damaged
    ]
    for job_id in cancelled:
        console.print(f"cancelled {escape(job_id)}; nothing of it is left", soft_wrap=True)
    if cancelled:
        from launcher.checks.plan import lost_steps

        for run in {attempts.run for attempts in found.attempts}:
            if lost := lost_steps(found.storage(run)):
                console.print(f"{escape(run)}: {lost}", soft_wrap=True)
    for problem in problems:
        stderr.print(f"[bold red]error[/] {escape(str(problem))}", soft_wrap=True)
    if problems:
        raise typer.Exit(problems[0].exit_code)
    if not cancelled:
        console.print(f"nothing was running of {escape(found.name)}: every attempt at it has ended")


@app.command()
def reap(
    root: Root = DEFAULT_ROOT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without asking.")] = False,
) -> None:
    """Show what dead runs have left on their platforms, then remove it; jobs of cancelled flow runs end with it.

    Runs that live, or whose state is not known, are never touched.
    """
    unknown = False if dry_run else _reap_cancelled()
    unknown = _reap_leftovers(Index.of(root), dry_run=dry_run, yes=yes) or unknown
    if unknown:
        raise typer.Exit(EXIT_CODES[Fault.UNREACHABLE])


def _reap_cancelled() -> bool:
    """Cancel jobs that still run although Prefect's server has cancelled their flow runs; True if one is not known."""
    _quiet_prefect()
    from flows.reconciling import reap_here
    from flows.server import server_address

    if server_address() is None:
        return False
    found = reap_here()
    for reaped in found:
        console.print(escape(str(reaped)), soft_wrap=True)
    if not found:
        console.print("no job goes on whose flow run is cancelled")
    return any(reaped.problem for reaped in found)


def _reap_leftovers(index: Index, *, dry_run: bool, yes: bool) -> bool:
    """Show, and after a yes remove, what dead runs have left; return whether something is not known to be gone."""
    from launcher.runs.leftovers import Leftover, leftovers, remove_leftover

    found = leftovers(index)
    those = [one for one in found if isinstance(one, Leftover)]
    for one in found:
        console.print(escape(str(one)), soft_wrap=True)
    unknown = len(those) < len(found)
    if not those:
        console.print(f"nothing is left of the dead runs under {escape(index.root.address())}")
        return unknown
    if dry_run:
        return unknown
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"remove all of it, {len(those)} attempts?")):
        console.print("nothing was removed; --yes removes it")
        return unknown
    for one in those:
        try:
            gone = remove_leftover(index, one)
        except TrainLitgptError as error:
            stderr.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True)
            unknown = True
            continue
        text = f"removed {one.job_id}; nothing of it is left" if gone else f"{one.run} lives again, and was left alone"
        console.print(escape(text), soft_wrap=True)
    return unknown


def _folders(words: str, overrides: list[str] | None, profile: Path | None, root: str) -> list[Storage]:
    """The folders of the runs that a verb is about, a copy of a run among them, which is in no index."""
    if "/" in words and not words.endswith((".yaml", ".yml")):
        return [open_storage(words)]
    found = target_of(words, overrides, profile, root)
    return [found.storage(run) for run in found.runs]


def target_of(words: str, overrides: list[str] | None, profile: Path | None, root: str) -> Target:
    """The run or sweep that a verb is about: by its name or folder, or by its config."""
    if words.endswith((".yaml", ".yml")) or Path(words).is_file():
        return find_started_with(read_config(Path(words), overrides, profile))
    if overrides:
        raise ConfigProblem(f"{overrides[0]!r} is an override, which belongs to a config; {words!r} is a run's name")
    if profile is not None:
        raise ConfigProblem(f"--platform={profile} belongs to a config; {words!r} is a run's name, found under --root")
    return find(words, root=root)


def _print_findings(findings: Iterable[Finding]) -> None:
    signs = {"error": "[bold red]✗[/]", "unknown": "[cyan]?[/]", "warning": "[yellow]![/]", "info": "[green]✓[/]"}
    for finding in findings:
        # What could be done about it is news, though neither good nor bad.
        sign = "[dim]·[/]" if finding.severity == "info" and finding.fix else signs[finding.severity]
        fix = f"\n    [dim]→ {escape(finding.fix)}[/]" if finding.fix else ""
        console.print(f"{sign} {escape(finding.what)} [dim]{finding.code}[/]{fix}", soft_wrap=True)


def _print_notes(*notes: str) -> None:
    for note in filter(None, notes):
        console.print(f"[yellow]![/] {escape(note)}", soft_wrap=True)


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        table.add_column(escape(name), overflow="fold")  # an address that is cut short is of no use
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    console.print(table)


if __name__ == "__main__":
    interrupts.answer()
    main()
