"""What the tests of flows share."""

import pytest
from strict_platform import StrictPlatform

from launcher.platforms.local.settings import LocalPlatformConfig


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> StrictPlatform:
    """This machine, which starts no process."""
    made = StrictPlatform()
    monkeypatch.setattr(LocalPlatformConfig, "open", lambda settings: made)
    return made
