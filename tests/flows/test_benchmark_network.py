from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app

pytestmark = [pytest.mark.long, pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(300)]

CONFIG = """
name: links
root: {root}
model: {{sequence_length: 128}}     # a training's config will do
platform: {{kind: local, nodes: 2, processes: 1}}
"""


def test_the_benchmark_measures_over_gloo_and_shows_table_and_plots(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG.format(root=tmp_path))
    call = ["benchmark-network", str(tmp_path / "run.yaml"), "measure={seconds: 4, largest: 4194304}"]
    said = CliRunner().invoke(app, call, catch_exceptions=False, env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    (page,) = tmp_path.glob("runs/links-*/attempts/1/network.html")
    assert page.read_text().count("<svg") == 2
    told = json.loads((page.parent / "node-1" / "network.json").read_text())
    assert (told["backend"], told["nodes"]) == ("gloo", 2)
    assert {speed["bytes"] for speed in told["speeds"]} <= {2**20, 2**22}
    assert all(0 < speed["algbw"] == speed["busbw"] < 1000 for speed in told["speeds"])
    (pair,) = told["pairs"]
    assert pair["nodes"] == [0, 1]
    assert pair["gbytes"] > 0
    assert "2 ranks on 2 nodes reach" in said.output
    assert "busbw Gbit/s" in said.output
    assert "0 and 1" in said.output
