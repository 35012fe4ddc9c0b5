"""The command `train-litgpt drill`: which drills, on which platform, after a yes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import deployments
from cli.drills.ground import Ground
from cli.drills.judging import DrillResult, hold
from cli.drills.table import DRILLS, Drill
from launcher.checks.cost import listed_price
from launcher.config import RunConfig, config_document, overridden, overrides_of, read_profile, validated
from launcher.errors import ConfigProblem
from launcher.platforms.base import Capability

CONFIG = Path(deployments.__file__).with_name("configs") / "drill.yaml"


def config_for(platform: str | None, overrides: Sequence[str]) -> RunConfig:
    """Return the config of the drills' training.

    Args:
        platform: a profile's path; none, or the name of this machine's platform, for the machine itself.

    Raises:
        ConfigProblem: it is no profile, or has no root.
    """
    document = config_document(CONFIG)
    if platform is not None and platform != document["platform"]["kind"]:
        profile = Path(platform)
        if not profile.is_file():
            raise ConfigProblem(
                f"{platform!r} is neither {document['platform']['kind']} nor a file; give a profile, which has the "
                "`platform`, `root` and `image` of your cluster, as deployments/configs/profiles/*.yaml"
            )
        sections = read_profile(profile)
        if "root" not in sections:
            raise ConfigProblem(f"{profile} has no root; drills write under one that its nodes reach: add `root: …`")
        document |= sections
    return validated(RunConfig, overridden(document, overrides_of(overrides)), where=platform or str(CONFIG))


def is_here(config: RunConfig) -> bool:
    """Return whether the jobs are processes of this machine, which drills may hit one by one."""
    return Capability.ANYWHERE not in config.platform.open().capabilities


def chosen(config: RunConfig, only: Sequence[str]) -> list[Drill]:
    """Return the drills to hold, the undisturbed training first, with which the others are compared.

    Raises:
        ConfigProblem: there is no drill of a name that was asked for.
    """
    possible = [drill for drill in DRILLS if drill.anywhere or is_here(config)]
    names = [drill.name for drill in possible]
    if unknown := [name for name in only if name not in names]:
        raise ConfigProblem(f"there is no drill {', '.join(unknown)} on this platform; there are {', '.join(names)}")
    return [drill for drill in possible if not only or drill.name in {names[0], *only}]


def announcement(config: RunConfig, drills: Sequence[Drill], times: int) -> list[str]:
    """Return what will be launched, in lines."""
    platform = config.platform
    price = listed_price(platform)
    cost = f", {price.usd * platform.nodes:.2f} $ an hour by list price while one runs" if price else ""
    where = "a temporary folder" if is_here(config) else f"{config.root}, and stay there"
    return [
        f"{len(drills)} drills, {times} times: each starts a training of {config.train.max_steps} steps on "
        f"{platform.nodes} nodes x {platform.processes} processes ({platform.kind}), one after the other{cost}",
        f"{', '.join(drill.name for drill in drills)}; their runs are written under {where}",
    ]


def held(
    config: RunConfig, drills: Sequence[Drill], *, times: int, folder: Path, tell: Callable[[DrillResult], object]
) -> Iterator[DrillResult]:
    """Hold the drills in a folder on this machine, and yield what came of each."""
    ground = Ground.at(folder, config)
    root = str(folder / "root") if is_here(config) else f"{config.root.rstrip('/')}/drill-{ground.token}"
    ground.config = config.model_copy(update={"root": root})
    with ground:
        for _ in range(times):
            for drill in drills:
                if drill.needs():
                    continue
                result = hold(drill, ground)
                tell(result)
                yield result
                if ground.reference is None:  # nothing could be compared with it
                    return


def hold_all(
    config: RunConfig, drills: Sequence[Drill], *, times: int, tell: Callable[[str], object]
) -> tuple[list[DrillResult], list[str]]:
    """Hold the drills; return the results, and what is to be said after their table.

    The folder with what commands said stays where something went wrong.
    """
    folder = Path(tempfile.mkdtemp(prefix="train-litgpt-drills-"))

    def told(result: DrillResult) -> None:
        tell(f"{'✗' if result.violations else '✓'} {result.drill} ({result.seconds:.0f} s): {result.happened}")

    results = list(held(config, drills, times=times, folder=folder, tell=told))
    notes = [f"left out: {drill.name}, for {why}" for drill in drills if (why := drill.needs())]
    for result in results:
        notes += [f"✗ {result.drill}: {violation}; see {result.logs}" for violation in result.violations]
    if not any(result.violations for result in results):
        shutil.rmtree(folder, ignore_errors=True)
    return results, notes


def as_json(results: Sequence[DrillResult]) -> str:
    """Return every result, for programs."""
    return json.dumps([asdict(result) for result in results], indent=1)
