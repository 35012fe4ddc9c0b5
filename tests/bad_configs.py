"""Configs that cannot work, one list of them: whatever would start such a config refuses it, and so does its plan.

A case is a file of `folder` with overrides, words of the refusal, and the exit code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

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


def script(overrides: str, words: str) -> Bad:
    """A script with changes."""
    return Bad("script.yaml", tuple(overrides.split(" | ")), words)


SETTINGS = [
    training("train.lerning_rate=1", "there is no such setting; did you mean learning_rate"),
    training("train.max_steps=none", "train.max_steps: 'none' given"),
    training("train.max_steps=-1", "train.max_steps: -1 given"),
    training("train.learning_rate=-1", "train.learning_rate: -1 given"),
    training("train.min_learning_rate=1", "is above train.learning_rate"),
    training("train.micro_batch=3", "does not split over 1 processes"),
    training("train.micro_batch=8", "are the two swapped?"),
    training("train.warmup_steps=8", "leaves nothing of train.max_steps=8"),
    training("train.max_tokens=1000", "are both given"),
    training("train.strategy=fsdp | train.compile=model", "train.compile=model"),
    training("train.strategy=fsdp | train.precision=16-mixed", "take bf16-mixed"),
    training("train.float8=true", "is slower than bfloat16"),
    training("train.wandb={project: pages, secret: my key}", "is not a name in capitals"),
    training("model.name=pythia-14", "did you mean pythia-14m"),
    training("model.config={n_layers: 1}", "did you mean n_layer"),
    training("model.config.n_layer=-1", "n_layer=-1 is no size"),
    training("model.config.n_layer=0", "n_layer=0 is no size"),
    training("model.config.n_embd=33", "n_embd must be a multiple of n_head"),
    training("model={name: pythia-14m, config: {}, sequence_length: 4096}", "longer than the block_size"),
    training("data.filters={min_characters: 9, max_characters: 3}", "are the two swapped?"),
    training("data.validation_fraction=0", "data.validation_fraction: 0 given"),
    training("data.corpus.kind=web", "'web' given"),
    training("platform.kind=slurmy", "'slurmy' given"),
    training("platform={kind: local, nodes: 0}", "platform.nodes: 0 given"),
    training("name=Tiny Model", "name: 'Tiny Model' given"),
    Bad("nowhere.yaml", (), "nowhere.yaml is not there"),
    Bad("poem.txt", (), "settings belong there"),
    Bad("training.yaml", ("train.learning_rate",), "is not an override"),
]

PLACE = [
    training("root=s3://bucket/prefix", "s3://bucket/prefix"),
    training("root=poem.txt/below", "poem.txt is a file"),
    training("root=/proc/below", "cannot write to /proc"),
    training(
        "train.global_batch=16 | platform={kind: gke, machine: g2-standard-48}",
        "runs container images, and image.kind=none",
    ),
    training(
        "train.global_batch=64 | image={kind: docker, repository: r/x} | "
        "platform={kind: gke, machine: a3-highgpu-8g, nodes: 2, network: tcpx}",
        "the tcpx plug-in is qualified for >=2.19,<2.20",
    ),
    training(
        "train.global_batch=64 | image={kind: docker, repository: r/x, stack: default} | "
        "platform={kind: gke, machine: a3-megagpu-8g, nodes: 2, network: tcpxo}",
        "leave image.stack out: stack tcpxo has NCCL 2.28.9",
    ),
    training("image={kind: docker, repository: r/x, stack: tcpy}", "'tcpy' is no stack; there are default, tcpxo"),
    training("train.wandb={project: pages, secret: NOBODY_EXPORTS_THIS}", "needs the secret NOBODY_EXPORTS_THIS"),
    training("workers={kind: dask, scheduler: 'tcp://127.0.0.1:9'}", "tcp://127.0.0.1:9 does not answer"),
]

SIZES = [
    training(
        "model={name: pythia-14m, config: {}, sequence_length: 512} | train.global_batch=15625 | "
        "train.micro_batch=15625",
        "set train.micro_batch=",
    ),
    training("model={name: transformer-175b, config: {}}", "a model of at most about"),
    training("model.config.padded_vocab_size=64", "the tokenizer has 300 ids and model config has 64 embeddings"),
    training("train.max_steps=null | train.warmup_steps=100", "leaves nothing of the run's"),
    training("train.max_steps=null | train.max_tokens=1000 | train.warmup_steps=50", "leaves nothing of the 8 steps"),
    training("model.sequence_length=5000", "one sample of model.sequence_length=5000 needs 5001"),
]

CORPORA = [
    training("data.corpus.paths=[gone.txt]", "gone.txt does not exist"),
    training("data.corpus.paths=['*.nothing']", "no file under"),
    training("data.corpus.paths=['s3://bucket/x']", "only local paths and gs:// addresses can be read"),
    training("data.corpus.paths=[empty.txt]", "holds no text", DATA),
    training("data.corpus.paths=[one.txt]", "has 1 documents in 1 files", DATA),
    training("data.corpus.paths=[few.txt]", "the validation split of"),
    training("data.validation_fraction=0.999", "leaves none to train on"),
    training("data.filters.min_characters=100000", "has 0 documents", DATA),
    training("data.tokenizer.vocab_size=60000", "has only enough different text for", DATA),
    training("data.corpus.paths=[latin1.txt]", "latin1.txt", DATA),
    training("data.corpus={kind: files, paths: [cut.jsonl]}", "cut.jsonl, line 3", DATA),
    training("data.corpus={kind: files, paths: [good.jsonl], column: body}", "good.jsonl"),
    training("data.corpus={kind: files, paths: [columns.parquet], column: body}", "has no column 'body'"),
    training("data.corpus={kind: files, paths: [cut.parquet]}", "cut.parquet", DATA),
    training("data.tokenizer={kind: file, path: gone.json}", "gone.json is not there"),
    training("data.tokenizer={kind: file, path: poem.txt}", "is not JSON"),
    training("data.tokenizer={kind: file, path: unigram.json}", "only BPE tokenizers are supported"),
    training("data.tokenizer={kind: file, path: endless.json}", "names no end-of-text token"),
]

SWEEPS = [
    sweep("train.lerning_rate: [1.0e-3]", "trial train.lerning_rate=0.001 cannot be used"),
    sweep("train.learning_rate: [1.0e-3, -1]", "trial train.learning_rate=-1 cannot be used"),
    sweep("model.config.n_layer: [1, -1]", "trial model.config.n_layer=-1 cannot be used"),
    sweep("train.seed: [1, 1]", "two of its trials are the same training"),
    sweep("train.seed: []", "has no values for train.seed"),
    sweep("model.config.padded_vocab_size: [320, 64]", "trial model.config.padded_vocab_size=64: the tokenizer has"),
    sweep("model.sequence_length: [32, 5000]", "trial model.sequence_length=5000: the training split"),
    sweep("data.corpus.paths: [[poem.txt], [gone.txt]]", "gone.txt does not exist"),
]

OTHERS = [
    script("script=null", "script: None given"),
    script("model.name=pythia-14m", "model: there is no such setting"),
    script("script=gone.py", "gone.py is not a file"),
    script("script=-m no_such_module", "there is no module no_such_module"),
    script("root=poem.txt/below", "poem.txt is a file"),
    script("platform={kind: local, nodes: 1, processes: 1} | script=null | measure={}", "there is no such setting"),
]

ALL = [*SETTINGS, *PLACE, *SIZES, *CORPORA, *SWEEPS, *OTHERS]
CASES = [pytest.param(bad, id=" ".join([bad.file.partition(".")[0], *bad.overrides])[:90]) for bad in ALL]


def fill(folder: Path) -> None:
    """Put down the files that the cases name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def lines(*documents: object) -> str:
        return "".join(json.dumps({"text": document}) + "\n" for document in documents)

    def tokenizer(**model: object) -> str:
        return json.dumps({"model": model, "added_tokens": []})

    pq.write_table(pa.table({"text": POEM}), folder / "columns.parquet")
    (folder / "cut.parquet").write_bytes((folder / "columns.parquet").read_bytes()[:-40])
    (folder / "latin1.txt").write_bytes("\n\n".join([*POEM, "café"]).encode("latin-1"))
    texts = {
        "training.yaml": TRAINING,
        "script.yaml": "name: pi\nroot: out\nscript: pi.py\n",
        "pi.py": "",
        "poem.txt": "\n\n".join(POEM),
        "empty.txt": "",
        "one.txt": " ".join(POEM),
        "few.txt": "\n\n".join([" ".join(POEM), "bottles", "walls"]),
        "good.jsonl": lines(*POEM),
        "cut.jsonl": lines(*POEM[:2]) + '{"text": "cut\n',
        "unigram.json": tokenizer(type="Unigram", vocab=[["a", -1.0]]),
        "endless.json": tokenizer(type="BPE", vocab={"a": 0}, merges=[]),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
