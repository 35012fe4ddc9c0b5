"""The command line. A command imports what it needs when it is called, so that help and completion are quick."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import datetime
from functools import partial
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from traceback import walk_tb
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic_core import to_jsonable_python
from rich.markup import escape
from rich.table import Table

from cli.terminal import Screen, accept_any_text, show_text
from deployments import bootstrap
from flows import serving
from launcher import DEFAULT_ROOT, pages
from launcher.errors import ConfigProblem, JobFailed, raise_on_errors
from launcher.formatting import bytes_text, readable
from litgpt_demo.errors import EXIT_CODES, DataError, FailureClass, Finding, TrainLitgptError, fault_of_findings
from litgpt_demo.proxies import settle_proxies
from litgpt_demo.storage import Storage, is_remote, open_storage

if TYPE_CHECKING:
    from launcher.checks.plan import AnyConfig
    from launcher.runs.attempts import Attempts
    from launcher.runs.index import AttemptRecord
    from launcher.runs.listing import Target
    from litgpt_demo.export import FinalManifest

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=f"Documentation: {pages.START}, {pages.SYMPTOMS} (by the words that you see), and docs/.",
)
# Into a file or a pipe every row and message is one line, so that it can be searched and cut. Output of jobs has colons
# that are not emoji.
console = Screen(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 10_000)
stderr = Screen(stderr=True, highlight=False, emoji=False)


@app.callback(invoke_without_command=True)
def program(
    version: Annotated[bool, typer.Option("--version", help="Print the versions and the commit, then exit.")] = False,
) -> None:
    """From raw text to a verified, trained GPT, on whatever machines you have."""
    if version:  # from installed metadata: nothing heavy is imported
        from launcher.images.identity import software_identity

        identity = software_identity()
        typer.echo(", ".join(filter(None, [*identity.listed("train-litgpt"), identity.revision])))
        typer.echo(", ".join(identity.listed("torch", "litgpt", "prefect", "python")))
        raise typer.Exit


def _configs() -> list[str]:
    return sorted(map(str, [*Path().glob("*.yaml"), *Path("deployments/configs").glob("**/*.yaml")]))


def _targets(context: typer.Context) -> list[str]:
    """Return the runs and configs that a shell completes; runs in a bucket would take too long."""
    root = context.params.get("root") or DEFAULT_ROOT
    if is_remote(root):
        return _configs()
    from launcher.runs.index import Index

    return [*Index.of(root).runs(), *_configs()]


def _select_console(is_json: bool) -> bool:
    global console
    if is_json:
        console = stderr
    return is_json


Json = Annotated[bool, typer.Option("--json", callback=_select_console, help="Print one JSON document, for programs.")]
ConfigFile = Annotated[
    Path, typer.Argument(help="A YAML file, as in deployments/configs.", show_default=False, autocompletion=_configs)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings that override it: train.max_steps=100", show_default=False)
]
PlatformFile = Annotated[
    Path | None,
    typer.Option(
        "--platform", show_default=False, autocompletion=_configs,
        help="A YAML file whose platform, root and image replace the config's. Overrides win over it.",
    ),
]  # fmt: skip
Words = Annotated[
    str,
    typer.Argument(
        metavar="RUN", show_default=False, autocompletion=_targets,
        help="A run's or sweep's name or its beginning, @last, a run's folder, or the config that it was started with.",
    ),
]  # fmt: skip
Duplicate = Annotated[
    bool, typer.Option("--allow-duplicate", help="Start even if another job of this name is running.")
]
Replace = Annotated[bool, typer.Option("--replace", help="First cancel another job of this name that is running.")]
Root = Annotated[str, typer.Option(help="The root in which names are looked up: a folder, or gs://bucket/prefix.")]
_MOST_PROBLEMS = 20  # lines of a verification: a changed seed changes every batch
# The columns that a narrow terminal does without, in this order.
_SPARED = ("flow run", "attempts", "platform", "age", "validation")


def main() -> None:
    accept_any_text()
    with errors_for_people():
        settle_proxies(os.environ)
        app()


@contextmanager
def errors_for_people() -> Iterator[None]:
    """Print a known error as a message and exit with its code; only a bug shows a traceback."""
    try:
        yield
    except TrainLitgptError as error:
        _error(str(error), error.fault, "failed" if isinstance(error, JobFailed) else "error")
        sys.exit(error.exit_code)
    except ValueError as error:
        modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
        if not any(module.startswith("prefect.settings") for module in modules):
            raise
        _error(_problem_of_prefects_settings(error), FailureClass.USER)
        sys.exit(EXIT_CODES[FailureClass.USER])


def _problem_of_prefects_settings(error: ValueError) -> str:
    from pydantic import ValidationError

    from litgpt_demo.documents import first_problem

    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    files = (file.absolute() for file in (profiles, Path("prefect.toml"), Path("pyproject.toml")) if file.is_file())
    places = [str(file) for file in files if file.name != "pyproject.toml" or b"[tool.prefect" in file.read_bytes()]
    # Not the whole validation error: a value may be a secret.
    problem = first_problem(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
    return (
        f"Prefect cannot read its settings: {problem}; fix {' or '.join([*places, 'a variable PREFECT_…'])}. To ignore "
        "profiles.toml, put PREFECT_PROFILES_PATH=/dev/null in front of the command. To ignore another file, run the "
        "command in another folder"
    )


def read_config(
    path: Path, assignments: list[str] | None, platform_file: Path | None = None, *, kind: type[AnyConfig] | None = None
) -> AnyConfig:
    """Read a config of the kind that its sections name: `script`, `sweep`, `measure`, or a training. For an explicit
    `kind`, sections that such a config lacks are ignored."""
    from launcher.benchmark import BenchmarkConfig
    from launcher.config import RunConfig, ScriptConfig, SweepConfig, config_document, validated

    document = config_document(path, assignments or [], platform_file=platform_file)
    if kind is None:
        kinds: dict[str, type[AnyConfig]] = {"measure": BenchmarkConfig, "script": ScriptConfig, "sweep": SweepConfig}
        kind = next((kind for section, kind in kinds.items() if section in document), RunConfig)
    else:
        document = {name: value for name, value in document.items() if name in kind.model_fields}
    return validated(kind, document, where=" with ".join(map(str, filter(None, (path, platform_file)))))


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    platform_file: PlatformFile = None,
    output: Annotated[bool, typer.Option("--output", help="Also show what the job prints.")] = False,
    allow_duplicate: Duplicate = False,
    replace: Replace = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Let a worker of Prefect's server run it, and print the link to it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a config from this terminal: the whole pipeline, a script on several nodes, or a sweep."""
    changes = _with_launch(overrides, allow_duplicate=allow_duplicate, replace=replace)
    settings = read_config(config, changes, platform_file)
    if detach and output:
        raise ConfigProblem("--output shows what the job prints, and --detach waits for no job; give one of them")
    if detach:
        _quiet_prefect()
        from flows.parameters import submit_config
        from flows.server import server_problems

        with server_problems():
            _submitted(*submit_config(settings, config.stem))
    else:
        _run(settings, output)


def _with_launch(overrides: list[str] | None, *, allow_duplicate: bool, replace: bool) -> list[str]:
    if allow_duplicate and replace:
        raise ConfigProblem("--allow-duplicate keeps the running job, but --replace cancels it; give one of them")
    settings = list(overrides or [])
    if allow_duplicate:
        settings.append("launch.if_running=keep")
    if replace:
        settings.append("launch.if_running=cancel")
    return settings


def _run(settings: AnyConfig, output: bool = False) -> None:
    from launcher.benchmark import BenchmarkConfig, pairs_table, table
    from launcher.checks.plan import plan_to_start
    from launcher.config import RunConfig, ScriptConfig, SweepConfig
    from launcher.runs.sweeps import trials

    match settings:
        case SweepConfig():
            trials(settings)  # an impossible sweep is refused before anything starts
            rows = _run_in_foreground("flows.sweep_litgpt:sweep_litgpt", dict(settings), output=output)
            _print_table(_print_json(rows))
        case BenchmarkConfig():
            results = _print_json(_run_in_foreground("flows.run_torchrun:benchmark_network", dict(settings)))
            _print_table(table(results))
            _print_table(pairs_table(results[0]))
        case ScriptConfig():
            logs = _run_in_foreground("flows.run_torchrun:run_torchrun", dict(settings), output=True)
            _print_json({"logs": logs})
            _say(f"\n  logs     {escape(logs)}")
        case RunConfig():
            with console.status("planning"):  # before a server is started
                run = plan_to_start(settings)
            final = _run_in_foreground("flows.training:train_planned", {"run": run}, output=output)
            _print_final(open_storage(settings.root).within(f"runs/{final.run}"), final)


def _print_final(folder: Storage, final: FinalManifest) -> None:
    from litgpt_demo.export import usage
    from litgpt_demo.runs import FINAL, HUGGINGFACE, LITGPT, METRICS, REPORT

    paths = {"model": LITGPT, "card": f"{FINAL}/MODEL_CARD.md", "report": REPORT, "metrics": METRICS}
    if final.huggingface:
        paths = {"model": LITGPT, "hf model": HUGGINGFACE, **paths}
    addresses = {name: folder.address(path) for name, path in paths.items()}
    _print_json({"run": final.run, **addresses})
    current = f"{Path.cwd()}/"  # paths below it are shown relative to it
    _say("\n  a sample: the beginning of an unseen document, and the model's continuation")
    console.print(f"\n[bold]{escape(final.prompt)}[/]{escape(final.sample.removeprefix(final.prompt))}\n")
    for name, address in addresses.items():
        _say(f"  {name:<8} {escape(address.removeprefix(current))}")
    _say("\n  use it")
    for line in usage(folder.address().removeprefix(current), final, huggingface=False).splitlines():
        _say(f"    {escape(line)}")


@app.command(name="benchmark-network")
def benchmark_network(
    config: ConfigFile, overrides: Overrides = None, platform_file: PlatformFile = None, as_json: Json = False
) -> None:
    """Measure the network of a config's platform: the bandwidth among ranks, and the slow node if there is one."""
    from launcher.benchmark import BenchmarkConfig

    _run(read_config(config, overrides, platform_file, kind=BenchmarkConfig))


@app.command()
def prepare(config: ConfigFile, overrides: Overrides = None, platform_file: PlatformFile = None) -> None:
    """Prepare the dataset of a config, and stop there."""
    from launcher.config import RunConfig

    settings = read_config(config, overrides, platform_file)
    if not isinstance(settings, RunConfig):
        raise ConfigProblem(f"{config} runs a script, which has no dataset; give the config of a training or a sweep")
    sections = {name: getattr(settings, name) for name in ("root", "data", "dataset_workers")}
    _run_in_foreground("flows.train_litgpt:prepare_dataset", sections)


@app.command()
def sweep(
    config: ConfigFile,
    overrides: Overrides = None,
    platform_file: PlatformFile = None,
    allow_duplicate: Duplicate = False,
    replace: Replace = False,
) -> None:
    """Run the trials of a config's `sweep` section: a grid, or a random or TPE search."""
    from launcher.config import SweepConfig

    changes = _with_launch(overrides, allow_duplicate=allow_duplicate, replace=replace)
    settings = read_config(config, changes, platform_file)
    if not isinstance(settings, SweepConfig):
        raise ConfigProblem(
            f"{config} has no `sweep` section, so nothing varies; add one, as "
            "`sweep={grid: {train.seed: [1, 2]}}`, or use `train-litgpt run`"
        )
    _run(settings)


@app.command()
def collect(
    target: Words,
    overrides: Overrides = None,
    platform_file: PlatformFile = None,
    step: Annotated[int | None, typer.Option(help="Export the checkpoint of this step.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Export the newest checkpoint, even of a live run.")] = False,
    average: Annotated[
        bool, typer.Option("--average", help="Export the moving average of its weights, into final-average.")
    ] = False,
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """Export a run's last checkpoint for LitGPT and Hugging Face, and check both against the trained weights."""
    from launcher.provenance.statements import write_statements
    from litgpt_demo.export import summary_lines
    from litgpt_demo.runs import FINAL, FINAL_AVERAGE

    finals = []
    for storage in _folders(target, overrides, platform_file, root):
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # libraries print greetings and warnings
            from litgpt_demo.export.models import export as collect_models

            final = collect_models(storage, step=step, newest=newest, average=average)
        place = FINAL
        if average:
            place = FINAL_AVERAGE
        write_statements(storage, place)
        address = storage.address(place)
        finals.append({"final": address, **dict(final)})
        for line in summary_lines(final):
            _say(escape(line))
        _say(f"[green]✓[/] {escape(address)}")
    _print_json(finals)


def _folders(target: str, overrides: list[str] | None, platform_file: Path | None, root: str) -> list[Storage]:
    """Return the folders of runs, for verbs that only read files: a run's address works too, without an index."""
    if "/" in target and not target.endswith((".yaml", ".yml")):  # a copied run may be in no index
        return [open_storage(target)]
    resolved = target_of(target, overrides, platform_file, root)
    return [resolved.storage(run) for run in resolved.runs]


def _folder(target: str, root: str) -> Storage:
    folders = _folders(target, None, None, root)
    if len(folders) > 1:
        raise ConfigProblem(f"{target} is a sweep of {len(folders)} runs; name one: `train-litgpt status {target}`")
    return folders[0]


@app.command()
def generate(
    target: Words,
    text: Annotated[str, typer.Argument(help="The text to continue. Without it, the model begins a document.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="The most new tokens. A document may end earlier.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample only from the N likeliest tokens.")] = 50,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.")] = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Continue a text with a run's model: its collected model, or its newest checkpoint if that has more steps."""
    folder = _folder(target, root)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # libraries print greetings
        from litgpt_demo.export.generation import Writer

        writer = Writer(folder)
    pieces = writer.write(text, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed)
    first = next(pieces, "")  # an impossible text is refused before anything is shown
    _say(f"[dim]by the model of step {writer.step}[/]", stderr)
    for piece in (text, first, *pieces):
        show_text(piece, end="")
    typer.echo()


@app.command()
def evaluate(
    target: Words,
    tasks: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of the section evaluation: 'tasks=[hellaswag]' limit=100", show_default=False),
    ] = None,
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """Score a run's collected model: `evaluate RUN 'tasks=[hellaswag]' limit=100`, as `evaluation` has it."""
    from launcher.checks.preflight import check_evaluation
    from launcher.config import overrides_of, validated
    from litgpt_demo.config import EvaluationConfig
    from litgpt_demo.export.evaluation import evaluations

    settings = validated(EvaluationConfig, overrides_of(tasks or []), where="evaluation")
    raise_on_errors(check_evaluation(settings))  # before a server is started
    run = _folder(target, root)
    final = _run_in_foreground("flows.evaluate:evaluate", {"run": run.address(), "evaluation": settings})
    scores = evaluations(run, final.step)
    _print_json([row for evaluation in scores for row in evaluation.table])
    for evaluation in scores:
        for name, value in evaluation.pairs:
            _say(escape(f"  {name}: {value}"))


@app.command()
def replay(
    target: Words,
    steps: Annotated[str, typer.Option(help="The first and the last step, from 1: 400-412.", show_default=False)],
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on this machine. The default is the number that trained the last step."),
    ] = None,
    platform: Annotated[bool, typer.Option("--platform", help="Run it as a job on the run's own platform.")] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin at the initial weights, not at a checkpoint.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            show_default=False,
            help="The largest relative difference of a figure for exit code 0. The default is 1e-4, in 16 bits 0.02.",
        ),
    ] = None,
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """Train steps of a run again from a kept checkpoint, compare their figures, and show the samples of the last one.

    The run does not change. Its folder `replays` gets a page and the result.
    """
    from launcher.replay import plan_replay, replay_here
    from launcher.reports import replays

    if platform and processes is not None:
        raise ConfigProblem("--processes is for this machine, and --platform has the run's own number; give one")
    folder = _folder(target, root)
    planned = plan_replay(folder, steps, from_start=from_start, processes=processes, on_own_platform=platform)
    if platform:
        _run_in_foreground("flows.run_torchrun:run_torchrun", dict(planned.script))
        result = planned.read()
    else:
        with console.status("replaying"):
            result = replay_here(planned, on_warning=_print_notes)
    if tolerance is None:
        tolerance = planned.tolerance
    page = folder.write(planned.path.replace(".json", ".html"), replays.html(result, tolerance).encode()).path
    _print_json({**dict(result), "largest_difference": result.largest_difference, "page": folder.address(page)})
    _print_table(replays.table(result))
    for heading, lines, text in replays.worst_samples(result):
        _say(f"\n{escape(heading)}")
        for line in lines:
            _say(f"  [dim]{escape(line)}[/]")
        _say(f"  {escape(' '.join(text.split())[:400])}")
    _say(f"\n{escape(replays.verdict(result, tolerance))}\n  page     {escape(folder.address(page))}")
    if not replays.is_equal(result, tolerance):
        raise typer.Exit(1)


@app.command()
def submit(
    deployment: Annotated[
        str | None, typer.Argument(help="A deployment's name. Without it, all deployments are listed.")
    ] = None,
    overrides: Overrides = None,
    platform_file: PlatformFile = None,
    allow_duplicate: Duplicate = False,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Start the flow of a deployment on Prefect's server, with some settings changed, or list the deployments."""
    _quiet_prefect()
    from flows.parameters import list_deployments, submit_deployment
    from flows.server import server_address, server_problems
    from launcher.config import overrides_of, read_platform_file
    from launcher.yaml_files import read_yaml

    if deployment is None:
        if server_address() is None:
            _print_notes("no Prefect server runs: `train-litgpt serve` starts one with these deployments")
            texts = {entry["name"]: entry["description"] for entry in read_yaml(bootstrap.PREFECT_FILE)["deployments"]}
        else:
            with server_problems():
                texts = {name: entry.description or "" for name, entry in list_deployments().items()}
        rows = [{"deployment": name, "what": texts[name].partition("\n")[0]} for name in sorted(texts)]
        _print_table(_print_json(rows))
        return
    changes = overrides_of(_with_launch(overrides, allow_duplicate=allow_duplicate, replace=replace))
    with server_problems():
        _submitted(*submit_deployment(deployment, changes, platform_file=read_platform_file(platform_file)))


def _submitted(flow_run: str, full: str, page: str | None) -> None:
    _print_json({"flow_run": flow_run, "deployment": full, "page": page})
    _say(f"flow run [bold]{flow_run}[/] of {full}\n  {page}")


for _command in (bootstrap.serve, bootstrap.stop, bootstrap.deploy):
    app.command()(_command)


@app.command()
def init(
    platform: Annotated[str, typer.Argument(help="local, slurm, gke, kubernetes, runai or batch.", show_default=False)],
    file: Annotated[Path | None, typer.Argument(help="The file. The default is PLATFORM.yaml.")] = None,
) -> None:
    """Write a commented config of a training on a platform. An existing file is not changed."""
    configs = bootstrap.CONFIGS
    platforms = sorted(path.stem for path in (configs / "platforms").glob("*.yaml"))
    if platform not in platforms:
        raise ConfigProblem(f"unknown platform {platform!r}; choose one of {', '.join(platforms)}")
    file = file or Path(f"{platform}.yaml")
    shipped = (configs / f"{platform}.yaml").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as config:
            config.write(f"# From `train-litgpt init`; `train-litgpt settings` lists all settings.\n{shipped}")
    except OSError as error:
        raise ConfigProblem(f"{file} cannot be written ({error.strerror}); name another file") from error
    _say(f"{escape(str(file))} is written; fill in your values, then: train-litgpt plan {escape(str(file))}")


def _run_in_foreground(flow: str, parameters: Mapping[str, Any], *, output: bool = False) -> Any:
    """Run a flow, `module:name`, in this process. It is imported after the first output. On Ctrl-C, a started job
    continues."""
    from cli.foreground import in_foreground

    _quiet_prefect()
    return in_foreground(lambda: partial(resolve_name(flow), **parameters), console, output=output)


def _quiet_prefect() -> None:
    """Silence Prefect on the console, where its lines would mix with ours; its server and UI still get them."""
    defaults = {
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # A fresh database is migrated first, which takes 15 s on two cores; the default of 20 s is too close.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_CLIENT_MAX_RETRIES": "9",
    }
    os.environ.update({**defaults, **os.environ})


@app.command()
def render(
    config: ConfigFile,
    overrides: Overrides = None,
    platform_file: PlatformFile = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show instead where each environment variable of the nodes comes from.")
    ] = False,
) -> None:
    """Print exactly what would be sent to the platform, for each trial of a sweep. Nothing is started or written."""
    from launcher.checks.plan import previews

    submissions = previews(read_config(config, overrides, platform_file))
    unknown = dict.fromkeys(what for submission in submissions.values() for what in submission.unknown)
    if unknown and not explain:
        show_text("# Do not submit this as it is: it has placeholders for values that are not known here.")
    for what in unknown:
        if not explain:
            show_text(f"# - {' '.join(what.split())}")
        if explain or not sys.stdout.isatty():  # a terminal shows the line above
            _say(f"[cyan]?[/] not known here: {escape(what)}", stderr)
    for title, submission in submissions.items():
        if title:
            show_text(f"--- # {title}")
        if explain:
            _print_table([dict(row) for row in submission.environment])
        else:
            typer.echo(str(submission), nl=False)


@app.command()
def plan(
    config: ConfigFile, overrides: Overrides = None, platform_file: PlatformFile = None, as_json: Json = False
) -> None:
    """Show which steps would run, which are done already, what the training costs, and what blocks it."""
    from launcher.checks.plan import plan_of

    planned = _print_json(plan_of(read_config(config, overrides, platform_file)))
    for rows in (planned.steps, planned.trials, planned.arithmetic):
        _print_table(rows)
        if rows:
            console.print()
    _print_findings(planned.findings)
    fault = fault_of_findings(planned.findings)
    if fault:
        raise typer.Exit(EXIT_CODES[fault])
    severities = {finding.severity for finding in planned.findings}
    if "unknown" in severities:
        _say("nothing that is known blocks it; a run needs the facts that are marked with ?")
    elif severities <= {"info"}:
        _say("nothing blocks it")


@app.command()
def settings(
    prefix: Annotated[str, typer.Argument(help="Only settings whose names begin with this: train, data.corpus")] = "",
    kind: Annotated[str, typer.Option(help="training, script, sweep or network (the network benchmark)")] = "training",
    as_json: Json = False,
) -> None:
    """List every setting of a config, with its default and its meaning.

    The pages of docs/reference/settings also have the type and the unit of each.
    """
    from launcher.benchmark import BenchmarkConfig
    from launcher.config import RunConfig, ScriptConfig, SweepConfig, settings_of

    kinds = dict[str, Any](training=RunConfig, script=ScriptConfig, sweep=SweepConfig, network=BenchmarkConfig)
    if kind not in kinds:
        raise ConfigProblem(f"unknown --kind={kind!r}; choose one of {', '.join(kinds)}")
    rows = [
        {"setting": setting.name, "default": setting.default, "meaning": setting.meaning}
        for setting in settings_of(kinds[kind])
        if setting.name.startswith(prefix)
    ]
    if not rows:
        raise ConfigProblem(f"no setting begins with {prefix!r}; leave it out to list all settings")
    _print_table(_print_json(rows))


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Also check what this config needs.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    platform_file: PlatformFile = None,
    root: Annotated[str, typer.Option(help="The root to check. With a config it is the config's own.")] = "output",
    as_json: Json = False,
) -> None:
    """Check this machine and the needs of a config, and print how to fix each problem."""
    from launcher.checks.doctor import examine_environment
    from launcher.checks.plan import plan_of

    if config is None and platform_file is not None:
        raise ConfigProblem("--platform needs a config; give one: train-litgpt doctor CONFIG --platform FILE")
    settings = None
    if config is not None:
        settings = read_config(config, overrides, platform_file)
        root = settings.root
    findings = list(examine_environment(root, served=serving.served().get("PREFECT_API_URL")))
    if settings is not None:
        # Like `plan`, because a Hub or a bucket that does not answer must not hide the other findings.
        findings += [finding for finding in plan_of(settings).findings if finding not in findings]
    _print_json({"findings": findings})
    _print_findings(findings)
    if any(finding.severity in {"error", "unknown"} for finding in findings):
        raise typer.Exit(EXIT_CODES[FailureClass.USER])


@app.command()
def sign(
    target: Words,
    key: Annotated[Path, typer.Option(help="An EC or Ed25519 private key, in PEM.", show_default=False)],
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """Sign a run's collected model and the statements about it. The key stays on this machine.

    TRAIN_LITGPT_KEY_PASSWORD opens a key that is encrypted.
    """
    from launcher.provenance import signing, verification
    from litgpt_demo.runs import FINAL, FINAL_AVERAGE

    signer = signing.load_signer(key, os.environ.get(signing.KEY_PASSWORD))
    run, written = _folder(target, root), list[str]()
    names = [name for name in (FINAL, FINAL_AVERAGE) if name == FINAL or run.within(name).list()]
    models = {name: verification.signable_model(run, name) for name in names}
    for name, (title, digests) in models.items():
        final = run.within(name)
        written += [final.address(path) for path in signing.sign(final, title, digests, signer)]
    files = sum(len(digests) for _, digests in models.values())
    _print_json({"run": run.address().rpartition("/")[2], "files": files, "signatures": written})
    for address in written:
        _say(f"[green]✓[/] {escape(address)}")
    if signer.public_key.keytype != "ecdsa":
        _print_notes(f"there is no {signing.MODEL_SIGNATURE}, because model_signing takes no Ed25519 key")


@app.command()
def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", show_default=False, autocompletion=_targets,
            help="A run by its name or folder, a copy of its folder final, or the folder of a dataset.",
        ),
    ],
    public_key: Annotated[Path | None, typer.Option(help="The signer's public key, in PEM.")] = None,
    replay: Annotated[int, typer.Option(min=0, help="Train this many steps again, drawn at random.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Draw the same steps again.")] = None,
    output: Annotated[Path | None, typer.Option(help="A file for the result, as an in-toto statement.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compute every digest of a run, its model or a dataset again, and name each file that differs."""
    from launcher.provenance import replays, signing, verification
    from litgpt_demo.storage.local import translate_os_errors

    key = None
    if public_key is not None:
        key = signing.load_public_key(public_key)
    if Path(target).is_dir():
        place = open_storage(target)
    else:
        place = _folder(target, root)
    if not verification.is_run(place) and not verification.is_model(place):
        if public_key is not None or replay or output is not None:
            raise ConfigProblem(
                f"{target} is neither a run nor its model; --public-key, --replay and --output are for those"
            )
        _verify_dataset(target)
        return
    if output is not None and output.absolute().is_relative_to(place.local_path() or "/dev/null"):
        raise ConfigProblem(f"--output={output} is inside of what is verified; name a file elsewhere")
    with tempfile.TemporaryDirectory(prefix="train-litgpt-verify-") as folder:
        plans, steps = list[Any](), list[int]()
        if replay:  # steps that cannot be replayed here are refused at once
            if seed is None:
                seed = secrets.randbits(32)
            steps, plans = replays.draw_replays(place, replay, open_storage(folder), seed=seed)
            _say(f"replaying the steps {', '.join(map(str, steps))}, drawn with --seed {seed}", stderr)
        with console.status("verifying"):
            result = verification.verify(place, key=key)
            if plans:
                replays.check_replays(result, plans, steps, on_warning=_print_notes)
    if output is not None:
        with translate_os_errors(str(output)):
            output.write_text(json.dumps(result.statement(), indent=1) + "\n", encoding="utf-8")
    _print_verification(_print_json(result))
    if result.problems:
        raise typer.Exit(1)


def _print_verification(result: Any) -> None:
    for check in result.checks:
        mark = "[green]✓[/]"
        if check.problems:
            mark = "[bold red]✗[/]"
        _say(f"{mark} {check.count:,} {escape(check.what)}")
    for sentence in result.not_checked:
        _say(f"[cyan]?[/] not checked: {escape(sentence)}")
    for problem in result.problems[:_MOST_PROBLEMS]:
        _say(f"[bold red]differs[/] {escape(problem)}", stderr)
    if len(result.problems) > _MOST_PROBLEMS:
        _say(f"and {len(result.problems) - _MOST_PROBLEMS:,} more: --json has all of them", stderr)


def _verify_dataset(dataset: str) -> None:
    from litgpt_demo.data.dataset import verify_dataset

    manifest = verify_dataset(dataset)
    _print_json({"documents": manifest.documents, "tokens": manifest.tokens, "files": len(manifest.files)})
    size = bytes_text(sum(file.size for file in manifest.files))
    facts = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, all as in the manifest"
    _say(f"[green]✓[/] {len(manifest.files)} files, {size}: {facts}")


@app.command()
def summary(target: Words, root: Root = DEFAULT_ROOT) -> None:
    """Print a run's summary of training content for Article 53 of the EU AI Act, as Markdown, to be completed."""
    from launcher.provenance.summary import summary_of

    show_text(summary_of(_folder(target, root)))


@app.command()
def runs(
    folder: Annotated[str | None, typer.Argument(help="The root. It wins over --root.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """List the runs that were started under a root, the newest first."""
    from launcher.runs.index import DamagedRecords, Index
    from launcher.runs.listing import run_rows, table_of

    root, bad = folder or root, DamagedRecords()
    rows = run_rows(Index.of(root), bad=bad)
    if any(row.is_live for row in rows) and (os.environ.get("PREFECT_API_URL") or serving.served()):
        _quiet_prefect()
        from flows.reconciling import flag_state_conflicts

        rows = flag_state_conflicts(rows)
    _print_table(table_of(_print_json(rows)))
    if not rows:
        _say(f"nothing has been started under {escape(Index.of(root).root.address())}")
    _print_notes(*(f"{row.run}: {row.note}" for row in rows if row.note), str(bad))


@app.command()
def status(
    target: Words, overrides: Overrides = None, platform_file: PlatformFile = None, root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show the state and progress of every attempt of a run, or of every trial of a sweep."""
    from launcher.checks.plan import progress_of
    from launcher.runs.index import DamagedRecords
    from launcher.runs.listing import run_rows, table_of

    resolved, bad = target_of(target, overrides, platform_file, root), DamagedRecords()
    is_sweep = len(resolved.runs) > 1
    summary, attempts = list[Any](), list[Any]()
    if is_sweep or as_json:
        summary = run_rows(resolved.index, resolved.runs, bad=bad, open=resolved.open)
    if not is_sweep:
        attempts = resolved.attempts[0].all()
    details = [
        {"attempt": attempt.number, "job_id": attempt.record.job_id, **vars(attempt.status)} for attempt in attempts
    ]
    _print_json({"name": resolved.name, "runs": summary, "attempts": details})
    if is_sweep:
        _print_table(table_of(summary))
        _print_notes(str(bad))
        return
    rows = []
    for attempt in attempts:
        status, record = attempt.status, attempt.record
        row = {"attempt": attempt.number, "state": status.state, "platform status": status.native}
        code = {"code": record.code} if record.code else {}
        rows.append({**row, "job": record.job_id, **code})
    _print_table(rows)
    _print_findings(reason for attempt in attempts for reason in attempt.status.reasons)
    is_live = any(attempt.status.state.is_live for attempt in attempts)
    progress = progress_of(resolved.storage(resolved.runs[0]), live=is_live)
    if progress:
        _say(escape(progress))


def moment(text: str) -> float:
    """Return seconds since the epoch of an age, as 10m, or of a time in ISO 8601."""
    age = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if age:
        return time.time() - int(age[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[age[2]]
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    raise typer.BadParameter(f"{text!r} is neither an age, as 10m or 2h, nor a time, as 2026-01-31T08:00")


@app.command()
def logs(  # noqa: C901 - each option selects lines, and the closures share all of them
    target: Words,
    overrides: Overrides = None,
    platform_file: PlatformFile = None,
    attempt: Annotated[int | None, typer.Option(help="The number of the attempt. The default is the last one.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print metrics as the JSON that the job printed.")] = False,
    node: Annotated[int | None, typer.Option(help="Only what this node printed.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only what this rank printed.")] = None,
    since: Annotated[
        float | None,
        typer.Option(parser=moment, metavar="MOMENT", help="Since an age, as 10m, or a time, as 2026-01-31T08:00."),
    ] = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Show the log lines of all nodes, with metrics in words. Lines of a sweep begin with the name of their trial."""
    from launcher.runs import waiting

    resolved = target_of(target, overrides, platform_file, root)
    newest: dict[Attempts, AttemptRecord] = {}
    for attempts in resolved.attempts:
        records = [record for record in attempts.records() if attempt in (None, record.attempt)]
        if records:
            newest[attempts] = records[-1]
    if not newest:
        raise ConfigProblem(f"{resolved.name} has no attempt {attempt}; `train-litgpt status` lists them")
    for attempts in resolved.attempts:
        if attempts not in newest:
            _say(f"[yellow]![/] {escape(attempts.run)} has no attempt {attempt}", stderr)

    async def show(attempts: Attempts, record: AttemptRecord) -> None:
        platform, job_id = attempts.platform_of(record), record.job_id
        prefix = ""
        if len(resolved.runs) > 1:
            prefix = f"{attempts.run}  "

        def show_lines(lines: Iterable[Any]) -> None:
            for line in lines:
                if since is not None and line.time is None:
                    what = f"the logs of platform {platform.name} are files, whose lines have no time"
                    raise ConfigProblem(f"--since cannot be used: {what}; leave it out")
                wanted = node in (None, line.node) and (rank is None or line.text.startswith(f"[rank{rank}]:"))
                if wanted and (line.time or 0.0) >= (since or 0.0):
                    show_text(f"{prefix}{line if raw else readable(line)}")

        if follow:
            await waiting.follow(platform, job_id, on_lines=show_lines, poll=platform.poll_seconds)
        else:
            await waiting.read_logs(platform, job_id, on_lines=show_lines)

    async def show_all() -> None:
        await asyncio.gather(*(show(attempts, record) for attempts, record in newest.items()))

    asyncio.run(show_all())


@app.command()
def cancel(
    target: Words, overrides: Overrides = None, platform_file: PlatformFile = None, root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Cancel the jobs of a run or a sweep, and prove that no resources of them remain."""
    from launcher.checks.plan import lost_steps
    from launcher.runs.attempts import cancel_all

    resolved = target_of(target, overrides, platform_file, root)
    resolved.index.request_cancel(resolved.name)
    cancelled, problems = cancel_all(resolved.attempts, log=_print_notes)
    unreadable = f"a record that may belong to a trial of {resolved.name} cannot be read"
    problems += [DataError(f"{unreadable}: {reason}") for reason in resolved.damaged]
    lost = {run: lost_steps(resolved.storage(run)) for run in cancelled}
    _print_json({"name": resolved.name, "cancelled": cancelled, "lost": lost, "problems": list(map(str, problems))})
    for run in cancelled:
        _say(f"cancelled {escape(run)}; no resources remain")
        if lost[run]:
            _say(f"{escape(run)}: {lost[run]}")
    for problem in problems:
        _error(str(problem), problem.fault)
    if problems:
        raise typer.Exit(problems[0].exit_code)
    if not cancelled:
        _say(f"{escape(resolved.name)} has no running job: every attempt has ended")


@app.command()
def cleanup(
    root: Root = DEFAULT_ROOT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what is orphaned, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them without confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Show the orphaned resources of dead runs, then remove them. Jobs of cancelled flow runs are cancelled first.

    Runs that are live, or whose state is unknown, are never changed.
    """
    from launcher.runs.index import Index
    from launcher.runs.listing import orphaned_resources, remove_orphaned_resource

    is_unknown, cancelled, removed = False, list[Any](), list[str]()
    if not dry_run:
        _quiet_prefect()
        from flows import server
        from flows.reconciling import end_orphaned_jobs

        if server.server_address() is not None:
            server.require_server()
            with server.server_problems():
                cancelled = asyncio.run(end_orphaned_jobs())
            is_unknown = any(job.problem for job in cancelled)
            for line in list(map(str, cancelled)) or ["no job of a cancelled flow run is running"]:
                _say(escape(line))
    index = Index.of(root)
    orphaned = orphaned_resources(index)
    removable = [resource for resource in orphaned if resource.job_id is not None]
    is_unknown = is_unknown or len(removable) < len(orphaned)
    for resource in orphaned:
        _say(escape(resource.what))
    if not removable:
        _say(f"nothing is left of the dead runs under {escape(index.root.address())}")
    elif not dry_run and not yes and sys.stdin.isatty():
        yes = typer.confirm(f"remove the resources of all {len(removable)} attempts?", err=as_json)
    if removable and (dry_run or not yes):
        _say("nothing was removed; remove all of it with --yes")
        removable = []
    for resource in removable:
        try:
            if remove_orphaned_resource(index, resource):
                removed.append(str(resource.job_id))
                _say(escape(f"removed {resource.job_id}; no resources remain"))
            else:
                _say(escape(f"{resource.run} is running again, so that its resources stay"))
        except TrainLitgptError as error:
            _error(str(error), error.fault)
            is_unknown = True
    _print_json({"cancelled": list(map(str, cancelled)), "orphaned": orphaned, "removed": removed})
    if is_unknown:
        raise typer.Exit(EXIT_CODES[FailureClass.UNREACHABLE])


def target_of(name: str, overrides: list[str] | None, platform_file: Path | None, root: str) -> Target:
    """Return the runs that a config, a name or @last means, for verbs that query or change jobs."""
    from launcher.runs.listing import find_started_with, resolve_target

    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return find_started_with(read_config(Path(name), overrides, platform_file))
    if overrides:
        raise ConfigProblem(f"{overrides[0]!r} is an override, which belongs to a config; {name!r} is a run's name")
    if platform_file is not None:
        raise ConfigProblem(
            f"--platform={platform_file} belongs to a config; {name!r} is a run's name, found under --root"
        )
    return resolve_target(name, root=root)


def _print_json(result: T) -> T:
    if console is stderr:
        document = json.loads(json.dumps(to_jsonable_python(result)), parse_constant=str)  # JSON has no NaN: "NaN"
        typer.echo(json.dumps(document, indent=1))
    return result


def _say(markup: str, to: Screen | None = None) -> None:
    (to or console).print(markup, soft_wrap=True)


def _error(what: str, fault: FailureClass, word: str = "error") -> None:
    _say(f"[bold red]{word}[/] {escape(what)}", stderr)
    _print_page(pages.page_of_error(what, fault), stderr)


def _print_page(page: str, to: Screen | None = None) -> None:
    _say(f"[dim]help: {page}[/]", to)


def _print_findings(found: Iterable[Finding]) -> None:
    if console is stderr:  # the JSON document has them
        return
    findings = list(found)
    width = min(48, max((len(finding.what) for finding in findings), default=0))  # the codes are a column
    signs = {"error": "[bold red]✗[/]", "unknown": "[cyan]?[/]", "warning": "[yellow]![/]", "info": "[green]✓[/]"}
    for finding in findings:
        # Advice without a problem is neither good nor bad.
        sign = "[dim]·[/]" if finding.severity == "info" and finding.fix else signs[finding.severity]
        fix = f"\n    [dim]→ {escape(finding.fix)}[/]" if finding.fix else ""
        _say(f"{sign} {escape(finding.what.ljust(width))}  [dim]{finding.code}[/]{fix}")
    for severity in ("error", "unknown"):
        problem = next((finding for finding in findings if finding.severity == severity), None)
        if problem is not None:
            _print_page(pages.page_of_finding(problem))
            return


def _print_notes(*notes: str) -> None:
    for note in filter(None, notes):
        _say(f"[yellow]![/] {escape(note)}")


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows or console is stderr:  # the JSON document has the rows
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    lengths = {name: max(len(str(row.get(name, ""))) for row in [*rows, {name: name}]) for name in rows[0]}
    for name in _SPARED:
        if sum(lengths.values()) + 2 * len(lengths) > console.width:
            lengths.pop(name, None)
    for name in lengths:  # addresses must not be cut, and names of runs not be wrapped
        table.add_column(escape(name), overflow="fold", no_wrap=name == "run")
    for row in rows:
        table.add_row(*(escape(str(row.get(name, ""))) for name in lengths))
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():  # rich fills the last column with blanks
        _say(escape(line.rstrip()))
