"""The interface for notebooks, and the notebook that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.config import RunConfig
from launcher.errors import ConfigProblem, UnknownRun
from launcher.runs.attempts import claim_of
from litgpt_demo.errors import Fault, TrainLitgptError, UserError
from litgpt_demo.runs import METRICS
from litgpt_demo.storage import open_storage
from train_litgpt import open_run, submit

CHECKOUT = Path(__file__).parents[2]
NOTEBOOK = CHECKOUT / "docs" / "notebook.ipynb"
Tiny = Callable[..., RunConfig]


@pytest.fixture
def run(tiny: Tiny) -> str:
    """A run that has begun, with some metrics; step 2 was trained twice."""
    config = tiny()
    name = claim_of(config).take().run
    rows: list[dict[str, Any]] = [{"kind": "start", "step": 0, "steps": 8, "tokens_per_step": 128}]
    rows += [{"kind": "step", "step": step, "loss": loss} for step, loss in ((1, 5.0), (2, 4.0), (2, 3.5))]
    rows.append({"kind": "evaluation", "step": 2, "validation_loss": 4.5, "perplexity": 90.0})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    open_storage(config.root).within(f"runs/{name}").write(METRICS, text.encode())
    return name


def test_metrics_of_a_run_are_a_table(run: str, tmp_path: Path) -> None:
    found = open_run("@last", root=str(tmp_path))
    assert found.name == run
    assert found.metrics().to_pydict() == {"step": [1, 2], "loss": [5.0, 3.5]}
    assert found.metrics("evaluation").column("validation_loss").to_pylist() == [4.5]
    assert found.figures()["validation_loss"] == 4.5


def test_a_run_without_a_model_says_so(run: str, tmp_path: Path) -> None:
    with pytest.raises(TrainLitgptError, match="collect"):
        open_run(run, root=str(tmp_path)).write("hello")


def test_a_run_that_nobody_started_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(UnknownRun):
        open_run("gpt", root=str(tmp_path))


def test_what_cannot_be_used_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    config = str(CHECKOUT / "deployments" / "configs" / "local.yaml")
    with pytest.raises(ConfigProblem, match="there is no such setting"):
        submit(config, "train.lerning_rate=1", f"root={tmp_path}")
    with pytest.raises(ConfigProblem, match="has a section sweep"):
        submit(config, "sweep.grid={train.seed: [1, 2]}", f"root={tmp_path}")
    with pytest.raises(UserError, match=r"gone\.txt"):
        submit(config, "data.corpus={kind: files, paths: [gone.txt]}", f"root={tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.training
def test_the_cells_of_the_notebook_run(
    tmp_path: Path, prefect_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(prefect_home()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deployments").symlink_to(CHECKOUT / "deployments")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert names["losses"].num_rows == 20
    assert names["run"].figures()["step"] == 20
    assert names["run"].status().state == "done"


@pytest.mark.long
def test_a_run_that_fails_raises_its_class_and_words(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has a Prefect server configured that does not answer, which only the run itself finds out."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tiny().model_dump(mode="json")))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(TrainLitgptError, match=r"127\.0\.0\.1:9") as failed:
        submit(tmp_path / "config.yaml").wait()
    assert failed.value.fault is Fault.SERVER
