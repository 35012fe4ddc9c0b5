"""What all tests on the fake cluster share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that is away is away for good; a watch that opens when a test ends would ask again for 7.5 s."""
    monkeypatch.setattr("launcher.platforms.kubernetes.cluster._PAUSES", (0.01, 0.1))
