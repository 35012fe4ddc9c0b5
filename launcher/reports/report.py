"""The report of a training: a page to keep and send, and the same in short for Prefect's artifacts.

Pure: a RunReport in, text out; the same report gives the same bytes. Whatever a corpus, a model or a config says is
escaped, so that a page opened from a bucket is only ever text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import yaml
from pydantic import JsonValue

from launcher.formatting import NOTHING, bytes_text, count_text, duration_text, loss_text, rate_text, share_text
from launcher.images.identity import SoftwareIdentity
from launcher.reports import mermaid
from launcher.reports.charts import Chart, Line
from launcher.reports.curves import Progress, downsample, smoothed, summary
from launcher.reports.datasets import lengths, lengths_chart
from launcher.reports.goodput import Ledger
from launcher.reports.page import page, printable
from launcher.runs.diagnosis import Verdict
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.export import FinalManifest
from litgpt_demo.export.usage import usage
from litgpt_demo.metrics import Row, curve
from litgpt_demo.runs import ATTEMPTS, CONFIG, FINAL, HUGGINGFACE, LITGPT, METRICS

Pairs = list[tuple[str, str]]
"""Name and value, both as they are shown."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Everything that is known of a run; a part that does not exist yet is None."""

    name: str
    address: str
    """The address of the run's folder."""
    rows: Sequence[Row]
    """The run's metrics."""
    dataset: DatasetManifest | None = None
    final: FinalManifest | None = None
    identity: SoftwareIdentity | None = None
    config: Mapping[str, JsonValue]
    """The config as the user wrote it, every default filled in."""
    attempts: int
    seconds: float
    """Seconds of the training that counts; what was repeated after a restart counts once."""
    avoided: Sequence[str] = ()
    """The machines that the last attempt avoided, because earlier ones blamed them."""
    ledger: Ledger | None = None
    """The parts of the wall time of all attempts."""


# --- what it says -----------------------------------------------------------------------------------------------------


def outcome(report: RunReport) -> str:
    """Return the state of the run, in one line."""
    progress = summary(report.rows)
    if report.final is not None:
        if not report.final.complete:
            return f"A model of step {report.final.step:,} was collected on the way, and agrees with its checkpoint"
        return "Finished: the trained model was loaded back and agrees with its checkpoint"
    if progress.steps and progress.step >= progress.steps:
        return "Trained to the last step; the model is not collected yet"
    if progress.step:
        return f"Stopped at step {_of_steps(progress)}"
    return "No training step is done yet"


def key_figures(report: RunReport) -> Pairs:
    """The few figures that everybody asks for first; what is not known is left out."""
    progress, loss = summary(report.rows), _validation_loss(report)
    pace = list(curve(report.rows, "step", "tokens_per_second").values())
    figures = [
        ("Validation loss", loss_text(loss)),
        ("Perplexity", _perplexity_text(loss)),
        ("Tokens seen", count_text(progress.tokens) if progress.tokens else NOTHING),
        ("Throughput", rate_text(median(pace)) if pace else NOTHING),
        ("Training time", duration_text(report.seconds)),
        ("Parameters", count_text(parameters) if (parameters := _parameters(report)) else NOTHING),
    ]
    return [(name, value) for name, value in figures if value != NOTHING]


def further_figures(report: RunReport) -> Pairs:
    """The rest of them."""
    progress, final, start = summary(report.rows), report.final, _start(report.rows)
    used = list(curve(report.rows, "step", "mfu").values())
    figures = [
        ("Steps", _of_steps(progress)),
        ("Training loss", loss_text(progress.loss)),
        ("Bits per byte of text", _bits_per_byte(report)),
        ("Attempts", str(report.attempts)),
        ("Machines avoided", ", ".join(report.avoided) or NOTHING),
        ("Cost", str(final.cost) if final and final.cost else NOTHING),
        ("Processes", _processes(start)),
        ("Precision", str(start.get("precision", NOTHING))),
        ("MFU", share_text(median(used)) if used else NOTHING),
        ("Peak memory", NOTHING if progress.memory is None else bytes_text(progress.memory)),
        ("Loaded back", _differing(final.logits_difference) if final else NOTHING),
        ("In transformers", _in_transformers(final)),
    ]
    return [(name, value) for name, value in figures if value != NOTHING]


def dataset_facts(dataset: DatasetManifest) -> Pairs:
    """Return the table of the dataset."""
    tokens, documents = dataset.train.tokens + dataset.validation.tokens, dataset.train.documents
    return [
        ("Name", dataset.name),
        ("Text", bytes_text(dataset.text_bytes)),
        ("Training", f"{count_text(dataset.train.tokens)} tokens in {count_text(documents)} documents"),
        (
            "Validation",
            f"{count_text(dataset.validation.tokens)} tokens in {count_text(dataset.validation.documents)} documents",
        ),
        ("Vocabulary", f"{dataset.vocab_size:,} ids"),
        ("Bytes per token", f"{dataset.text_bytes / tokens:.2f}" if tokens else NOTHING),
        ("Key", dataset.key),
    ]


def versions(identity: SoftwareIdentity) -> Pairs:
    """Return the table of the code."""
    commit = f"{identity.commit} with uncommitted changes" if identity.dirty else identity.commit
    named = [("Image", identity.image), ("Commit", commit)]
    return [(name, value) for name, value in named if value] + sorted(identity.packages.items())


def places(report: RunReport) -> Pairs:
    """Return the table of addresses."""
    named = {
        "Trained model": LITGPT if report.final else None,
        "For Hugging Face": HUGGINGFACE if report.final and report.final.huggingface else None,
        "Model card": f"{FINAL}/MODEL_CARD.md" if report.final else None,
        "Checkpoints": "checkpoints",
        "Metrics": METRICS,
        "Config": CONFIG,
        "Logs": ATTEMPTS,
    }
    found = [(name, f"{report.address}/{path}") for name, path in named.items() if path]
    root, runs, _ = report.address.rpartition("/runs/")
    if report.dataset and runs:
        found.append(("Dataset", f"{root}/datasets/{report.dataset.name}-{report.dataset.key}"))
    return found


def usage_of(report: RunReport) -> str:
    """Commands that let the trained model write; empty while there is none."""
    final = report.final
    return "" if final is None else usage(report.address, huggingface=final.huggingface is not None)


def _start(rows: Sequence[Row]) -> Row:
    starts = [row for row in rows if row.get("kind") == "start"]
    return starts[-1] if starts else {}


def _validation_loss(report: RunReport) -> float | None:
    """The collected model's, else the newest evaluation's."""
    if report.final is not None:
        return report.final.validation_loss
    return summary(report.rows).validation_loss


def _in_transformers(final: FinalManifest | None) -> str:
    if final is None:
        return NOTHING
    proof = final.huggingface
    if proof is None:
        return "; ".join(final.findings)
    return f"{proof.architecture}, {_differing(proof.logits_difference)}"


def _differing(logits: float) -> str:
    return f"logits differ by {logits:.1e} at most" if logits else "the same logits"


def _parameters(report: RunReport) -> int | None:
    if report.final is not None:
        return report.final.parameters
    parameters = _start(report.rows).get("parameters")
    return int(parameters) if parameters is not None else None


def _processes(start: Row) -> str:
    if "world_size" not in start:
        return NOTHING
    device = start.get("device_name") or str(start.get("device", "")).partition(":")[0]
    return f"{start['world_size']:,} on {device}" if device else f"{start['world_size']:,}"


def _of_steps(progress: Progress) -> str:
    return f"{progress.step:,} of {progress.steps:,}" if progress.steps else f"{progress.step:,}"


def _perplexity_text(loss: float | None) -> str:
    # Above e^20 it says nothing more than "untrained", in ever more digits.
    return f"{math.exp(loss):,.2f}" if loss is not None and math.isfinite(loss) and loss < 20 else NOTHING


def _bits_per_byte(report: RunReport) -> str:
    """Validation loss per byte of text instead of per token, so that different tokenizers can be compared.

    Tokens per byte are those of the whole dataset: the manifest does not count the validation split's bytes.
    """
    loss, dataset = _validation_loss(report), report.dataset
    if loss is None or not math.isfinite(loss) or dataset is None or not dataset.text_bytes:
        return NOTHING
    tokens = dataset.train.tokens + dataset.validation.tokens
    return f"{loss / math.log(2) * tokens / dataset.text_bytes:.3f}"


# --- Prefect's artifacts ----------------------------------------------------------------------------------------------


def table(report: RunReport) -> list[dict[str, str]]:
    """Rows of a table artifact."""
    figures = [("Outcome", outcome(report)), *key_figures(report), *further_figures(report)]
    return [{"figure": printable(name), "value": printable(value)} for name, value in figures]


def markdown(report: RunReport) -> str:
    """The report as a markdown artifact."""
    rows, final = report.rows, report.final
    parts = [
        f"## {_inline(report.name)}",
        f"**{outcome(report)}.**",
        _markdown_table(("Figure", "Value"), [*key_figures(report), *further_figures(report)]),
        _loss_lines(rows),
        _throughput_lines(rows),
    ]
    if final is not None:
        parts += [
            "### What it writes",
            _fenced(f"{final.prompt}{final.sample}"),
            "### Use it",
            _fenced(usage_of(report), "python"),
        ]
    if report.ledger is not None and (spent := report.ledger.rows()):
        rows_of_it = [tuple(row.values()) for row in spent]
        parts += ["### Where the time went", _markdown_table(tuple(spent[0]), rows_of_it)]
    if report.dataset is not None:
        parts += ["### Dataset", _markdown_table(("What", "Value"), dataset_facts(report.dataset))]
    parts += ["### Where everything is", _markdown_table(("What", "Address"), places(report))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _loss_lines(rows: Sequence[Row]) -> str:
    losses = {"training": curve(rows, "step", "loss"), "validation": curve(rows, "evaluation", "validation_loss")}
    return mermaid.lines("Loss", losses, y_label="nats per token")


def _throughput_lines(rows: Sequence[Row]) -> str:
    """Return the points in thousands where they are many: mermaid writes every tick out in full."""
    pace, unit = curve(rows, "step", "tokens_per_second"), "tokens per second"
    if max(pace.values(), default=0.0) >= 10_000:
        pace, unit = {step: value / 1000 for step, value in pace.items()}, f"thousand {unit}"
    return mermaid.lines("Throughput", {"": pace}, y_label=unit, from_zero=True)


def live_markdown(rows: Sequence[Row]) -> str:
    """The training while it runs."""
    progress = summary(rows)
    if not rows:
        return "The job has not reported a step yet.\n"
    percent = f" ({progress.percent:.0f} %)" if progress.steps else ""
    figures = (
        ("Step", _of_steps(progress) + percent),
        ("Loss", loss_text(progress.loss)),
        ("Validation loss", loss_text(progress.validation_loss)),
        ("Tokens seen", count_text(progress.tokens)),
        ("Throughput", rate_text(progress.tokens_per_second)),
        ("MFU", share_text(progress.mfu)),
        ("Peak memory", NOTHING if progress.memory is None else bytes_text(progress.memory)),
        ("Time left", duration_text(progress.eta_seconds)),
    )
    # Prefect's table would break a value between the number and its unit.
    header, values = zip(*((name, value.replace(" ", "\N{NO-BREAK SPACE}")) for name, value in figures), strict=True)
    return "\n\n".join(part for part in (_markdown_table(header, [values]), _loss_lines(rows)) if part) + "\n"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_inline(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _inline(text: str) -> str:
    """Text that stays text, on its line and in its table cell."""
    line = re.sub(r"[^\S\N{NO-BREAK SPACE}]+", " ", printable(text)).strip()
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", line)


def _fenced(text: str, language: str = "text") -> str:
    """A code block that nothing in the text can close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"


def verdict_markdown(verdict: Verdict) -> str:
    """Return why an attempt ended, for a page in Prefect. What a node wrote stays text."""
    finding = verdict.finding
    rows = [
        (finding.code, f"{verdict.fault}{verdict.culprit}"),
        ("machine", verdict.host),
        ("what follows", verdict.action),
        ("what to do", finding.fix),
        ("logs", verdict.logs),
    ]
    told = [row for row in rows if row[1]]
    return "\n\n".join([_markdown_table(("verdict", ""), told), _fenced("\n".join(verdict.lines))])


# --- the page ---------------------------------------------------------------------------------------------------------


def html(report: RunReport) -> str:
    """Return one page that needs nothing but itself: no script, no font, no image to load."""
    dataset, identity = report.dataset, report.identity
    return page(
        "report.html",
        title=report.name,
        outcome=outcome(report),
        lead=_lead(report),
        tiles=key_figures(report),
        curves=_curves(report.rows),
        final=report.final,
        figures=further_figures(report),
        ledger=report.ledger if report.ledger and report.ledger.wall else None,
        dataset=dataset_facts(dataset) if dataset else None,
        lengths=lengths_chart(dataset) if dataset and lengths(dataset) else None,
        usage=usage_of(report),
        places=places(report),
        software=versions(identity) if identity else None,
        # As YAML: what a run can be started with again.
        config=yaml.safe_dump(dict(report.config), sort_keys=False, allow_unicode=True),
    )


def _lead(report: RunReport) -> str:
    """The run in a sentence, as far as it is known."""
    model = report.config.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    tokens = summary(report.rows).tokens
    corpus = f" of {report.dataset.name}" if report.dataset else ""
    parts = [
        str(name or "A GPT"),
        f"{count_text(parameters)} parameters" if (parameters := _parameters(report)) else "",
        f"trained on {count_text(tokens)} tokens{corpus}" if tokens else "",
    ]
    return ", ".join(part for part in parts if part) + "."


def _curves(rows: Sequence[Row]) -> dict[str, Chart]:
    """The charts of a training by name; none where there is no curve to draw yet."""
    if len(downsample(curve(rows, "step", "loss"))) < 2:
        return {}
    rate, pace = curve(rows, "step", "learning_rate"), curve(rows, "step", "tokens_per_second")
    charts = (
        _loss_chart(rows, "wide"),
        _loss_chart(rows, "narrow"),
        Chart(name="rate", title="Learning rate", lines=[Line(points=rate, color="violet")], y_text=_short),
        Chart(
            name="pace",
            title="Throughput, tokens per second",
            lines=_with_average(pace, "green"),
            y_text=_short,
            from_zero=True,
        ),
    )
    return {chart.name: chart for chart in charts}


def _loss_chart(rows: Sequence[Row], name: str) -> Chart:
    lines = _with_average(curve(rows, "step", "loss"), "blue", label="training")
    if validation := curve(rows, "evaluation", "validation_loss"):
        lines.append(Line(points=validation, color="orange", label="validation", marked=len(validation) <= 40))
    restarts = sorted({int(row["step"]) for row in rows if row.get("kind") == "start" and row.get("step")})
    title = "Loss, nats per token" + ("; dotted where an attempt resumed" if restarts else "")
    return Chart(name=name, title=title, lines=lines, y_text=_short, restarts=restarts)


def _with_average(points: Mapping[int, float], color: str, *, label: str = "") -> list[Line]:
    """Every value faintly, and where they go."""
    return [Line(points=points, color=color, faint=True), Line(points=smoothed(points), color=color, label=label)]


def _short(value: float) -> str:
    """A tick's label."""
    for size, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {name}"
    return f"{value:g}"
