"""What is done to the blocks changes how fast and how large they are, not what they compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from litgpt.config import Config
from torch import Tensor

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import UserError
from litgpt_demo.models.model import initialise
from litgpt_demo.training.blocks import multiply_in_float8, prepare_blocks
from litgpt_demo.training.loss import LossGPT
from litgpt_demo.training.rounding import round_by_hand, rounded

CPU = torch.device("cpu")
SMALL = {"n_layer": 3, "n_embd": 32, "n_head": 2, "padded_vocab_size": 96, "block_size": 24, "intermediate_size": 48}


def model(family: str = "pythia-14m", **changes: Any) -> LossGPT:
    made = LossGPT(Config.from_name(family, **(SMALL | changes)))
    initialise(made, seed=3)
    return made


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(96, (2, 25), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(of: LossGPT, *, precision: str = "32-true") -> tuple[float, dict[str, Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        loss = of(*batch())
    loss.backward()
    names = {name.replace("_checkpoint_wrapped_module.", ""): weight for name, weight in of.named_parameters()}
    return loss.item(), {name: weight.grad for name, weight in names.items() if weight.grad is not None}


@pytest.mark.parametrize(
    ("settings", "saved"),
    [({"activation_checkpointing": "selective"}, 0.7), ({"activation_checkpointing": "full"}, 0.4)],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_recomputing_keeps_less_and_changes_nothing(settings: dict[str, Any], saved: float, precision: str) -> None:
    plain, other = model(), model()
    prepare_blocks(plain, TrainConfig(precision=precision), CPU)
    prepare_blocks(other, TrainConfig(precision=precision, **settings), CPU)
    kept = [bytes_kept(one, precision) for one in (plain, other)]
    assert kept[1] < saved * kept[0]
    loss, gradients = loss_and_gradients(plain, precision=precision)
    again, same = loss_and_gradients(other, precision=precision)
    assert again == loss
    assert same.keys() == gradients.keys()
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)


def bytes_kept(of: LossGPT, precision: str) -> int:
    """Of all that the forward pass of the blocks keeps for the backward pass, weights left out."""
    kept: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in of.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[Tensor] = []  # else memory is freed and counted again under the same address
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        of.body(batch()[0])
    return sum(kept.values())


@pytest.mark.training
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "settings",
    [{"compile": "blocks", "activation_checkpointing": "full"}, {"compile": "model"}],
    ids=lambda settings: settings["compile"],
)
def test_compiling_changes_only_rounding_and_no_name(
    settings: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler writes C++, which takes a minute; without it the model is traced and differentiated all the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, compiled = model(), model()
    prepare_blocks(compiled, TrainConfig(**settings), CPU)
    loss, gradients = loss_and_gradients(plain)
    again, same = loss_and_gradients(compiled)
    assert again == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-3, atol=1e-6)


# --- bfloat16 by hand -------------------------------------------------------------------------------------------------


@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_a_rounded_number_is_bfloat16s_nearest(values: list[float]) -> None:
    one = torch.tensor(values)
    assert rounded(one).dtype == torch.float32
    assert torch.equal(rounded(one), one.bfloat16().float())
    assert torch.equal(rounded(rounded(one)), rounded(one))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("pythia-14m", {}),
        ("Gemma-2-2b", {"n_query_groups": 1, "head_size": 16, "sliding_window_size": 8}),
        ("Llama-3.2-1B", {"n_query_groups": 1, "head_size": 16}),
    ],
)
def test_rounding_by_hand_is_nearer_to_exact_than_autocast_and_keeps_the_weights_names(
    family: str, changes: dict[str, Any]
) -> None:
    exact, autocast, by_hand = (model(family, **changes) for _ in range(3))
    names = list(by_hand.state_dict())
    round_by_hand(by_hand.transformer)
    assert list(by_hand.state_dict()) == names
    true, gradients = loss_and_gradients(exact)
    theirs, _ = loss_and_gradients(autocast, precision="bf16-mixed")
    ours, mine = loss_and_gradients(by_hand, precision="bf16-mixed")
    assert ours == pytest.approx(true, rel=2e-3)
    assert ours != true  # the operands are rounded
    assert ours == pytest.approx(theirs, rel=2e-3)
    for name, gradient in gradients.items():
        assert (mine[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-6, name


def test_float8_rounds_the_blocks_products_and_changes_no_name() -> None:
    exact, eighth = model(), model()
    multiply_in_float8(eighth.bfloat16(), emulate=True)
    assert list(eighth.state_dict()) == list(exact.state_dict())
    true, gradients = loss_and_gradients(exact)
    loss, rounded_gradients = loss_and_gradients(eighth)
    assert loss not in {true, loss_and_gradients(model().bfloat16())[0]}
    assert loss == pytest.approx(true, rel=0.02)
    layer = "transformer.h.0.mlp.fc.weight"  # eight bits leave three to a number's fraction
    assert (rounded_gradients[layer] - gradients[layer]).norm() < 0.2 * gradients[layer].norm()


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused where there is no GPU")
def test_float8_is_refused_where_nothing_multiplies_in_it() -> None:
    with pytest.raises(UserError, match=r"train\.float8=true needs a GPU .* this is a CPU; leave it off"):
        prepare_blocks(model(), TrainConfig(float8=True, compile="blocks"), CPU)
