"""The report of a run: a page that needs nothing but itself, and Prefect's artifacts; whatever a node wrote is text."""

import io
import math
import re
from functools import partial
from html.parser import HTMLParser
from typing import Any, ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cli.foreground import Watch
from launcher.config import RunConfig
from launcher.events import MetricsRow, report
from launcher.formatting import readable
from launcher.images.identity import SoftwareIdentity
from launcher.job import LogLine
from launcher.reports.goodput import AttemptTimes, ledger
from launcher.reports.report import RunReport, diagnosis_markdown, figures, html, live_markdown, markdown, outcome
from launcher.runs.diagnosis import Diagnosis
from launcher.runs.index import AttemptRecord
from launcher.runs.run import trained_seconds
from litgpt_demo.data.dataset import DatasetManifest, Split
from litgpt_demo.documents import FileRecord
from litgpt_demo.errors import FailureClass
from litgpt_demo.export import FinalManifest, HuggingFaceProof
from litgpt_demo.metrics import COLUMNS, from_log_line, to_log_line

FILES = (FileRecord(path="train.bin", size=10, crc32c="00000000"),)
HOSTILE = [
    "<script>alert(1)</script>", "</pre><img src=x onerror=y>", "````\n# title", "\x00\x1b[31m", "\u202ereversed",
    "\ud800", "a|b", "&lt;",
]  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=()), max_size=60) | st.sampled_from(HOSTILE)


def training(steps: int = 40) -> list[dict[str, Any]]:
    """Rows of a training that reached `steps` of 40, and resumed once on the way."""
    start = {"kind": "start", "step": 0, "steps": 40, "tokens_per_step": 512, "world_size": 2}
    pace = {"learning_rate": 1e-3, "tokens_per_second": 12_345.0, "step_seconds": 0.04}
    numbers = range(1, steps + 1)
    rows = [
        {"kind": "step", "step": entry, "loss": 4.0 + 6.0 / entry, "tokens": entry * 512, **pace} for entry in numbers
    ]
    evaluation = {"kind": "evaluation", "step": steps, "validation_loss": 4.5, "seconds": 1.0}
    return [start, *rows[:20], {**start, "step": 19}, *rows[20:], evaluation]


def dataset(**changes: Any) -> DatasetManifest:
    values = {
        "name": "stdlib", "content_hash": "0123456789", "vocab_size": 4096, "document_lengths": (),
        "text_bytes": 4_000_000, "train": Split(documents=990, tokens=990_000, files=FILES),
        "validation": Split(documents=10, tokens=10_000, files=FILES),
    }  # fmt: skip
    return DatasetManifest.model_construct(**{**values, **changes})


def final(**changes: Any) -> FinalManifest:
    values = {
        "run": "gpt-0f1e2d3c4b", "step": 40, "parameters": 14_067_712, "validation_loss": math.log(16),
        "complete": True, "logits_difference": 1.9e-6, "findings": (), "cost": None, "files": FILES,
        "huggingface": HuggingFaceProof(
            architecture="GPTNeoXForCausalLM", attention="sdpa", logits_difference=2.9e-6, tokens=256, sample=""
        ),
        "prompt": "def main(", "sample": "argv: list[str]) -> int:",
    }  # fmt: skip
    return FinalManifest.model_construct(**{**values, **changes})


def a_report(**changes: Any) -> RunReport:
    values: dict[str, Any] = {
        "name": "gpt-0f1e2d3c4b", "address": "/data/runs/gpt-0f1e2d3c4b", "rows": training(), "dataset": dataset(),
        "final": final(), "attempts": 2, "seconds": 200.0, "config": RunConfig(name="gpt").model_dump(mode="json"),
        "identity": SoftwareIdentity(image=None, packages={"torch": "2.13.0"}, commit="70af7e1", dirty=True),
    }  # fmt: skip
    return RunReport(**{**values, **changes})


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.prose = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.prose += data


def test_report_is_self_contained() -> None:
    """It has the same bytes each time."""
    text = html(a_report())
    page = Page(text)
    assert html(a_report()) == text
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    fetched = {value for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset")}
    assert fetched <= {f"#{value}" for name, value in page.attributes if name == "id"}
    assert not re.search(r"url\((?!#)|@import|http", text)


def test_report_has_outcome_figures_curves_with_a_sample() -> None:
    """So has the Markdown."""
    page, text = Page(html(a_report())), markdown(a_report())
    for query in (
        "Finished", "2.7726", "20,480", "12,345 tok/s", "3 min 20 s", "40 of 40", "/data/datasets/stdlib-0123456789",
        "/data/runs/gpt-0f1e2d3c4b/final/huggingface", "70af7e1 with uncommitted changes",
    ):  # fmt: skip
        assert query in page.prose
    labels = [str(value).partition(",")[0] for name, value in page.attributes if name == "aria-label"]
    assert set(labels) == {"Loss", "Learning rate", "Throughput"}
    assert text.count("```mermaid") == 2
    assert "def main(argv: list[str]) -> int:" in text
    # log(16) nats are 4 bits per token; a million tokens of four million bytes are a bit per byte.
    assert ("Bits per byte of text", "1.000") in figures(a_report())[1]
    assert "4.2400" in live_markdown(training(25))


def sampled(*steps: int, prompt: str = "def ", text: str = "main():") -> list[dict[str, Any]]:
    """Rows of a text of each step."""
    return [{"kind": "sample", "step": step, "prompt": prompt, "text": f"{text}{step}"} for step in steps]


def test_texts_of_the_first_last_steps_are_shown() -> None:
    """A step that was repeated has its last text, and a long training only some."""
    rows = [*sampled(*range(100, 10_001, 100)), *sampled(10_000, text="again")]
    page, text = Page(html(a_report(rows=[*training(), *rows]))), markdown(a_report(rows=[*training(), *rows]))
    for step in ("100", "1,500", "2,900"):
        assert f"{step}def main():{step.replace(',', '')}" in page.prose
        assert f"| {step} | def | main():{step.replace(',', '')} |" in text
    assert "10,000def again10000" in page.prose
    assert "main():10000" not in page.prose + text
    assert page.prose.count("def main():") == 7
    assert "Texts during the training" not in html(a_report()) + markdown(a_report())


def test_a_running_training_shows_its_texts() -> None:
    assert "| 20 | def | main():20 |" in live_markdown(training(25), sampled(20))
    assert "Texts" not in live_markdown(training(25))


def test_the_outcome_says_how_far_the_run_came() -> None:
    assert outcome(a_report(final=final(step=20, complete=False))).startswith("A model of step 20 was collected")
    assert outcome(a_report(final=None)) == "Trained to the last step; the model is not collected yet"
    assert outcome(a_report(final=None, rows=training(25))) == "Stopped at step 25 of 40"
    html(a_report(rows=[], dataset=None, final=None, identity=None, config={}))
    broken = a_report(final=None, rows=[*training(25), {"kind": "step", "step": 26, "loss": "nan", "tokens": 13_312}])
    assert ("Training loss", "not a number") in figures(broken)[1]


@given(name=TEXT, sample=TEXT, setting=TEXT)
@settings(max_examples=60)
def test_no_text_becomes_markup(name: str, sample: str, setting: str) -> None:
    reported = a_report(
        rows=sampled(1, prompt=name, text=sample), name=name, address=f"/data/runs/{name}",
        final=final(prompt=name, sample=sample),
        dataset=dataset(name=name.encode(errors="replace").decode()),
        identity=SoftwareIdentity(image=name, packages={setting: name}, commit=setting, dirty=False),
        config={"name": setting, "model": {"name": setting}, setting: [setting]},
    )  # fmt: skip
    page = html(reported)
    found, expected = Page(page), Page(html(a_report(rows=sampled(1))))
    structure = [tag for tag in found.tags if tag not in ("tr", "th", "td", "code")]
    assert structure == [tag for tag in expected.tags if tag not in ("tr", "th", "td", "code")]
    page.encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)
    text = markdown(reported)
    text.encode()
    [cells] = [line for line in text.splitlines() if line.startswith("| Name |")]
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", cells)) == 3
    fence = re.search(r"^(`{3,})text$", text, re.MULTILINE)
    block = text[fence.end() + 1 :]
    assert block[block.index(f"\n{fence[1]}\n") :].startswith(f"\n{fence[1]}\n\n### Use it"), "no sample ends its block"


def test_diagnosis_is_a_page_whatever_a_node_wrote() -> None:
    diagnosis = Diagnosis(
        fault=FailureClass.HANG,
        node=1,
        rank=3,
        evidence="Hung: ```\n<script>alert(1)</script>",
        logs="/runs/1",
        host="a|b",
    )
    text = diagnosis_markdown(diagnosis)
    assert "| attempt.hang | hang on node 1, rank 3 |" in text
    assert r"| machine | a\|b |" in text
    assert r"| help | docs/reference/exit-codes.md\#46 |" in text
    assert text.endswith("````text\nHung: ```\n<script>alert(1)</script>\n````")


FLOATS = st.floats() | st.sampled_from([0.0, -1.0, 1e-320, 1e16, 1.7e308, -1.7e308])
POOLS = ((3, st.integers(0, 2**53)), (0.5, FLOATS), ("x", TEXT))
KINDS = st.sampled_from(["start", "step", "evaluation", "checkpoint", "leave", "network", "end", "?"])
STEPS = st.integers(0, 9) | st.integers(0, 2**53)
MISSING = object()
ATTEMPT = AttemptRecord.model_construct(attempt=3, platform={"nodes": 2}, created=0.0, flow_run=None)


def survives(name: str, value: object) -> bool:
    return from_log_line(to_log_line({"kind": "step", "step": 1, name: value})) is not None


PLAIN: dict[str, Any] = {name: 3 if survives(name, 3) else "x" for name in COLUMNS}


def odd(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Rows that are plain but for one column: each value is of its type, for one that is refused costs the row."""
    pools = [pool.filter(partial(survives, name)) for example, pool in POOLS if survives(name, example)]
    return st.fixed_dictionaries({"kind": KINDS, "step": STEPS, name: st.one_of(*pools, st.just(MISSING))})


MADE_UP = st.sampled_from([*COLUMNS, "unknown"]).flatmap(odd)


class Noted(dict[str, Any]):
    """A row that notes which columns are read."""

    read: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


@given(st.lists(MADE_UP, min_size=1, max_size=6))
@settings(max_examples=50)
def test_malformed_rows_never_stop_a_report(made_up: list[dict[str, Any]]) -> None:
    Noted.read.clear()
    made = [{name: value for name, value in (PLAIN | row).items() if value is not MISSING} for row in made_up]
    rows = [Noted(row) for line in made if (row := from_log_line(to_log_line(line))) is not None]
    assert len(rows) == len(made_up), "every row reaches the reports"
    for row in rows:
        assert len(readable(LogLine(0, to_log_line(row))).splitlines()) == 1
    live_markdown(rows)
    with Watch(Console(file=io.StringIO())):
        for row in rows:
            report(MetricsRow(row=row))
    trained_seconds(rows)
    shown = a_report(rows=rows, final=None, ledger=ledger([AttemptTimes(record=ATTEMPT, end=None)], rows))
    assert re.search(r"(?<!\\)<script", markdown(shown)) is None
    assert "script" not in Page(html(shown)).tags
    assert Noted.read - {"kind", "step"} <= COLUMNS.keys(), "litgpt_demo.metrics.COLUMNS lacks a column that is read"
