"""Settings as `train-litgpt settings` lists them."""

from __future__ import annotations

import pytest
import yaml

from cli.settings import settings_of
from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from litgpt_demo.config import Settings


@pytest.mark.parametrize("kind", [RunConfig, ScriptConfig, SweepConfig])
def test_every_setting_says_what_it_means(kind: type[Settings]) -> None:
    assert [setting.name for setting in settings_of(kind) if len(setting.text) < 10] == []


def test_each_kind_of_a_section_is_listed_with_its_own_settings() -> None:
    listed = [(setting.name, setting.default) for setting in settings_of(RunConfig)]
    for kind in ("stdlib", "files", "hub", "openwebtext"):
        assert ("data.corpus.kind", kind) in listed
    assert ("train.learning_rate", "0.0006") in listed
    assert ("data.corpus.paths", "") in listed  # has to be given
    assert listed.index(("train.wandb", "null")) < listed.index(("train.wandb.project", ""))  # left out as a whole


def test_a_default_that_is_listed_can_be_written_back() -> None:
    listed = list(settings_of(RunConfig))
    off = tuple(f"{setting.name}." for setting in listed if setting.default == "null")
    for setting in listed:
        if setting.name.startswith(off):  # of a section that is left out: writing anything below it turns it on
            continue
        if setting.default and setting.name.split(".")[0] in {"train", "model"}:
            document = overridden({}, {setting.name: yaml.safe_load(setting.default)})
            assert validated(RunConfig, document, where=setting.name) == RunConfig()
