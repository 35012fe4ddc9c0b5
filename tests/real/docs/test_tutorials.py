"""The commands of each tutorial run in an empty folder, and print what the page shows."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from page_reader import CHECKOUT, HAS_SCORES, Reader

from launcher.runs.run import RunManifest
from litgpt_demo.documents import read_manifest
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.storage import open_storage


@pytest.fixture
def reader(tmp_path: Path, prefect_home: Callable[[], Path]) -> Reader:
    return Reader(tmp_path, prefect_home())


def test_tutorial_installs_an_environment_for_doctor(reader: Reader) -> None:
    """The commands of make are left out: a second environment takes minutes, and this one is in use."""
    reader.follow("docs/start/install.md", instead={"make train": "", "make stop": "", "make clean": ""})
    assert "python.version" in reader.printed["train-litgpt doctor"]


def test_tutorial_trains_a_first_model(reader: Reader) -> None:
    """The command of `make train` is typed in its place, because make would make a second environment."""
    command = "train-litgpt run deployments/configs/local.yaml"
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^train: .*\n\t\$\(BIN\)/{command}\n", makefile, re.MULTILINE)
    reader.follow("docs/start/first-model.md", instead={"make train": command})
    report, *_ = reader.folder.glob("output/runs/*/report.html")
    for part in ("Validation loss", "What it writes", "Where the time went", "Dataset", "Use it"):
        assert part in report.read_text(encoding="utf-8")


def test_tutorial_resumes_a_model_of_own_text(reader: Reader) -> None:
    """A real Ctrl-C stops it, and the same command continues at the step of its last checkpoint."""
    reader.follow("docs/start/own-text.md")
    [run] = reader.folder.glob("output/runs/own-text-*")
    assert {attempt.name for attempt in (run / "attempts").iterdir()} == {"1", "2"}
    assert [*curve(rows_of((run / "metrics.jsonl").read_bytes()), "step", "loss")] == [*range(1, 401)]
    [stopped] = re.findall(r"step (\d+)/400", reader.printed["train-litgpt status own.yaml"])
    assert int(stopped) < 400
    assert f"step {stopped}/400" in reader.printed["train-litgpt run own.yaml"]


def test_tutorial_continues_a_model_on_token_files(reader: Reader) -> None:
    """It ends with scores and text."""
    reader.follow("docs/start/pretrain.md")
    runs = reader.folder / "output" / "runs"
    [first], [second] = runs.glob("first-*"), runs.glob("second-*")
    with gzip.open(first / "profile" / "steps-20-22-rank-0.json.gz") as trace:
        marks = {event["name"] for event in json.load(trace)["traceEvents"]}
    assert {"ProfilerStep#20", "ProfilerStep#21", "ProfilerStep#22"} <= marks
    rows = rows_of((second / "metrics.jsonl").read_bytes())
    rates = curve(rows, "step", "learning_rate")
    assert [*rates] == [*range(1, 21)]
    assert {rates[step] for step in range(1, 11)} == {4e-3}
    assert rates[10] > rates[11] > rates[19] > rates[20] == pytest.approx(4e-4)
    shares = [curve(rows, "step", f"tokens.{source}")[20] / (20 * 8 * 64) for source in ("mine", "stdlib")]
    assert shares == pytest.approx([0.7, 0.3], abs=0.01)
    learned = curve(rows_of((first / "metrics.jsonl").read_bytes()), "step", "loss")
    assert curve(rows, "step", "loss")[1] < learned[10], "it began with the weights of the first"
    origin = read_manifest(open_storage(str(second)), RunManifest).origin
    lineage = json.loads((second / "final" / "lineage.json").read_text())["training"]["origin"]
    assert lineage["files"] == {name: [*file] for name, file in origin.files.items()}
    assert "trained from" in (second / "final" / "MODEL_CARD.md").read_text()
    printed = "".join(reader.printed.values())
    assert "The value of " in printed
    assert ("openings, acc: " if HAS_SCORES else "not installed: lm_eval") in printed
