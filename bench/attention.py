"""The step time of training with attention within documents, next to causal attention on the same tokens."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

SAMPLES, LENGTH, WARM_UP, STEPS = 4, 512, 2, 10
MEDIAN_LENGTH, SPREAD = 400, 1.0  # tokens of a document, log-normal: about those of web pages


def packed_batches(count: int, *, vocab_size: int, end_of_text: int) -> Any:
    """Return random tokens of shape (count, SAMPLES, LENGTH + 1), cut into documents by `end_of_text`."""
    generator = np.random.default_rng(0)
    size = count * SAMPLES * (LENGTH + 1)
    tokens = generator.integers(end_of_text + 1, vocab_size, size)
    lengths = generator.lognormal(np.log(MEDIAN_LENGTH), SPREAD, size).astype(np.int64) + 1
    ends = np.cumsum(lengths) - 1
    tokens[ends[ends < size]] = end_of_text
    return tokens.reshape(count, SAMPLES, LENGTH + 1)


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    from lightning.fabric.plugins.precision import MixedPrecision
    from litgpt.config import Config

    from litgpt_demo.config import TrainConfig
    from litgpt_demo.models.model import LossGPT, initialise
    from litgpt_demo.optimizers import optimizer_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()  # else a step takes a minute
    config, sides = Config.from_name("pythia-14m"), {"causal": None, "documents": 0}
    batches = torch.from_numpy(packed_batches(WARM_UP + rounds * STEPS, vocab_size=50_254, end_of_text=0)).to(device)
    seen: dict[str, list[float]] = {}
    bars: dict[str, Any] = {}
    for precision in ("bf16-mixed", "32-true") if bf16 else ("32-true",):
        train, trained = TrainConfig.model_validate({"precision": precision}), {}
        autocast = MixedPrecision("bf16-mixed", device.type).forward_context
        for side, end_of_text in sides.items():
            with device:
                model = LossGPT(config, end_of_text=end_of_text)
            model.max_seq_length = LENGTH
            initialise(model, seed=0)
            trained[side] = model, optimizer_of(train).build(model, train, False)

        def step(side: str, batch: Any) -> float:
            model, optimizer = trained[side]
            began = time.perf_counter()
            if precision == "bf16-mixed":
                with autocast():
                    loss = model(batch[:, :-1], batch[:, 1:])
            else:
                loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        # The sides take turns, each first in every other step.
        for number, batch in enumerate(batches):
            order = list(sides) if number % 2 else list(reversed(sides))
            for side in order:
                seconds = step(side, batch)
                if number >= WARM_UP:
                    seen.setdefault(f"{side}, {precision}", []).append(seconds)
        pairs = zip(seen[f"documents, {precision}"], seen[f"causal, {precision}"], strict=True)
        ratio = median(masked / causal for masked, causal in pairs)
        bars[f"step time within documents / causal, {precision}"] = ratio, "at most", 1.15
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    return bars, {"device": name, "torch": torch.__version__, "seconds": seen}
