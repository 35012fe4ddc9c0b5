"""A dataset as people are shown it: how far its preparation is, its totals, how long its documents are."""

from __future__ import annotations

from launcher.formatting import bytes_text, count_text, duration_text
from launcher.reports import mermaid
from launcher.reports.charts import Chart
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.data.preparation import Preparation

_LENGTHS, _TOKENS = "Length of documents", "tokens, this many to twice as many"


def progress_text(progress: Preparation) -> str:
    if progress.phase == "publish":
        return "publish: joining the pieces"
    if progress.phase == "tokenizer":
        return f"tokenizer: training on {progress.documents:,} documents, {bytes_text(progress.text_bytes)}"
    tokens = f", {count_text(progress.tokens)} tokens" if progress.tokens else ""
    left = "" if progress.seconds_left is None else f", {duration_text(progress.seconds_left)} left"
    return f"{progress.phase}: {progress.documents:,} documents{tokens}, {bytes_text(progress.rate)}/s{left}"


def fraction(progress: Preparation) -> float | None:
    """The share of the encoding, which is nearly all of the work; None where the end is not known."""
    if progress.phase == "publish":
        return 1.0
    return progress.text_bytes / progress.all_bytes if progress.all_bytes else None


def table(manifest: DatasetManifest, *, seconds: float) -> list[dict[str, str]]:
    """Rows of a table artifact: the totals of a preparation of `seconds`."""
    rows: list[tuple[str, str]] = []
    for name, split in (("Training", manifest.train), ("Validation", manifest.validation)):
        first, *others = [file.path for file in split.files] or ["those of its sources"]
        rows += [
            (f"{name}: files", f"{first} and {len(others):,} more" if others else first),
            (f"{name}: size", bytes_text(sum(file.size for file in split.files))),
            (f"{name}: tokens", f"{split.tokens:,}"),
            (f"{name}: documents", f"{split.documents:,}"),
            (f"{name}: tokens per document", f"{split.tokens / max(split.documents, 1):,.1f}"),
        ]
    rows += [(f"Dropped: {reason}", f"{dropped:,} documents") for reason, dropped in manifest.dropped.items()]
    rows += [
        ("Bad documents", f"{manifest.bad_documents:,}"),
        ("Text", bytes_text(manifest.text_bytes)),
        ("Time", duration_text(seconds)),
        ("Speed", f"{bytes_text(manifest.text_bytes / max(seconds, 1e-3))}/s"),
    ]
    return [{"figure": name, "value": value} for name, value in rows]


def lengths(manifest: DatasetManifest) -> dict[str, float]:
    """The least length of a class of documents, in tokens, to the percentage of all documents that it is."""
    counts = list(enumerate(manifest.document_lengths))
    first = next((power for power, documents in counts if documents), 0)
    every = sum(manifest.document_lengths)
    return {_short(power): 100 * documents / every for power, documents in counts[first:]} if every else {}


def _short(power: int) -> str:
    """A power of two as it is spoken: 512, 1k, 64k, 1M."""
    unit = min(power // 10, 3)
    return f"{2 ** (power - 10 * unit)}{('', 'k', 'M', 'G')[unit]}"


def lengths_chart(manifest: DatasetManifest) -> Chart:
    title, bars = f"{_LENGTHS}, percent of {manifest.documents:,}", lengths(manifest)
    return Chart(name="lengths", title=title, bars=bars, x_label=_TOKENS, y_text=lambda share: f"{share:g} %")


def lengths_markdown(manifest: DatasetManifest) -> str:
    return mermaid.bars(_LENGTHS, lengths(manifest), x_label=_TOKENS, y_label="percent of documents")
