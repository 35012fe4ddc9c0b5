"""The command line. Heavy imports (Prefect, and through no path torch) wait until a command needs them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows import interrupts
from launcher.attempts import Attempts, attempts_of
from launcher.benchmark import BenchmarkConfig, pairs_table, table, with_bars
from launcher.config import (
    RunConfig,
    ScriptConfig,
    SweepConfig,
    load,
    overridden,
    overrides_of,
    read_document,
    validated,
)
from launcher.errors import ConfigProblem, JobFailed, LauncherError
from launcher.figures import bytes_text
from launcher.findings import Finding
from launcher.job import LogLine
from litgpt_demo.config import Settings
from litgpt_demo.faults import EXIT_CODES, Fault, LitgptDemoError
from litgpt_demo.runs import FINAL, HUGGINGFACE, LITGPT, METRICS, REPORT

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="From raw text to a verified, trained GPT, on whatever machines you have.",
)
# Into a file or a pipe every row and message is one line, so that it can be searched and cut. Output of jobs has colons
# that are no emoji.
console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 10_000)
stderr = Console(stderr=True, highlight=False, emoji=False)

ConfigFile = Annotated[Path, typer.Argument(help="A YAML file; deployments/configs has some.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings that win: train.learning_rate=3e-4", show_default=False)
]


def main() -> None:
    """The console script."""
    with _errors_for_people():
        app()


@contextmanager
def _errors_for_people() -> Iterator[None]:
    """A known error is a message and an exit code; a traceback is for errors that are ours."""
    try:
        yield
    except JobFailed as error:
        stderr.print(f"[bold red]failed[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(EXIT_CODES[error.verdict.fault])
    except (LauncherError, LitgptDemoError) as error:
        stderr.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True)
        fault = error.fault if isinstance(error, LitgptDemoError) else Fault.USER
        sys.exit(EXIT_CODES[fault])


AnyKind: TypeAlias = RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig


def read_config(path: Path, assignments: list[str] | None) -> AnyKind:
    """The config in a file, of the kind that its sections say: `script`, `sweep`, `measure`, or a training."""
    document = overridden(read_document(path), overrides_of(assignments or []))
    if "measure" in document:
        return validated(BenchmarkConfig, document, where=str(path))
    if "script" in document:
        return validated(ScriptConfig, document, where=str(path))
    return validated(SweepConfig if "sweep" in document else RunConfig, document, where=str(path))


# --- doing ------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[bool, typer.Option("--output", help="Also show what the job prints.")] = False,
) -> None:
    """Run a config here and now: the whole pipeline, a script on several nodes, or a sweep."""
    settings = read_config(config, overrides)
    match settings:
        case SweepConfig():
            _run_sweep(settings, output)
        case RunConfig():
            _run_training(settings, output)
        case ScriptConfig():
            _run_script(settings)
        case BenchmarkConfig():
            _run_benchmark(settings)


def _run_training(settings: RunConfig, output: bool) -> None:
    from launcher.runs import plan_run

    async def pipeline() -> Any:
        from flows.train_litgpt import train_litgpt

        return await train_litgpt(**_groups(settings))

    final = _watched(pipeline, output=output)
    where = plan_run(settings).storage
    console.print(f"\n[bold]{escape(final.prompt)}[/]{escape(final.sample.removeprefix(final.prompt))}\n")
    model = (
        {"model": LITGPT}
        | ({"hf model": HUGGINGFACE} if final.huggingface else {})
        | {"card": f"{FINAL}/MODEL_CARD.md"}
    )
    for name, path in (model | {"report": REPORT, "metrics": METRICS}).items():
        console.print(f"  {name:<8} {escape(where.address(path))}", soft_wrap=True)
    console.print(
        f"\n  use it   python -c \"from litgpt import LLM; print(LLM.load('{escape(where.address(LITGPT))}')"
        ".generate('def '))\"",
        soft_wrap=True,
    )


def _run_script(settings: ScriptConfig) -> None:
    async def pipeline() -> Any:
        from flows.run_torchrun import run_torchrun

        return await run_torchrun(**_groups(settings))

    logs = _watched(pipeline, output=True)
    console.print(f"\n  logs     {escape(logs)}", soft_wrap=True)


def _run_sweep(settings: SweepConfig, output: bool) -> None:
    async def pipeline() -> Any:
        from flows.sweep_litgpt import sweep_litgpt

        return await sweep_litgpt(**_groups(settings))

    _print_table(_watched(pipeline, output=output))


def _run_benchmark(settings: BenchmarkConfig) -> None:
    async def pipeline() -> Any:
        from flows.benchmark_network import benchmark_network

        return await benchmark_network(**_groups(settings))

    made = _watched(pipeline)
    _print_table(with_bars(table(made)))
    _print_table(pairs_table(made.result))


@app.command(name="benchmark-network")
def benchmark_network(config: ConfigFile, overrides: Overrides = None) -> None:
    """Measure the network of a config's platform: how fast ranks reduce, and which node is slow."""
    document = overridden(read_document(config), overrides_of(overrides or []))
    # Any config will do: of a training's, what it trains is left out.
    mine = {name: value for name, value in document.items() if name in BenchmarkConfig.model_fields}
    _run_benchmark(validated(BenchmarkConfig, mine, where=str(config)))


@app.command()
def prepare(config: ConfigFile, overrides: Overrides = None) -> None:
    """Prepare a config's dataset, and nothing else."""
    settings = read_config(config, overrides)
    if isinstance(settings, ScriptConfig | BenchmarkConfig):
        raise ConfigProblem(f"{config} runs a script, which has no dataset; give the config of a training or a sweep")

    async def pipeline() -> Any:
        from flows.prepare_dataset import prepare_dataset

        return await prepare_dataset(root=settings.root, data=settings.data, workers=settings.workers)

    _watched(pipeline)


@app.command()
def sweep(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train every combination of a grid (the config's `sweep` section)."""
    _run_sweep(load(SweepConfig, config, overrides or []), output=False)


@app.command()
def collect(
    run: Annotated[str, typer.Argument(help="Its folder, or gs://bucket/…/runs/…", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Take the checkpoint of this step.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Take the newest one, wherever the run is.")] = False,
) -> None:
    """Make models that LitGPT and Hugging Face open of a run's last checkpoint, and prove that they are its."""
    from litgpt_demo.collection import collect as collect_models
    from litgpt_demo.collection import described
    from litgpt_demo.storage import open_storage

    storage = open_storage(run)
    final = collect_models(storage, step=step, newest=newest)
    for line in described(final):
        console.print(escape(line), soft_wrap=True)
    console.print(f"[green]✓[/] {escape(storage.address(FINAL))}", soft_wrap=True)


@app.command()
def submit(
    deployment: Annotated[str, typer.Argument(help="`local`, or FLOW/DEPLOYMENT in full.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Start a deployment's flow on the server, with some settings changed."""
    _quiet_prefect()
    from flows.submission import submit_deployment

    created = asyncio.run(submit_deployment(deployment, overrides_of(overrides or [])))
    console.print(f"flow run [bold]{created.name}[/] of {created.deployment}\n  {created.url}", soft_wrap=True)


def _groups(settings: AnyKind) -> dict[str, Any]:
    """The sections of a config as the parameters of its flow."""
    return {name: getattr(settings, name) for name in type(settings).model_fields}


def _watched(pipeline: Callable[[], Coroutine[Any, Any, Any]], *, output: bool = False) -> Any:
    """Run a flow in this process and show it; Ctrl-C leaves a job that has been started alone, and says so."""
    from flows.foreground import in_foreground

    _quiet_prefect()
    return in_foreground(pipeline, console, output=output)


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
    explain: Annotated[
        bool, typer.Option("--explain", help="Instead, where every environment variable of the nodes comes from.")
    ] = False,
) -> None:
    """Print exactly what would be sent to the platform; nothing is started or written."""
    attempts = _attempts(read_config(config, overrides))
    submission = attempts.platform.render(attempts.make_job(attempts.next()))
    if explain:
        _print_table([dict(row) for row in submission.environment])
    else:
        typer.echo(str(submission), nl=False)


@app.command()
def plan(config: ConfigFile, overrides: Overrides = None) -> None:
    """What would run, what is done already by its key, what it takes, and what stands in the way."""
    from launcher.plan import plan_of

    planned = plan_of(read_config(config, overrides))
    findings = planned.findings
    for rows in (planned.steps, planned.arithmetic):
        _print_table(rows)
        if rows:
            console.print()
    _print_findings(findings)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(EXIT_CODES[Fault.USER])
    if all(finding.severity == "info" for finding in findings):
        console.print("nothing stands in the way")


@app.command()
def settings(
    prefix: Annotated[str, typer.Argument(help="Only those that begin so: train, data.corpus")] = "",
    kind: Annotated[str, typer.Option(help="Of a training, a script, a sweep or a network benchmark.")] = "training",
) -> None:
    """Every setting that a config may have, with its default and what it means."""
    from launcher.settings import settings_of

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
        Path | None, typer.Argument(help="Also check all that this config needs, its cluster too.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    root: Annotated[str, typer.Option(help="Where runs would be written.")] = "output",
) -> None:
    """Check this environment, and what a config needs, and say how to mend it."""
    from launcher.doctor import examine
    from launcher.plan import findings_of

    settings = None if config is None else read_config(config, overrides)
    findings = examine(root if settings is None else settings.root)
    if settings is not None:
        findings += [finding for finding in findings_of(settings) if finding not in findings]
    _print_findings(findings)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(EXIT_CODES[Fault.USER])


@app.command()
def verify(
    dataset: Annotated[str, typer.Argument(help="Its folder, or gs://bucket/…/datasets/…", show_default=False)],
) -> None:
    """Read every byte of a prepared dataset again, and compare it with its manifest."""
    from litgpt_demo.verification import verify as verify_dataset

    start = time.monotonic()
    found = verify_dataset(dataset)
    manifest, seconds = found.manifest, max(time.monotonic() - start, 1e-3)
    for problem in found.problems:
        console.print(f"[bold red]✗[/] {escape(problem)}", soft_wrap=True)
    if found.problems:
        stderr.print(
            f"[bold red]error[/] {escape(dataset)} is not what its manifest says: remove it, and prepare it again",
            soft_wrap=True,
        )
        raise typer.Exit(EXIT_CODES[Fault.DATA])
    size = sum(file.size for file in manifest.files)
    console.print(
        f"[green]✓[/] {len(manifest.files)} files, {bytes_text(size)} at {bytes_text(size / seconds)}/s: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, all as the manifest says"
    )


@app.command()
def status(config: ConfigFile, overrides: Overrides = None) -> None:
    """Every attempt at a config's job, and how far its training is."""
    from launcher.plan import progress_of

    settings = read_config(config, overrides)
    attempts = _attempts(settings).all()
    _print_table(
        [
            {
                "attempt": str(attempt.number),
                "state": attempt.status.state.value,
                "in the platform's words": attempt.status.native,
                "job": attempt.job_id,
            }
            for attempt in attempts
        ]
    )
    if not attempts:
        console.print("nothing has been started")
    if isinstance(settings, RunConfig) and (progress := progress_of(settings)):
        console.print(progress)


@app.command()
def logs(
    config: ConfigFile,
    overrides: Overrides = None,
    attempt: Annotated[int | None, typer.Option(help="Which attempt; the last one unless given.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """The log lines of all nodes."""
    from launcher.waiting import follow as follow_job

    attempts = _attempts(read_config(config, overrides))
    there = [found for found in attempts.all() if attempt in (None, found.number)]
    if not there:
        raise ConfigProblem("there is no such attempt; `train-litgpt status` lists them")
    if follow:
        platform, job_id = attempts.platform, there[-1].job_id
        asyncio.run(follow_job(platform, job_id, on_lines=_print_lines, poll=1.0))
        return
    _print_lines(attempts.platform.logs(there[-1].job_id).lines)


def _print_lines(lines: Iterable[LogLine]) -> None:
    for line in lines:
        typer.echo(str(line))


@app.command()
def cancel(config: ConfigFile, overrides: Overrides = None) -> None:
    """Stop a config's job, and prove that nothing of it is left."""
    cancelled = _attempts(read_config(config, overrides)).cancel()
    for job_id in cancelled:
        console.print(f"cancelled {escape(job_id)}; nothing of it is left", soft_wrap=True)
    if not cancelled:
        console.print("nothing was running")


def _attempts(settings: AnyKind) -> Attempts:
    if isinstance(settings, SweepConfig):
        raise ConfigProblem("a sweep has many jobs; give the config of one trial (its overrides after a plain config)")
    return attempts_of(settings)


def _print_findings(findings: list[Finding]) -> None:
    signs = {"error": "[bold red]✗[/]", "warning": "[yellow]![/]", "info": "[green]✓[/]"}
    for finding in findings:
        fix = f"\n    [dim]→ {escape(finding.fix)}[/]" if finding.fix else ""
        console.print(f"{signs[finding.severity]} {escape(finding.what)} [dim]{finding.code}[/]{fix}", soft_wrap=True)


def _print_table(rows: list[dict[str, Any]]) -> None:
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
