"""LitGPT's models by name, and what is known of the devices that they are trained on."""

from __future__ import annotations

import pytest

from litgpt_demo.models import catalogue
from litgpt_demo.models.devices import DEVICES, device_named, multiplied_in


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
        ("§§§", {}, "litgpt download list"),
        ("pythia-14m", {"n_heads": 4}, r"unknown fields \['n_heads'\]; did you mean n_head"),
        ("pythia-14m", {"§": 4}, r"LitGPT's Config has .*block_size"),
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
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("NVIDIA L40S", "L40S"),
        ("a3-ultragpu-8g", "H200"), ("a4x-highgpu-4g", "GB200"), ("NVIDIA GeForce RTX 3090", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_the_names_that_are_met_and_no_other_is_guessed(said: str, name: str | None) -> None:
    device = device_named(said)
    assert (device and device.name) == name


def test_the_figures_of_devices_are_dense_ones() -> None:
    for device in DEVICES:
        rates = device.teraflops
        # Tensor cores: narrower types are faster, float8 twice as fast; a sparse figure would break the ratio.
        assert rates["float16"] > 3 * rates["float32"]
        assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
        if "float8" in rates:
            assert rates["float8"] == pytest.approx(2 * rates["float16"], rel=0.02)


def test_a_training_is_held_against_the_type_that_it_multiplies_in() -> None:
    words = ["32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true"]
    assert [multiplied_in(word) for word in words] == ["float32", "float16", "bfloat16", "bfloat16", "float16"]
    assert multiplied_in("bf16-mixed", float8=True) == "float8"
    t4 = device_named("Tesla T4")
    assert t4 is not None
    assert t4.peak("bfloat16") is None, "it has none: a share of nothing is no figure"
