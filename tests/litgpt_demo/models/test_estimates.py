"""What is said of a model without building it is what it turns out to be when it is built."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
from litgpt.config import Config, configs
from litgpt.model import GPT
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from litgpt_demo import catalogue
from litgpt_demo.config import TrainConfig
from litgpt_demo.models import estimates
from litgpt_demo.models.loss import Workspace
from litgpt_demo.models.model import LossGPT
from litgpt_demo.muon import Muon
from litgpt_demo.optimizers import OPTIMIZERS, block_matrices, optimizer_of
from litgpt_demo.training.setup import apply_float8_ac_compile

LAYERS = 3  # of the models that are built of the whole catalogue: blocks are alike, and some have thousands of experts


def completed(name: str | None, changes: dict[str, Any] | None = None, *, length: int = 32) -> Any:
    return catalogue.config_of(name, changes or {}, sequence_length=length, vocab_size=300)


def built(config: Any) -> GPT:
    fields = {name: getattr(config, name) for name in Config.__dataclass_fields__}
    with torch.device("meta"):
        return GPT(Config(**fields))


def test_parameter_counts_of_the_catalogue_are_exact() -> None:
    assert len(configs) > 100
    assert {config["name"] for config in configs} <= catalogue.models().keys()
    seen = set()
    for name in catalogue.models():
        config = completed(name, {"n_layer": min(LAYERS, completed(name).n_layer)})
        looks = asdict(config) | {"name": "OLMo" in config.name, "hf_config": None}
        if (alike := json.dumps(looks, sort_keys=True)) not in seen:
            seen.add(alike)
            model = built(config)
            assert estimates.parameters(config) == sum(weight.numel() for weight in model.parameters()), name
            matrices = sum(estimates.block(config, layer).matrices for layer in range(config.n_layer))
            assert matrices == sum(weight.numel() for weight in block_matrices(model).values()), name
    assert len(seen) > 70


def test_the_arithmetic_is_what_torch_counts_and_the_papers_say() -> None:
    """Products alone, forward and backward; torch counts the whole square of the attention, too."""
    changes = {"n_layer": 2, "n_embd": 128, "n_head": 8, "n_query_groups": 2, "intermediate_size": 96}
    config, length = completed("Llama-3.2-1B", changes, length=64), 64
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        built(config)(torch.zeros(2, length, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == 2 * length * estimates.flops_per_token(config, length)
    # GPT-3 in Brown et al. 2020, table D.1: 3.14e23 for 300 billion tokens, without attention and output.
    gpt3 = completed("transformer-175b", length=2048)
    assert 3e11 * estimates.flops_per_token(gpt3, 2048) == pytest.approx(3.14e23, rel=0.06)


@pytest.mark.parametrize(("name", "error"), [("pythia-14m", 0.05), ("Llama-3.2-1B", 0.25)])
def test_the_arithmetic_of_an_update_is_what_torch_counts(name: str, error: float) -> None:
    """Of Muon, about: wide matrices need less for each of their numbers."""
    config, train = completed(name, {"n_layer": 1, "n_embd": 128, "n_head": 8}), TrainConfig(optimizer="muon")
    model = built(config)
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight)
    optimizer = optimizer_of(train).build(model, train, False)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert estimates.update_flops(config, train) == pytest.approx(counter.get_total_flops(), rel=error)
    assert estimates.update_flops(config, TrainConfig()) == 0


SMALL = {
    "n_layer": 2, "n_embd": 128, "n_head": 4, "n_query_groups": 2, "intermediate_size": 512, "padded_vocab_size": 2048,
}  # fmt: skip


def measured(config: Any, train: TrainConfig, length: int) -> int:
    """Most bytes of tensors at once in the second step, as torch's own tracker sees every operator's results."""
    fields = {name: getattr(config, name) for name in Config.__dataclass_fields__}
    model = LossGPT(Config(**fields), end_of_text=train.attention_end(0))
    model.to(torch.bfloat16 if train.precision == "bf16-true" else torch.float32)
    model.max_seq_length = length
    apply_float8_ac_compile(model, train.model_copy(update={"precision": "32-true"}), torch.device("cpu"))
    optimizer = optimizer_of(train).build(model, train, False)
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


WINDOWED = {"sliding_window_size": 64, "sliding_window_indices": [1, 1]}


@pytest.mark.parametrize(
    ("device", "length", "settings", "windows"),
    [
        ("cuda", 128, {"precision": "32-true", "activation_checkpointing": "full"}, {}),
        ("cuda", 128, {"activation_checkpointing": "selective", "optimizer": "muon"}, {}),
        ("cpu", 1536, {}, WINDOWED),
        ("cpu", 512, {"precision": "32-true", "attention": "documents"}, WINDOWED),
    ],
)
def test_the_memory_of_a_step_is_about_what_is_measured(
    device: str, length: int, settings: dict[str, Any], windows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a CPU if it has masks: on a GPU there are none."""
    # As on a GPU, where nothing is kept for the next step.
    monkeypatch.setattr(Workspace, "of", lambda room, name, *shape, **where: torch.empty(shape, **where))
    samples = max(1, 512 // length)
    train = TrainConfig.model_validate({"global_batch": samples, "micro_batch": samples} | settings)
    config = completed("Llama-3.2-1B", SMALL | windows, length=length)
    estimate = estimates.memory(config, train, length=length, world_size=1, device=device).total
    assert estimate == pytest.approx(measured(config, train, length), rel=0.1)


@pytest.mark.parametrize("shape", [(512, 512), (128, 1024), (1024, 128)])
def test_update_with_muon_holds_the_copies_that_plan_counts(shape: tuple[int, int]) -> None:
    weight, tracker = torch.nn.Parameter(torch.ones(shape)), MemTracker()
    optimizer = Muon([{"params": [weight], "row_blocks": (), "weight_decay": 0.1}], betas=(0.9, 0.95), fused=True)
    weight.grad = torch.ones(shape)
    optimizer.step()
    tracker.track_external(weight, weight.grad, optimizer)
    with tracker:
        optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    copies = peak / weight.nbytes - 3
    assert copies <= OPTIMIZERS["muon"].matrix_copies


def test_sharding_and_recomputing_shrink_the_memory_estimate() -> None:
    config = completed("pythia-1b")

    def memory(world_size: int, nodes: int = 1, **train: Any) -> estimates.Memory:
        settings = TrainConfig.model_validate({"global_batch": 64, "micro_batch": 8} | train)
        return estimates.memory(config, settings, length=2048, world_size=world_size, nodes=nodes)

    replicated, sharded = memory(8), memory(8, strategy="fsdp")
    assert replicated.state == 16 * estimates.parameters(config)  # weights, gradients and two averages, 4 bytes each
    assert sharded.state == pytest.approx(replicated.state / 8, rel=1e-6)
    assert sharded.unsharded > 0 == replicated.unsharded
    assert memory(8, nodes=2, strategy="hybrid") == memory(4, strategy="fsdp")
    assert memory(8, strategy="fsdp", reshard_after_forward=False).unsharded > sharded.unsharded
    kept = [memory(1, activation_checkpointing=choice).activations for choice in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0] / 8


@pytest.mark.parametrize(("strategy", "times"), [("fsdp", 2), ("hybrid", 1), ("ddp", 1)])
def test_fsdp_alone_sends_for_each_accumulated_pass(strategy: str, times: int) -> None:
    def sent_bytes(micro_batch: int) -> float:
        train = TrainConfig.model_validate({"strategy": strategy, "global_batch": 64, "micro_batch": micro_batch})
        return estimates.network_bytes_per_step(completed("pythia-14m"), train, world_size=16, nodes=2)

    assert sent_bytes(2) == times * sent_bytes(4)
