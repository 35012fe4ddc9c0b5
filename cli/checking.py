"""The commands that look before a run: what would be sent, what it costs, what blocks it, which settings there are."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cli.arguments import DEFAULT_ROOT, AsJson, ConfigFile, Overrides, ProfileFile, config_at, require_same_root
from cli.terminal import console, print_findings, print_json, show_line, stderr
from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.errors import ConfigProblem
from launcher.findings import fault_of_refusal
from launcher.formatting import bytes_text
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.findings import fault_of_findings
from litgpt_demo.settings import Settings


def render(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where every environment variable of the nodes comes from instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print exactly what would be sent to the platform, for each trial of a sweep. Nothing is started or written."""
    from launcher.checks.preview import previews

    shown = list(previews(config_at(config, overrides, profile)))
    if as_json:
        print_json([{**asdict(preview.submission), "title": preview.title} for preview in shown])
        return
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
            console.print_table([dict(row) for row in preview.submission.environment])
        else:
            typer.echo(str(preview.submission), nl=False)


def plan(config: ConfigFile, overrides: Overrides = None, profile: ProfileFile = None, as_json: AsJson = False) -> None:
    """Show which steps would run, which are done already, what the training costs, and what blocks it."""
    from launcher.checks.plan import plan_of

    planned = plan_of(config_at(config, overrides, profile))
    if as_json:
        print_json(asdict(planned))
    else:
        for rows in (planned.steps, planned.trials, planned.arithmetic, planned.layouts):
            console.print_table(rows)
            if rows:
                console.print()
        print_findings(planned.findings)
    if fault := fault_of_findings(planned.findings):
        raise typer.Exit(EXIT_CODES[fault])
    if as_json:
        return
    severities = {finding.severity for finding in planned.findings}
    if "unknown" in severities:
        console.print("nothing that is known blocks it; a run needs to know what is marked with ?")
    elif severities <= {"info"}:
        console.print("nothing blocks it")


def settings(
    prefix: Annotated[str, typer.Argument(help="Only settings whose names begin with this: train, data.corpus")] = "",
    kind: Annotated[str, typer.Option(help="training, script, sweep or network")] = "training",
    as_json: AsJson = False,
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
    if as_json:
        print_json([asdict(item) for item in found])
        return
    console.print_table([{"setting": item.name, "default": item.default, "meaning": item.text} for item in found])


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Also check what this config needs.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    root: Annotated[str, typer.Option(help="Where runs would be written.")] = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Check this machine and what a config needs, and say how to fix what is wrong."""
    from launcher.checks.doctor import examine_environment
    from launcher.checks.plan import findings_of

    if config is None and profile is not None:
        raise ConfigProblem("--platform means nothing without a config; give the config that is to run there")
    settings = None if config is None else config_at(config, overrides, profile)
    if settings is not None:
        require_same_root(root, settings.root, str(config))
    findings = examine_environment(root if settings is None else settings.root)
    if settings is not None:
        findings += [finding for finding in findings_of(settings) if finding not in findings]
    print_json([asdict(finding) for finding in findings]) if as_json else print_findings(findings)
    if fault := fault_of_refusal(findings):
        raise typer.Exit(EXIT_CODES[fault])


def verify(
    dataset: Annotated[str, typer.Argument(help="Its folder, or gs://bucket/…/datasets/…", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Read every byte of a prepared dataset again, and compare the dataset with its manifest."""
    from litgpt_demo.data.verification import verify_dataset

    start = time.monotonic()
    found = verify_dataset(dataset)
    manifest, seconds = found.manifest, max(time.monotonic() - start, 1e-3)
    if as_json:
        print_json({"problems": found.problems, "seconds": seconds, "manifest": manifest.model_dump(mode="json")})
        raise typer.Exit(EXIT_CODES[Fault.DATA] if found.problems else 0)
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
