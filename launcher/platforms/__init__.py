"""The registry of platforms, one folder each.

A new platform is a folder with its settings (launcher.platforms.settings) and the platform that they open
(launcher.platforms.base), and a line in this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from types import MappingProxyType

from launcher.platforms.settings import PlatformSettings

PLATFORMS: Mapping[str, str] = MappingProxyType(
    {
        "local": "launcher.platforms.local.settings:LocalPlatformConfig",
        "gke": "launcher.platforms.kubernetes.settings:GkePlatformConfig",
        "kubernetes": "launcher.platforms.kubernetes.settings:KubernetesPlatformConfig",
        "runai": "launcher.platforms.runai.settings:RunaiPlatformConfig",
        "batch": "launcher.platforms.batch.settings:BatchPlatformConfig",
        "slurm": "launcher.platforms.slurm.settings:SlurmPlatformConfig",
    }
)
"""The class of settings for each `kind` of a config. The first is the default."""


def settings_classes() -> tuple[type[PlatformSettings], ...]:
    """Return the class of each platform's settings, in the order of the registry."""
    return tuple(map(resolve_name, PLATFORMS.values()))


def default_settings() -> PlatformSettings:
    """Return the settings of a config that names no platform."""
    return settings_classes()[0].model_validate({"kind": next(iter(PLATFORMS))})
