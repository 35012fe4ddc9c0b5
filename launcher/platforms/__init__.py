"""The registry of platforms: where jobs run, one folder each.

A new platform is a folder with its settings (launcher.platforms.settings) and the platform that they open
(launcher.platforms.base), and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from launcher.platforms.settings import PlatformSettings

PLATFORMS: Mapping[str, str] = MappingProxyType(
    {
        "local": "launcher.platforms.local.settings:LocalPlatformConfig",
        "gke": "launcher.platforms.kubernetes.settings:GkePlatformConfig",
        "runai": "launcher.platforms.runai.settings:RunaiPlatformConfig",
        "batch": "launcher.platforms.batch.settings:BatchPlatformConfig",
    }
)
"""The `kind` that a config gives, and the class of its settings, which opens the platform. The first is the default."""


def settings_classes() -> tuple[type[PlatformSettings], ...]:
    """Return the class of each platform's settings, in the order of the registry."""
    return tuple(_imported(name) for name in PLATFORMS.values())


def default_settings() -> PlatformSettings:
    """Return the settings of a config that names no platform."""
    kind, name = next(iter(PLATFORMS.items()))
    return _imported(name).model_validate({"kind": kind})


def _imported(name: str) -> type[PlatformSettings]:
    module, _, attribute = name.partition(":")
    found: type[PlatformSettings] = getattr(import_module(module), attribute)
    return found
