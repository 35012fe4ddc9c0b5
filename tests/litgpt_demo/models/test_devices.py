"""The table of devices: names as drivers and platforms say them, figures as the makers say them."""

from __future__ import annotations

import pytest

from litgpt_demo.models.devices import DEVICES, device_named, multiplied_in


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("a3-highgpu-8g", "H100"),
        ("a3-megagpu-8g", "H100"),
        ("a3-ultragpu-8g", "H200"),
        ("a4-highgpu-8g", "B200"),
        ("a4x-highgpu-4g", "GB200"),
        ("a2-ultragpu-1g", "A100 80GB"),
        ("g2-standard-48", "L4"),
    ],
)
def test_devices_are_known_by_the_names_that_are_met(said: str, name: str) -> None:
    device = device_named(said)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize("said", ["NVIDIA GeForce RTX 3090", "AMD Instinct MI300X", "NVIDIA A16", "", "n1-standard-8"])
def test_a_device_that_is_not_in_the_table_is_not_guessed(said: str) -> None:
    assert device_named(said) is None


def test_the_figures_are_dense_ones_and_have_a_source() -> None:
    for device in DEVICES:
        assert device.source.startswith("https://")
        assert device.memory >= 16e9
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
    h200, t4 = device_named("NVIDIA H200"), device_named("Tesla T4")
    assert h200 is not None
    assert h200.peak("bfloat16") == 989.5e12
    assert t4 is not None
    assert t4.peak("bfloat16") is None  # it has none: a share of nothing is no figure
