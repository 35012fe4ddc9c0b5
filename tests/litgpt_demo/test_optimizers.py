"""The parameter groups of the optimizers, and the size of their state."""

import pytest
import torch
from states import loss_and_gradients, model_with_loss

from litgpt_demo.config import TrainConfig
from litgpt_demo.optimizers import (
    OPTIMIZERS,
    RATE_SCALE,
    OptimizerKind,
    block_matrices,
    decay_groups,
    optimizer_of,
    set_learning_rate,
)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = model_with_loss()
    decaying, kept = decay_groups(model, 0.1)
    assert (decaying["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    names = {id(weight): name for name, weight in model.named_parameters()}
    grouped = [{names[id(weight)] for weight in group["params"]} for group in (decaying, kept)]
    assert grouped[0] | grouped[1] == set(names.values())
    assert grouped[1] == {name for name in names.values() if "norm" in name or "ln_f" in name or ".bias" in name}


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_has_the_bytes_that_plan_counts(kind: OptimizerKind) -> None:
    model = model_with_loss()
    optimizer = kind.build(model, TrainConfig(), False)
    matrices = sum(weight.nbytes for weight in block_matrices(model).values())
    loss_and_gradients(model)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    held = sum(value.nbytes for value in values if torch.is_tensor(value) and value.dim())
    weights = sum(weight.nbytes for weight in model.parameters())
    assert held == kind.state_bytes(weights, matrices)


def test_muons_learning_rate_follows_the_schedule_too() -> None:
    for own, expected in [(None, 0.01), (3e-3, 0.05)]:
        train = TrainConfig.model_validate({"optimizer": "muon", "muon_learning_rate": own})
        optimizer = optimizer_of(train).build(model_with_loss(), train, False)
        set_learning_rate(optimizer, 0.01)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected] * 2 + [0.01] * 2)


def test_group_learning_rate_is_the_schedules_times_its_scale() -> None:
    optimizer = OPTIMIZERS["adamw"].build(model_with_loss(), TrainConfig(), False)
    optimizer.param_groups[1][RATE_SCALE] = 0.5
    set_learning_rate(optimizer, 0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005]
