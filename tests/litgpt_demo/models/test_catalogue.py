"""LitGPT's models by name, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from litgpt_demo.models import catalogue


def test_the_catalogue_and_the_settings_import_no_torch() -> None:
    program = (
        "import sys\n"
        "from litgpt_demo.config import ModelConfig\n"
        "ModelConfig(name='pythia-14m')\n"
        "heavy = {'torch', 'lightning', 'litgpt', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_model_of_litgpt_can_be_named() -> None:
    from litgpt.config import configs

    names = [config["name"] for config in configs]
    assert len(names) > 100
    for name in names:
        assert catalogue.settings(name, {})["name"] == name


@pytest.mark.parametrize(("name", "billions"), [("transformer-100b", 100), ("transformer-175b", 175)])
def test_the_two_models_of_the_ancestor_are_as_large_as_they_say(name: str, billions: float) -> None:
    fields = catalogue.settings(name, {})
    # 12 n_embd² per layer and the two tables of a GPT-NeoX, untied, as LitGPT's Config completes it.
    rows = catalogue.padded_vocabulary(name, {})
    assert rows is not None
    parameters = 12 * fields["n_layer"] * fields["n_embd"] ** 2 + 2 * rows * fields["n_embd"]
    assert parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("pythia-160", "pythia-160m"), ("llama-3.2-1b", "Llama-3.2-1B"), ("transformer-100B", "transformer-100b")],
)
def test_an_unknown_model_suggests_its_neighbours(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{given!r} is not a LitGPT model; did you mean .*{meant}"):
        catalogue.settings(given, {})


def test_a_name_unlike_any_other_says_where_the_names_are() -> None:
    with pytest.raises(ValueError, match="litgpt download list"):
        catalogue.settings("§§§", {})


def test_an_unknown_field_suggests_its_neighbours_or_lists_all() -> None:
    with pytest.raises(ValueError, match=r"unknown fields \['n_heads'\]; did you mean n_head"):
        catalogue.settings("pythia-14m", {"n_heads": 4})
    with pytest.raises(ValueError, match=r"LitGPT's Config has .*block_size"):
        catalogue.settings("pythia-14m", {"§": 4})


def test_a_change_goes_on_top_of_the_named_model_and_leaves_the_catalogue_alone() -> None:
    changed = catalogue.settings("pythia-14m", {"n_layer": 2})
    assert changed == catalogue.settings("pythia-14m", {}) | {"n_layer": 2}
    assert catalogue.settings("pythia-14m", {})["n_layer"] == 6


@pytest.mark.parametrize("change", [{"n_embd": 129}, {"n_head": 3}])
def test_fields_that_make_no_model_together_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="on pythia-14m is no LitGPT Config"):
        catalogue.settings("pythia-14m", change)


@pytest.mark.parametrize(
    ("name", "changes", "rows"),
    [
        ("pythia-14m", {}, 50304),
        ("pythia-14m", {"padded_vocab_size": 51200}, 51200),
        (None, {"n_layer": 2, "n_embd": 32, "n_head": 2}, None),
        (None, {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 1000, "padding_multiple": 64}, 1024),
    ],
)
def test_the_vocabulary_is_the_models_where_it_has_one(
    name: str | None, changes: dict[str, object], rows: int | None
) -> None:
    assert catalogue.padded_vocabulary(name, changes) == rows
