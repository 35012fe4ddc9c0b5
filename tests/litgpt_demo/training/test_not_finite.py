"""A loss that is no number stops a training with the samples it came of, or costs it that step's batch.

The bad batch of these tests is one that holds a certain sample: the model's loss of it is made no number, every time.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from states import training_of
from waiting import free_port

from litgpt_demo.__main__ import main as litgpt_demo
from litgpt_demo.data import windows
from litgpt_demo.data.batches import numbers_of, share_of
from litgpt_demo.data.dataset import stage
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.metrics import rows_of
from litgpt_demo.runs import read_skipped, read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import committed, folder_of
from litgpt_demo.training.feed import open_data
from litgpt_demo.training.finite import MOST
from litgpt_demo.training.loop import fit, main, scratch_of
from litgpt_demo.training.setup import Training, set_up
from litgpt_demo.training.step import train_step

NewRun: TypeAlias = Callable[..., Path]


def numbers(training: Training, step: int) -> list[int]:
    """The samples of a step, counted from 1."""
    return [int(number) for number in numbers_of(training.spec, training.data.train, step - 1)]


def poison(training: Training, sample: int) -> None:
    """From now on no batch with that sample has a loss."""
    import numpy as np

    inputs, _ = training.data.train.read(np.array([sample], dtype=np.uint64))
    bad = torch.from_numpy(inputs[0])

    def spoil(_module: object, given: tuple[torch.Tensor, ...], loss: torch.Tensor) -> torch.Tensor:
        return loss * math.nan if (given[0] == bad).all(dim=1).any() else loss

    training.model.register_forward_hook(spoil)


def rows(run: Path, *kinds: str) -> list[dict[str, Any]]:
    return [row for row in rows_of((run / "metrics.jsonl").read_text()) if row["kind"] in kinds]


def weights(training: Training) -> list[torch.Tensor]:
    return list(training.model.module.state_dict().values())


def by_hand(run: Path, *, without: int) -> list[torch.Tensor]:
    """The weights after all steps but one."""
    training = training_of(run)
    for step in range(training.spec.steps):
        if step + 1 != without:
            train_step(training, step)
    return weights(training)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and all(weight.isfinite().all() for weight in one)


# --- stop -------------------------------------------------------------------------------------------------------------


def test_it_stops_with_the_windows_and_a_command_that_shows_their_text(
    new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    training = training_of(new_run("run"))
    samples = numbers(training, 7)
    poison(training, samples[3])
    with pytest.raises(UserError, match="the loss of step 7 is nan") as stopped:
        fit(training)
    assert f"its samples are the windows {', '.join(map(str, samples))} of the training split" in str(stopped.value)
    assert [found.step for found in committed(training.run)] == [4]
    assert not training.run.exists("skipped.json")

    command = re.search(r"`python -m litgpt_demo (.*?)`", str(stopped.value))
    assert command is not None
    capsys.readouterr()
    assert litgpt_demo(shlex.split(command[1])) == 0
    shown = capsys.readouterr().out
    assert [int(number) for number in re.findall(r"^--- window (\d+), ", shown, re.MULTILINE)] == samples
    corpus = next(line for line in shown.splitlines() if not line.startswith("---"))
    assert re.fullmatch(r"[etaoinshrdlu\s]+", corpus)


def test_the_text_of_a_window_is_that_of_its_tokens(new_run: NewRun, tiny_dataset: Path) -> None:
    import numpy as np
    from tokenizers import Tokenizer

    spec = read_spec(open_storage(str(new_run("run"))))
    tokenizer = Tokenizer.from_file(str(tiny_dataset / "tokenizer" / "tokenizer.json"))
    every = dict(windows.texts(spec, tiny_dataset, step=5))
    tokens = np.memmap(tiny_dataset / "train.bin", dtype="<u2", mode="r")
    for number, text in every.items():
        assert tokenizer.encode(text).ids[:5] or text
        assert text == tokenizer.decode(tokens[number * 32 : number * 32 + 32].tolist(), skip_special_tokens=False)
    one = next(iter(every))
    assert dict(windows.texts(spec, tiny_dataset, step=5, only=[one])) == {one: every[one]}
    with pytest.raises(UserError, match="step 5 has no window 99999999"):
        list(windows.texts(spec, tiny_dataset, step=5, only=[99999999]))


@pytest.mark.parametrize("step", [0, 13])
def test_a_step_that_the_run_does_not_have_is_refused(new_run: NewRun, step: int) -> None:
    with pytest.raises(UserError, match=f"--step={step} is no step of .*; it has the steps 1 to 12"):
        windows.main(["--run", str(new_run("run")), "--step", str(step)])


# --- skip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [2, 4, 7, 12])
def test_it_goes_back_and_leaves_that_batch_out_in_this_and_every_later_attempt(new_run: NewRun, bad: int) -> None:
    """Before the first checkpoint, in the step that is saved, after it, and in the last."""
    run = new_run("run", on_not_finite="skip")
    training = training_of(run)
    samples = numbers(training, bad)
    poison(training, samples[0])
    fit(training)
    expected = by_hand(new_run("by-hand"), without=bad)
    assert same(weights(training), expected)
    told = read_skipped(open_storage(str(run)))
    assert [(left_out.step, sorted(left_out.windows)) for left_out in told.steps] == [(bad, sorted(samples))]
    skipped = rows(run, "skip")
    assert {row["step"] for row in skipped} == {bad}
    assert skipped[0]["why"] == f"the loss of step {bad} is nan"
    assert {row["step"] for row in rows(run, "step")} == set(range(1, 13)) - {bad}
    assert committed(training.run)[0].step == 12

    for step in (8, 12):
        shutil.rmtree(run / folder_of(step))
    again = training_of(run)  # whose samples are all sound
    fit(again)
    assert same(weights(again), expected)


def test_a_training_that_keeps_breaking_down_stops_in_the_end(new_run: NewRun) -> None:
    run = new_run("run", on_not_finite="skip", max_steps=20)
    training = training_of(run)
    for step in range(3, 20):
        poison(training, numbers(training, step)[0])
    with pytest.raises(UserError, match=rf"The batches of {MOST} steps were left out already"):
        fit(training)
    assert len(read_skipped(open_storage(str(run))).steps) == MOST


def test_a_spoilt_list_of_skipped_steps_is_refused(new_run: NewRun) -> None:
    run = new_run("run")
    (run / "skipped.json").write_text('{"steps": [{"st')
    with pytest.raises(DataError, match=r"(?s)skipped\.json is not a valid Skipped .*removing it trains on all"):
        main(["--run", str(run)])


def test_gradients_that_overflow_where_losses_are_scaled_are_no_failure(new_run: NewRun) -> None:
    run = open_storage(str(new_run("run", precision="16-mixed")))
    spec, scratch = read_spec(run), scratch_of(open_storage(run.root), 0)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
    fit(set_up(spec, open_data(spec, stage(spec.dataset, scratch)), fabric, run, scratch))
    norms = [float(row["grad_norm"]) for row in rows(Path(run.root), "step")]
    assert len(norms) == 12
    assert not all(map(math.isfinite, norms))
    assert committed(run)[0].step == 12


TWO_RANKS = """
import sys
from pathlib import Path
from states import training_of
from test_not_finite import numbers, poison
from litgpt_demo.training.loop import fit

training = training_of(Path(sys.argv[1]))
poison(training, numbers(training, 7)[-1])
fit(training)
"""


@pytest.mark.long
@pytest.mark.training
def test_both_ranks_leave_out_the_batch_that_one_of_them_could_not_take(
    new_run: NewRun, tmp_path: Path, finished: Path
) -> None:
    run, script = new_run("run", world_size=2, on_not_finite="skip"), tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", str(script), str(run),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    alone = new_run("alone", on_not_finite="skip")
    training = training_of(alone)
    poison(training, numbers(training, 7)[-1])
    fit(training)
    losses = [{row["step"]: row["loss"] for row in rows(each, "step")} for each in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    [left_out] = read_skipped(open_storage(str(run))).steps
    second = share_of(numbers_of(training.spec, training.data.train, 6), rank=1, world_size=2)
    assert list(left_out.windows) == second.tolist()  # of the rank whose own loss was no number
