"""The platforms: one folder each, found by name and imported on use."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from launcher.errors import ConfigProblem

if TYPE_CHECKING:
    from launcher.platforms.base import Platform


class PlatformSettings(Protocol):
    """The `platform` section of a config: one model per platform (launcher.config), told apart by `kind`."""

    @property
    def kind(self) -> str: ...


PLATFORMS = MappingProxyType(
    {
        "local": "launcher.platforms.local.platform:LocalPlatform",
        "gke": "launcher.platforms.kubernetes.platform:GkePlatform",
        "runai": "launcher.platforms.runai.platform:RunaiPlatform",
        "batch": "launcher.platforms.batch.platform:BatchPlatform",
    }
)


def open_platform(settings: PlatformSettings) -> Platform:
    """The platform that a config's `platform` section names, set up as it says.

    Raises:
        ConfigProblem: no such platform.
    """
    if settings.kind not in PLATFORMS:
        raise ConfigProblem(f"platform.kind={settings.kind!r} is not a platform; there are {', '.join(PLATFORMS)}")
    module, _, name = PLATFORMS[settings.kind].partition(":")
    platform: Platform = getattr(import_module(module), name).configured(settings)
    return platform
