"""The report of a training and of its dataset: a page to keep and send, and the same in short for Prefect's artifacts.

Pure: a RunReport in, text out; the same report gives the same bytes. Whatever a corpus, a model or a config says is
escaped, so that a page opened from a bucket is only ever text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import median
from typing import TYPE_CHECKING

import yaml
from pydantic import JsonValue

from launcher.curves import Progress, downsample, smoothed, summary
from launcher.formatting import (
    ACTIVE,
    NOTHING,
    bytes_text,
    count_text,
    duration_text,
    loss_text,
    rate_text,
    share_text,
    shown,
)
from launcher.images.identity import SoftwareIdentity
from launcher.pages import page_of_error
from launcher.reports import mermaid
from launcher.reports.charts import Chart, Line, svg
from launcher.reports.goodput import Ledger
from launcher.runs.diagnosis import ADVICE, Diagnosis
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.data.preparation import Preparation
from litgpt_demo.export import FinalManifest, usage
from litgpt_demo.export.evaluation import Evaluation
from litgpt_demo.metrics import Row, curve
from litgpt_demo.runs import ATTEMPTS, CONFIG, FINAL, HUGGINGFACE, LITGPT, METRICS, REPORT

if TYPE_CHECKING:
    from jinja2 import Template

Pairs = list[tuple[str, str]]
"""Name and value, both as they are shown."""

_SAMPLED_STEPS = 8
"""Steps whose texts a report shows: the first, the last, and others evenly between."""
_LENGTHS, _TOKENS = "Length of documents", "tokens, this many to twice as many"


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Everything that is known of a run; a part that does not exist yet is None."""

    name: str
    address: str
    rows: Sequence[Row]
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
    evaluations: Sequence[Evaluation] = ()
    """The scores of the collected model, and of checkpoints on the way; the oldest first."""
    live: bool = False
    """An orchestrator is at work on the run."""
    ended: str = ""
    """Why the run has ended before its model was collected."""

    @cached_property
    def progress(self) -> Progress:
        return summary(self.rows)

    @property
    def parameters(self) -> int:
        """The model's; 0 where they are not known yet."""
        if self.final is not None:
            return self.final.parameters
        return int(self.progress.start.get("parameters") or 0)


def outcome(report: RunReport) -> str:
    progress = report.progress
    if report.final is not None:
        if not report.final.complete:
            return f"A model of step {report.final.step:,} was collected on the way, and agrees with its checkpoint"
        return "Finished: the trained model was loaded back and agrees with its checkpoint"
    if progress.steps and progress.step >= progress.steps:
        reached = "Trained to the last step; the model is not collected yet"
    elif progress.step:
        reached = f"{'Training' if report.live else 'Stopped'} at step {_of_steps(progress)}"
    else:
        reached = "No training step is done yet"
    return ": ".join(filter(None, (reached, report.ended)))


def bits_per_byte(nats: float, tokens: int, size: int) -> str:
    """A loss per byte of text instead of per token, so that different tokenizers can be compared. Tokens per byte are
    those of the whole dataset: no manifest counts the validation split's bytes."""
    return f"{nats / math.log(2) * tokens / size:.3f}" if math.isfinite(nats) and size else NOTHING


def figures(report: RunReport) -> tuple[Pairs, Pairs]:
    """Return the few figures that readers want first, and the rest of them, without unknown ones."""
    progress, start, final, dataset = report.progress, report.progress.start, report.final, report.dataset
    pace, used = (list(curve(report.rows, "step", name).values()) for name in ("tokens_per_second", "mfu"))
    loss = final.validation_loss if final else progress.validation_loss
    nats, bits = math.nan, NOTHING
    if loss is not None:
        nats = loss
    if dataset is not None:
        bits = bits_per_byte(nats, dataset.tokens, dataset.text_bytes)
    device = start.get("device_name") or str(start.get("device", "")).partition(":")[0]
    processes = NOTHING
    if "world_size" in start:
        processes = " on ".join(filter(None, (f"{start['world_size']:,}", device)))
    loaded_back = in_transformers = NOTHING
    if final is not None:
        loaded_back, in_transformers = _differing(final.logits_difference), "; ".join(final.findings)
        if (proof := final.huggingface) is not None:
            in_transformers = f"{proof.architecture}, {_differing(proof.logits_difference)}"
    first = [
        ("Validation loss", loss_text(loss)),
        # Above e^20 it says nothing more than "untrained", in ever more digits.
        ("Perplexity", f"{math.exp(nats):,.2f}" if -math.inf < nats < 20 else NOTHING),
        ("Tokens seen", shown(count_text, progress.tokens or None)),
        ("Throughput", rate_text(median(pace or [math.nan]))),
        ("Training time", duration_text(report.seconds)),
        ("Parameters", shown(count_text, report.parameters or None)),
    ]
    further = [
        ("Steps", _of_steps(progress)),
        ("Training loss", loss_text(progress.loss)),
        ("Bits per byte of text", bits),
        ("Attempts", str(report.attempts)),
        ("Machines avoided", ", ".join(report.avoided) or NOTHING),
        ("Cost", shown(str, final and final.cost)),
        ("Processes", processes),
        ("Precision", str(start.get("precision", NOTHING))),
        ("MFU", share_text(median(used or [math.nan]))),
        ("Peak memory", shown(bytes_text, progress.memory)),
        ("Loaded back", loaded_back),
        ("In transformers", in_transformers),
        *scores(report),
    ]
    known = ([(name, value) for name, value in pairs if value != NOTHING] for pairs in (first, further))
    return next(known), next(known)


def scores(report: RunReport) -> Pairs:
    """Return each task and metric with its scores; of those on the way the steps too."""
    found: dict[str, list[str]] = {}
    for evaluation in report.evaluations:
        suffix = f" at step {evaluation.step:,}"
        if report.final is not None and evaluation.step == report.final.step:
            suffix = ""
        for name, value in evaluation.pairs:
            found.setdefault(name, []).append(value + suffix)
    return [(name, "; ".join(values)) for name, values in found.items()]


def dataset_facts(dataset: DatasetManifest) -> Pairs:
    train, validation = dataset.train, dataset.validation
    density = dataset.text_bytes / max(dataset.tokens, 1) or None
    return [
        ("Name", dataset.name),
        ("Text", shown(bytes_text, dataset.text_bytes or None)),
        ("Training", f"{count_text(train.tokens)} tokens in {count_text(train.documents)} documents"),
        ("Validation", f"{count_text(validation.tokens)} tokens in {count_text(validation.documents)} documents"),
        ("Vocabulary", f"{dataset.vocab_size:,} ids"),
        ("Bytes per token", shown("{:.2f}".format, density)),
        ("Content hash", dataset.content_hash),
    ]


def progress_text(progress: Preparation) -> str:
    if progress.phase == "publish":
        return "publish: joining the pieces"
    if progress.phase == "tokenizer":
        return f"tokenizer: training on {progress.documents:,} documents, {bytes_text(progress.text_bytes)}"
    text = f"{progress.phase}: {progress.documents:,} documents"
    if progress.tokens:
        text += f", {count_text(progress.tokens)} tokens"
    text += f", {bytes_text(progress.rate)}/s"
    if progress.seconds_left is not None:
        text += f", {duration_text(progress.seconds_left)} left"
    return text


def fraction(progress: Preparation) -> float | None:
    """The share of the encoding, which is nearly all of the work; None where the end is not known."""
    if progress.phase == "publish":
        return 1.0
    if not progress.all_bytes:
        return None
    return progress.text_bytes / progress.all_bytes


def dataset_table(manifest: DatasetManifest, *, seconds: float) -> list[dict[str, str]]:
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
    spoken = [f"{2**power}{unit}" for unit in ("", "k", "M", "G") for power in range(10)]  # 512, 1k, 64k, 1M
    return {spoken[power]: 100 * documents / every for power, documents in counts[first:]} if every else {}


def lengths_chart(manifest: DatasetManifest) -> Chart:
    title, bars = f"{_LENGTHS}, percent of {manifest.documents:,}", lengths(manifest)
    return Chart(name="lengths", title=title, bars=bars, x_label=_TOKENS, y_text=lambda share: f"{share:g} %")


def lengths_markdown(manifest: DatasetManifest) -> str:
    return mermaid.bars(_LENGTHS, lengths(manifest), x_label=_TOKENS, y_label="percent of documents")


def source_facts(dataset: DatasetManifest, rows: Sequence[Row]) -> Pairs:
    """Return what came from each source of a mixture: its share at each stage, its tokens, its losses."""
    found: Pairs = []
    if dataset.mixture is None:
        return found
    for number, source in enumerate(dataset.mixture.sources):
        facts = [", then ".join(f"{shares[number] / 10:g} %" for _, shares in dataset.mixture.schedule)]
        tokens = [*curve(rows, "step", f"tokens.{source.name}").values()]
        if tokens:
            facts.append(f"{count_text(int(tokens[-1]))} of its {count_text(source.train)} tokens seen")
        losses = [*curve(rows, "step", f"loss.{source.name}").values()]
        if losses:
            facts.append(f"training loss {loss_text(losses[-1])}")
        validation = [*curve(rows, "evaluation", f"validation_loss.{source.name}").values()]
        if validation:
            facts.append(f"validation loss {loss_text(validation[-1])}")
            bits = bits_per_byte(validation[-1], source.train + source.validation, source.text_bytes)
            if bits != NOTHING:
                facts.append(f"{bits} bits per byte of text")
        found.append((f"Source {source.name}", "; ".join(facts)))
    return found


def samples(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return step, prompt and text of what the model wrote during the training, the oldest first."""
    texts = {
        (int(row["step"]), str(row["prompt"])): str(row["text"])
        for row in rows
        if row.get("kind") == "sample" and {"prompt", "text"} <= row.keys()
    }
    steps = sorted({step for step, _ in texts})
    last, gaps = len(steps) - 1, min(len(steps), _SAMPLED_STEPS) - 1
    kept = {steps[number * last // max(gaps, 1)] for number in range(gaps + 1)}
    return [(f"{step:,}", prompt, text) for (step, prompt), text in sorted(texts.items()) if step in kept]


def _samples_markdown(rows: Sequence[Row]) -> str:
    found = samples(rows)
    if not found:
        return ""
    return f"### Texts during the training\n\n{_markdown_table(('Step', 'Prompt', 'Text'), found)}"


def places(report: RunReport) -> Pairs:
    named = {"Checkpoints": "checkpoints", "Metrics": METRICS, "Config": CONFIG, "Logs": ATTEMPTS, "Report": REPORT}
    if report.final:
        hub = {"For Hugging Face": HUGGINGFACE} if report.final.huggingface else {}
        named = {"Trained model": LITGPT, **hub, "Model card": f"{FINAL}/MODEL_CARD.md", **named}
    found = [(name, f"{report.address}/{path}") for name, path in named.items()]
    root, runs, _ = report.address.rpartition("/runs/")
    if report.dataset and runs:
        found.append(("Dataset", f"{root}/datasets/{report.dataset.name}-{report.dataset.content_hash}"))
    return found


def _differing(logits: float) -> str:
    return f"logits differ by {logits:.1e} at most" if logits else "the same logits"


def _of_steps(progress: Progress) -> str:
    return " of ".join(f"{number:,}" for number in (progress.step, progress.steps) if number is not None)


def markdown(report: RunReport) -> str:
    # In thousands where they are many: mermaid writes every tick out in full.
    pace, unit = curve(report.rows, "step", "tokens_per_second"), "tokens per second"
    if max(pace.values(), default=0.0) >= 10_000:
        pace, unit = {step: value / 1000 for step, value in pace.items()}, f"thousand {unit}"
    parts = [
        f"## {_inline(report.name)}",
        f"**{outcome(report)}.**",
        _markdown_table(("Figure", "Value"), [*figures(report)[0], *figures(report)[1]]),
        _loss_lines(report.rows),
        mermaid.lines("Throughput", {"": pace}, y_label=unit, from_zero=True),
        _samples_markdown(report.rows),
    ]
    if (final := report.final) is not None:
        parts += ["### What it writes", _fenced(f"{final.prompt}{final.sample}")]
        code = usage(report.address, final, huggingface=final.huggingface is not None)
        parts += ["### Use it", _fenced(code, "python")]
    if report.ledger is not None and (spent := report.ledger.rows()):
        parts += ["### Where the time went", _markdown_table(tuple(spent[0]), [tuple(row.values()) for row in spent])]
    if report.dataset is not None:
        facts = [*dataset_facts(report.dataset), *source_facts(report.dataset, report.rows)]
        parts += ["### Dataset", _markdown_table(("What", "Value"), facts)]
    parts += ["### Where everything is", _markdown_table(("What", "Address"), places(report))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _loss_lines(rows: Sequence[Row]) -> str:
    losses = {"training": curve(rows, "step", "loss"), "validation": curve(rows, "evaluation", "validation_loss")}
    return mermaid.lines("Loss", losses, y_label="nats per token")


def live_markdown(rows: Sequence[Row], texts: Sequence[Row] = ()) -> str:
    """Return the page of a training that runs, with the rows of `texts` that its model wrote."""
    progress = summary(rows)
    if not rows:
        return "The job has not reported a step yet.\n"
    steps = _of_steps(progress)
    if progress.steps:
        steps += f" ({progress.percent:.0f} %)"
    figures = (
        ("Step", steps),
        ("Loss", loss_text(progress.loss)),
        ("Validation loss", loss_text(progress.validation_loss)),
        ("Tokens seen", count_text(progress.tokens)),
        ("Throughput", rate_text(progress.tokens_per_second)),
        ("MFU", share_text(progress.mfu)),
        ("Peak memory", shown(bytes_text, progress.memory)),
        ("Time left", duration_text(progress.eta_seconds)),
    )
    # Prefect's table would break a value between the number and its unit.
    header, values = zip(*((name, value.replace(" ", "\N{NO-BREAK SPACE}")) for name, value in figures), strict=True)
    parts = _markdown_table(header, [values]), _loss_lines(rows), _samples_markdown(texts)
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_inline(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _inline(text: str) -> str:
    line = re.sub(r"[^\S\N{NO-BREAK SPACE}]+", " ", printable(text)).strip()
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", line)


def _fenced(text: str, language: str = "text") -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{printable(text)}\n{fence}"


def diagnosis_markdown(diagnosis: Diagnosis) -> str:
    """Return why an attempt ended, for a page in Prefect. Text that a node wrote stays text."""
    rows = [
        (diagnosis.code, f"{diagnosis.fault}{diagnosis.culprit}"),
        ("machine", diagnosis.host or NOTHING),
        ("what follows", diagnosis.action),
        ("what to do", ADVICE[diagnosis.fault]),
        ("help", page_of_error(diagnosis.evidence, diagnosis.fault)),
        ("logs", diagnosis.logs),
    ]
    return "\n\n".join([_markdown_table(("diagnosis", ""), rows), _fenced("\n".join(diagnosis.lines))])


def html(report: RunReport) -> str:
    """One page that needs nothing but itself: no script, no font, no image to load."""
    dataset, final, software, (first, further) = report.dataset, report.final, None, figures(report)
    if (identity := report.identity) is not None:
        commit = f"{identity.commit} with uncommitted changes" if identity.dirty else identity.commit
        named = [("Image", identity.image), ("Commit", commit)]
        software = [(name, value) for name, value in named if value] + sorted(identity.packages.items())
    model, tokens = report.config.get("model"), report.progress.tokens
    name = model.get("name") if isinstance(model, dict) else None
    lead = str(name or "A GPT")
    if report.parameters:
        lead += f", {count_text(report.parameters)} parameters"
    if tokens:
        lead += f", trained on {count_text(tokens)} tokens"
    facts, chart, example = None, None, ""
    if dataset is not None:
        facts = [*dataset_facts(dataset), *source_facts(dataset, report.rows)]
        if tokens:
            lead += f" of {dataset.name}"
        if lengths(dataset):
            chart = lengths_chart(dataset)
    if final is not None:
        example = usage(report.address, final, huggingface=final.huggingface is not None)
    return template("report.html").render(
        title=report.name,
        outcome=outcome(report),
        lead=f"{lead}.",
        tiles=first,
        curves=_curves(report.rows),
        final=final,
        samples=samples(report.rows),
        figures=further,
        ledger=report.ledger if report.ledger and report.ledger.wall else None,
        dataset=facts,
        lengths=chart,
        usage=example,
        places=places(report),
        software=software,
        # As YAML: what a run can be started with again.
        config=yaml.safe_dump(dict(report.config), sort_keys=False, allow_unicode=True),
    )


@cache
def template(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("launcher", "reports/templates"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"svg": svg, "duration_text": duration_text}
    return environment.get_template(name)


def printable(text: str) -> str:
    """Return `text` without what no page and no database takes: control characters, half characters, reversed text."""
    kept = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(f"[{ACTIVE}]", "\ufffd", kept)


def _curves(rows: Sequence[Row]) -> dict[str, Chart]:
    loss, validation = curve(rows, "step", "loss"), curve(rows, "evaluation", "validation_loss")
    rate, pace = curve(rows, "step", "learning_rate"), curve(rows, "step", "tokens_per_second")
    if len(downsample(loss)) < 2:
        return {}
    # Every value faintly, and where they go.
    losses = [Line(points=loss, color="blue", faint=True), Line(points=smoothed(loss), color="blue", label="training")]
    if validation:
        losses.append(Line(points=validation, color="orange", label="validation", marked=len(validation) <= 40))
    restarts = sorted({int(row["step"]) for row in rows if row.get("kind") == "start" and row.get("step")})
    paces = [Line(points=pace, color="green", faint=True), Line(points=smoothed(pace), color="green")]
    title, rates = "Loss, nats per token", [Line(points=rate, color="violet")]
    if restarts:
        title += "; dotted where an attempt resumed"
    wide = Chart(name="wide", title=title, lines=losses, y_text=_short, restarts=restarts)
    return {
        "wide": wide,
        "narrow": replace(wide, name="narrow"),
        "rate": Chart(name="rate", title="Learning rate", lines=rates, y_text=_short),
        "pace": Chart(name="pace", title="Throughput, tokens per second", lines=paces, y_text=_short, from_zero=True),
    }


def _short(value: float) -> str:
    for size, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {name}"
    return f"{value:g}"
