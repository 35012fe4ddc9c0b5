"""The commands of each tutorial run in an empty folder, with the files that the page shows."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.runs.run import RunManifest
from litgpt_demo.documents import read_manifest
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.storage import open_storage

CHECKOUT = Path(__file__).parents[3]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def test_tutorial_continues_a_model_on_token_files(tmp_path: Path, prefect_home: Callable[[], Path]) -> None:
    """It ends with scores and text."""
    page, runs = (CHECKOUT / "docs" / "start" / "pretrain.md").read_text(encoding="utf-8"), tmp_path / "output" / "runs"
    environment = {**os.environ, "PREFECT_HOME": str(prefect_home()), "COLUMNS": "120"}
    outputs = dict[str, str]()

    def typed(*arguments: str, code: int = 0) -> str:
        done = subprocess.run([*arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Warning" not in done.stderr
        return done.stdout + done.stderr

    for kind, name, block in BLOCK.findall(page):
        block = block.replace("first-0123456789", next((run.name for run in runs.glob("first-*")), "first-"))
        if name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(block)
        if kind == "python":
            typed(sys.executable, name)
        for _, verb, *arguments in (shlex.split(line, comments=True) for line in block.splitlines() if kind == "sh"):
            is_installed = verb != "evaluate" or find_spec("lm_eval") is not None
            program = Path(sys.executable).with_name("train-litgpt")
            outputs[verb] = typed(str(program), verb, *arguments, code=0 if is_installed else 40)

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
    assert "The value of " in outputs["generate"]
    assert ("openings, acc: " if find_spec("lm_eval") else "not installed: lm_eval") in outputs["evaluate"]
