"""A platform is one folder and one line of the registry: everything that shared code needs is asked of its class."""

from __future__ import annotations

import pytest

from launcher.config import RunConfig, validated
from launcher.errors import ConfigProblem
from launcher.platforms import PLATFORMS, settings_classes


def test_every_platform_is_registered_under_the_kind_that_its_settings_have() -> None:
    for kind, settings in zip(PLATFORMS, settings_classes(), strict=True):
        assert settings.model_json_schema()["properties"]["kind"]["const"] == kind


def test_a_platform_that_is_not_registered_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigProblem, match=r"platform\.kind: 'toy' given; there are 'local', 'gke', 'runai', 'batch'"):
        validated(RunConfig, {"platform": {"kind": "toy"}}, where="here")
