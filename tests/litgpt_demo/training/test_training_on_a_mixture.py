"""Training on a mixture: each source's loss is told, and a killed run ends as if it had not been."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from waiting import free_port

from litgpt_demo.config import EvaluationConfig
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.settings import DataConfig
from litgpt_demo.data.windows import texts
from litgpt_demo.metrics import curve, rows_of, score_curves
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.loop import main

NewRun: TypeAlias = Callable[..., Path]


@pytest.fixture(scope="session")
def mixture(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English that is a dataset already, and noise, which is annealed away; read only."""
    folder = tmp_path_factory.mktemp("mixture")
    noise = folder / "noise"
    noise.mkdir()
    for name, tokens in (("train.bin", 5000), ("val.bin", 700)):
        np.random.default_rng(1).integers(0, 300, tokens).astype("<u2").tofile(noise / name)
    data = DataConfig.model_validate(
        {
            "tokenizer": {"kind": "file", "path": str(tiny_dataset / "tokenizer" / "tokenizer.json")},
            "mixture": [
                {"name": "english", "weight": 0.75, "corpus": {"kind": "tokens", "path": str(tiny_dataset)}},
                {"weight": 0.25, "corpus": {"kind": "tokens", "path": str(noise)}},
            ],
            "stages": [{"until_step": 8}, {"weights": {"english": 1}}],
        }
    )
    planned = plan_dataset(data)
    prepare(planned, open_storage(str(folder / "root")))
    return folder / "root" / planned.path


def told(run: Path) -> list[dict[str, Any]]:
    """The losses, as the run's metrics tell them."""
    names = {"kind", "step", "loss", "grad_norm"}
    return [
        {name: value for name, value in row.items() if name in names or name.startswith("validation_loss")}
        for row in rows_of((run / "metrics.jsonl").read_text())
        if row["kind"] in {"step", "evaluation"}
    ]


def test_each_sources_loss_is_told_and_a_run_that_lost_its_last_steps_makes_the_same_ones_again(
    new_run: NewRun, mixture: Path
) -> None:
    run = new_run("mixed", dataset=mixture, evaluation=EvaluationConfig(every_checkpoints=1, validation_windows=4))
    assert main(["--run", str(run)]) == 0
    first = told(run)
    english, noise = (curve(first, "evaluation", f"validation_loss/{name}") for name in ("english", "noise"))
    assert list(english) == list(noise) == [4, 8, 12]
    assert english[12] < noise[12]
    both = curve(first, "evaluation", "validation_loss")[12]
    assert both == pytest.approx((4 * english[12] + 3 * noise[12]) / 7)  # of 7 samples, in turn
    scores = score_curves(rows_of((run / "metrics.jsonl").read_text()))
    assert {name: list(points) for name, points in scores.items()} == {
        f"{task}/{metric}": [4, 8, 12]
        for task in ("validation", "validation/english", "validation/noise")
        for metric in ("bits_per_byte", "perplexity")
    }
    # Of each source as many tokens, so that the losses have their mean.
    perplexities = [scores[f"validation{source}/perplexity"][12] for source in ("/english", "/noise", "")]
    assert math.log(perplexities[2]) == pytest.approx(sum(map(math.log, perplexities[:2])) / 2)
    shutil.rmtree(run / folder_of(12))
    (run / "manifest.json").unlink(missing_ok=True)
    assert main(["--run", str(run)]) == 0
    assert told(run) == first


def test_the_samples_of_a_step_can_be_shown_as_text(new_run: NewRun, mixture: Path) -> None:
    spec = read_spec(open_storage(str(new_run("shown", dataset=mixture))))
    assert len(list(texts(spec, mixture, step=3))) == 8


@pytest.mark.long
def test_two_ranks_train_on_the_batches_that_one_does(new_run: NewRun, mixture: Path) -> None:
    one, two = new_run("one", dataset=mixture), new_run("two", dataset=mixture, world_size=2)
    assert main(["--run", str(one)]) == 0
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", "-m", "litgpt_demo", "--", "train", "--run", str(two),
    ]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for mine, theirs in zip(told(one), told(two), strict=True):
        assert mine.pop("kind") == theirs.pop("kind")
        assert mine == pytest.approx(theirs, rel=1e-4)
