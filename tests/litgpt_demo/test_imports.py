"""Imports without the collection of garbage, and the help texts that no import reads."""

import gc
import sys
from importlib import import_module
from types import ModuleType

import pytest

from launcher.platforms.local.settings import LocalPlatformConfig
from litgpt_demo.config import Settings, described
from litgpt_demo.imports import importing


def test_garbage_is_collected_after_an_import_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        import_module("no_such_library")
    assert gc.isenabled()
    gc.unfreeze()


def test_objects_of_an_import_are_not_visited_again() -> None:
    gc.collect()
    with importing():
        library = [[] for _ in range(1000)]
    assert not any(found is library for found in gc.get_objects())
    gc.unfreeze()


def test_inherited_settings_have_their_descriptions() -> None:
    fields = described(LocalPlatformConfig)
    assert str(fields["usd_per_hour"].description).startswith("The price of a node for an hour, in dollars")
    assert all(fields[name].description for name in ("port", "grace_period"))


def test_settings_without_source_have_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "of_bytecode", ModuleType("of_bytecode"))

    class Compiled(Settings):
        __module__ = "of_bytecode"
        steps: int = 1

    assert described(Compiled)["steps"].description is None
