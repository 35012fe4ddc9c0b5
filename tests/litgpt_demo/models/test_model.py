"""LitGPT models from settings, with initial weights that depend on the seed alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT

from litgpt_demo.config import ModelConfig
from litgpt_demo.errors import UserError
from litgpt_demo.models.model import decay_groups, initialise, litgpt_config

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2}


def model(name: str | None = None, *, length: int = 32, **config: Any) -> ModelConfig:
    return ModelConfig(name=name, config=config, sequence_length=length)


def gpt(seed: int, **config: Any) -> GPT:
    made = GPT(litgpt_config(model(**(SMALL | config)), vocab_size=300))
    initialise(made, seed=seed)
    return made


def test_a_named_model_is_litgpts_own() -> None:
    assert litgpt_config(model("pythia-14m", length=128), vocab_size=50_277) == Config.from_name("pythia-14m")


def test_a_named_model_takes_the_fields_that_were_changed() -> None:
    config = litgpt_config(model("pythia-14m", n_layer=2), vocab_size=300)
    assert config == Config.from_name("pythia-14m", n_layer=2)


def test_an_inline_model_takes_the_tokenizers_vocabulary_and_the_sequences_length() -> None:
    config = litgpt_config(model(**SMALL), vocab_size=300)
    assert (config.vocab_size, config.padded_vocab_size, config.block_size) == (300, 320, 32)
    assert litgpt_config(model(**SMALL, block_size=64), vocab_size=300).block_size == 64


@pytest.mark.parametrize(
    ("asked", "rows", "would_do"),
    [
        (model("pythia-14m"), 50_304, 50_368),
        (model(**SMALL, vocab_size=1000, padding_multiple=8), 1000, 50_368),
    ],
)
def test_a_vocabulary_larger_than_the_model_is_refused_with_what_would_do(
    asked: ModelConfig, rows: int, would_do: int
) -> None:
    assert litgpt_config(asked, vocab_size=rows).padded_vocab_size == rows
    words = f"has 50305 ids and model .* has {rows} embeddings; .*padded_vocab_size={would_do}"
    with pytest.raises(UserError, match=words):
        litgpt_config(asked, vocab_size=50_305)


@pytest.mark.parametrize(
    "config", [{}, {"bias": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 64}]
)
def test_initial_weights_depend_on_the_seed_alone(config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    first = gpt(seed=7, **config)
    torch.manual_seed(2)
    again, other = gpt(seed=7, **config), gpt(seed=8, **config)
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), again.parameters(), strict=True))
    same = [torch.equal(one, two) for one, two in zip(first.parameters(), other.parameters(), strict=True)]
    matrices = [weight.dim() == 2 for weight in first.parameters()]
    assert [not alike for alike in same] == matrices


def test_initial_weights_have_gpt_neoxs_spread_and_projections_a_smaller_one() -> None:
    wide = gpt(seed=7, n_embd=256, n_head=2)
    for name, weight in wide.named_parameters():
        if name.endswith(".bias"):
            assert not weight.any()
        elif weight.dim() == 2:
            expected = 1 / (2 * math.sqrt(256)) if name.endswith(".proj.weight") else math.sqrt(2 / (5 * 256))
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.02), name


def test_an_untrained_model_is_about_as_surprised_as_one_that_guesses() -> None:
    ids = torch.randint(0, 300, (4, 33), generator=torch.Generator().manual_seed(0))
    logits = gpt(seed=7)(ids[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
    assert float(loss) == pytest.approx(math.log(320), rel=0.1)


def test_matrices_decay_and_vectors_do_not() -> None:
    made = gpt(seed=7)
    decaying, kept = decay_groups(made, 0.1)
    assert (decaying["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    names = {id(weight): name for name, weight in made.named_parameters()}
    grouped = [[names[id(weight)] for weight in group["params"]] for group in (decaying, kept)]  # type: ignore[attr-defined]
    assert sorted(grouped[0] + grouped[1]) == sorted(names.values())
    assert all("norm" in name or "ln_f" in name or name.endswith(".bias") for name in grouped[1])
    assert "lm_head.weight" in grouped[0]
    assert not any(name.endswith(".bias") for name in grouped[0])
