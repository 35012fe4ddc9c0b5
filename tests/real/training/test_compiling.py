"""Compiled code of torch changes only rounding, on a CPU."""

from typing import Any

import pytest
import torch
from states import loss_and_gradients, model_with_loss

from litgpt_demo.config import TrainConfig
from litgpt_demo.training.setup import apply_float8_ac_compile


@pytest.mark.parametrize("settings", [{"compile": "blocks", "activation_checkpointing": "full"}, {"compile": "model"}])
def test_compiling_changes_only_rounding_and_no_name(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # which the compiler sets
    compiled = model_with_loss()
    apply_float8_ac_compile(compiled, TrainConfig(**settings), torch.device("cpu"))
    loss, gradients = loss_and_gradients(model_with_loss())
    again, alike = loss_and_gradients(compiled)
    assert again == pytest.approx(loss, rel=1e-5)
    assert alike.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(alike[name], gradient, rtol=1e-3, atol=1e-6)
