"""Attention sees what a mask lets it see, and is LitGPT's otherwise."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from litgpt.config import Config
from litgpt.model import GPT
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from litgpt_demo.config import TrainConfig
from litgpt_demo.models import attention
from litgpt_demo.models.model import LossGPT, initialise
from litgpt_demo.training.setup import apply_float8_ac_compile

END, CPU = 7, torch.device("cpu")
SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 4, "padded_vocab_size": 96, "block_size": 64, "intermediate_size": 48}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "head_size": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "pythia-14m": {},
    "Llama-3.2-1B": {"n_query_groups": 2, "head_size": 8},
    "Gemma-2-2b": {"n_query_groups": 2, "head_size": 16, "sliding_window_size": 8},
    "Gemma-3-1b-it": {
        "n_query_groups": 1,
        "head_size": 16,
        "sliding_window_size": 8,
        "sliding_window_indices": [1, 0],
        "rope_indices": [1, 0],
    },
    "OLMo-2-1124-7B": {"n_query_groups": 2},
    "Qwen3-0.6B": {"n_query_groups": 1, "head_size": 16},
    "latent": {"latent_attention": LATENT, "n_query_groups": 4},
}


def model_of(family: str, *, end_of_text: int | None = END) -> LossGPT:
    name = "pythia-14m" if family == "latent" else family
    model = LossGPT(Config.from_name(name, **(SMALL | FAMILIES[family])), end_of_text=end_of_text)
    torch.manual_seed(0)  # with weights of 0.02, attention would hardly show
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model.double()


packed_model = cache(model_of)


@settings(max_examples=20)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    cut=st.integers(0, 20),
    is_open=st.booleans(),
)
def test_logits_of_packed_documents_are_those_of_each_alone(
    family: str, lengths: list[int], cut: int, is_open: bool, one_thread: None
) -> None:
    """The first document may have begun before the sample, and the last one may end after it."""
    generator = torch.Generator().manual_seed(sum(lengths))
    documents = [torch.randint(8, 96, (length,), generator=generator) for length in lengths]
    for number, document in enumerate(documents):
        if number < len(documents) - 1 or not is_open:
            document[-1] = END
    documents[0] = documents[0][min(cut, lengths[0] - 1) :]
    packed = torch.cat(documents)[:64]
    model, start = packed_model(family), 0
    neighbor = torch.randint(8, 96, packed.shape, generator=generator)  # of a second sample, whose ends are elsewhere
    logits = model(torch.stack([packed, neighbor]))[0]
    for document in documents:
        alone = document[: len(packed) - start]
        if len(alone):
            torch.testing.assert_close(logits[start : start + len(alone)], model(alone[None])[0], rtol=1e-5, atol=1e-5)
        start += len(alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_of_one_document_is_computed_as_by_litgpt(family: str) -> None:
    fused, tokens = model_of(family), torch.randint(8, 96, (2, 20), generator=torch.Generator().manual_seed(0))
    plain = GPT(fused.config).double()
    plain.load_state_dict(fused.state_dict())
    torch.testing.assert_close(fused(tokens), plain(tokens))


def test_shared_heads_are_not_copied_for_each_query() -> None:
    model, kept = model_of("Llama-3.2-1B", end_of_text=None).float(), list[tuple[int, ...]]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(1, 16, dtype=torch.int64))
    # Of each of two layers: queries and what comes out have four heads, keys and values two.
    assert (kept.count((1, 4, 16, 8)), kept.count((1, 2, 16, 8))) == (4, 4)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("end_of_text", [None, END])
def test_flex_attention_sees_as_the_mask_of_a_cpu(window: int | None, end_of_text: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(40, (2, 150), generator=generator)  # more than a block of 128 x 128 scores
    documents = None if end_of_text is None else attention.document_numbers(tokens, end_of_text)
    sees = attention._sees(documents, window)
    dense = attention.dense_mask(sees, tokens, torch.float32)
    block = attention.block_mask(sees, tokens, shared=documents is None)
    queries, keys, values = (torch.randn(2, heads, 150, 16, generator=generator) for heads in (4, 2, 2))
    expected, found = (attention.attend(queries, keys, values, mask, scale=0.3) for mask in (dense, block))
    torch.testing.assert_close(found, expected)


def gradients(model: LossGPT, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    named = {name.replace("_checkpoint_wrapped_module.", ""): weight.grad for name, weight in model.named_parameters()}
    return loss.detach(), {name: gradient for name, gradient in named.items() if gradient is not None}


@pytest.mark.parametrize(("family", "how"), [("Qwen3-0.6B", "selective"), ("latent", "none")])
def test_models_with_flex_attention_have_the_same_gradients(
    family: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, in bfloat16; uncompiled, so not by the GPU's kernels."""
    tokens, found = torch.randint(12, (2, 25), generator=torch.Generator().manual_seed(0)), []
    for is_flex in (False, True):
        if is_flex:
            monkeypatch.setattr(flex, "_validate_device", lambda *parts: None)  # torch has no CPU kernel of it
        model = model_of(family).float()
        initialise(model, seed=0)
        apply_float8_ac_compile(model, TrainConfig.model_validate({"activation_checkpointing": how}), CPU)
        model.by_flex = is_flex
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(gradients(model, tokens))
    (loss, expected), (same, by_flex) = found
    torch.testing.assert_close(same, loss, rtol=1e-3, atol=0.0)
    for name, gradient in expected.items():
        assert (by_flex[name] - gradient).norm() <= 0.05 * gradient.norm(), name


@pytest.mark.parametrize("how", ["selective", "full"])
def test_masks_survive_recomputing(how: str) -> None:
    tokens = torch.randint(12, (2, 25), generator=torch.Generator().manual_seed(0))
    plain, changed = model_of("Gemma-3-1b-it"), model_of("Gemma-3-1b-it")
    apply_float8_ac_compile(changed, TrainConfig.model_validate({"activation_checkpointing": how}), CPU)
    (loss, expected), (same, found) = gradients(plain, tokens), gradients(changed, tokens)
    assert torch.equal(same, loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_masks_follow_autocast() -> None:
    tokens = torch.randint(12, (2, 25), generator=torch.Generator().manual_seed(0))
    model = model_of("Gemma-3-1b-it").float()
    initialise(model, seed=0)
    exact = model(tokens[:, :-1], tokens[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(rounded, exact, rtol=0.01, atol=0.0)
