"""What is said of a model without building it is what it turns out to be when it is built."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from litgpt.config import Config
from litgpt.model import GPT
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from litgpt_demo.config import TrainConfig
from litgpt_demo.models import catalogue, estimates
from litgpt_demo.training import loss
from litgpt_demo.training.blocks import prepare_blocks
from litgpt_demo.training.loss import LossGPT

LAYERS = 3  # of the models that are built of the whole catalogue: blocks are alike, and some have thousands of experts


def completed(name: str | None, changes: dict[str, Any] | None = None, *, length: int = 32) -> Any:
    fields = catalogue.fields_of(name, changes or {}, sequence_length=length, vocab_size=300)
    return catalogue.config_of(fields)


def built(config: Any) -> GPT:
    fields = {name: getattr(config, name) for name in Config.__dataclass_fields__}
    with torch.device("meta"):
        return GPT(Config(**fields))


def counted(config: Any) -> int:
    return sum(weight.numel() for weight in built(config).parameters())


# --- parameters -------------------------------------------------------------------------------------------------------


def test_the_parameters_of_every_model_in_the_catalogue_are_known_to_the_last() -> None:
    seen = set()
    for name in catalogue.models():
        config = completed(name, {"n_layer": min(LAYERS, completed(name).n_layer)})
        looks = asdict(config) | {"name": "OLMo" in config.name, "hf_config": None}
        if (alike := json.dumps(looks, sort_keys=True)) not in seen:
            seen.add(alike)
            assert estimates.parameters(config) == counted(config), name
    assert len(seen) > 70


@pytest.mark.parametrize("name", ["pythia-1b", "Llama-3.2-1B", "transformer-175b", "Mixtral-8x7B-v0.1"])
def test_so_are_those_of_whole_models(name: str) -> None:
    assert estimates.parameters(completed(name)) == counted(completed(name))


@settings(max_examples=40)
@given(
    changes=st.fixed_dictionaries(
        {
            "n_layer": st.integers(1, 3),
            "n_head": st.sampled_from([2, 4]),
            "n_embd": st.sampled_from([16, 32]),
            "n_query_groups": st.sampled_from([1, 2]),
            "bias": st.booleans(),
            "attn_bias": st.booleans(),
            "lm_head_bias": st.booleans(),
            "norm_class_name": st.sampled_from(["LayerNorm", "RMSNorm"]),
            "norm_qk": st.booleans(),
            "norm_qk_type": st.sampled_from(["default", "olmo2"]),
            "norm_1": st.booleans(),
            "norm_2": st.booleans(),
            "post_attention_norm": st.booleans(),
            "post_mlp_norm": st.booleans(),
            "shared_attention_norm": st.booleans(),
            "intermediate_size": st.sampled_from([24, 64]),
            "mlp_class_name": st.sampled_from(["GptNeoxMLP", "LLaMAMLP", "GemmaMLP"]),
            "head_size": st.sampled_from([None, 12]),
        }
    ),
    experts=st.none() | st.sampled_from([0, 1]),
    latent=st.booleans(),
)
def test_whatever_is_set_the_parameters_are_those_that_are_built(
    changes: dict[str, Any], experts: int | None, latent: bool
) -> None:
    if experts is not None:
        changes |= {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 8}
        changes |= {"n_shared_expert": 2, "first_k_dense_replace": experts}
    if latent:
        ranks = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 7}
        changes |= {"latent_attention": ranks, "n_query_groups": changes["n_head"]}
    config = completed(None, changes)
    assert estimates.parameters(config) == counted(config)


def test_only_the_experts_that_a_token_sees_count_as_used() -> None:
    """Mistral AI says 46.7 billion parameters, 12.9 of them used by a token (https://mistral.ai/news/mixtral-of-experts)."""
    config = completed("Mixtral-8x7B-v0.1")
    assert estimates.parameters(config) / 1e9 == pytest.approx(46.7, abs=0.05)
    assert (estimates.used_parameters(config) + estimates.table(config)) / 1e9 == pytest.approx(12.9, abs=0.05)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pythia-14m", {"n_layer": 2}),
        ("Llama-3.2-1B", {"n_layer": 2, "n_embd": 128, "n_head": 8, "n_query_groups": 2, "intermediate_size": 96}),
    ],
    ids=["pythia", "llama"],
)
def test_the_arithmetic_is_what_torch_counts(name: str, changes: dict[str, Any]) -> None:
    """Products alone, forward and backward; torch counts the whole square of the attention, too."""
    config, length = completed(name, changes, length=64), 64
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        built(config)(torch.zeros(2, length, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == 2 * length * estimates.flops_per_token(config, length)


def test_a_window_bounds_the_attention_of_the_layers_that_have_it() -> None:
    config = completed("Gemma-2-2b")
    every = 12 * config.n_head * config.head_size
    windowed = sum(config.sliding_window_indices)
    assert 0 < windowed < config.n_layer
    assert estimates.attention_flops(config, 8192) == every * (
        windowed * config.sliding_window_size + (config.n_layer - windowed) * 8192
    )


def test_the_arithmetic_agrees_with_that_of_the_papers() -> None:
    """GPT-3 in Brown et al. 2020, table D.1: 3.14e23 for 300 billion tokens, without attention and output."""
    config = completed("transformer-175b", length=2048)
    assert 3e11 * estimates.flops_per_token(config, 2048) == pytest.approx(3.14e23, rel=0.06)


# --- memory -----------------------------------------------------------------------------------------------------------

SMALL = {
    "pythia-160m": {"n_layer": 4, "n_embd": 128, "n_head": 2, "intermediate_size": 512, "padded_vocab_size": 2048},
    "Llama-3.2-1B": {
        "n_layer": 3, "n_embd": 128, "n_head": 4, "n_query_groups": 2, "intermediate_size": 512,
        "padded_vocab_size": 2048,
    },
    "Gemma-2-2b": {
        "n_layer": 2, "n_embd": 128, "n_head": 4, "n_query_groups": 2, "head_size": 32, "intermediate_size": 512,
        "padded_vocab_size": 2048, "sliding_window_size": 64,
    },
    "Qwen3-30B-A3B": {
        "n_layer": 2, "n_embd": 128, "n_head": 4, "n_query_groups": 2, "head_size": 32, "moe_intermediate_size": 128,
        "padded_vocab_size": 2048, "n_expert": 8, "n_expert_per_token": 2,
    },
}  # fmt: skip


def measured(config: Any, train: TrainConfig, length: int) -> int:
    """Most bytes of tensors at once in the second step, as torch's own tracker sees every operator's results."""
    model = LossGPT(Config(**{name: getattr(config, name) for name in Config.__dataclass_fields__}))
    model.to(torch.bfloat16 if train.precision == "bf16-true" else torch.float32)
    model.max_seq_length = length
    prepare_blocks(model, train.model_copy(update={"precision": "32-true"}), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids, tracker = torch.zeros(train.micro_batch, length, dtype=torch.int64), MemTracker()

    def step() -> None:
        mixed = train.precision == "bf16-mixed"
        with torch.autocast("cpu", dtype=torch.bfloat16) if mixed else nullcontext():
            value = model(ids, ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize(
    ("name", "precision", "recompute"),
    [
        ("pythia-160m", "32-true", "full"),
        ("pythia-160m", "bf16-mixed", "none"),
        ("Llama-3.2-1B", "bf16-mixed", "selective"),
        ("Llama-3.2-1B", "bf16-true", "none"),
        pytest.param("Gemma-2-2b", "32-true", "none", marks=pytest.mark.long),
        pytest.param("Qwen3-30B-A3B", "bf16-mixed", "none", marks=pytest.mark.long),
    ],
)
def test_the_memory_of_a_step_is_within_a_tenth_of_what_is_measured(
    name: str, precision: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, which multiplies in bfloat16 itself, and where nothing is kept for the next step.
    monkeypatch.setattr(loss, "rounds_by_hand", lambda *_: False)
    monkeypatch.setattr(loss.Workspace, "of", lambda room, name, *shape, **where: torch.empty(shape, **where))
    train = TrainConfig.model_validate(
        {"global_batch": 4, "micro_batch": 4, "precision": precision, "activation_checkpointing": recompute}
    )
    config = completed(name, SMALL[name], length=128)
    said = estimates.memory(config, train, length=128, world_size=1).total
    assert said == pytest.approx(measured(config, train, 128), rel=0.1)


def test_sharding_divides_the_state_and_recomputing_shrinks_what_is_kept() -> None:
    config = completed("pythia-1b")

    def memory(world_size: int, **train: Any) -> estimates.Memory:
        asked = TrainConfig.model_validate({"global_batch": 64, "micro_batch": 8} | train)
        return estimates.memory(config, asked, length=2048, world_size=world_size)

    whole, sharded = memory(8), memory(8, strategy="fsdp")
    assert whole.state == 16 * estimates.parameters(config)  # weights, gradients and two averages, 4 bytes each
    assert sharded.state == pytest.approx(whole.state / 8, rel=1e-6)
    assert sharded.gathered > 0 == whole.gathered
    assert memory(8, strategy="fsdp", reshard_after_forward=False).gathered > sharded.gathered
    kept = [memory(1, activation_checkpointing=choice).activations for choice in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0] / 8


def test_no_torch_is_needed_for_the_largest_model() -> None:
    program = (
        "import sys\n"
        "from litgpt_demo.models import catalogue, estimates\n"
        "from litgpt_demo.config import TrainConfig\n"
        "fields = catalogue.fields_of('transformer-175b', {}, sequence_length=2048, vocab_size=None)\n"
        "config = catalogue.config_of(fields)\n"
        "train = TrainConfig(global_batch=8, micro_batch=1, strategy='fsdp')\n"
        "print(estimates.memory(config, train, length=2048, world_size=8).total)\n"
        "print(estimates.flops_per_token(config, 2048))\n"
        "assert not {'torch', 'numpy', 'litgpt'} & set(sys.modules)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    total, flops = map(int, said.split())
    assert total > 16 * 175e9 / 8
    assert flops > 6 * 174e9


def test_on_a_cpu_the_room_for_logits_is_there_all_the_time() -> None:
    train = TrainConfig(global_batch=4, micro_batch=4, precision="32-true", activation_checkpointing="full")
    config = completed("pythia-160m", SMALL["pythia-160m"], length=128)
    said = estimates.memory(config, train, length=128, world_size=1, device="cpu")
    assert said.room > 0.1 * said.total
    assert said.total == pytest.approx(measured(config, train, 128), rel=0.1)
