"""The loss in chunks is that of the whole logits, and what is done to blocks changes speed and size, no result."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from litgpt.config import Config
from litgpt.model import GPT, do_softcapping
from states import loss_and_gradients, model_with_loss
from torch import Tensor
from torch.nn.functional import cross_entropy

from litgpt_demo.config import TrainConfig
from litgpt_demo.models import estimates
from litgpt_demo.models.loss import projected_cross_entropy
from litgpt_demo.models.model import LossGPT
from litgpt_demo.training.setup import apply_float8_ac_compile, compiled_part, multiply_in_float8


def gradients(loss: Tensor, *of: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [tensor for tensor in of if tensor is not None]))


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 12), st.integers(2, 40)),
    chunk=st.integers(1, 40),
    spread=st.sampled_from([1e-3, 1.0, 30.0, 1e3]),
    biased=st.booleans(),
    softcap=st.none() | st.floats(0.5, 50),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.1]),
)
def test_loss_and_gradients_are_those_of_the_whole_logits(
    shape: tuple[int, int, int, int],
    chunk: int,
    spread: float,
    biased: bool,
    softcap: float | None,
    dtype: torch.dtype,
    scale: float,
    z_loss: float,
) -> None:
    """A z-loss is in the gradients, and not in the value, which stays comparable."""
    batch, length, width, vocabulary = shape
    generator = torch.Generator().manual_seed(batch * 1000 + length * 100 + width * 10 + vocabulary)

    def drawn(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator, dtype=dtype) * spread).requires_grad_()

    hidden, weight, bias = drawn(batch, length, width), drawn(vocabulary, width), drawn(vocabulary) if biased else None
    targets = torch.randint(vocabulary, (batch, length), generator=generator)
    with patch.dict(estimates.CHUNK_BYTES, cpu=chunk * 4 * vocabulary):  # so few bytes of logits at a time
        loss = projected_cross_entropy(hidden, weight, targets, bias=bias, softcap=softcap, z_loss=z_loss)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else do_softcapping(logits, softcap)
    full_loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    # Scores as large as spread squared are known to that many units in the last place.
    error = torch.finfo(dtype).eps * 64 * max(1.0, spread**2 * width)
    assert loss.item() == pytest.approx(full_loss.item(), rel=error, abs=error)
    trained = full_loss + z_loss * logits.logsumexp(-1).square().mean()
    fused, reference = gradients(loss * scale, hidden, weight, bias), gradients(trained * scale, hidden, weight, bias)
    for tensor, counterpart in zip(fused, reference, strict=True):
        torch.testing.assert_close(tensor, counterpart, rtol=error, atol=error * max(1.0, spread))


def test_float16_gradients_keep_small_probabilities() -> None:
    """Of all but the target 4e-8 each, which float16 has no number for."""
    hidden, weight = torch.ones(4, 8), torch.zeros(64, 8)
    weight[0], targets = 17 / 8, torch.zeros(4, dtype=torch.int64)
    exact = gradients(
        projected_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets), hidden, weight
    )
    with torch.autocast("cpu", dtype=torch.float16):
        loss = projected_cross_entropy(hidden, weight, targets)
    for half, full in zip(gradients(loss, hidden, weight), exact, strict=True):
        torch.testing.assert_close(half, full, rtol=0.02, atol=1e-9)


SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "padded_vocab_size": 96, "block_size": 24, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "pythia-14m": {},
    "Gemma-2-2b": {"n_query_groups": 1, "head_size": 16, "sliding_window_size": 8},
    "Gemma-3-1b-it": {"n_query_groups": 1, "head_size": 16, "sliding_window_size": 8, "n_layer": 6},
    "OLMo-2-1124-7B": {"n_query_groups": 2},
    "Qwen3-0.6B": {"n_query_groups": 1, "head_size": 16},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 1, "head_size": 16, "n_expert": 3},
}


@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("pythia-14m", True)])
def test_the_model_with_its_loss_is_litgpts_own(family: str, tied: bool) -> None:
    config = Config.from_name(family, **(SMALL | FAMILIES[family]))
    torch.manual_seed(0)
    plain = GPT(config).double()
    fused = LossGPT(config).double()
    fused.load_state_dict(plain.state_dict())
    for model in (plain, fused) if tied else ():
        model.transformer.wte.weight = model.lm_head.weight
    tokens = torch.randint(96, (2, 13))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    torch.testing.assert_close(fused(inputs), plain(inputs))
    full_loss, loss = cross_entropy(plain(inputs).flatten(0, 1), targets.flatten()), fused(inputs, targets)
    torch.testing.assert_close(loss, full_loss)
    loss.backward()
    full_loss.backward()
    for (name, weight_of_ours), reference in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight_of_ours.grad, reference.grad, msg=name)


def test_windows_cost_the_same_operators_at_any_length() -> None:
    """One mask for each pass, and none where no sample is longer than the window."""
    config = Config.from_name("Gemma-3-1b-it", **(SMALL | FAMILIES["Gemma-3-1b-it"] | {"block_size": 64}))
    model, counts = LossGPT(config), dict[int, int]()
    for length in (8, 16, 64):
        with torch.profiler.profile() as seen:
            model(torch.zeros(1, length, dtype=torch.int64))
        counts[length] = sum(event.name.startswith("aten::") for event in seen.events() or ())
    assert counts[8] < counts[16] == counts[64] < counts[8] + 60


CPU = torch.device("cpu")


def test_gpus_compile_blocks_where_a_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, auto = torch.device("cuda"), TrainConfig()
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    assert [compiled_part(auto, device) for device in (gpu, CPU)] == ["blocks", "none"]
    assert compiled_part(TrainConfig(compile="model"), CPU) == "model"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert compiled_part(auto, gpu) == "none"


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputing_changes_nothing(how: str) -> None:
    plain, counterpart = model_with_loss(), model_with_loss()
    apply_float8_ac_compile(counterpart, TrainConfig.model_validate({"activation_checkpointing": how}), CPU)
    loss, gradients = loss_and_gradients(plain)
    again, same = loss_and_gradients(counterpart)
    assert again == loss
    assert same.keys() == gradients.keys()
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)


def test_float8_rounds_the_blocks_products_and_changes_no_name() -> None:
    exact, eighth = model_with_loss(), model_with_loss()
    multiply_in_float8(eighth.bfloat16(), emulate=True)
    assert list(eighth.state_dict()) == list(exact.state_dict())
    true, gradients = loss_and_gradients(exact)
    loss, rounded_gradients = loss_and_gradients(eighth)
    assert loss not in {true, loss_and_gradients(model_with_loss().bfloat16())[0]}
    assert loss == pytest.approx(true, rel=0.02)
    layer = "transformer.h.0.mlp.fc.weight"  # eight bits leave three to a number's fraction
    assert (rounded_gradients[layer] - gradients[layer]).norm() < 0.2 * gradients[layer].norm()


def test_float8_converts_the_attention_alone_of_experts() -> None:
    changes = {"n_query_groups": 1, "head_size": 16, "n_expert": 16, "n_expert_per_token": 2, "norm_qk": False}
    model = LossGPT(Config.from_name("Qwen3-30B-A3B", **(SMALL | changes))).bfloat16()
    multiply_in_float8(model, emulate=True)
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert converted == {f"transformer.h.{layer}.attn.{name}" for layer in range(2) for name in ("qkv", "proj")}
