"""The ground of a module's drills: on this machine, or with the root and the platform that the module gives."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drill_ground import Ground, Scene


@pytest.fixture(scope="module")
def place() -> tuple[dict[str, Any], dict[str, str]]:
    """Settings that differ from TRAINING's, and variables of the environment."""
    return {}, {}


@pytest.fixture(scope="module")
def drills(place: Any, prefect_home: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with Ground(tmp_path_factory.mktemp("drills"), prefect_home(), *place).used() as made:
        yield made


@pytest.fixture
def scene(drills: Ground) -> Iterator[Scene]:
    with drills.scene() as made:
        yield made
