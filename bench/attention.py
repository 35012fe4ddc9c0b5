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
    from litgpt.config import Config

    from litgpt_demo.config import TrainConfig
    from litgpt_demo.models.model import LossGPT, initialise
    from litgpt_demo.optimizers import optimizer_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()  # else a step takes a minute
    batches = torch.from_numpy(packed_batches(WARM_UP + rounds * STEPS, vocab_size=50_254, end_of_text=0)).to(device)

    def step(model: Any, optimizer: Any, batch: Any, precision: str) -> float:
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seen, bars = dict[str, list[float]](), dict[str, Any]()
    for precision in ("bf16-mixed", "32-true") if bf16 else ("32-true",):
        sides = dict[str, Any]()
        for attention in ("causal", "documents"):
            train = TrainConfig.model_validate({"precision": precision, "attention": attention})
            with device:
                model = LossGPT(Config.from_name("pythia-14m"), end_of_text=train.attention_end(0))
            model.max_seq_length = LENGTH
            initialise(model, seed=0)
            sides[attention] = model, optimizer_of(train).build(model, train, False)
            seen[f"{attention}, {precision}"] = []
        for number, batch in enumerate(batches):  # the sides take turns, each first in every other step
            for attention in sorted(sides, reverse=number % 2 == 1):
                seconds = step(*sides[attention], batch, precision)
                if number >= WARM_UP:
                    seen[f"{attention}, {precision}"].append(seconds)
        pairs = zip(seen[f"documents, {precision}"], seen[f"causal, {precision}"], strict=True)
        ratio = median(masked / causal for masked, causal in pairs)
        bars[f"step time within documents / causal, {precision}"] = ratio, "at most", 1.15
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    return bars, {"device": name, "torch": torch.__version__, "seconds": seen}
