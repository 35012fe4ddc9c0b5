"""docs/recipes.md, walked as its reader walks it: its configs written down, its commands run one after the other."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from console_script import Cli

from litgpt_demo.metrics import curve, rows_of

PAGE = Path("docs/recipes.md")
BLOCK = re.compile(r"^```(yaml|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\S+\.yaml)\n")


@pytest.mark.timeout(1500)  # five runs one after the other
@pytest.mark.long
@pytest.mark.training
@pytest.mark.prefect
def test_the_page_leads_from_token_files_to_a_model_that_answers(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    (tmp_path / "docs").symlink_to(PAGE.parent.resolve())
    monkeypatch.chdir(tmp_path)
    said: dict[str, str] = {}
    for kind, text in blocks:
        if kind == "yaml":
            config = NAMED.match(text)
            assert config is not None, text
            Path(config[1]).write_text(text, encoding="utf-8")
            continue
        for line in text.splitlines():
            program, *words = shlex.split(line)
            if program != "train-litgpt":
                subprocess.run(line, shell=True, check=True)
                continue
            monkeypatch.setattr("sys.stdin", StringIO("import os\ndef \n\n"))  # what chat is told
            done = cli(*words)
            assert done.code == 0, (line, done)
            said[line] = done.out
    _second_went_on_from_first_and_was_scored(Path("output/runs"))
    scores = [text for line, text in said.items() if "evaluate second" in line]
    assert len(scores) == 2
    assert all("validation/prose" in text and "bits_per_byte" in text for text in scores)
    wrote = said["train-litgpt generate second --prompt 'def ' --tokens 40"]
    assert len(wrote) > 20
    assert said["train-litgpt chat second --tokens 40"].strip()
    assert "second-" in said["train-litgpt runs"]


def _second_went_on_from_first_and_was_scored(runs: Path) -> None:
    (first,), (second,) = runs.glob("first-*"), runs.glob("second-*")
    losses = [curve(rows_of((run / "metrics.jsonl").read_bytes()), "step", "loss") for run in (first, second)]
    # Its first batch is another one than the last of the run before, and of a mixture.
    assert losses[1][1] == pytest.approx(losses[0][max(losses[0])], abs=1)
    assert losses[1][1] < losses[0][1] - 2
    (scored,) = [
        path for path in second.glob("evaluations/*/manifest.json") if '"validation_windows": 32' in path.read_text()
    ]
    tasks = {score["task"] for score in json.loads(scored.read_text())["scores"]}
    assert tasks == {"validation", "validation/code", "validation/prose"}
    lineage = json.loads((second / "final/lineage.json").read_text())
    assert lineage["weights"]["address"].endswith(first.name)
