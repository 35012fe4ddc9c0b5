"""The `platform` section of a config for the toy platform."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from launcher.platforms.settings import PlatformSettings
from litgpt_demo.config import Count, Kind
from litgpt_demo.findings import Finding

if TYPE_CHECKING:
    from toy_platform.platform import ToyPlatform


class ToySettings(PlatformSettings):
    """Processes that a shell starts."""

    kind: Literal["toy"] = Kind("toy")
    nodes: Count = Field(1, gt=0, le=8)
    """How many shells."""
    processes: Count = Field(1, gt=0, le=8)
    """Ranks in each."""

    @property
    def hardware(self) -> str:
        """Return the name of a GPU that shared code knows the memory of."""
        return "NVIDIA L4"

    def open(self) -> ToyPlatform:
        """Return the toy platform."""
        from toy_platform.platform import ToyPlatform

        return ToyPlatform()

    def missing_secrets(self, names: Iterable[str]) -> Iterator[Finding]:
        """Yield nothing: shells inherit this environment."""
        yield from ()
