"""What torch compiles for a CPU changes only rounding. The compiler writes C++, which takes a minute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from litgpt.config import Config

from litgpt_demo.config import TrainConfig
from litgpt_demo.models.model import initialise
from litgpt_demo.training.blocks import prepare_blocks
from litgpt_demo.training.loss import LossGPT

SMALL = {"n_layer": 3, "n_embd": 32, "n_head": 2, "padded_vocab_size": 96, "block_size": 24, "intermediate_size": 48}


@pytest.mark.parametrize(
    "settings",
    [{"compile": "blocks", "activation_checkpointing": "full"}, {"compile": "model"}],
    ids=lambda settings: settings["compile"],
)
def test_compiling_changes_only_rounding_and_no_name(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # which the compiler sets
    tokens = torch.randint(96, (2, 25), generator=torch.Generator().manual_seed(0))
    plain, compiled = (LossGPT(Config.from_name("pythia-14m", **SMALL)) for _ in range(2))
    for model in (plain, compiled):
        initialise(model, seed=3)
    prepare_blocks(compiled, TrainConfig(**settings), torch.device("cpu"))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    for name, weight in compiled.named_parameters():
        expected = gradients[name.replace("_checkpoint_wrapped_module.", "")]
        torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-6)
