"""A cloud for the tests of its platform, whose containers are said to run until they are told to stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from batch import Cloud, running_batch
from batch_jobs import IMAGE


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with running_batch(tmp_path / "cloud") as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        made.options.recorded[IMAGE] = {}
        yield made
