"""A cloud for the tests of its platform, whose tasks end as the test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from batch import Cloud, running_batch


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with running_batch() as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made
