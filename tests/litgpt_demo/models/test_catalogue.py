"""LitGPT's models by name, and what is known of the devices that they are trained on."""

from __future__ import annotations

import pytest

from litgpt_demo.models import catalogue
from litgpt_demo.models.devices import device_named


def test_every_model_of_litgpt_can_be_named() -> None:
    from litgpt.config import configs

    names = [config["name"] for config in configs]
    assert len(names) > 100
    for name in names:
        assert catalogue.settings(name, {})["name"] == name


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("pythia-160", {}, "'pythia-160' is not a LitGPT model; did you mean .*pythia-160m"),
        ("pythia-14m", {"n_heads": 4}, "did you mean n_head"),
        ("pythia-14m", {"n_head": 3}, "on pythia-14m is no LitGPT Config"),
    ],
)
def test_what_is_no_model_is_refused_with_what_would_be_one(name: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        catalogue.settings(name, changes)


def test_a_change_goes_on_top_of_the_named_model_and_leaves_the_catalogue_alone() -> None:
    changed = catalogue.settings("pythia-14m", {"n_layer": 2})
    assert changed == catalogue.settings("pythia-14m", {}) | {"n_layer": 2}
    assert catalogue.settings("pythia-14m", {})["n_layer"] == 6


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("a3-ultragpu-8g", "H200"),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_a_device_is_known_by_the_names_that_are_met_and_no_other_is_guessed(said: str, name: str | None) -> None:
    device = device_named(said)
    assert (device and device.name) == name
