"""A training from Python is submitted, waited for and read. Another one fails."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from waiting import until

from launcher.config import RunConfig
from launcher.errors import ConfigProblem
from launcher.runs.index import Index
from litgpt_demo.errors import DataError, TrainLitgptError
from train_litgpt import submit


def test_five_lines_of_python_train_a_model(
    tiny: Callable[..., RunConfig],
    tmp_path: Path,
    prefect_home: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure has the command's message."""
    monkeypatch.setenv("PREFECT_HOME", str(prefect_home()))
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny().model_dump(mode="json", exclude={"launch"})))
    changes = {"train.max_steps": 6, "train.betas": [0.9, 0.99]}
    # A script or a kernel that ends, and with it whoever reads what the command prints.
    lines = f"from train_litgpt import submit; submit({str(config)!r}, {changes!r})"
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", lines], stdout=subprocess.PIPE) as gone:
        assert gone.wait() == 0
    until(lambda: [*tmp_path.glob("runs/*/attempts/1")], seconds=600)
    run = submit(config, changes)
    with pytest.raises(DataError, match="it is not collected yet"):
        run.model()
    run.wait()
    assert [row["step"] for row in run.metrics() if row["kind"] == "evaluation"][-1] == 6
    saved = torch.load(tmp_path / "runs" / run.run.name / "final" / "litgpt" / "lit_model.pth", weights_only=True)
    assert torch.equal(run.model().get_output_embeddings().weight, saved["lm_head.weight"])
    until(lambda: [*tmp_path.glob("runs/*/report.html")], seconds=600)
    assert [record.attempt for record in Index.of(str(tmp_path)).records(run.run.name)] == [1]

    with pytest.raises(ConfigProblem, match=r"train\.steps: unknown setting"):
        submit(config, {"train.steps": 6})
    (tmp_path / "taken").write_text("")
    with pytest.raises(TrainLitgptError, match="taken"):
        submit(config, {"root": str(tmp_path / "taken" / "root")}).wait()
