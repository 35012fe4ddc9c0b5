"""Where jobs run: one module per platform, found by name and imported on use."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from launcher.errors import ConfigProblem

if TYPE_CHECKING:
    from launcher.platforms.base import Platform

PLATFORMS = MappingProxyType(
    {
        "local": "launcher.platforms.local:LocalPlatform",
    }
)


def open_platform(kind: str) -> Platform:
    """The platform called `kind`.

    Raises:
        ConfigProblem: no such platform.
    """
    if kind not in PLATFORMS:
        raise ConfigProblem(f"platform.kind={kind!r} is not a platform; there are {', '.join(PLATFORMS)}")
    module, _, name = PLATFORMS[kind].partition(":")
    platform: Platform = getattr(import_module(module), name)()
    return platform
