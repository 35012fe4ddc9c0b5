"""The commands that start something: a run, a dataset, a sweep, a measurement, a flow run on a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.arguments import AsJson, CancelOld, ConfigFile, NewJob, Overrides, ProfileFile, config_at, given_as
from cli.terminal import console, print_json, stderr
from launcher.benchmark import BenchmarkConfig, pairs_table, table, with_bars
from launcher.config import (
    RunConfig,
    ScriptConfig,
    SweepConfig,
    config_document,
    overridden,
    overrides_of,
    read_profile,
    validated,
)
from launcher.errors import ConfigProblem
from launcher.runs.sweeps import trials
from litgpt_demo.export.usage import use_of
from litgpt_demo.runs import FINAL, HUGGINGFACE, LITGPT, METRICS, REPORT


def run(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    output: Annotated[bool, typer.Option("--output", help="Also show what the job prints.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Hand it over to a worker of Prefect's server, and print the link.")
    ] = False,
    new: NewJob = False,
    cancel_old: CancelOld = False,
    as_json: AsJson = False,
) -> None:
    """Run a config from this terminal: the whole pipeline, a script on several nodes, or a sweep."""
    settings = config_at(config, [*(overrides or []), *_about_others(new=new, cancel_old=cancel_old)], profile)
    if detach:
        quiet_prefect()
        from cli import submitting

        words = [str(config), *(overrides or []), *(["--platform", str(profile)] if profile else [])]
        submitting.detach(settings, words, as_json=as_json, console=console)
        return
    match settings:
        case SweepConfig():
            _run_sweep(settings, output=output, as_json=as_json)
        case RunConfig():
            _run_training(settings, output=output, as_json=as_json)
        case ScriptConfig():
            _run_script(settings, as_json=as_json)
        case BenchmarkConfig():
            _run_benchmark(settings, as_json=as_json)


def _about_others(*, new: bool, cancel_old: bool) -> list[str]:
    """The overrides that these options stand for."""
    if new and cancel_old:
        raise ConfigProblem("--new keeps the job that runs already and --cancel-old ends it; give one of them")
    return ["start.others=keep"] if new else ["start.others=cancel"] if cancel_old else []


def _run_training(settings: RunConfig, *, output: bool, as_json: bool) -> None:
    from launcher.runs.run import plan_run

    final = _watched("flows.train_litgpt:train_litgpt", dict(settings), output=output, as_json=as_json)
    where = plan_run(settings).storage
    if as_json:
        print_json({"address": where.address(), **final.model_dump(mode="json")})
        return
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


def _run_script(settings: ScriptConfig, *, as_json: bool) -> None:
    logs = _watched("flows.run_torchrun:run_torchrun", dict(settings), output=True, as_json=as_json)
    if as_json:
        print_json({"logs": logs})
        return
    console.print(f"\n  logs     {escape(logs)}", soft_wrap=True)


def _run_sweep(settings: SweepConfig, *, output: bool, as_json: bool) -> None:
    trials(settings)  # one that cannot be is refused before anything is started for it
    rows = _watched("flows.sweep_litgpt:sweep_litgpt", dict(settings), output=output, as_json=as_json)
    print_json(rows) if as_json else console.print_table(rows)


def _run_benchmark(settings: BenchmarkConfig, *, as_json: bool) -> None:
    made = _watched("flows.benchmark_network:benchmark_network", dict(settings), as_json=as_json)
    if as_json:
        print_json(made.result.model_dump(mode="json"))
        return
    console.print_table(with_bars(table(made)))
    console.print_table(pairs_table(made.result))


def benchmark_network(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    new: NewJob = False,
    cancel_old: CancelOld = False,
    as_json: AsJson = False,
) -> None:
    """Measure the network of a config's platform: the bandwidth among ranks, and the slow node if there is one."""
    changes = overrides_of([*(overrides or []), *_about_others(new=new, cancel_old=cancel_old)])
    # Any config will do: of a training's file, what it trains is left out. An override is meant for this measurement.
    written = config_document(config, profile=profile)
    mine = {name: value for name, value in written.items() if name in BenchmarkConfig.model_fields}
    settings = validated(BenchmarkConfig, overridden(mine, changes), where=given_as(config, profile))
    _run_benchmark(settings, as_json=as_json)


def prepare(
    config: ConfigFile, overrides: Overrides = None, profile: ProfileFile = None, as_json: AsJson = False
) -> None:
    """Prepare the dataset of a config, and stop there."""
    settings = config_at(config, overrides, profile)
    if isinstance(settings, ScriptConfig | BenchmarkConfig):
        raise ConfigProblem(f"{config} runs a script, which has no dataset; give the config of a training or a sweep")
    parameters = {"root": settings.root, "data": settings.data, "workers": settings.workers}
    manifest = _watched("flows.prepare_dataset:prepare_dataset", parameters, as_json=as_json)
    if as_json:
        print_json(manifest.model_dump(mode="json"))


def sweep(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    new: NewJob = False,
    cancel_old: CancelOld = False,
    as_json: AsJson = False,
) -> None:
    """Train every combination of a grid (the config's `sweep` section)."""
    changes = [*(overrides or []), *_about_others(new=new, cancel_old=cancel_old)]
    settings = config_at(config, changes, profile)
    if not isinstance(settings, SweepConfig):
        raise ConfigProblem(
            f"{config} has no `sweep` section, so that there is nothing to vary; add one, as "
            "`sweep={grid: {train.learning_rate: [3.0e-4, 1.0e-3]}}`, or use `train-litgpt run`"
        )
    _run_sweep(settings, output=False, as_json=as_json)


def submit(
    deployment: Annotated[
        str | None,
        typer.Argument(help="`local`, or FLOW/DEPLOYMENT in full; without one they are listed.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    new: NewJob = False,
    cancel_old: CancelOld = False,
    as_json: AsJson = False,
) -> None:
    """Start the flow of a deployment on Prefect's server, with some settings changed."""
    quiet_prefect()
    from cli import submitting

    # No deployment's name has an equals sign: it is the first of the overrides then.
    first = [deployment] if deployment is not None and "=" in deployment else []
    name = None if first else deployment
    changes = overrides_of([*first, *(overrides or []), *_about_others(new=new, cancel_old=cancel_old)])
    sections = {} if profile is None else read_profile(profile)
    submitting.submit(name, changes, sections, as_json=as_json, console=console)


def _watched(flow: str, parameters: Mapping[str, Any], *, output: bool = False, as_json: bool = False) -> Any:
    """Run a flow in this process and show it; Ctrl-C leaves a job that has been started alone, and says so.

    Args:
        flow: `module:name`; imported when the terminal shows something.
        as_json: show it on standard error, for standard output is a program's.
    """
    from cli.foreground import in_foreground

    def load() -> Callable[[], Coroutine[Any, Any, Any]]:
        module, _, name = flow.partition(":")
        return partial(getattr(import_module(module), name), **parameters)

    quiet_prefect()
    return in_foreground(load, stderr if as_json else console, output=output)


def quiet_prefect() -> None:
    """Prefect's own console lines would fight with ours; its server and UI get them all the same."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # A fresh database is migrated first, which takes 15 s on two cores; the default of 20 s is too close.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "9")
