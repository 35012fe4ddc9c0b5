"""A ground of drills whose root is a bucket, with the training that nobody disturbed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.drills.command import CONFIG
from cli.drills.ground import Ground
from cli.drills.judging import DrillResult, hold
from cli.drills.table import DRILLS, Drill
from launcher.config import RunConfig, config_document, overridden, validated


@pytest.fixture(scope="session")
def held_on(
    prefect_home: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any]], Any]:
    """Makes grounds: `held_on({"root": "gs://…"})` is a context in which drills are held, after an undisturbed one."""

    @contextmanager
    def made(changes: dict[str, Any]) -> Iterator[Callable[[Drill], DrillResult]]:
        folder = tmp_path_factory.mktemp("drills")
        for name in ("prefect", "prefect-of-commands"):
            shutil.copytree(prefect_home(), folder / name)
        config = validated(RunConfig, overridden(config_document(CONFIG), changes), where="drill")
        with Ground.at(folder, config) as ground:
            undisturbed = hold(DRILLS[0], ground)
            assert undisturbed.violations == ()
            yield lambda drill: hold(drill, ground)

    return made
