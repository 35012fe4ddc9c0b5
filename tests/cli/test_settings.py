"""Settings as `train-litgpt settings` lists them."""

from __future__ import annotations

import json

import pytest
import yaml

from cli.settings import one_line, settings_of
from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.platforms import settings_classes
from litgpt_demo.settings import Settings


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


def test_each_setting_has_its_own_meaning_and_default_where_the_form_has_another_order() -> None:
    for kind in settings_classes():
        listed = {setting.name: setting for setting in settings_of(kind)}
        for name, field in kind.model_fields.items():
            if name in listed and isinstance(field.default, int) and name != "kind":
                assert listed[name].default == json.dumps(field.default), name
                assert listed[name].text == one_line(field.description), name


def test_a_default_that_is_listed_can_be_written_back() -> None:
    listed = list(settings_of(RunConfig))
    whole = tuple(f"{setting.name}." for setting in listed if setting.default)
    for setting in listed:
        if setting.name.startswith(whole):  # below null or one word: writing it makes a section of that
            continue
        if setting.default and setting.name.split(".")[0] in {"train", "model"}:
            document = overridden({}, {setting.name: yaml.safe_load(setting.default)})
            assert validated(RunConfig, document, where=setting.name) == RunConfig()
