"""Configs that cannot work: each is refused by its plan, in these words and with this exit code.

A case is a file of `folder` with overrides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from litgpt_demo.errors import EXIT_CODES, Fault

USER, DATA = EXIT_CODES[Fault.USER], EXIT_CODES[Fault.DATA]

TRAINING = """
name: tiny
root: out
data:
  corpus: {kind: files, paths: [poem.txt], separator: "\\n\\n"}
  tokenizer: {kind: train, vocab_size: 300}
  validation_fraction: 0.05
model: {name: null, config: {n_layer: 1, n_embd: 32, n_head: 2}, sequence_length: 32}
train: {global_batch: 4, micro_batch: 4, max_steps: 8, warmup_steps: 1, precision: 32-true}
"""
POEM = [f"{number} bottles on the wall, {number} of them fall" for number in range(200)]


@dataclass(frozen=True)
class Bad:
    """A config that cannot work."""

    file: str
    overrides: tuple[str, ...]
    words: str
    """In the refusal."""
    code: int = USER


def training(overrides: str, words: str, code: int = USER) -> Bad:
    """A training with changes that are separated by ` | `."""
    return Bad("training.yaml", tuple(overrides.split(" | ")), words, code)


def sweep(grid: str, words: str) -> Bad:
    """A sweep of the training."""
    return Bad("training.yaml", (f"sweep={{grid: {{{grid}}}}}",), words)


ALL = [
    training("train.lerning_rate=1", "there is no such setting; did you mean learning_rate"),
    training("train.min_learning_rate=1", "is above train.learning_rate"),
    training("train.micro_batch=8", "are the two swapped?"),
    training("train.strategy=fsdp | train.precision=16-mixed", "take bf16-mixed"),
    training("model.config.n_layer=-1", "n_layer=-1 is no size"),
    training("model={name: pythia-14m, config: {}, sequence_length: 4096}", "longer than the block_size"),
    Bad("nowhere.yaml", (), "nowhere.yaml is not there"),
    Bad("training.yaml", ("train.learning_rate",), "is not an override"),
    training("root=poem.txt/below", "poem.txt is a file"),
    training(
        "train.global_batch=64 | image={kind: docker, repository: r/x} | "
        "platform={kind: gke, machine: a3-highgpu-8g, nodes: 2, network: tcpx}",
        "the tcpx plug-in is qualified for >=2.19,<2.20",
    ),
    training("train.wandb={project: pages, secret: NOBODY_EXPORTS_THIS}", "needs the secret NOBODY_EXPORTS_THIS"),
    training("model={name: transformer-175b, config: {}}", "a model of at most about"),
    training("model.config.padded_vocab_size=64", "the tokenizer has 300 ids and model config has 64 embeddings"),
    training("train.max_steps=null | train.warmup_steps=100", "leaves nothing of the run's"),
    training("model.sequence_length=5000", "one sample of model.sequence_length=5000 needs 5001"),
    training("data.corpus.paths=[gone.txt]", "gone.txt does not exist"),
    training("data.corpus.paths=[latin1.txt]", "latin1.txt", DATA),
    training("data.corpus={kind: files, paths: [cut.jsonl]}", "cut.jsonl, line 3", DATA),
    training("data.filters.min_characters=100000", "has 0 documents", DATA),
    training("data.tokenizer={kind: file, path: poem.txt}", "is not JSON"),
    sweep("train.learning_rate: [1.0e-3, -1]", "trial train.learning_rate=-1 cannot be used"),
    sweep("train.seed: [1, 1]", "two of its trials are the same training"),
    sweep("model.config.padded_vocab_size: [320, 64]", "trial model.config.padded_vocab_size=64: the tokenizer has"),
    Bad("script.yaml", ("script=gone.py",), "gone.py is not a file"),
]


def fill(folder: Path) -> None:
    """Put down the files that the cases name."""
    lines = "".join(json.dumps({"text": document}) + "\n" for document in POEM[:2])
    texts = {
        "training.yaml": TRAINING,
        "script.yaml": "name: pi\nroot: out\nscript: pi.py\n",
        "pi.py": "",
        "poem.txt": "\n\n".join(POEM),
        "cut.jsonl": lines + '{"text": "cut\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin1.txt").write_bytes("\n\n".join([*POEM, "café"]).encode("latin-1"))
