"""`train-litgpt compare`: runs of a root side by side, in the terminal, as a page and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cli.arguments import DEFAULT_ROOT, AsJson, Root, complete_run, target_of
from cli.terminal import console, print_json, print_notes
from launcher.errors import ConfigProblem
from launcher.reports.compare import as_json as comparison
from launcher.reports.compare import charts, html, results_table, settings_table
from launcher.runs.results import result_of_run
from litgpt_demo.metrics import damaged_lines
from litgpt_demo.storage import open_storage

_PICTURE = (940, 420)  # pixels at the size where its labels are as tall as small print


def compare(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            show_default=False,
            autocompletion=complete_run,
            help="Names of runs or sweeps, @last, folders of runs, or configs; a sweep is all of its trials.",
        ),
    ],
    page: Annotated[Path, typer.Option(help="The file for the page.")] = Path("comparison.html"),
    picture: Annotated[
        Path | None,
        typer.Option(help="The file for the picture: .png, .svg or .pdf. Left out, it is next to the page."),
    ] = None,
    as_json: AsJson = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Compare runs: their losses in one picture, the settings in which they differ, and their results."""
    from launcher.reports.charts import PICTURES
    from launcher.reports.charts import picture as drawn

    file = page.with_suffix(".png") if picture is None else picture
    kind = file.suffix.removeprefix(".")
    if kind not in PICTURES:
        raise ConfigProblem(f"--picture={file} has to end with one of {', '.join(f'.{one}' for one in PICTURES)}")
    found = [target_of(words, None, None, root) for words in targets]
    named = dict.fromkeys((target.index, run) for target in found for run in target.runs)
    if len(named) < 2:
        raise ConfigProblem(f"{targets[0]} is one run, and nothing to compare it with; name another one")
    bad = damaged_lines()
    results = [result_of_run(index, run, bad) for index, run in named]
    if as_json:
        print_json(comparison(results))
        return
    for rows in (results_table(results), settings_table(results)):
        console.print_table(rows)
        console.print()
    _write(page, html(results, root=", ".join({index.root.address(): None for index, _ in named})).encode())
    shown = charts(results)
    losses = shown.get("loss") or shown.get("validation")
    if losses is None:
        console.print("none of them has a curve yet, so that there is no picture")
    else:
        _write(file, drawn(losses, width=_PICTURE[0], height=_PICTURE[1], kind=kind))
    print_notes(str(bad))


def _write(file: Path, content: bytes) -> None:
    stored = open_storage(str(file.parent)).write(file.name, content)
    console.print(f"[green]✓[/] {escape(str(file))} [dim]({stored.size:,} bytes)[/]", soft_wrap=True)
