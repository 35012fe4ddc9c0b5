"""`train-litgpt profile`: a training that runs is asked for a profile of its next steps."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.arguments import DEFAULT_ROOT, AsJson, Root, RunName
from cli.terminal import print_json
from launcher.errors import ConfigProblem
from launcher.runs.targets import find
from litgpt_demo.runs import PROFILES, ProfileRequest, read_spec, write_profile_request


def profile(
    target: RunName,
    steps: Annotated[int, typer.Option(min=1, max=50, help="How many steps.")] = 5,
    rank: Annotated[list[int] | None, typer.Option(min=0, help="A rank that records; may be given again. [0]")] = None,
    as_json: AsJson = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Ask a training that runs for a timeline and the memory of its next steps."""
    found, ranks = find(target, root=root), tuple(sorted(set(rank or (0,))))
    attempts, run = found.of_one(found.run), found.storage(found.run)
    if not any(attempt.status.state.live for attempt in attempts.all()):
        raise ConfigProblem(
            f"{found.name} does not run, so that it has no next step; set train.profile={{steps: 20-25}} and start it"
        )
    if ranks[-1] >= (world_size := read_spec(run).world_size):
        raise ConfigProblem(f"--rank={ranks[-1]} is none of {found.name}, whose ranks are 0 to {world_size - 1}")
    write_profile_request(run, ProfileRequest(steps=steps, ranks=ranks))
    if as_json:
        print_json({"run": found.run, "steps": steps, "ranks": ranks, "address": run.address(PROFILES)})
        return
    typer.echo(
        f"asked; a few seconds and {steps} steps later it is in {run.address(PROFILES)}: open https://ui.perfetto.dev"
    )
