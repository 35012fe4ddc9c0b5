"""A ground of drills whose root is a bucket, with the training that nobody disturbed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cli.drills.command import CONFIG
from cli.drills.ground import Ground
from cli.drills.judging import DrillResult, hold
from cli.drills.table import DRILLS, Drill
from launcher.config import RunConfig, config_document, overridden, validated


@pytest.fixture(scope="session")
def held_on(
    prefect_home: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any], str], Any]:
    """Makes grounds: `held_on({"root": "gs://…"}, bucket)` is a context for drills, after an undisturbed one."""

    @contextmanager
    def made(changes: dict[str, Any], bucket: str) -> Iterator[Callable[[Drill], DrillResult]]:
        folder = tmp_path_factory.mktemp("drills")
        for name in ("prefect", "prefect-of-commands"):
            shutil.copytree(prefect_home(), folder / name)
        config = validated(RunConfig, overridden(config_document(CONFIG), changes), where="drill")
        with_the_bucket = patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": bucket})
        with ExitStack() as stack:
            with with_the_bucket:
                ground = stack.enter_context(Ground.at(folder, config))
                assert hold(DRILLS[0], ground).violations == ()
            yield lambda drill: with_the_bucket(hold)(drill, ground)

    return made
