"""How much memory a collection takes, measured by the kernel in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from litgpt.model import GPT

from litgpt_demo.config import ModelConfig
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints

NewRun: TypeAlias = Callable[..., Path]

# VmHWM is the most memory that the process ever had. While LitGPT's loader copies weights it also maps the file that
# they come from, whose pages the kernel takes back when it needs them: so a whole collection is measured by RssAnon,
# the memory that nothing but this process can give back, looked at every few milliseconds.
# A collection of a small run comes first, so that what imports take is not counted.
PROGRAM = """
import json, re, sys, threading, time
from pathlib import Path
from litgpt_demo.export import export
from litgpt_demo.export.huggingface import huggingface_model
from litgpt_demo.export.weights import Weights, write_litgpt, write_safetensors
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage

def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

small, large = map(open_storage, sys.argv[1:])
export(small)

spec, scratch = read_spec(large), Path(large.root, ".scratch")
before = memory("VmHWM")
weights = Weights(Path(large.root, "checkpoints/step-00000012"))
write_litgpt(weights, scratch / "lit_model.pth")
write_safetensors(weights, huggingface_model(litgpt_config(spec.model, vocab_size=300)).rename, scratch)
consolidation = memory("VmHWM") - before

before, most, done = memory("RssAnon"), 0, threading.Event()
def look():
    global most
    while not done.wait(0.003):
        most = max(most, memory("RssAnon"))
looking = threading.Thread(target=look)
looking.start()
export(large)
done.set()
looking.join()
print(json.dumps({"consolidation": consolidation / weights.size, "collection": (most - before) / weights.size}))
"""


@pytest.fixture
def large_run(new_run: NewRun) -> tuple[Path, int]:
    """A run of 150 MB of weights whose last checkpoint is there, though nobody trained it, and those bytes."""
    model = ModelConfig(name=None, config={"n_layer": 8, "n_embd": 640, "n_head": 8}, sequence_length=32)
    run = new_run("large", model=model)
    spec = read_spec(open_storage(str(run)))
    weights = GPT(litgpt_config(model, vocab_size=300)).state_dict()
    dcp.save({"model": weights}, checkpoint_id=run / ".scratch/shards", no_dist=True)
    storage = open_storage(str(run))
    files = checkpoints.publish((run / ".scratch/shards").iterdir(), storage, spec.steps)
    checkpoints.commit(
        storage, checkpoints.manifest_of(spec, step=spec.steps, validation_loss=None, files=files, seconds=1.0)
    )
    return run, sum(weight.numel() * weight.element_size() for weight in weights.values())


@pytest.mark.long
def test_writing_takes_a_few_blocks_of_memory_and_proving_one_copy_of_the_weights(
    large_run: tuple[Path, int], finished_copy: Path
) -> None:
    run, size = large_run
    assert size > 150_000_000
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(finished_copy), str(run)],
        capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    copies = json.loads(done.stdout.splitlines()[-1])
    assert copies["consolidation"] < 0.5  # a block is an eighth, and pages of mapped files count too
    assert 0.7 < copies["collection"] < 1.3, copies  # below, the measurement has missed it
    assert torch.load(run / "final/litgpt/lit_model.pth", weights_only=True, mmap=True)
