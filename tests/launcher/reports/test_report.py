from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cli.console import Watch
from launcher.config import RunConfig
from launcher.events import MetricsRow, report
from launcher.images.identity import SoftwareIdentity
from launcher.job import LogLine
from launcher.reports.goodput import Ledger, Part
from launcher.reports.report import (
    RunReport,
    further_figures,
    html,
    live_markdown,
    markdown,
    outcome,
    table,
    verdict_markdown,
)
from launcher.runs.diagnosis import Verdict
from launcher.runs.log_text import readable
from launcher.runs.run import trained_seconds
from litgpt_demo.data.dataset import DatasetManifest, Split
from litgpt_demo.errors import Fault
from litgpt_demo.export import FinalManifest, HuggingFaceProof
from litgpt_demo.export.cost import Cost
from litgpt_demo.manifests import FileRecord
from litgpt_demo.metrics import marked, parsed
from litgpt_demo.runs import RecordedPrice

FILES = (FileRecord(path="train.bin", size=10, crc32c="00000000"),)
TEXT = st.text(st.characters(exclude_categories=()), max_size=60) | st.sampled_from(
    [
        "<script>alert(1)</script>",
        "</pre><img src=x onerror=y>",
        "````\n# title",
        "\x00\x1b[31m",
        "\u202ereversed",
        "\ud800",
        "a|b",
        "&lt;",
    ]
)


def training(steps: int = 40, *, of: int = 40) -> list[dict[str, Any]]:
    """Rows of a training that reached `steps` of `of`, and resumed once on the way."""
    rows: list[dict[str, Any]] = [{"kind": "start", "step": 0, "steps": of, "tokens_per_step": 512, "world_size": 2}]
    for number in range(1, steps + 1):
        rows.append(
            {
                "kind": "step",
                "step": number,
                "loss": 4.0 + 6.0 / number,
                "learning_rate": 1e-3,
                "tokens": number * 512,
                "tokens_per_second": 12_345.0,
                "step_seconds": 0.04,
            }
        )
        if number % 10 == 0:
            rows.append({"kind": "evaluation", "step": number, "validation_loss": 4.2 + 6.0 / number, "seconds": 1.0})
    rows.insert(21, {"kind": "start", "step": 19, "steps": of, "tokens_per_step": 512, "world_size": 2})
    return rows


def dataset(**changes: Any) -> DatasetManifest:
    values = {
        "format": 1,
        "name": "stdlib",
        "key": "0123456789",
        "corpus": {},
        "filters": {},
        "dropped": {"duplicate": 3},
        "bad_documents": 0,
        "bad_places": (),
        "document_lengths": (),
        "tokenizer_hash": "ab",
        "vocab_size": 4096,
        "end_of_text": 0,
        "dtype": "<u2",
        "validation_fraction": 0.0005,
        "split_seed": 2357,
        "text_bytes": 4_000_000,
        "train": Split(documents=990, tokens=990_000, files=FILES),
        "validation": Split(documents=10, tokens=10_000, files=FILES),
        "tokenizer": FILES,
    }
    return DatasetManifest.model_validate({**values, **changes})


def final(**changes: Any) -> FinalManifest:
    values = {
        "run": "gpt-0f1e2d3c4b",
        "step": 40,
        "tokens": 20_480,
        "parameters": 14_067_712,
        "dataset_key": "0123456789",
        "validation_loss": math.log(16),
        "perplexity": 16.0,
        "complete": True,
        "logits_difference": 1.9e-6,
        "huggingface": HuggingFaceProof(architecture="GPTNeoXForCausalLM", logits_difference=2.9e-6, sample=""),
        "findings": (),
        "cost": None,
        "prompt": "def main(",
        "sample": "argv: list[str]) -> int:",
        "files": FILES,
    }
    return FinalManifest.model_construct(**{**values, **changes})


def a_report(**changes: Any) -> RunReport:
    values: dict[str, Any] = {
        "name": "gpt-0f1e2d3c4b",
        "address": "/data/runs/gpt-0f1e2d3c4b",
        "rows": training(),
        "dataset": dataset(),
        "final": final(),
        "identity": SoftwareIdentity(image=None, packages={"torch": "2.13.0"}, commit="70af7e1", dirty=True),
        "config": RunConfig(name="gpt").model_dump(mode="json"),
        "attempts": 2,
        "seconds": 200.0,
    }
    return RunReport(**{**values, **changes})


class Page(HTMLParser):
    """What a browser would make of a page; fails where an element is closed that is not the open one."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def prose(self) -> str:
        return "".join(self.text)


@pytest.fixture(scope="module")
def page() -> str:
    return html(a_report())


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_machines_that_a_run_avoids_are_in_its_report() -> None:
    assert ("Machines avoided", "gke-b, gke-d") in further_figures(a_report(avoided=("gke-b", "gke-d")))
    assert "Machines avoided" not in dict(further_figures(a_report()))


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(parsed.tags)
    fetched = [(name, value) for name, value in parsed.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert fetched  # the charts' own markers
    assert all(value.startswith("#") for _, value in fetched)
    assert "http" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_every_reference_of_a_chart_leads_to_one_element_of_the_page(page: str) -> None:
    ids = [value for name, value in Page(page).attributes if name == "id"]
    referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert len(ids) == len(set(ids))
    assert referred <= set(ids)


def test_the_page_tells_the_outcome_and_the_figures(page: str) -> None:
    prose = Page(page).prose
    for text in (
        "Finished",
        "2.7726",
        "16.00",
        "20,480",
        "12,345 tok/s",
        "3 min 20 s",
        "14.1 M",
        "40 of 40",
        "1.9e-06",
        "GPTNeoXForCausalLM, logits differ by 2.9e-06 at most",
    ):
        assert text in prose
    assert "/data/datasets/stdlib-0123456789" in prose
    assert "/data/runs/gpt-0f1e2d3c4b/final/litgpt" in prose
    assert "/data/runs/gpt-0f1e2d3c4b/final/huggingface" in prose
    assert "/data/runs/gpt-0f1e2d3c4b/final/MODEL_CARD.md" in prose
    assert "70af7e1 with uncommitted changes" in prose


def test_the_page_draws_loss_learning_rate_and_throughput(page: str) -> None:
    labels = [value for name, value in Page(page).attributes if name == "aria-label"]
    assert [label.split(",")[0] for label in labels] == ["Loss", "Loss", "Learning rate", "Throughput"]  # wide, narrow
    assert "dotted where an attempt resumed" in page


def test_the_page_shows_where_the_time_went_as_a_bar_and_a_table() -> None:
    spent = {Part.TRAINING: 300.0, Part.LOST: 60.0, Part.RESTART: 40.0}
    price = RecordedPrice(machine="a3-highgpu-8g", usd=36.0, region="us-central1", date="2026-01-01")
    made = a_report(ledger=Ledger(seconds=spent, held=spent, price=price))
    shown = Page(html(made))
    widths = [value for name, value in shown.attributes if name == "style" and value.startswith("flex-grow")]
    assert widths == ["flex-grow: 0.750000", "flex-grow: 0.150000", "flex-grow: 0.100000"]
    for text in ("Where the time went", "lost work", "1 min", "15 %", "$0.60", "wall time", "6 min 40 s", "$4.00"):
        assert text in shown.prose
    assert "| lost work | 1 min | 15 % | $0.60 |" in markdown(made)
    assert "Where the time went" not in html(a_report(ledger=Ledger(seconds={}, held={})))


def test_charts_take_their_colours_from_the_page(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    used = set(re.findall(r"var\((--\w+)\)", "".join(drawings)))
    assert used
    assert all(f"{name}:" in page for name in used)
    assert not re.search(r"#[0-9a-f]{6}", "".join(drawings))


def test_the_same_report_is_the_same_page(page: str) -> None:
    assert html(a_report()) == page


def test_bits_per_byte_do_not_depend_on_the_tokenizer() -> None:
    """log(16) nats are 4 bits per token; a million tokens of four million bytes are a bit per byte."""
    assert {"figure": "Bits per byte of text", "value": "1.000"} in table(a_report())


@given(name=TEXT, prompt=TEXT, sample=TEXT, setting=TEXT)
@settings(deadline=None, max_examples=60)
def test_no_text_becomes_markup(name: str, prompt: str, sample: str, setting: str) -> None:
    plain = a_report(rows=[])
    told = a_report(
        rows=[],
        name=name,
        address=f"/data/runs/{name}",
        final=final(prompt=prompt, sample=sample),
        dataset=dataset(name=name.encode(errors="replace").decode()),
        identity=SoftwareIdentity(image=name, packages={setting: name}, commit=setting, dirty=False),
        config={"name": setting, "model": {"name": setting}, setting: [setting]},
    )
    page = html(told)
    parsed, expected = Page(page), Page(html(plain))
    structure = [tag for tag in parsed.tags if tag not in ("tr", "th", "td", "code")]
    assert structure == [tag for tag in expected.tags if tag not in ("tr", "th", "td", "code")]
    assert "script" not in parsed.tags
    page.encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), min_size=1))
@settings(deadline=None, max_examples=30)
def test_a_sample_is_shown_as_it_was_written(sample: str) -> None:
    assert sample in Page(html(a_report(rows=[], final=final(sample=sample)))).prose


# --- runs that are not finished, or strange ---------------------------------------------------------------------------


def test_a_model_that_transformers_cannot_open_is_reported_with_the_reason() -> None:
    text = html(a_report(final=final(huggingface=None, findings=("there is no such architecture",))))
    assert "there is no such architecture" in Page(text).prose
    assert "final/huggingface" not in text


def test_the_outcome_says_how_far_the_run_came() -> None:
    assert outcome(a_report()).startswith("Finished")
    early = outcome(a_report(final=final(step=20, complete=False)))
    assert early == "A model of step 20 was collected on the way, and agrees with its checkpoint"
    assert outcome(a_report(final=None)) == "Trained to the last step; the model is not collected yet"
    assert outcome(a_report(final=None, rows=training(25))) == "Stopped at step 25 of 40"
    assert outcome(a_report(final=None, rows=[])) == "No training step is done yet"


def test_a_run_of_which_nothing_is_known_has_a_page_too() -> None:
    bare = a_report(rows=[], dataset=None, final=None, identity=None, config={})
    page = Page(html(bare))
    assert "svg" not in page.tags
    assert "No training step is done yet" in page.prose
    assert "mermaid" not in markdown(bare)
    assert {"figure": "Training time", "value": "3 min 20 s"} in table(bare)


def test_a_loss_that_stopped_being_a_number_is_reported_and_drawn_up_to_there() -> None:
    row = {"kind": "step", "step": 26, "loss": "nan", "learning_rate": 1e-3, "tokens": 26 * 512}
    broken = a_report(final=None, rows=[*training(25), row])
    assert {"figure": "Training loss", "value": "not a number"} in table(broken)
    assert "svg" in Page(html(broken)).tags
    assert '"step" 1 --> 25' in markdown(broken)


def test_a_training_that_never_had_a_finite_loss_has_no_chart() -> None:
    rows = [{"kind": "step", "step": number, "loss": "inf", "tokens": 1} for number in (1, 2, 3)]
    page = Page(html(a_report(final=None, rows=rows)))
    assert "svg" not in page.tags
    assert "infinite" in page.prose


def test_twenty_thousand_steps_make_a_page_that_can_be_mailed() -> None:
    assert len(html(a_report(rows=training(20_000, of=20_000)))) < 400_000


# --- Prefect's artifacts ----------------------------------------------------------------------------------------------


def test_the_markdown_report_has_both_curves_and_the_sample() -> None:
    text = markdown(a_report())
    assert text.count("```mermaid") == 2
    assert "| Validation loss | 2.7726 |" in text
    assert "def main(argv: list\\[str]" not in text  # code is shown as it is
    assert "def main(argv: list[str]) -> int:" in text


def test_a_model_in_a_bucket_is_used_after_it_is_copied() -> None:
    text = markdown(a_report(address="gs://bucket/runs/gpt-0f1e2d3c4b"))
    assert "gcloud storage cp --recursive gs://bucket/runs/gpt-0f1e2d3c4b/final ." in text
    assert "LLM.load('final/litgpt')" in text
    assert "gs://bucket/datasets/stdlib-0123456789" in text.replace("\\", "")


def test_the_cost_is_told_where_the_machines_have_a_list_price() -> None:
    price = RecordedPrice(machine="a2-highgpu-1g", usd=3.6, region="us-central1", date="2025-03-06")
    rows = {row["figure"]: row["value"] for row in table(a_report(final=final(cost=Cost(hours=2, price=price))))}
    assert rows["Cost"].startswith("$7.20 or more: 2.00 hours of a2-highgpu-1g")
    assert "Cost" not in {row["figure"] for row in table(a_report())}


def test_a_node_that_the_others_waited_for_is_in_the_report() -> None:
    slow = {"kind": "straggler", "step": 30, "node": 1, "rank": 9, "since": 21, "factor": 2.27, "seconds": 0.25}
    rows = {row["figure"]: row["value"] for row in table(a_report(rows=[*training(), slow]))}
    assert rows["Slow nodes"] == "node 1 (rank 9) takes 2.3 times as long as the others since step 21"
    assert "Slow nodes" not in {row["figure"] for row in table(a_report())}


def test_a_verdict_is_a_page_whatever_a_node_wrote() -> None:
    verdict = Verdict(
        fault=Fault.HANG, node=1, rank=3, evidence="Hung: ```\n<script>alert(1)</script>", logs="/runs/1", host="a|b"
    )
    text = verdict_markdown(verdict)
    assert "| attempt.hang | hang on node 1, rank 3 |" in text
    assert r"| machine | a\|b |" in text
    assert text.endswith("````text\nHung: ```\n<script>alert(1)</script>\n````")


NUMBERS = st.floats() | st.sampled_from([0.0, -1.0, 1e-320, 1e16, 1.7e308, -1.7e308])
WHOLE = st.integers(0, 2**53) | st.sampled_from([0, 1, 2, 2**53])
MADE_UP = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(
            ["start", "step", "evaluation", "checkpoint", "skip", "leave", "network", "straggler", "end", "?"]
        )
    }
    | {"step": st.integers(0, 9) | WHOLE},
    optional=dict.fromkeys(("steps", "tokens", "tokens_per_step", "parameters", "world_size", "memory", "bytes"), WHOLE)
    | dict.fromkeys(("node", "rank", "since"), WHOLE)
    | dict.fromkeys(("loss", "validation_loss", "learning_rate", "tokens_per_second", "mfu", "busbw"), NUMBERS)
    | dict.fromkeys(
        ("seconds", "step_seconds", "data_seconds", "save_seconds", "grad_norm", "floor", "factor"), NUMBERS
    )
    | dict.fromkeys(("device_name", "precision", "why", "path"), TEXT),
)


@given(st.lists(MADE_UP, max_size=12))
@settings(deadline=None)
def test_rows_that_no_training_writes_stop_nothing_that_shows_them(made_up: list[dict[str, Any]]) -> None:
    rows = [row for given in made_up if (row := parsed(marked(given))) is not None]
    for row in rows:
        assert len(readable(LogLine(0, marked(row))).splitlines()) == 1
    live_markdown(rows)
    with Watch(Console(file=io.StringIO())):
        for row in rows:
            report(MetricsRow(row=row))
    trained_seconds(rows)
    made = a_report(rows=rows, final=None)
    assert re.search(r"(?<!\\)<script", markdown(made)) is None
    table(made)


@given(st.lists(MADE_UP, max_size=12))
@settings(deadline=None, max_examples=15)
def test_rows_that_no_training_writes_make_a_page_of_text(made_up: list[dict[str, Any]]) -> None:
    page = Page(html(a_report(rows=made_up, final=None)))
    assert "script" not in page.tags


@given(TEXT, TEXT)
@settings(deadline=None)
def test_no_sample_ends_its_code_block(prompt: str, sample: str) -> None:
    text = markdown(a_report(rows=[], final=final(prompt=prompt, sample=sample)))
    fence = re.search(r"^(`{3,})text$", text, re.MULTILINE)
    assert fence
    block = text[fence.end() + 1 :]
    body = block[: block.index(f"\n{fence[1]}\n")]
    assert fence[1] not in body
    assert block[len(body) :].startswith(f"\n{fence[1]}\n\n### Use it")
    assert "\x00" not in text
    text.encode()


@given(TEXT)
@settings(deadline=None)
def test_no_text_breaks_a_table(text: str) -> None:
    told = markdown(a_report(rows=[], dataset=dataset(name=text.encode(errors="replace").decode())))
    cells = [line for line in told.splitlines() if line.startswith("| Name |")]
    assert len(cells) == 1
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", cells[0])) == 3


def test_live_numbers_fit_a_row() -> None:
    lines = live_markdown(training(25)).splitlines()
    assert lines[0] == "| Step | Loss | Validation loss | Tokens seen | Throughput | MFU | Peak memory | Time left |"
    shown = lines[2].replace("\N{NO-BREAK SPACE}", " ")
    assert shown.startswith("| 25 of 40 (62 %) | 4.2400 | 4.5000 | 12,800 | 12,345 tok/s | ")
    assert all(" " not in cell.strip(" ") for cell in lines[2].strip("|").split("|"))  # a value stays on its line
    [chart] = [line for line in lines if line.startswith("    line ")][1:]
    assert chart.startswith('    line "validation" [')


def test_before_the_first_row_the_live_view_says_so() -> None:
    assert live_markdown([]) == "The job has not reported a step yet.\n"


def test_the_table_artifact_is_plain_text() -> None:
    rows = table(a_report())
    assert rows[0] == {"figure": "Outcome", "value": outcome(a_report())}
    assert all(set(row) == {"figure", "value"} and all(row.values()) for row in rows)


def test_the_page_draws_the_lengths_of_the_datasets_documents() -> None:
    page = html(a_report(rows=[], dataset=dataset(document_lengths=(0, 0, 100, 0, 500, 400))))
    assert page.count("<svg") == 1
    assert "Length of documents, percent of 1,000" in page
    assert page.count("fill: var(--blue)") == 4


def test_how_many_elastic_nodes_trained_from_which_step_on_is_in_the_report() -> None:
    told = [
        {"kind": "start", "step": 0, "nodes": 3, "generation": 1},
        {"kind": "step", "step": 9, "loss": 3.0, "tokens_per_second": 3000.0},
        {"kind": "start", "step": 8, "nodes": 2, "generation": 2},
        {"kind": "step", "step": 9, "loss": 3.0, "tokens_per_second": 2000.0},
        {"kind": "start", "step": 12, "nodes": 3, "generation": 3},
    ]
    rows = {row["figure"]: row["value"] for row in table(a_report(rows=told))}
    assert rows["Nodes"] == "3 from step 0 (3,000 tok/s); 2 from step 8 (2,000 tok/s); 3 from step 12"
    assert "Nodes" not in {row["figure"] for row in table(a_report())}
