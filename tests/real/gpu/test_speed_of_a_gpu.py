"""Training is as fast as its report says, nothing is compiled twice, and its speed is compared with LitGPT's."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import pytest
import torch
from states import training_of
from training_runs import NewRun

from litgpt_demo.models.devices import device_named
from litgpt_demo.training.step import MetricReducer, evaluate, train_step

Record = Callable[[str, object], None]
CHECKOUT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _undisturbed(alone: Callable[[], None]) -> None:
    alone()


def test_random_states_of_a_step_cost_microseconds(device: torch.device, record_property: Record) -> None:
    torch.zeros(1, device=device)
    torch.manual_seed(0)  # the first call imports what it needs
    began = perf_counter()
    for number in range(100):
        torch.manual_seed(number)
    seconds = (perf_counter() - began) / 100
    record_property("microseconds", seconds * 1e6)
    if device.type == "cuda":  # where CUDA has not begun, torch formats a stack each time
        assert seconds < 1e-4


def test_seconds_of_steps_add_up_to_the_wall_clock(
    new_run: NewRun, device: torch.device, record_property: Record
) -> None:
    """They come from events of the device, beside evaluations that none of them has."""
    training = training_of(new_run("run", compile="none", max_steps=200))
    reducer, waited, ends = MetricReducer(training.fabric), 0.0, list[float]()
    began = monotonic()
    for step in range(100):
        stats = train_step(training, step)
        waited += stats.data_wait
        reducer.submit(step + 1, stats, leave=False, time_up=False)
        if step % 30 == 20:
            evaluate(training, done=step)
        while (result := reducer.collect(max_in_flight=0 if step == 99 else 1)) is not None:
            ends.append(result.ended)
    seconds = monotonic() - began
    training.feed.close()
    record_property("seconds by events, by the clock, waiting for data", [ends[-1] - began, seconds, waited])
    assert ends == sorted(ends)
    assert ends[-1] - began == pytest.approx(seconds, rel=0.01, abs=0.005)
    assert len(ends) == 100


def test_nothing_is_compiled_after_the_first_evaluation(
    new_run: NewRun, device: torch.device, record_property: Record
) -> None:
    """A part of a batch compiles once more, the first time that one is evaluated."""
    from torch._dynamo.utils import counters

    counters.clear()
    training = training_of(new_run("run", compile="blocks", evaluation_samples=7))
    graphs = list[int]()
    for step in (0, 2, 4):
        train_step(training, step)
        evaluate(training, done=step)
        train_step(training, step + 1)
        graphs.append(counters["stats"]["unique_graphs"])
    training.feed.close()
    record_property("graphs", graphs)
    assert graphs[0] == graphs[2]
    assert graphs[0] <= 4


def product_flops(device: torch.device, side: int) -> float:
    """FLOP/s of large products in bfloat16, of random numbers: zeros take less power, and are faster."""
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    product, repeats = torch.empty_like(matrix), 20
    for number in range(2 * repeats):
        if number == repeats:
            _wait(device)
            began = perf_counter()
        torch.mm(matrix, matrix, out=product)
    _wait(device)
    return 2.0 * side**3 * repeats / (perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def test_large_products_reach_most_of_the_peak(device: torch.device, record_property: Record) -> None:
    """No training can have a larger share of the peak than they have."""
    flops = product_flops(device, 8192 if device.type == "cuda" else 256)
    record_property("TFLOP/s", flops / 1e12)
    if device.type == "cuda":
        known = device_named(torch.cuda.get_device_name())
        assert known is not None, "plan and MFU know this GPU"
        peak = known.peak("bfloat16")
        assert peak is not None
        assert 0.6 < flops / peak < 1.0


def figures(text: str) -> dict[str, Any]:
    """The bars of a result that say something of a side, and the ones that were missed."""
    results = json.loads(text)
    return {name: bar[0] for name, bar in results["bars"].items()} | {"missed": results["missed"]}


def test_training_beside_litgpt_pretrain(gpu: torch.device, record_property: Record) -> None:
    """A bar that is missed fails no test: it is in the figures, by its name."""
    command = [sys.executable, "-m", "bench", "training", "--quick"]
    environ = {
        name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"
    }  # as users have it
    done = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    written = re.search(r"^figures: (.*)$", done.stdout, re.MULTILINE)
    assert written is not None
    measured = figures((CHECKOUT / written[1]).read_text())
    for name, figure in measured.items():
        record_property(name, figure)
    for model in ("pythia-410m", "pythia-1b"):
        assert f"tokens/s / litgpt pretrain, {model}" in measured
        for side in ("ours", "ours without compile", "ours in float8", "litgpt"):
            assert measured[f"tokens/s, {side}, {model}"] > 0
        assert 0 < measured[f"MFU, ours, {model}"] < 1
