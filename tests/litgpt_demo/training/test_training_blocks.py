"""What is done to the blocks changes how fast and how large they are, not what they compute."""

from __future__ import annotations

import pytest
import torch
from states import loss_and_gradients, model_with_loss

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import UserError
from litgpt_demo.training.blocks import multiply_in_float8, prepare_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputing_changes_nothing(how: str) -> None:
    plain, other = model_with_loss(), model_with_loss()
    prepare_blocks(other, TrainConfig.model_validate({"activation_checkpointing": how}), CPU)
    loss, gradients = loss_and_gradients(plain)
    again, same = loss_and_gradients(other)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused where there is no GPU")
def test_float8_is_refused_where_nothing_multiplies_in_it() -> None:
    with pytest.raises(UserError, match=r"train\.float8=true needs a GPU .* this is a CPU; leave it off"):
        prepare_blocks(model_with_loss(), TrainConfig(float8=True, compile="blocks"), CPU)
