"""A training takes the memory of a GPU and of its host that the plan says, and recordings show where it went."""

import gzip
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import NewRun, rows, train

from litgpt_demo.config import ModelConfig
from litgpt_demo.metrics import curve
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import list_complete
from litgpt_demo.training.reporting import PROFILES

Record = Callable[[str, object], None]
WAYS = ("none", "selective", "full")


def trained(new_run: NewRun, device: torch.device, name: str, model: str, **settings: Any) -> Path:
    """A run of some steps on samples of 2048 tokens; a rehearsal has a smaller model and shorter ones."""
    length = 2048 if device.type == "cuda" else 64
    sizes = ModelConfig(name=model if device.type == "cuda" else "pythia-14m", sequence_length=length)
    few: dict[str, Any] = {"micro_batch": 8, "max_steps": 4, "evaluation_samples": 1, "precision": "bf16-mixed"}
    run = new_run(name, model=sizes, **few | settings)
    train(run)
    return run


@pytest.mark.parametrize("checkpointing", WAYS)
@pytest.mark.parametrize("model", ["pythia-410m"])
def test_a_step_takes_the_memory_of_its_estimate(
    new_run: NewRun, device: torch.device, without_saves: None, model: str, checkpointing: str, record_property: Record
) -> None:
    run = trained(new_run, device, "run", model, compile="none", activation_checkpointing=checkpointing)
    estimate, last = rows(run, "start")[0]["memory_estimate"], rows(run, "step")[-1]
    shares = [last[name] / estimate for name in ("memory", "memory_reserved") if name in last]
    record_property("allocated and reserved, as shares of the estimate", shares)
    if device.type == "cuda":
        assert shares[1] >= shares[0]
        assert shares[0] == pytest.approx(1.0, abs=0.1)
        assert last["allocation_retries"] == 0


def test_compiled_blocks_keep_what_checkpointing_lets_them(
    new_run: NewRun, device: torch.device, without_saves: None, record_property: Record
) -> None:
    memory = list[int]()
    for name in ("none", "selective"):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        how = {"compile": "blocks" if device.type == "cuda" else "none", "activation_checkpointing": name}
        run = trained(new_run, device, name, "pythia-160m", **how)
        memory.append(rows(run, "step")[-1]["memory"])
    record_property("none, selective", memory)
    if device.type == "cuda":
        assert memory[0] > memory[1]


def test_selective_checkpointing_computes_no_attention_twice(
    new_run: NewRun, device: torch.device, without_saves: None, record_property: Record
) -> None:
    """The recorded step has as many forward kernels of attention as without checkpointing."""
    forward = dict[str, list[str]]()
    for way in WAYS:
        recorded = {"profiler": {"steps": "3-3"}, "compile": "none", "activation_checkpointing": way}
        run = trained(new_run, device, way, "pythia-160m", **recorded)
        kernels = [event["name"] for event in read_trace(run)["traceEvents"] if event.get("cat") == "kernel"]
        attention = [name for name in kernels if re.search("flash|fmha|sdpa|attention", name, re.IGNORECASE)]
        forward[way] = [name for name in attention if not re.search("bwd|back|bprop|grad|_d[oqkv]", name)]
    record_property("kernels", {way: sorted(set(names)) for way, names in forward.items()})
    counts = [len(forward[way]) for way in WAYS]
    assert counts[0] == counts[1]
    if device.type == "cuda":
        assert 0 < counts[0] < counts[2]


def read_trace(run: Path) -> dict[str, Any]:
    [path] = (run / PROFILES).glob("*.json.gz")
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


def test_a_profile_has_kernels_of_the_gpu_with_its_memory(new_run: NewRun, device: torch.device) -> None:
    """Training goes on, and the memory's recording ends with the steps."""
    run = new_run("run", profiler={"steps": "3-5"}, compile="none")
    train(run)
    assert len(rows(run, "step")) == 12
    kinds = {event.get("cat") for event in read_trace(run)["traceEvents"]}
    assert "cpu_op" in kinds
    if device.type == "cuda":
        assert "kernel" in kinds
        [path] = (run / PROFILES).glob("*.memory.pickle")
        snapshot = pickle.loads(path.read_bytes())
        assert sum(map(len, snapshot["device_traces"])) > 0
        torch.empty(2**20, device=device)
        assert sum(map(len, torch.cuda.memory._snapshot()["device_traces"])) == 0


def test_steps_report_the_memory_of_the_allocator(gpu: torch.device, new_run: NewRun) -> None:
    run = new_run("run", max_steps=2, compile="auto")
    train(run)
    last = rows(run, "step")[-1]
    assert last["memory_reserved"] >= last["memory"] > 0
    assert last["allocation_retries"] == 0
    assert rows(run, "start")[0]["compile"] == "blocks"


def test_a_block_of_a_model_that_fits_no_gpu_trains_on_one(
    gpu: torch.device, new_run: NewRun, without_saves: None
) -> None:
    if torch.cuda.mem_get_info()[1] < 40e9:
        pytest.skip("weights, gradients and averages of such a block take 15 GB, and its update as much again")
    sizes = {"n_layer": 1, "padded_vocab_size": 320}
    model = ModelConfig(name="transformer-175b", config=sizes, sequence_length=32)
    once = {"evaluate_every": 12, "checkpoint_every": 12}
    run = new_run("run", model=model, precision="bf16-true", learning_rate=1e-4, compile="none", **once)
    train(run)
    losses = curve(rows(run), "step", "loss")
    assert losses[12] < losses[1] - 0.3


def test_saves_stop_the_training_less_than_a_step(
    new_run: NewRun, device: torch.device, alone: Callable[[], None], record_property: Record,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The first one takes memory for the copy, which the driver pins: that may stop a training for longer."""
    alone()
    run = trained(new_run, device, "run", "pythia-410m", compile="none", max_steps=12, checkpoint_every=5, keep_last=1)
    saves, steps = rows(run, "checkpoint"), [row["step_seconds"] for row in rows(run, "step")]
    stalls, usual = [row["seconds"] for row in saves], sorted(steps)[len(steps) // 2]
    record_property(
        "stalls, seconds of the saves, bytes", [(row["seconds"], row["save_seconds"], row["bytes"]) for row in saves]
    )
    record_property("seconds of the steps", steps)
    assert len(saves) == 3
    assert "warning" not in capsys.readouterr().out, "the host's memory was pinned"
    assert list_complete(open_storage(str(run)))[0].step == 12
    if device.type == "cuda":
        assert stalls[1] < max(usual, 0.1)
