"""The command line. Heavy imports (Prefect, and through no path torch) wait until a command needs them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from traceback import walk_tb
from typing import Annotated, Any, TypeAlias, get_args

import typer
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from cli.terminal import Screen, accept_any_text, show_line
from launcher.benchmark import BenchmarkConfig, pairs_table, table
from launcher.checks.doctor import examine_environment
from launcher.checks.plan import findings_of, lost_steps, plan_of, previews, progress_of
from launcher.config import RunConfig, ScriptConfig, SweepConfig, config_document, overrides_of, read_profile, validated
from launcher.errors import ConfigProblem, JobFailed
from launcher.formatting import bytes_text
from launcher.images.identity import software_identity
from launcher.job import LogLine
from launcher.runs import waiting
from launcher.runs.attempts import Attempts, cancel_each
from launcher.runs.index import DamagedRecords, Index
from launcher.runs.listing import Target, find, find_started_with, leftovers, remove_leftover, run_rows, table_of
from launcher.runs.sweeps import trials
from litgpt_demo.config import Settings
from litgpt_demo.data.dataset import verify_dataset
from litgpt_demo.documents import first_problem
from litgpt_demo.errors import EXIT_CODES, DataError, Fault, Finding, TrainLitgptError, fault_of_findings
from litgpt_demo.export import summary_lines, usage
from litgpt_demo.proxies import settle_proxies
from litgpt_demo.runs import FINAL, HUGGINGFACE, LITGPT, METRICS, REPORT
from litgpt_demo.storage import open_storage

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# Into a file or a pipe every row and message is one line, so that it can be searched and cut. Output of jobs has colons
# that are no emoji.
console = Screen(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 10_000)
stderr = Screen(stderr=True, highlight=False, emoji=False)


@app.callback(invoke_without_command=True)
def program(
    version: Annotated[bool, typer.Option("--version", help="Versions and commit, then exit.")] = False,
) -> None:
    """From raw text to a verified, trained GPT, on whatever machines you have."""
    if version:  # from installed metadata: nothing heavy is imported
        identity = software_identity()
        typer.echo(", ".join(filter(None, [*identity.listed("train-litgpt"), identity.revision])))
        typer.echo(", ".join(identity.listed("torch", "litgpt", "prefect", "python")))
        raise typer.Exit


ConfigFile = Annotated[Path, typer.Argument(help="A YAML file, as in deployments/configs.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings that override it: train.max_steps=100", show_default=False)
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--platform", show_default=False,
        help="A YAML file whose platform, root and image take the place of the config's; overrides win over it.",
    ),
]  # fmt: skip
Words = Annotated[
    str,
    typer.Argument(
        metavar="RUN", show_default=False,
        help="A run's or sweep's name or its beginning, @last, a run's folder, or the config that it was started with.",
    ),
]  # fmt: skip
New = Annotated[bool, typer.Option("--new", help="Start even if another job of this name runs.")]
Old = Annotated[bool, typer.Option("--cancel-old", help="First cancel another job of this name that runs.")]
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
        _error(str(error), "failed" if isinstance(error, JobFailed) else "error")
        sys.exit(error.exit_code)
    except ValueError as error:
        modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
        if not any(module.startswith("prefect.settings") for module in modules):
            raise
        _error(_problem_of_prefects_settings(error))
        sys.exit(EXIT_CODES[Fault.USER])


def _problem_of_prefects_settings(error: ValueError) -> str:
    """Say which files have the settings that Prefect could not read when it was imported, and how to go on without."""
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    files = (file.absolute() for file in (profiles, Path("prefect.toml"), Path("pyproject.toml")) if file.is_file())
    places = [str(file) for file in files if file.name != "pyproject.toml" or b"[tool.prefect" in file.read_bytes()]
    # Of a validation not all is said: what was given may be a secret.
    words = first_problem(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
    return (
        f"Prefect cannot read its settings: {words}; mend {' or '.join([*places, 'a variable PREFECT_…'])}. To go on "
        "without: PREFECT_PROFILES_PATH=/dev/null in front of the command for a profiles.toml, another folder for the "
        "others"
    )


AnyKind: TypeAlias = RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig


def read_config(
    path: Path, assignments: list[str] | None, profile: Path | None = None, *, kind: type[AnyKind] | None = None
) -> AnyKind:
    """The config in a file, of the kind that its sections say: `script`, `sweep`, `measure`, or a training.

    Args:
        kind: what to read it as all the same; sections that such a config has not are left out.
    """
    document = config_document(path, assignments or [], profile=profile)
    if kind is None:
        kinds: dict[str, type[AnyKind]] = {"measure": BenchmarkConfig, "script": ScriptConfig, "sweep": SweepConfig}
        kind = next((kind for section, kind in kinds.items() if section in document), RunConfig)
    else:
        document = {name: value for name, value in document.items() if name in kind.model_fields}
    return validated(kind, document, where=str(path) if profile is None else f"{path} with {profile}")


# --- doing ------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: Profile = None,
    output: Annotated[bool, typer.Option("--output", help="Also show what the job prints.")] = False,
    new: New = False,
    cancel_old: Old = False,
) -> None:
    """Run a config from this terminal: the whole pipeline, a script on several nodes, or a sweep."""
    _run(read_config(config, _with_others(overrides, new=new, cancel_old=cancel_old), profile), output)


def _with_others(overrides: list[str] | None, *, new: bool, cancel_old: bool) -> list[str]:
    """The overrides, and those that these options stand for."""
    if new and cancel_old:
        raise ConfigProblem("--new keeps the job that runs already and --cancel-old ends it; give one of them")
    others = ["start.others=keep"] if new else ["start.others=cancel"] if cancel_old else []
    return [*(overrides or []), *others]


def _run(settings: AnyKind, output: bool = False) -> None:
    match settings:
        case SweepConfig():
            trials(settings)  # one that cannot be is refused before anything is started for it
            _print_table(_watched("flows.sweep_litgpt:sweep_litgpt", dict(settings), output=output))
        case BenchmarkConfig():
            made = _watched("flows.run_torchrun:benchmark_network", dict(settings))
            _print_table(table(made))
            _print_table(pairs_table(made[0]))
        case ScriptConfig():
            logs = _watched("flows.run_torchrun:run_torchrun", dict(settings), output=True)
            _say(f"\n  logs     {escape(logs)}")
        case RunConfig():
            final = _watched("flows.train_litgpt:train_litgpt", dict(settings), output=output)
            where = open_storage(settings.root).within(f"runs/{final.run}")
            here = f"{Path.cwd()}/"  # what is below it is shown relative to it
            _say("\n  a sample: a document's opening that it has not seen, and how it goes on")
            console.print(f"\n[bold]{escape(final.prompt)}[/]{escape(final.sample.removeprefix(final.prompt))}\n")
            hf, card = {"hf model": HUGGINGFACE} if final.huggingface else {}, f"{FINAL}/MODEL_CARD.md"
            for name, path in {"model": LITGPT, **hf, "card": card, "report": REPORT, "metrics": METRICS}.items():
                _say(f"  {name:<8} {escape(where.address(path).removeprefix(here))}")
            _say("\n  use it")
            for line in usage(where.address().removeprefix(here), final, huggingface=False).splitlines():
                _say(f"    {escape(line)}")


@app.command(name="benchmark-network")
def benchmark_network(config: ConfigFile, overrides: Overrides = None, profile: Profile = None) -> None:
    """Measure the network of a config's platform: the bandwidth among ranks, and the slow node if there is one."""
    _run(read_config(config, overrides, profile, kind=BenchmarkConfig))


@app.command()
def prepare(config: ConfigFile, overrides: Overrides = None, profile: Profile = None) -> None:
    """Prepare the dataset of a config, and stop there."""
    settings = read_config(config, overrides, profile)
    if isinstance(settings, ScriptConfig | BenchmarkConfig):
        raise ConfigProblem(f"{config} runs a script, which has no dataset; give the config of a training or a sweep")
    sections = {name: getattr(settings, name) for name in ("root", "data", "workers")}
    _watched("flows.train_litgpt:prepare_dataset", sections)


@app.command()
def sweep(
    config: ConfigFile, overrides: Overrides = None, profile: Profile = None, new: New = False, cancel_old: Old = False
) -> None:
    """Train every combination of a grid (the config's `sweep` section)."""
    settings = read_config(config, _with_others(overrides, new=new, cancel_old=cancel_old), profile)
    if not isinstance(settings, SweepConfig):
        raise ConfigProblem(
            f"{config} has no `sweep` section, so that there is nothing to vary; add one, as "
            "`sweep={grid: {train.seed: [1, 2]}}`, or use `train-litgpt run`"
        )
    _run(settings)


@app.command()
def collect(
    target: Words,
    overrides: Overrides = None,
    profile: Profile = None,
    step: Annotated[int | None, typer.Option(help="Export the checkpoint of this step.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="The newest one, even of a live run.")] = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Export a run's last checkpoint for LitGPT and Hugging Face, and check both against the trained weights."""
    from litgpt_demo.export.models import export as collect_models

    if "/" in target and not target.endswith((".yaml", ".yml")):  # a copy of a run may be in no index
        folders = [open_storage(target)]
    else:
        found = target_of(target, overrides, profile, root)
        folders = [found.storage(run) for run in found.runs]
    for storage in folders:
        final = collect_models(storage, step=step, newest=newest)
        for line in summary_lines(final):
            _say(escape(line))
        _say(f"[green]✓[/] {escape(storage.address(FINAL))}")


@app.command()
def submit(
    deployment: Annotated[str, typer.Argument(help="`local`, or FLOW/DEPLOYMENT in full.", show_default=False)],
    overrides: Overrides = None,
    profile: Profile = None,
    new: New = False,
    cancel_old: Old = False,
) -> None:
    """Start the flow of a deployment on Prefect's server, with some settings changed."""
    _quiet_prefect()
    from flows.parameters import submit_deployment
    from flows.server import server_problems

    changes = overrides_of(_with_others(overrides, new=new, cancel_old=cancel_old))
    sections = {} if profile is None else read_profile(profile)
    with server_problems():
        name, full, page = submit_deployment(deployment, changes, profile=sections)
    _say(f"flow run [bold]{name}[/] of {full}\n  {page}")


def _watched(flow: str, parameters: Mapping[str, Any], *, output: bool = False) -> Any:
    """Run a flow in this process and show it; Ctrl-C leaves a job that has been started alone, and says so.

    Args:
        flow: `module:name`; imported when the terminal shows something.
    """
    from cli.foreground import in_foreground

    _quiet_prefect()
    return in_foreground(lambda: partial(resolve_name(flow), **parameters), console, output=output)


def _quiet_prefect() -> None:
    """Prefect's own console lines would fight with ours; its server and UI get them all the same."""
    ours = {
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # A fresh database is migrated first, which takes 15 s on two cores; the default of 20 s is too close.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_CLIENT_MAX_RETRIES": "9",
    }
    os.environ.update({**ours, **os.environ})


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
    shown = list(previews(read_config(config, overrides, profile)))
    unknown = dict.fromkeys(what for preview in shown for what in preview.unknown)
    if unknown and not explain:
        show_line("# Not to be sent as it is: values that are not known from here have something else in their place.")
    for what in unknown:
        if not explain:
            show_line(f"# - {' '.join(what.split())}")
        if explain or not sys.stdout.isatty():  # a terminal shows the line above
            _say(f"[cyan]?[/] not known from here: {escape(what)}", stderr)
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
        _say("nothing that is known blocks it; a run needs to know what is marked with ?")
    elif severities <= {"info"}:
        _say("nothing blocks it")


@app.command()
def settings(
    prefix: Annotated[str, typer.Argument(help="Only settings whose names begin with this: train, data.corpus")] = "",
    kind: Annotated[str, typer.Option(help="training, script, sweep or network benchmark")] = "training",
) -> None:
    """List every setting of a config, with its default and its meaning."""
    kinds: dict[str, type[Settings]] = {
        "training": RunConfig, "script": ScriptConfig, "sweep": SweepConfig, "network": BenchmarkConfig,
    }  # fmt: skip
    if kind not in kinds:
        raise ConfigProblem(f"--kind={kind!r} is no kind of config; there are {', '.join(kinds)}")
    found = [row for row in _settings_of(kinds[kind]) if row["setting"].startswith(prefix)]
    if not found:
        raise ConfigProblem(f"no setting begins with {prefix!r}; without it all are listed")
    _print_table(found)


def _settings_of(model: type[Settings], prefix: str = "", whole: Any = None) -> Iterator[dict[str, str]]:
    """Each setting of a model and of its sections, in the order of the form; defaults as JSON, which YAML reads.

    A section that comes in several kinds lists each, headed by its `kind`; one that may be left out is one itself.

    Args:
        whole: the default of the whole section, which may have other values than the section's own.
    """
    for name in model.model_json_schema()["properties"]:
        field = model.model_fields[name]
        value = getattr(whole, name) if isinstance(whole, model) else field.default
        default, text, sections = "", field.description, list(_sections(field.annotation))
        if name == "kind":
            default, text = get_args(field.annotation)[0], model.__doc__
        elif not field.is_required() and (not sections or value is None):
            default = json.dumps(value, ensure_ascii=False)
        if not sections or value is None:
            yield {"setting": f"{prefix}{name}", "default": default, "meaning": " ".join((text or "").split())}
        for section in sections:
            yield from _settings_of(section, f"{prefix}{name}.", value)


def _sections(annotation: Any) -> Iterator[type[Settings]]:
    """The settings models in an annotation: one for a section, several for a union of them."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


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
    if config is None and profile is not None:
        raise ConfigProblem("--platform means nothing without a config; give the config that is to run there")
    settings = None if config is None else read_config(config, overrides, profile)
    findings = list(examine_environment(root if settings is None else settings.root))
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
    found = verify_dataset(dataset)
    for problem in found.problems:
        _say(f"[bold red]✗[/] {escape(problem)}")
    if found.problems:
        _error(f"{dataset} is not what its manifest says: {found.remedy}")
        raise typer.Exit(EXIT_CODES[Fault.DATA])
    manifest, size = found.manifest, bytes_text(sum(file.size for file in found.manifest.files))
    told = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, all as the manifest says"
    _say(f"[green]✓[/] {len(manifest.files)} files, {size}: {told}")


@app.command()
def runs(
    root: Annotated[str, typer.Argument(help="A folder, or gs://bucket/prefix.")] = DEFAULT_ROOT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, for programs.")] = False,
) -> None:
    """List the runs that were started under a root, the newest first."""
    rows = run_rows(Index.of(root), bad=(bad := DamagedRecords()))
    if os.environ.get("PREFECT_API_URL") and any(row.live for row in rows):
        from flows.reconciling import contradicted

        rows = contradicted(rows)
    if as_json:
        if bad:
            _say(escape(str(bad)), stderr)
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    _print_table(table_of(rows))
    if not rows:
        _say(f"nothing has been started under {escape(Index.of(root).root.address())}")
    _print_notes(*(f"{row.run}: {row.note}" for row in rows if row.note), str(bad))


@app.command()
def status(target: Words, overrides: Overrides = None, profile: Profile = None, root: Root = DEFAULT_ROOT) -> None:
    """Show the state and progress of every attempt of a run, or of every trial of a sweep."""
    found = target_of(target, overrides, profile, root)
    if len(found.runs) > 1:
        _print_table(table_of(run_rows(found.index, found.runs, bad=(bad := DamagedRecords()), open=found.open)))
        _print_notes(str(bad))
        return
    [attempts] = found.attempts
    seen = attempts.all()
    rows = []
    for one in seen:
        row = {"attempt": one.number, "state": one.status.state, "in the platform's words": one.status.native}
        rows.append({**row, "job": one.record.job_id, **({"code": one.record.code} if one.record.code else {})})
    _print_table(rows)
    _print_findings(reason for attempt in seen for reason in attempt.status.reasons)
    if progress := progress_of(found.storage(attempts.run), live=any(attempt.status.state.live for attempt in seen)):
        _say(escape(progress))


@app.command()
def logs(
    target: Words,
    overrides: Overrides = None,
    profile: Profile = None,
    attempt: Annotated[int | None, typer.Option(help="Which attempt; the last one unless given.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Metrics as the JSON that the job printed.")] = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Show the log lines of all nodes, with metrics in words. Lines of a sweep begin with the name of their trial."""
    found = target_of(target, overrides, profile, root)

    async def show(attempts: Attempts) -> None:
        there = [record for record in attempts.records() if attempt in (None, record.attempt)]
        if not there:
            raise ConfigProblem(f"{attempts.run} has no attempt {attempt}; `train-litgpt status` lists them")
        platform, job_id = attempts.platform_of(there[-1]), there[-1].job_id
        prefix = f"{attempts.run}  " if len(found.runs) > 1 else ""

        def show_lines(lines: Iterable[LogLine]) -> None:
            for line in lines:
                show_line(f"{prefix}{line if raw else waiting.readable(line)}")

        if follow:
            await waiting.follow(platform, job_id, on_lines=show_lines, poll=1.0)
        else:
            await waiting.read_logs(platform, job_id, on_lines=show_lines)

    async def show_all() -> None:
        await asyncio.gather(*map(show, found.attempts))

    asyncio.run(show_all())


@app.command()
def cancel(target: Words, overrides: Overrides = None, profile: Profile = None, root: Root = DEFAULT_ROOT) -> None:
    """Cancel the jobs of a run or a sweep, and prove that nothing of them is left."""
    found = target_of(target, overrides, profile, root)
    found.index.request_cancel(found.name)
    cancelled, problems = cancel_each(found.attempts, tell=_print_notes)
    unread = f"a record that may be of a trial of {found.name} cannot be read"
    problems += [DataError(f"{unread}: {why}") for why in found.damaged]
    for job_id in cancelled:
        _say(f"cancelled {escape(job_id)}; nothing of it is left")
    if cancelled:
        for run in found.runs:
            if lost := lost_steps(found.storage(run)):
                _say(f"{escape(run)}: {lost}")
    for problem in problems:
        _error(str(problem))
    if problems:
        raise typer.Exit(problems[0].exit_code)
    if not cancelled:
        _say(f"nothing was running of {escape(found.name)}: every attempt at it has ended")


@app.command()
def reap(
    root: Root = DEFAULT_ROOT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without asking.")] = False,
) -> None:
    """Show what dead runs have left on their platforms, then remove it; jobs of cancelled flow runs end with it.

    Runs that live, or whose state is not known, are never touched.
    """
    unknown = False
    if not dry_run:
        _quiet_prefect()
        from flows import server
        from flows.reconciling import reap_jobs

        if server.server_address() is not None:
            server.require_server()
            with server.server_problems():
                reaped = asyncio.run(reap_jobs())
            unknown = any(one.problem for one in reaped)
            for what in [str(one) for one in reaped] or ["no job goes on whose flow run is cancelled"]:
                _say(escape(what))
    index = Index.of(root)
    found = leftovers(index)
    those = [one for one in found if one.job_id is not None]
    unknown = unknown or len(those) < len(found)
    for one in found:
        _say(escape(one.what))
    if not those:
        _say(f"nothing is left of the dead runs under {escape(index.root.address())}")
    elif dry_run or not (yes or (sys.stdin.isatty() and typer.confirm(f"remove all of it, {len(those)} attempts?"))):
        _say("nothing was removed; --yes removes it")
        those = []
    for one in those:
        try:
            gone = remove_leftover(index, one)
            lives = f"{one.run} lives again, and was left alone"
            _say(escape(f"removed {one.job_id}; nothing of it is left" if gone else lives))
        except TrainLitgptError as error:
            _error(str(error))
            unknown = True
    if unknown:
        raise typer.Exit(EXIT_CODES[Fault.UNREACHABLE])


def target_of(words: str, overrides: list[str] | None, profile: Path | None, root: str) -> Target:
    """The run or sweep that a verb is about: by its name or folder, or by its config."""
    if words.endswith((".yaml", ".yml")) or Path(words).is_file():
        return find_started_with(read_config(Path(words), overrides, profile))
    if overrides:
        raise ConfigProblem(f"{overrides[0]!r} is an override, which belongs to a config; {words!r} is a run's name")
    if profile is not None:
        raise ConfigProblem(f"--platform={profile} belongs to a config; {words!r} is a run's name, found under --root")
    return find(words, root=root)


def _say(markup: str, to: Screen = console) -> None:
    to.print(markup, soft_wrap=True)


def _error(what: str, word: str = "error") -> None:
    _say(f"[bold red]{word}[/] {escape(what)}", stderr)


def _print_findings(findings: Iterable[Finding]) -> None:
    signs = {"error": "[bold red]✗[/]", "unknown": "[cyan]?[/]", "warning": "[yellow]![/]", "info": "[green]✓[/]"}
    for finding in findings:
        # What could be done about it is news, though neither good nor bad.
        sign = "[dim]·[/]" if finding.severity == "info" and finding.fix else signs[finding.severity]
        fix = f"\n    [dim]→ {escape(finding.fix)}[/]" if finding.fix else ""
        _say(f"{sign} {escape(finding.what)} [dim]{finding.code}[/]{fix}")


def _print_notes(*notes: str) -> None:
    for note in filter(None, notes):
        _say(f"[yellow]![/] {escape(note)}")


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        table.add_column(escape(name), overflow="fold")  # an address that is cut short is of no use
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    console.print(table)
