"""LitGPT models by name and from settings, their initial weights, and the devices that they are trained on."""

import math
from typing import Any

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from litgpt_demo import catalogue
from litgpt_demo.config import ModelConfig
from litgpt_demo.models import model as module
from litgpt_demo.models.devices import device_named
from litgpt_demo.models.model import initialise, litgpt_config
from litgpt_demo.models.sampling import sampled

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2}


def model(name: str | None = None, *, length: int = 32, **config: Any) -> ModelConfig:
    return ModelConfig(name=name, config=config, sequence_length=length)


def gpt(seed: int, **config: Any) -> GPT:
    made = GPT(litgpt_config(model(**(SMALL | config)), vocab_size=300))
    initialise(made, seed=seed)
    return made


def test_inline_model_takes_vocabulary_and_length_of_the_data() -> None:
    assert litgpt_config(model("pythia-14m", length=128), vocab_size=50_277) == Config.from_name("pythia-14m")
    config = litgpt_config(model(**SMALL), vocab_size=300)
    assert (config.vocab_size, config.padded_vocab_size, config.block_size) == (300, 320, 32)
    assert litgpt_config(model(**SMALL, block_size=64), vocab_size=300).block_size == 64


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = gpt(seed=7)
    torch.manual_seed(2)
    again, different = gpt(seed=7), gpt(seed=8)
    assert all(
        torch.equal(weight, weight_again)
        for weight, weight_again in zip(first.parameters(), again.parameters(), strict=True)
    )
    same = [
        torch.equal(weight, weight_again)
        for weight, weight_again in zip(first.parameters(), different.parameters(), strict=True)
    ]
    matrices = [weight.dim() == 2 for weight in first.parameters()]
    assert [not alike for alike in same] == matrices


def test_a_rank_draws_only_pieces_of_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same numbers as in the whole model, on any number of ranks."""
    monkeypatch.setattr(module, "_DRAWN_AT_ONCE", 64)
    model, drawn, draw = gpt(seed=7), list[str](), module._draw
    monkeypatch.setattr(module, "_draw", lambda *arguments: drawn.append(arguments[3]) or draw(*arguments))
    gpt(seed=7)
    pieces_of_all, sharded = len(drawn), GPT(model.config)
    torch.distributed.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (4,)))
        drawn.clear()
        initialise(sharded, seed=7)
        assert len(drawn) == pieces_of_all / 4
        for (name, held), all_rows in zip(sharded.named_parameters(), model.parameters(), strict=True):
            if held.dim() == 2:
                assert isinstance(held, DTensor), name
                assert torch.equal(held.to_local(), all_rows.chunk(4)[2]), name
    finally:
        torch.distributed.destroy_process_group()


def test_initial_weights_have_the_spread_of_gpt_neox() -> None:
    wide = gpt(seed=7, n_embd=256, n_head=2)
    for name, weight in wide.named_parameters():
        if name.endswith(".bias"):
            assert not weight.any()
        elif weight.dim() == 2:
            expected = 1 / (2 * math.sqrt(256)) if name.endswith(".proj.weight") else math.sqrt(2 / (5 * 256))
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.02), name


@pytest.mark.parametrize("window", [16, 40])
@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("length", [10, 60])
def test_sampling_equals_full_passes_when_windowed(window: int, cap: float | None, length: int) -> None:
    """The likeliest token each time, whatever the prompt's length; without a cache every pass sees all tokens."""
    fields = {"n_query_groups": 1, "intermediate_size": 48, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP"}
    fields |= {"sliding_window_size": window, "sliding_window_indices": [1, 0], "attention_logit_softcapping": cap}
    made, prompt = gpt(3, **fields, block_size=128).requires_grad_(False), list(range(length))
    expected = list(prompt)
    while len(expected) < length + 24:
        expected.append(int(made(torch.tensor([expected]))[0, -1].argmax()))
    written = sampled(made, prompt, length=length + 24, temperature=0.0, top_k=1, eos_id=-1)
    assert [*prompt, *written] == expected


def test_changes_of_a_named_model_leave_the_catalogue_unchanged() -> None:
    changed = catalogue.settings("pythia-14m", {"n_layer": 2})
    assert changed == catalogue.settings("pythia-14m", {}) | {"n_layer": 2}
    assert catalogue.settings("pythia-14m", {})["n_layer"] == 6


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("a3-ultragpu-8g", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GB300", "GB300"),
        ("a4x-maxgpu-4g-metal", "GB300"),
        ("a4x-highgpu-4g", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_devices_match_their_names_and_no_others(reported: str, name: str | None) -> None:
    device = device_named(reported)
    assert (device and device.name) == name


def test_a_device_has_the_figures_of_its_own_variant() -> None:
    hopper, large, aws = (device_named(f"NVIDIA {name}") for name in ("GH200 480GB", "GH200 144G HBM3e", "A10G"))
    assert (hopper.memory, large.memory) == (96 * 10**9, 144 * 10**9)
    assert aws.peak("bfloat16") == 70e12
    assert (aws.peak("float32"), device_named("Tesla T4").peak("float32")) == (35e12, 8.1e12), "in TF32 and without it"
