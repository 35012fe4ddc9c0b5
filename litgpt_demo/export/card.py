"""Companions of a model: MODEL_CARD.md for people, loss.png in it, and lineage.json for programs.

A card is made of the run's own files only. Unknown facts are left out.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest, open_dataset
from litgpt_demo.documents import Unreadable
from litgpt_demo.export import Cost, FinalManifest, usage
from litgpt_demo.metrics import Row, curve
from litgpt_demo.runs import ATTEMPTS, node_reports, read_document, read_metrics
from litgpt_demo.storage import Storage
from litgpt_demo.training.checkpoints import CheckpointManifest, folder_of

CARD, LINEAGE, PICTURE = "MODEL_CARD.md", "lineage.json", "loss.png"

_EAGER = (
    "The model limits its attention scores (soft-capping). transformers computes that with `eager` attention, which "
    "`config.json` selects. With `sdpa` it leaves the limit out, without a warning, and the logits differ. "
    "`LLM.generate` of LitGPT 0.5.13 lets the tokens of a prompt see later ones: write with transformers, or with "
    "`train-litgpt generate`."
)

_DOCUMENTS = (
    "The model was trained with attention within documents: no token saw another document of its sample. The "
    "validation loss is measured so too. transformers and LitGPT attend to all tokens that they are given, also where "
    "tasks are scored, so give them one document at a time."
)


def cost_of(run: Storage) -> Cost | None:
    """Return what the run's attempts have cost; None where its machines have no list price or no node reported."""
    if (price := read_document(run).price) is None:
        return None
    attempts, bad, seconds = run.within(ATTEMPTS), Unreadable("nodes' reports"), 0.0
    folders = {path.partition("/")[0] for path in attempts.list() if "/" in path}
    for folder in sorted(folders):
        for report in node_reports(attempts.within(folder), bad, all_lives=True):
            if report.started is None:
                bad.add(f"node {report.node} of attempt {folder} reports no start")
            else:
                seconds += max(0.0, report.ended - report.started)
    return Cost(hours=seconds / 3600, price=price, unreadable=bad.count) if seconds else None


def write_card(
    run: Storage, spec: TrainingSpec, checkpoint: CheckpointManifest, final: FinalManifest, target: Path
) -> None:
    document, rows = read_document(run), [row for row in read_metrics(run) if row["step"] <= checkpoint.step]
    dataset, names = open_dataset(spec.dataset), ("device", "device_name", "world_size", "precision")
    starts = [{name: row[name] for name in names if name in row} for row in rows if row.get("kind") == "start"]
    skips = {row["step"]: row for row in rows if row.get("kind") == "skip"}  # every attempt may report the same one
    # Enough to make the model again, and to check whether it is the same.
    lineage: dict[str, Any] = {
        "run": spec.run,
        "address": run.address(),
        "step": checkpoint.step,
        "tokens": checkpoint.tokens,
        "seconds": checkpoint.seconds,
        "checkpoint": {
            "folder": folder_of(checkpoint.step),
            **checkpoint.model_dump(include={"world_size", "versions", "files"}, exclude_none=True),
        },
        "dataset": {
            "content_hash": dataset.content_hash,
            "address": spec.dataset,
            "name": dataset.name,
            "corpus": dataset.corpus,
            "tokenizer_hash": dataset.tokenizer_hash,
            "tokens": {"train": dataset.train.tokens, "validation": dataset.validation.tokens},
        },
        "config": dict(document.run),
        "training": spec.model_dump(mode="json"),
        # Steps without an update, with the reason and their samples.
        "left_out": [{name: row.get(name) for name in ("step", "why", "windows")} for _, row in sorted(skips.items())],
        "software": dict(document.software),
        # The machines of each attempt that got to train, the same in a row once.
        "hardware": [start for start, _ in groupby(starts)],
        "cost": None if final.cost is None else {**final.cost.model_dump(), "usd": final.cost.usd},
        "collected_with": {name: importlib.metadata.version(name) for name in ("torch", "litgpt", "transformers")},
    }
    (target / LINEAGE).write_text(json.dumps(lineage, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pictured = _draw_loss(rows, target / PICTURE)
    (target / CARD).write_text(_card(lineage, spec, dataset, final, pictured=pictured), encoding="utf-8")


def _card(
    lineage: Mapping[str, Any], spec: TrainingSpec, dataset: DatasetManifest, final: FinalManifest, *, pictured: bool
) -> str:
    proof, config = final.huggingface, lineage["config"]
    checkpoint, software = lineage["checkpoint"], lineage["software"]
    mixed = [source.name for source in dataset.mixture.sources] if dataset.mixture else []
    corpus, platform = config.get("data", {}).get("corpus", {}), config.get("platform", {})
    known = [
        f"{name}: {platform[name]}" for name in ("kind", "machine", "nodes", "processes_per_node") if platform.get(name)
    ]
    used = [
        f"{start.get('world_size', 1):,} processes on {start.get('device_name', '?')}" for start in lineage["hardware"]
    ]
    averaged = ""
    if final.average:
        averaged = f"Its weights are a moving average, of which each step kept {spec.train.weight_average:g}. "
    changed = " with uncommitted changes" if software.get("dirty") else ""
    versions = {**checkpoint["versions"], **software.get("packages", {})}
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [litgpt, pretrained]\n---",
        f"# {_text(spec.run)}",
        f"{_text(spec.model.name or 'A GPT')} with {final.parameters:,} parameters, trained from "
        f"{_text(spec.origin.name) if spec.origin else 'scratch'} on "
        f"{final.tokens:,} tokens of {_text(dataset.name)} ({final.step:,} of {spec.steps:,} steps). {averaged}"
        "It continues text; it follows no instructions, and says what its training data would.",
        "## Results",
        _table(
            ("Validation loss", f"{final.validation_loss:.4f} nats per token"),
            ("Perplexity", f"{final.perplexity:.2f}"),
            ("Measured on", f"{final.validation_windows:,} samples of {spec.model.sequence_length:,} tokens"),
            ("LitGPT opens it", f"largest difference of a logit from the checkpoint's: {final.logits_difference:.1e}"),
            ("transformers opens it", f"{proof.architecture}, {proof.logits_difference:.1e}" if proof else "no"),
            ("Compared over", f"{proof.tokens:,} tokens, with {proof.attention} attention" if proof else ""),
            ("Tolerance", f"{final.logits_tolerance:.1e}"),
        ),
        "## What it writes",
        "After the opening of a document it has not seen:",
        _fenced(f"{final.prompt}{final.sample.removeprefix(final.prompt)}"),
        "## Use",
        _fenced(usage("", final, huggingface=proof is not None), "python"),
        _EAGER if proof is not None and proof.attention == "eager" else "",
        _DOCUMENTS if spec.train.attention == "documents" else "",
        "## Data",
        _table(
            ("Corpus", ", ".join(mixed or (f"{name}: {value}" for name, value in corpus.items() if value is not None))),
            ("Text", f"{f'{text:,} bytes in ' if (text := dataset.text_bytes) else ''}{dataset.documents:,} documents"),
            ("Training split", f"{dataset.train.tokens:,} tokens"),
            ("Validation split", f"{dataset.validation.tokens:,} tokens in {dataset.validation.documents:,} documents"),
            ("Tokens seen", f"{final.tokens:,} ({final.tokens / max(1, dataset.train.tokens):.2f} passes)"),
            ("Vocabulary", f"{dataset.vocab_size:,} ids"),
            ("Before a text", f"{' '.join(final.prefix) or 'no token'}, as in training: the tokenizer puts it there"),
            ("Content hash", dataset.content_hash),
        ),
        "## Training",
        _table(
            ("Sequence length", f"{spec.model.sequence_length:,} tokens"),
            ("Steps", f"{spec.steps:,}"),
            *((f"model.config.{name}", value) for name, value in spec.model.config.items()),
            *sorted(spec.train.shaping_settings().items()),
            ("Steps left out", ", ".join(str(skip["step"]) for skip in lineage["left_out"])),
        ),
        f"![Loss over the steps of the training]({PICTURE})" if pictured else "",
        "## Hardware and cost",
        _table(
            *(("Hardware", machines) for machines in used),
            ("Platform", ", ".join(known)),
            ("Training time", f"{lineage['seconds']:,.0f} s"),
            ("Process hours", f"{lineage['seconds'] * checkpoint['world_size'] / 3600:,.2f}"),
            ("Cost", final.cost or ""),
        ),
        "## Origin",
        _table(
            ("Run", spec.run),
            ("Checkpoint", checkpoint["folder"]),
            ("Image", software.get("image") or "none: the nodes ran what was installed on them"),
            ("Commit", f"{software['commit']}{changed}" if software.get("commit") else "not known"),
            ("Software", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))),
            ("Everything else", LINEAGE),
        ),
        *(f"> {_text(finding)}" for finding in final.findings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(*pairs: tuple[str, object]) -> str:
    shown = [(name, "none" if value is None else value) for name, value in pairs if value != ""]
    lines = (f"| {_text(name)} | {_text(value)} |" for name, value in shown)
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _text(value: object) -> str:
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", " ".join(str(value).split()))


def _fenced(text: str, language: str = "text") -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _draw_loss(rows: Sequence[Row], path: Path) -> bool:
    from matplotlib.figure import Figure

    loss, held_out = curve(rows, "step", "loss"), curve(rows, "evaluation", "validation_loss")
    if len(loss) < 2:
        return False
    figure = Figure(figsize=(8, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(list(loss), list(loss.values()), color="#8ab4d8", linewidth=1, label="training")
    axes.plot(list(held_out), list(held_out.values()), color="#b5541c", marker="o", markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Software": None})  # so that the same curve is the same file
    return True
